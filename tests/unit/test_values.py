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
from thinwire.compress.values import value_code

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.0**-149]
)


@contextmanager
def kernels_or_not(fast: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not fast:
            patch.setattr(module, "kernels", None)
        yield


def received(values: torch.Tensor, name: str) -> torch.Tensor:
    """As the other end gets them."""
    code = value_code(name, values.dtype)
    sent = torch.full((code.nbytes(values.numel()),), 255, dtype=torch.uint8)  # of which nothing may be left
    code.encode(values, sent)
    return code.decode(sent, values.numel())


@given(st.floats(1e-37, 1e38), st.sampled_from([-1.0, 1.0]))
def test_bfloat16_has_the_range_of_float32_and_keeps_what_rounding_loses_exactly(size: float, sign: float) -> None:
    value = torch.tensor([sign * size], dtype=torch.float32)
    rounded = received(value, "bfloat16")
    assert rounded.item() == pytest.approx(value.item(), rel=2**-8)
    assert torch.equal(rounded + (value - rounded), value)


@given(st.lists(numbers, min_size=1, max_size=70), st.sampled_from([torch.float32, torch.float64]))
def test_four_bits_turn_no_value_round_lose_none_and_are_off_by_no_more_than_half_a_rung(
    values: list[float], dtype: torch.dtype
) -> None:
    x = torch.tensor(values, dtype=torch.float32).to(dtype)
    ladders = []
    for fast in (True, False):
        with kernels_or_not(fast):
            ladders.append(received(x, "log4"))
    rounded = ladders[0]
    assert torch.equal(rounded, ladders[1])
    assert torch.equal(rounded.sign(), x.sign())
    sizes = x.abs()[x != 0].double()
    if sizes.numel():
        rungs = 6 if (x == 0).any() else 7
        factor = float((sizes.max().log() - sizes.min().log()).div(rungs).exp())
        off = (rounded.double() - x.double()).abs()[x != 0] / sizes
        assert off.max() <= (factor - 1) / (factor + 1) * 1.01 + 1e-6 or sizes.min() < 1e-30  # where few bits are left
        assert rounded.abs().max() == x.abs().max()


@pytest.mark.parametrize("values", [[0.0], [0.0, -0.0, 0.0], [math.nan, 1.0], [math.inf, -1.0, 0.0], []])
def test_four_bits_of_nothing_or_of_what_is_no_number_are_some_bits(values: list[float]) -> None:
    for fast in (True, False):
        with kernels_or_not(fast):
            assert received(torch.tensor(values), "log4").numel() == len(values)
