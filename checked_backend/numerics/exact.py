"""Read a block in the general, slower way: in float64 with masks, for every dtype and for NaN and infinities."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from checked_backend.numerics.bits import flip_sign_bit, unsigned_gap, unsigned_to_float64

__all__ = ["Classes", "count", "greatest_integer_gap", "read_exactly"]


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of the elements of a block that is not all finite.

    Attributes:
        differs: Elements whose class (finite, NaN, +inf, -inf) differs. A complex element has a class for each part.
        beside: Complex elements of the same class with an infinite part, whose finite parts differ.
        compared: Elements that are finite on both sides.
        reference_finite: Elements that are finite in the reference.
        nans: Number of NaNs in the reference and in the candidate.
        infs: Number of infinities in the reference and in the candidate.
    """

    differs: torch.Tensor
    beside: torch.Tensor
    compared: torch.Tensor
    reference_finite: torch.Tensor
    nans: tuple[int, int]
    infs: tuple[int, int]


def read_exactly(
    reference: torch.Tensor, candidate: torch.Tensor, gap: torch.Tensor, size: torch.Tensor
) -> Classes | None:
    """Fill two float64 buffers with a block's absolute differences and the reference's magnitudes.

    Args:
        reference: A block of any supported dtype.
        candidate: The same elements of the candidate.
        gap: Float64, of the block's shape; receives ``|candidate - reference|``, 0 where either is not finite.
        size: Float64, of the block's shape; receives ``|reference|``, 0 where it is not finite.

    Returns:
        The classes if a NaN or an infinity is present on either side, else None.
    """
    if reference.dtype in (torch.int64, torch.uint64):
        size.copy_(reference).abs_()
        gap.copy_(unsigned_to_float64(_integer_gap(reference, candidate)))
        return None
    is_complex = reference.is_complex()
    if is_complex:  # copies, because the difference is taken in place
        left, right = (torch.view_as_real(side).to(torch.float64, copy=True) for side in (reference, candidate))
    else:
        left, right = size.copy_(reference).unsqueeze(-1), gap.copy_(candidate).unsqueeze(-1)
    classes = _classes(left, right)
    right.sub_(left)
    for parts, magnitude in ((right, gap), (left, size)):
        if is_complex:
            torch.hypot(parts[..., 0], parts[..., 1], out=magnitude)
        else:
            magnitude.abs_()
    if classes is not None:
        gap.masked_fill_(~classes.compared, 0.0)
        size.masked_fill_(~classes.reference_finite, 0.0)
    return classes


def greatest_integer_gap(reference: torch.Tensor, candidate: torch.Tensor) -> int:
    """Position of the greatest difference within a block of int64 or uint64, found without rounding."""
    return int(flip_sign_bit(_integer_gap(reference, candidate)).reshape(-1).argmax().item())


def _integer_gap(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    if reference.dtype is torch.uint64:
        reference, candidate = (flip_sign_bit(side.view(torch.int64)) for side in (reference, candidate))
    return unsigned_gap(reference, candidate)


def _classes(reference: torch.Tensor, candidate: torch.Tensor) -> Classes | None:
    """Classes of a block's parts: float64, with the parts of an element in the last dimension."""
    if _all_finite(reference) and _all_finite(candidate):
        return None
    reference_class, candidate_class = _class_of(reference), _class_of(candidate)
    reference_finite = (reference_class == 0).all(-1)
    candidate_finite = (candidate_class == 0).all(-1)
    nans = [(side == _NAN).any(-1) for side in (reference_class, candidate_class)]
    infs = [~finite & ~nan for finite, nan in zip((reference_finite, candidate_finite), nans, strict=True)]
    differs = (reference_class != candidate_class).any(-1)
    parts_differ = ((reference != candidate) & (reference_class == 0)).any(-1)
    return Classes(
        differs=differs,
        beside=infs[0] & ~differs & parts_differ,
        compared=reference_finite & candidate_finite,
        reference_finite=reference_finite,
        nans=(count(nans[0]), count(nans[1])),
        infs=(count(infs[0]), count(infs[1])),
    )


_NAN = 2


def _class_of(parts: torch.Tensor) -> torch.Tensor:
    """0 for finite, 1 for +inf, -1 for -inf, 2 for NaN, as int8."""
    nan = parts.isnan()
    infinite = parts.isinf()
    classes = infinite.to(torch.int8)
    classes.masked_fill_(infinite & (parts < 0), -1)
    return classes.masked_fill_(nan, _NAN)


def _all_finite(parts: torch.Tensor) -> bool:
    low, high = torch.aminmax(parts)  # both are NaN if any element is
    return math.isfinite(low.item()) and math.isfinite(high.item())


def count(mask: torch.Tensor) -> int:
    """Number of elements that are true."""
    return int(torch.count_nonzero(mask).item())
