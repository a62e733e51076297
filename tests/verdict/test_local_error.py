"""Is one operator's result within what its own inputs and precision allow?"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from checked_backend.verdict.local_error import LocalError, local_error

ROUNDOFF = 2.0**-8


def _error(signal: Tensor, noise: float, made: float, *, shares: float = 0.0) -> LocalError:
    """The error of a kernel that makes ``made`` times the signal, and this share of the rounding of its inputs."""
    rounding, *moved = (torch.randn(4, *signal.shape, dtype=torch.float64) * noise).unbind()
    right = signal + rounding
    candidate = (made * signal + shares * rounding).to(torch.bfloat16)
    error = local_error(
        candidate=candidate,
        reference=right.to(torch.bfloat16),
        exact=right,
        samples=[right + one for one in moved],
        roundoff=ROUNDOFF,
    )
    assert error is not None
    return error


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
    error = _error(signal, noise, 1 + 4 * max(noise, ROUNDOFF))
    assert error.wrong


def test_what_hides_a_factor_is_the_share_of_noise_in_the_squares() -> None:
    signal = torch.randn(65_536, dtype=torch.float64)
    allowed = [_error(signal, noise, 1.0).bias_allowed for noise in (0.0, 0.1, 0.3, 1.0)]
    assert allowed[0] < 3 * ROUNDOFF
    assert allowed[1] < 0.1 < allowed[2] < 1 < allowed[3]
    assert all(math.isfinite(one) for one in allowed)


def test_as_much_noise_as_signal_does_not_hide_that_a_tensor_is_many_times_too_large() -> None:
    assert _error(torch.zeros(256, dtype=torch.float64), 1e-3, 1.0, shares=8.0).wrong
