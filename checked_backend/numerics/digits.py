"""Elements with no digit right, among others so much larger that a norm does not show it."""

from __future__ import annotations

import torch

from checked_backend.numerics.noise import difference

__all__ = ["lost_digits"]

LOST = 1e-3
"""Relative error of an element that has lost its digits: fewer than three are right."""

LOST_ROUNDOFFS = 64.0
"""The same in machine epsilons, for dtypes that have few digits to lose."""

EAGER_FACTOR = 20.0
"""And it is this many times greater than the greatest relative error that eager has anywhere in the tensor."""


def lost_digits(
    *, reference: torch.Tensor, candidate: torch.Tensor, high_precision: torch.Tensor
) -> torch.Tensor | None:
    """Find the elements that have lost their digits in the candidate, though eager keeps those of every element.

    ``exp(x) - 1`` for ``expm1(x)`` has none left at 1e-9, and beside elements of 1 its error looks like rounding. That
    eager's relative error is small everywhere says that small elements are not what a sum of large ones left over.

    Args:
        reference: Eager's tensor.
        candidate: The compiled program's, of the same dtype and shape.
        high_precision: The reference in float64.

    Returns:
        A mask; None for dtypes whose elements have no digits of their own (integers, complex numbers). Elements below
        the dtype's smallest normal number have fewer digits, and are left out, as are NaN and infinity.
    """
    if not reference.dtype.is_floating_point:
        return None
    info = torch.finfo(reference.dtype)
    magnitude = high_precision.detach().to(torch.float64).abs()
    eager, compiled = difference(high_precision, reference), difference(high_precision, candidate)
    judged = (magnitude >= info.tiny) & magnitude.isfinite() & eager.isfinite() & compiled.isfinite()
    if not bool(judged.any()):
        return judged
    worst = float((eager[judged] / magnitude[judged]).max().item())
    return judged & (compiled > max(LOST, LOST_ROUNDOFFS * info.eps, EAGER_FACTOR * worst) * magnitude)
