"""Find elements with no digit right, among elements so much larger that a norm does not show the error."""

from __future__ import annotations

import math

import torch

from checked_backend.numerics.bits import unit_roundoff
from checked_backend.verdict import thresholds
from checked_backend.verdict.elements import blocks, difference, root_mean_square
from checked_backend.verdict.local_scale import EXPONENTS, exponents


def least_digits(dtype: torch.dtype) -> float:
    """The relative error above which an element of a floating dtype has lost its digits."""
    return max(thresholds.LOST_DIGITS, thresholds.LOST_DIGITS_ROUNDOFFS * torch.finfo(dtype).eps)


def lost_digits(
    *, reference: torch.Tensor, candidate: torch.Tensor, high_precision: torch.Tensor
) -> torch.Tensor | None:
    """Find the elements that have lost their digits in the candidate, while eager keeps those of every such element.

    ``exp(x) - 1`` instead of ``expm1(x)`` has no digit left at 1e-9, and beside elements of 1 its error looks like
    rounding. If eager's relative error is small in all elements of this size and above, they are not the remainder of
    a sum of large numbers. Still smaller elements may be such a remainder, and so may a few in which eager is right
    by chance.

    Returns:
        A mask; None for dtypes without digits to lose (integers, complex numbers). Elements below the dtype's
        smallest normal number have fewer digits and are left out, as are NaN and infinity.
    """
    if not reference.dtype.is_floating_point:
        return None
    masks: list[torch.Tensor] = []
    errors = torch.zeros(EXPONENTS, dtype=torch.float64, device=reference.device)
    norm, count = 0.0, 0
    for high, first, second in blocks(high_precision, reference, candidate):
        size = high.to(torch.float64).abs()
        eager, compiled = difference(high, first), difference(high, second)
        counted = (size >= torch.finfo(reference.dtype).tiny) & size.isfinite()
        counted &= eager.isfinite() & compiled.isfinite()
        masks.append(counted & (compiled > least_digits(reference.dtype) * size))
        error = torch.where(counted, eager / size, 0.0)
        errors.scatter_reduce_(0, exponents(size), error.to(torch.float64), "amax")
        among = eager[counted]
        norm, count = math.hypot(norm, root_mean_square(among) * math.sqrt(among.numel())), count + among.numel()
    lost = torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool, device=reference.device)
    places = lost.nonzero().flatten()
    if len(places):
        high, first, second = (tensor.detach().reshape(-1)[places] for tensor in (high_precision, reference, candidate))
        size = high.to(torch.float64).abs()
        eager, compiled = difference(high, first), difference(high, second)
        factor = thresholds.LOST_DIGITS_EAGER_FACTOR
        near = compiled > factor * _greatest_from_here_on(errors)[exponents(size)] * size
        typical = norm / math.sqrt(count)
        alike = near & (compiled <= factor * typical)
        rounded = torch.maximum(eager, unit_roundoff(reference.dtype) * size)
        lost[places] = near & ~alike if _is_by_chance(rounded[alike], typical) else near
    return lost.reshape(reference.shape)


def _is_by_chance(errors: torch.Tensor, typical: float) -> bool:
    """Whether eager may be as near as it is in some elements although its error is the same everywhere.

    Then they are small because large numbers cancel there, and the compiled program's error, which is like eager's in
    the others, is as good. An error of a thousandth of the typical one has a chance of a thousandth.
    """
    chances = (errors / typical).clamp(max=1.0) if typical else errors.new_zeros(1)
    return float(chances.log10().sum().item()) > math.log10(thresholds.LOST_DIGITS_CHANCE)


def _greatest_from_here_on(errors: torch.Tensor) -> torch.Tensor:
    """By stored exponent, the greatest error among elements of that size (down to a quarter of it) and above."""
    from_here_on = errors.flip(0).cummax(0).values.flip(0)
    return torch.cat([from_here_on[:1], from_here_on[:-1]])
