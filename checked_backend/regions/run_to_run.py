"""Does eager differ from run to run, and is that rounding?

Sums without a fixed order differ by rounding, which float64 makes as much smaller as its digits are more. A program
that reads a clock, random bytes or uninitialised memory differs by as much in float64. Its spread is no noise that a
candidate could be within.
"""

from __future__ import annotations

import torch

from checked_backend.numerics.noise import Envelope, difference, root_mean_square
from checked_backend.regions.case import Case, is_floating
from checked_backend.regions.controls import Values

__all__ = ["is_rounding", "repeats", "spreads"]

REPEATS = 1e-6
"""A float64 reference repeats itself if its control runs, with junk in uninitialised memory, spread less, relative.

Rounding in float64 spreads 1e-16 times the program's condition. Junk spreads 1.
"""

ROUNDING_SHRINKS = 1e-3
"""From float32 to float64 rounding shrinks to ``2 ** -29`` of itself; the rest is room for a few elements that jump."""

ROUNDOFFS = 4.0
"""A spread between two runs is looked into from here on, in machine epsilons of the tensor's size."""


def repeats(envelope: Envelope | None, scale: float) -> bool:
    """Whether eager repeats itself in float64.

    Args:
        envelope: How far control runs in float64 lie apart; None if there were none.
        scale: The tensor's size, root mean square.
    """
    return envelope is not None and envelope.rms <= REPEATS * scale


def spreads(case: Case, repeated: Values | None) -> bool:
    """Whether two runs of eager differ by more than a rounding or two of a floating tensor."""
    if not is_floating(case.pair.reference):
        return False
    least = ROUNDOFFS * torch.finfo(case.pair.reference.dtype).eps * case.metrics.reference_rms
    return _spread(case, repeated) > least


def is_rounding(case: Case, repeated: Values | None) -> bool:
    """Whether rounding, as far as is known, explains that eager differs from run to run, if it does.

    Args:
        case: A floating tensor; of others True. Takes note of both spreads if they are no rounding.
        repeated: A second run of eager, if it could be made.
    """
    if case.float64_spread is None or case.float64_repeats or not spreads(case, repeated):
        return True
    spread = _spread(case, repeated)
    narrow = torch.finfo(case.pair.reference.dtype).eps > torch.finfo(torch.float64).eps
    if narrow and case.float64_spread <= ROUNDING_SHRINKS * spread:
        return True
    case.evidence["eager's own spread between two runs, rms"] = spread
    case.evidence["the same in float64"] = case.float64_spread
    return False


def _spread(case: Case, repeated: Values | None) -> float:
    again = None if repeated is None else case.sample(repeated)
    return 0.0 if again is None else root_mean_square(difference(case.pair.reference, again))
