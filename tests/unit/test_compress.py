"""Selectors and the codes of what they choose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from thinwire.compress import base, coding, topk
from thinwire.compress.base import Compensated, Selector, Shortlist, compensate, multiply
from thinwire.compress.coding import Bitmap, Coding, EliasFano, IndexCode, Int32, code_for
from thinwire.compress.topk import LayerwiseTopK, RandomK, ThresholdTopK, TopK, take_largest
from thinwire.compress.values import VALUES
from thinwire.types import Sparse

ratios = st.sampled_from([1.0, 0.5, 0.1, 0.034, 0.01, 0.001])
tensors = hnp.arrays(
    st.sampled_from([np.float32, np.float64]),
    st.integers(1, 400),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149]),
).map(torch.from_numpy)
EVERY = [TopK(), ThresholdTopK(), RandomK(seed=3)]


def layers_of(numel: int) -> tuple[int, ...]:
    """Some layers of so many entries in all, one of them empty."""
    return (numel // 3, 0, numel - numel // 3 - numel // 5, numel // 5)


CODES: list[IndexCode] = [Int32(), Bitmap(), EliasFano()]


def reference_largest(x: torch.Tensor, k: int) -> list[int]:
    """By sorting: magnitude first, then the lowest index."""
    magnitude = x.abs().tolist()
    return sorted(sorted(range(len(magnitude)), key=lambda i: (-magnitude[i], i))[:k])


@given(tensors, ratios)
def test_top_k_is_exact_with_ties_to_the_lowest_index(x: torch.Tensor, ratio: float) -> None:
    k = TopK().count(x.numel(), ratio)
    chosen = take_largest(x.clone(), k)
    assert chosen.indices.tolist() == reference_largest(x, k)
    assert torch.equal(chosen.values, x[chosen.indices.long()])


@pytest.mark.parametrize("numel", [65_537, 300_000])
@pytest.mark.parametrize("ratio", [0.3, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "few values", "mostly zero", "sorted", "one block"])
def test_top_k_is_exact_on_large_tensors_of_every_kind(kind: str, ratio: float, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    x = {
        "normal": normal,
        "heavy tails": normal**7,
        "few values": (2 * normal).round(),
        "mostly zero": torch.where(torch.rand(numel, generator=generator) < 1e-3, normal, 0.0),
        "sorted": normal.sort().values,
        "one block": torch.where(torch.arange(numel) // 1000 == 7, 1e3 * normal, normal),
    }[kind]
    k = TopK().count(numel, ratio)
    order = np.lexsort((np.arange(numel), -x.abs().numpy()))
    assert np.array_equal(take_largest(x.clone(), k).indices.numpy(), np.sort(order[:k]))


@given(tensors, ratios)
def test_torch_alone_chooses_what_the_kernels_choose(x: torch.Tensor, ratio: float) -> None:
    k = TopK().count(x.numel(), ratio)
    ours, plain = take_largest(x.clone(), k), topk._take_largest_by_torch(x.clone(), k)
    assert torch.equal(ours.indices, plain.indices)
    assert torch.equal(ours.values, plain.values)


@pytest.mark.parametrize("selector", EVERY, ids=lambda s: s.name)
@given(x=tensors, ratio=ratios, step=st.integers(0, 9))
def test_a_selector_takes_out_as_many_distinct_entries_as_it_says(
    selector: Selector, x: torch.Tensor, ratio: float, step: int
) -> None:
    left = x.clone()
    chosen = selector.take(Compensated.of(left), ratio, step)
    assert torch.equal(left, x.index_fill(0, chosen.indices.long(), 0.0))
    assert chosen.indices.dtype == torch.int32
    assert chosen.indices.numel() == selector.count(x.numel(), ratio) >= 1
    assert (chosen.indices.diff() > 0).all()
    assert torch.equal(chosen.values, x[chosen.indices.long()])


@pytest.mark.parametrize("selector", [TopK(), ThresholdTopK()], ids=lambda s: s.name)
@given(x=tensors, ratio=ratios)
def test_what_is_left_is_a_contraction(selector: Selector, x: torch.Tensor, ratio: float) -> None:
    k, d = selector.count(x.numel(), ratio), x.numel()
    chosen = selector.take(Compensated.of(x.clone()), ratio, 0)
    left = x.double().index_fill(0, chosen.indices.long(), 0.0)
    # Sums of squares of up to 400 doubles: 1e-12 covers their rounding.
    assert left.square().sum() <= (1 - k / d) * x.double().square().sum() * (1 + 1e-12)


@given(tensors, ratios)
def test_threshold_search_comes_within_its_last_interval_of_the_exact_top_k(x: torch.Tensor, ratio: float) -> None:
    k = TopK().count(x.numel(), ratio)
    exact = take_largest(x.clone(), k).values.double().square().sum()
    found = ThresholdTopK().take(Compensated.of(x.clone()), ratio, 0).values.double().square().sum()
    assert found >= exact * (1 - 1e-4) - k * float(x.abs().max()) ** 2 * 2.0**-20


@given(x=tensors, ratio=ratios)
def test_layer_wise_top_k_is_the_top_k_of_every_layer(x: torch.Tensor, ratio: float) -> None:
    sizes = layers_of(x.numel())
    selector, left = LayerwiseTopK(sizes), x.clone()
    chosen = selector.take(Compensated.of(left), ratio, 0)
    assert chosen.indices.numel() == selector.count(x.numel(), ratio)
    start, expected = 0, []
    for size in sizes:
        k = min(size, max(1, int(ratio * size * (1 + 1e-12))))
        expected += [start + i for i in reference_largest(x[start : start + size], k)]
        start += size
    assert chosen.indices.tolist() == expected
    assert torch.equal(left, x.index_fill(0, chosen.indices.long(), 0.0))


def test_layer_wise_top_k_serves_every_layer() -> None:
    x = torch.cat([torch.full((100,), 9.0), torch.tensor([1.0]), torch.arange(50.0)])
    selector = LayerwiseTopK((100, 1, 0, 50))
    chosen = selector.take(Compensated.of(x.clone()), 0.04, 0)
    assert chosen.indices.tolist() == [0, 1, 2, 3, 100, 149, 150]
    assert selector.count(151, 0.04) == 7


def test_random_k_draws_anew_at_each_step_and_alike_for_a_shared_seed() -> None:
    def draw(seed: int, step: int) -> list[int]:
        return RandomK(seed).take(Compensated.of(torch.randn(1000)), 0.1, step).indices.tolist()

    assert draw(1, 0) == draw(1, 0)
    assert draw(1, 0) != draw(1, 1)
    assert draw(1, 0) != draw(2, 0)


@given(st.lists(tensors.filter(lambda t: t.dtype == torch.float32), min_size=1, max_size=6), ratios)
def test_the_shortlist_never_changes_what_is_chosen(gradients: list[torch.Tensor], ratio: float) -> None:
    numel = min(g.numel() for g in gradients)
    shortlist = Shortlist(torch.float32)
    error, x = torch.zeros(numel), torch.zeros(numel)
    for gradient in gradients:
        shortlist.count = 0
        split = numel // 3
        energies = [
            compensate(error[part], gradient[:numel][part], 1.0, x[part], part.start, shortlist)
            for part in (slice(0, split), slice(split, numel))
        ]
        assert torch.equal(x, error + gradient[:numel])
        for energy, vector in zip(map(sum, zip(*energies, strict=True)), (x, gradient[:numel]), strict=True):
            if vector.abs().max() < 1e15:  # squares of larger ones overflow, which the memory looks into
                assert energy == pytest.approx(float(vector.double().square().sum()), rel=1e-4, abs=1e-30)
        k = TopK().count(numel, ratio)
        expected = reference_largest(x, k)
        assert take_largest(x, k, shortlist).indices.tolist() == expected
        assert not x[expected].any()
        error, x = x, error


def test_the_shortlist_saves_the_second_look_when_thresholds_drift_slowly() -> None:
    generator = torch.Generator().manual_seed(0)
    shortlist = Shortlist(torch.float32)
    error, x = torch.zeros(200_000), torch.zeros(200_000)
    saved = 0
    for _ in range(30):
        shortlist.count = 0
        compensate(error, torch.randn(200_000, generator=generator), 1.0, x, 0, shortlist)
        saved += shortlist.holds(2000)
        take_largest(x, 2000, shortlist)
        error, x = x, error
    assert saved >= 20


@given(st.integers(1, 5000), st.data())
def test_index_codes_give_back_what_they_were_given_in_the_size_they_said(n: int, data: st.DataObject) -> None:
    indices = torch.tensor(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))), dtype=torch.int32)
    k = indices.numel()
    for code in CODES:
        out = torch.empty(code.nbytes(n, k), dtype=torch.uint8)
        code.encode(indices, n, out)
        assert torch.equal(code.decode(out, n, k), indices), code.name


@settings(max_examples=30)
@given(n=st.integers(1, 2000), data=st.data())
def test_codes_have_the_same_bytes_without_kernels(n: int, data: st.DataObject) -> None:
    indices = torch.tensor(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))), dtype=torch.int32)
    k = indices.numel()
    for code in CODES:
        fast, plain = (torch.empty(code.nbytes(n, k), dtype=torch.uint8) for _ in range(2))
        code.encode(indices, n, fast)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coding, "kernels", None)
            code.encode(indices, n, plain)
            assert torch.equal(code.decode(plain, n, k), indices)
        assert torch.equal(fast, plain), code.name


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("n", [10_007, 1_000_000, 25_557_032])
def test_the_index_code_is_within_15_per_cent_of_the_entropy(n: int, ratio: float) -> None:
    k = TopK().count(n, ratio)
    entropy_bits = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    slack = 128  # two sections, each a whole number of 64-bit words: it shows for a handful of indices only
    assert 8 * code_for(n, k).nbytes(n, k) <= 1.15 * entropy_bits + slack


def test_the_code_is_chosen_by_size() -> None:
    names = {k: code_for(1_000_000, k).name for k in (1, 1000, 100_000, 400_000, 999_999, 1_000_000)}
    assert names == {
        1: "int32",
        1000: "elias-fano",
        100_000: "elias-fano",
        400_000: "bitmap",
        999_999: "bitmap",
        1_000_000: "everything",
    }


@given(tensors, ratios, st.sampled_from(VALUES))
def test_decoding_gives_exactly_what_was_sent_and_finite_stays_finite(
    x: torch.Tensor, ratio: float, values: str
) -> None:
    chosen = take_largest(x.clone(), TopK().count(x.numel(), ratio))
    code = Coding(x.numel(), chosen.indices.numel(), x.dtype, values)
    message = torch.empty(code.nbytes, dtype=torch.uint8)
    code.encode(chosen, message)
    received = code.decode(message)
    assert torch.equal(received.indices, chosen.indices)
    assert torch.isfinite(received.values).all()
    assert torch.equal(received.values, chosen.values) or code.rounds


@given(st.integers(2, 300), st.data())
def test_a_code_that_no_honest_peer_sends_is_refused_or_harmless(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n - 1))
    code = Coding(n, k, torch.float32)
    noise = torch.frombuffer(
        bytearray(data.draw(st.binary(min_size=code.index_bytes, max_size=code.index_bytes))), dtype=torch.uint8
    )
    for fast in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not fast:
                patch.setattr(coding, "kernels", None)
            try:
                indices = code.decode_indices(noise)
            except ValueError as refusal:
                assert "ascending" in str(refusal)
            else:
                assert indices.numel() == k
                assert 0 <= int(indices[0]) and int(indices[-1]) < n and (indices.diff() > 0).all()


def test_kernels_compile_where_compiled_code_cannot_be_kept() -> None:
    namespace: dict[str, Any] = {}
    exec("def double(number): return 2 * number", namespace)  # no file, so no place beside it
    assert base.kernels._compiler()(namespace["double"])(21) == 42


def test_everything_works_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected = take_largest(x.clone(), 100)
    monkeypatch.setattr(base, "kernels", None)
    monkeypatch.setattr(coding, "kernels", None)
    shortlist = Shortlist(torch.float32)
    target = torch.empty(1000)
    error = torch.ones(1000)
    energies = compensate(error, x, 2.0, target, 0, shortlist)
    assert energies == pytest.approx([float((error + 2 * x).square().sum()), float((2 * x).square().sum())])
    compensate(torch.zeros(1000), x, 1.0, target, 0, shortlist)
    chosen = take_largest(target, 100, shortlist)
    assert torch.equal(chosen.indices, expected.indices)
    code = Coding(1000, 100, torch.float32)
    message = torch.empty(code.nbytes, dtype=torch.uint8)
    code.encode(chosen, message)
    total = torch.zeros(1000)
    base.add_entries(total, code.decode(message), 0.5)
    assert torch.equal(total, torch.zeros(1000).index_copy(0, expected.indices.long(), 0.5 * expected.values))


def test_entries_are_added_with_the_same_bits_on_every_kind_of_processor() -> None:
    generator = torch.Generator().manual_seed(0)
    entries = Sparse(torch.arange(10_000, dtype=torch.int32), torch.randn(10_000, generator=generator))
    fast, plain = torch.randn(10_000, generator=generator), torch.empty(10_000)
    plain.copy_(fast)
    base.add_entries(fast, entries, 1 / 3)
    plain += entries.values * torch.tensor(1 / 3)  # rounded after the product and after the sum
    assert torch.equal(fast, plain)


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NUMELS = [*range(1, 201), 65_537, 300_007]  # whole vectors and what is left beside them
PLACES = [(n, place) for n in NUMELS for place in {0, n // 2, n - 1}] + [(200, place) for place in range(200)]
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
either_way = pytest.mark.parametrize("fast", [True, False], ids=["kernels", "torch alone"])


@pytest.fixture
def fast_or_not(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(base, "kernels", None)


@either_way
@every_float
@pytest.mark.parametrize("factor", [1.0, 1 / 2, 1 / 3, 1 / 7])
@pytest.mark.usefixtures("fast_or_not")
def test_multiplying_gives_the_bits_of_torchs_own_product(dtype: torch.dtype, factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in NUMELS:
        x = torch.randn(numel, generator=generator).to(dtype)
        x[::5] *= torch.finfo(dtype).tiny  # the smallest, some below what is normal
        x[::7] = -0.0
        expected = x.clone().mul_(factor)
        assert multiply(x, factor)
        assert torch.equal(x.view(torch.uint8), expected.view(torch.uint8)), numel


@either_way
@every_float
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.usefixtures("fast_or_not")
def test_multiplying_tells_of_an_entry_that_is_not_finite_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    for numel, place in PLACES:
        x = torch.ones(numel, dtype=dtype)
        x[place] = value
        assert not multiply(x, 0.5), (numel, place)
        assert torch.equal(x.isfinite().logical_not().nonzero(), torch.tensor([[place]]))


@either_way
@every_float
@pytest.mark.usefixtures("fast_or_not")
def test_infinities_that_cancel_are_told_of_too(dtype: torch.dtype) -> None:
    for numel, place in PLACES:
        if numel > 1:
            x = torch.ones(numel, dtype=dtype)
            x[place], x[(place + numel // 2) % numel] = math.inf, -math.inf
            assert not multiply(x, 0.5), (numel, place)


@either_way
@every_float
@pytest.mark.parametrize("signs", [(1,), (-1,), (1, -1), (1, 1, -1, -1)], ids=str)
@pytest.mark.usefixtures("fast_or_not")
def test_a_sum_that_overflows_is_not_taken_for_an_entry_that_does(dtype: torch.dtype, signs: tuple[int, ...]) -> None:
    for numel in NUMELS:
        huge = torch.finfo(dtype).max * torch.tensor(signs, dtype=dtype).repeat(numel)[:numel]
        assert multiply(huge.clone(), 0.5), numel
        assert not multiply(huge.clone(), 2.0), numel  # where every entry does
        huge[numel // 2] = math.nan
        assert not multiply(huge, 0.5), numel


def test_ratio_in_float16_keeps_the_rest_in_the_error() -> None:
    code, x = Coding(4, 2, torch.float32, "float16"), torch.tensor([1e6, 0.0, 0.1, 0.0])
    chosen, message = Sparse(torch.tensor([0, 2], dtype=torch.int32), x[::2]), torch.empty(32, dtype=torch.uint8)
    code.encode(chosen, message[: code.nbytes])
    rounded = code.decode_values(message[: code.nbytes])
    assert rounded.tolist() == [65504.0, pytest.approx(0.1, rel=1e-3)]
    base.add_entries(x, Sparse(chosen.indices, rounded), -1.0)
    assert x[0] == 1e6 - 65504.0
