"""Is one operator's result within what its own inputs and precision allow?"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from checked_backend.verdict.local_error import COLUMN, ROW, WHOLE, LocalError, local_error

ROUNDOFF = 2.0**-8


def _judged(candidate: Tensor, right: Tensor, samples: list[Tensor], **given: bool) -> LocalError | None:
    made, low = candidate.to(torch.bfloat16), right.to(torch.bfloat16)
    return local_error(candidate=made, reference=low, exact=right, samples=samples, roundoff=ROUNDOFF, **given)


def _error(signal: Tensor, noise: float, made: float, *, shares: float = 0.0) -> LocalError | None:
    """The error of a kernel that makes ``made`` times the signal, and this share of the rounding of its inputs."""
    rounding, *moved = (torch.randn(4, *signal.shape, dtype=torch.float64) * noise).unbind()
    right = signal + rounding
    return _judged(made * signal + shares * rounding, right, [right + one for one in moved])


@pytest.mark.parametrize("count", [16, 240, 65_536])
@pytest.mark.parametrize("shares", [0.0, 0.267, 1.5])
def test_a_factor_says_nothing_of_what_is_rounding_alone(count: int, shares: float) -> None:
    """The gradient of what softmax takes away: the kernel rounds no inputs, or some of them, and makes other zeros."""
    error = _error(torch.zeros(count, dtype=torch.float64), 1e-3, 1.0, shares=shares)
    assert not error.wrong
    assert error.bias == pytest.approx(shares - 1, abs=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("count", [16, 65_536])
def test_a_factor_of_what_is_no_rounding_is_found(noise: float, count: int) -> None:
    signal = torch.randn(count, dtype=torch.float64)
    assert not _error(signal, noise, 1.0).wrong
    assert _error(signal, noise, 1 + 4 * max(noise, ROUNDOFF)).wrong


def test_what_hides_a_factor_is_the_share_of_noise_in_the_squares() -> None:
    signal = torch.randn(65_536, dtype=torch.float64)
    allowed = [_error(signal, noise, 1.0).bias_allowed for noise in (0.0, 0.1, 0.3, 1.0)]
    assert allowed[0] < 3 * ROUNDOFF
    assert allowed[1] < 0.1 < allowed[2] < 1 < allowed[3]
    assert all(math.isfinite(one) for one in allowed)


def test_as_much_noise_as_signal_does_not_hide_that_a_tensor_is_many_times_too_large() -> None:
    assert _error(torch.zeros(256, dtype=torch.float64), 1e-3, 1.0, shares=8.0).wrong


FUNCTIONS = {"relu": torch.relu, "sigmoid": torch.sigmoid, "exp": torch.exp, "softmax": lambda x: x.softmax(-1)}


def _error_in_part(
    function: Callable[[Tensor], Tensor], size: tuple[int, ...], made: Callable[[Tensor], object], **given: bool
) -> LocalError | None:
    """The error of a kernel that leaves out the rounding of its inputs, and spoils its result."""
    x = torch.randn(size).to(torch.bfloat16).double()

    def moved() -> Tensor:
        return function(x * (1 + (torch.rand_like(x) * 2 - 1) * ROUNDOFF))

    right, candidate = function(x), moved()
    made(candidate)
    return _judged(candidate, right, [moved() for _ in range(3)], **{"smooth": True, **given})


@pytest.mark.parametrize("size", [(256, 256), (4, 8, 32, 64), (40, 500)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_factor_of_a_row_or_a_column_is_found(name: str, size: tuple[int, ...]) -> None:
    function = FUNCTIONS[name]
    clean = _error_in_part(function, size, lambda _: None)
    assert not clean.wrong
    assert clean.excess < 0.5
    assert clean.part == WHOLE
    column = _error_in_part(function, size, lambda made: made[..., -1].mul_(1.06))
    assert column.wrong
    assert column.is_factor
    assert column.part == COLUMN
    assert column.bias == pytest.approx(0.06, abs=0.01)
    row = _error_in_part(function, size, lambda made: made.view(-1, size[-1])[3].mul_(0.94))
    assert row.wrong
    assert row.part == ROW
    assert row.bias == pytest.approx(-0.06, abs=0.01)
    whole = _error_in_part(function, size, lambda made: made.mul_(1.03))
    assert whole.wrong
    assert whole.part == WHOLE


def test_parts_say_nothing_where_an_element_may_jump() -> None:
    """One choice that flips is a percent of a row."""

    def flip(made: Tensor) -> None:
        made[3, 5] *= 4

    assert not _error_in_part(torch.relu, (64, 64), flip, smooth=False).wrong
    assert not _error_in_part(torch.relu, (64, 64), flip, jumps=True).wrong


@pytest.mark.parametrize("size", [(16, 16), (1, 64), (64, 1), (64, 64, 0)])
def test_parts_of_few_elements_are_none(size: tuple[int, ...]) -> None:
    x = torch.randn(size).double()
    error = _judged(x, x, [], smooth=True)
    assert error is None or (not error.wrong and error.part == WHOLE)


def test_rows_of_zeros_are_right() -> None:
    def spoil(made: Tensor) -> None:
        made[7] = 1e-3

    def cut(x: Tensor) -> Tensor:
        return torch.relu(x) * (torch.arange(64)[:, None] % 8 != 7)

    assert not _error_in_part(cut, (64, 64), lambda _: None).wrong
    assert _error_in_part(cut, (64, 64), spoil).wrong
