"""How values go on the wire: what comes back, and what of it is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.compress import values as module
from thinwire.compress.values import LEVELS, Floats, Ladder, ValueCode, value_code

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.0**-149]
)


@contextmanager
def kernels_or_not(fast: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not fast:
            patch.setattr(module, "kernels", None)
        yield


def received(values: torch.Tensor, code: ValueCode) -> torch.Tensor:
    """As the other end gets them."""
    sent = torch.full((code.nbytes(values.numel()),), 255, dtype=torch.uint8)  # of which nothing may be left
    code.encode(values, sent)
    return code.decode(sent, values.numel())


@given(st.floats(1e-37, 1e38), st.sampled_from([-1.0, 1.0]))
def test_bfloat16_has_the_range_of_float32_and_keeps_what_rounding_loses_exactly(size: float, sign: float) -> None:
    value = torch.tensor([sign * size], dtype=torch.float32)
    rounded = received(value, Floats(torch.float32, torch.bfloat16))
    assert rounded.item() == pytest.approx(value.item(), rel=2**-8)
    assert torch.equal(rounded + (value - rounded), value)


@given(st.lists(numbers, min_size=1, max_size=70), st.sampled_from([torch.float32, torch.float64]))
def test_four_bits_turn_no_value_round_and_always_bring_one_nearer(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float32).to(dtype)
    with kernels_or_not(True):
        rounded = received(x, Ladder(x.dtype))
    with kernels_or_not(False):
        assert torch.equal(rounded, received(x, Ladder(x.dtype)))
    assert (rounded * x.sign() >= 0).all() and (rounded[x == 0] == 0).all()
    assert ((x - rounded).abs() <= x.abs()).all()
    assert float(rounded.abs().max()) == pytest.approx(float(x.abs().max()), rel=1e-6)


@given(st.lists(st.floats(1.0, 16.0), min_size=2, max_size=70), st.booleans())
def test_four_bits_are_off_by_no_more_than_half_a_rung(values: list[float], has_zeros: bool) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    factor = float(x.max() / x.min()) ** (1 / (LEVELS - 2 if has_zeros else LEVELS - 1))
    rounded = received(torch.cat([x, x.new_zeros(int(has_zeros))]), Ladder(x.dtype))
    assert ((rounded[: len(x)] / x - 1).abs() <= (factor - 1) / (factor + 1) + 1e-6).all()


def test_a_speck_of_dust_does_not_set_the_rungs_far_apart() -> None:
    x = torch.cat([torch.linspace(1, 2, 99), torch.tensor([1e-12])])
    off = (received(x, Ladder(x.dtype)) - x).abs()
    assert off[-1] == x[-1]  # which stays for later
    assert off.square().sum() < 0.02 * x.square().sum()


@pytest.mark.parametrize("values", [[0.0], [0.0, -0.0, 0.0], [math.nan, 1.0], [math.inf, -1.0, 0.0], []])
def test_four_bits_of_nothing_or_of_what_is_no_number_are_some_bits(values: list[float]) -> None:
    for fast in (True, False):
        with kernels_or_not(fast):
            assert received(torch.tensor(values), Ladder(torch.float32)).numel() == len(values)


def test_the_largest_numbers_there_are_stay_finite() -> None:
    x = torch.tensor([1.7e308, -1.6e308, 1e300], dtype=torch.float64)
    rounded = received(x, Ladder(x.dtype))
    assert torch.isfinite(rounded).all() and ((x - rounded).abs() <= x.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_four_bits_are_taken_where_they_are_fewer_bytes_and_fine_enough(dtype: torch.dtype) -> None:
    half = value_code("bfloat16", dtype, 10_000, 1)
    for k in (1, 8, 20, 21, 100, 1000, 1001, 10_000):
        code = value_code("log4", dtype, 10_000, k)
        assert code.nbytes(k) <= half.nbytes(k)
        assert isinstance(code, Ladder) == (code.nbytes(k) < half.nbytes(k))
        assert isinstance(code, Ladder) == (64 <= k <= 1000) or k in (20, 21)
