"""The quick comparison of every checked call: three numbers about a difference, as fast as memory is read.

`measure` gives all metrics of a difference. A call whose tensors differ by no more than when they were measured needs
only these three numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checked_backend.numerics.bits import FORMATS, with_memory
from checked_backend.numerics.fused import fused_loop

__all__ = ["QuickDiff", "quick_diff"]

_LARGE = 1 << 16  # elements; for tensors of this size one compiled loop is faster than a call for each number
_BLOCK = 1 << 17  # elements; two buffers of it and a block of each tensor stay in a processor's cache


@dataclass(frozen=True, slots=True)
class QuickDiff:
    """The size of a difference between two tensors that are finite throughout.

    Attributes:
        max_abs_diff: Greatest absolute difference.
        rmse: Root of the mean squared difference.
        reference_rms: Root mean square of the reference.
    """

    max_abs_diff: float
    rmse: float
    reference_rms: float


def quick_diff(*, reference: torch.Tensor, candidate: torch.Tensor) -> QuickDiff | None:
    """Compute the size of a difference in one pass.

    Args:
        reference: A floating tensor.
        candidate: One of the same shape and dtype, on the same device.

    Returns:
        The size. None if only `measure` can tell: for other dtypes, for elements that are not finite (or sums of
        squares that overflow), for large tensors that are not dense in the same order.
    """
    if not reference.dtype.is_floating_point or reference.dtype.itemsize < 2 or type(reference) is not type(candidate):
        return None
    if reference.dtype != candidate.dtype or reference.layout is not torch.strided or not reference.numel():
        return None
    with torch.no_grad():
        flat = _flat_alike(with_memory(reference.detach()), with_memory(candidate.detach()))
        if flat is None:
            return None
        greatest, squares, reference_squares = _reduce(*flat)
    if not greatest + squares + reference_squares < float("inf"):
        return None
    count = reference.numel()
    return QuickDiff(greatest, (squares / count) ** 0.5, (reference_squares / count) ** 0.5)


def _flat_alike(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both as flat views in one order of their elements, if memory allows."""
    if reference.is_contiguous() and candidate.is_contiguous():
        return reference.view(-1), candidate.view(-1)
    if reference.is_neg() or candidate.is_neg():
        return None
    order = sorted(range(reference.dim()), key=lambda dim: (reference.stride(dim), reference.size(dim)), reverse=True)
    one, other = reference.permute(order), candidate.permute(order)
    if one.is_contiguous() and other.is_contiguous():
        return one.view(-1), other.view(-1)
    # A compiled gradient often has another layout than eager's. A small one is cheaper to copy than to measure.
    if reference.numel() > _BLOCK:
        return None
    return reference.contiguous().view(-1), candidate.contiguous().view(-1)  # reshape leaves one expanded dimension


def _reduce(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[float, float, float]:
    """Greatest difference, sum of squared differences, sum of squares of the reference."""
    if reference.numel() >= _LARGE and reference.device.type == candidate.device.type == "cpu":
        loop = fused_loop(reference.dtype)
        if loop is not None and not (reference.is_neg() or candidate.is_neg()):
            # ratios and distances are not needed: the given ones cannot be exceeded, so the loop skips them
            found = loop(reference, candidate, float("inf"), 2 * FORMATS[reference.dtype].largest)
            return found.peak, found.squares, found.reference_squares
    low = reference.dtype.itemsize == 2
    block = _BLOCK if reference.device.type == "cpu" else reference.numel()
    size = min(block, reference.numel())
    work = torch.float32 if low else reference.dtype
    difference = torch.empty(size, dtype=work, device=reference.device)
    widened = torch.empty(size, dtype=work, device=reference.device) if low else difference
    greatest = squares = reference_squares = 0.0
    for start in range(0, reference.numel(), block):
        one, other = reference[start : start + block], candidate[start : start + block]
        gap = difference[: one.numel()]
        if low:
            one = widened[: one.numel()].copy_(one)
        torch.sub(other, one, out=gap)
        squares += torch.dot(gap, gap).item()
        reference_squares += torch.dot(one, one).item()
        here = gap.abs_().amax().item()
        greatest = here if here > greatest or here != here else greatest  # NaN stays
    return greatest, squares, reference_squares
