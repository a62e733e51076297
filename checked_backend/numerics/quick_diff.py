"""The quick comparison of every checked call: three numbers about a difference, as fast as memory is read.

`measure` gives all metrics of a difference. A call whose tensors differ by no more than when they were measured needs
only these three numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from checked_backend._torch.tensors import differences_of, norms_of
from checked_backend.findings import Metrics
from checked_backend.numerics.bits import is_on_cpu, slabs, with_memory

_BLOCK = 1 << 17  # elements; two buffers of it and a block of each tensor stay in a processor's cache


@dataclass(frozen=True, slots=True)
class QuickDiff:
    """The size of a difference between two tensors that are finite throughout."""

    max_abs_diff: float
    rmse: float
    reference_rms: float

    @classmethod
    def of(cls, metrics: Metrics) -> QuickDiff | None:
        """The same from all metrics, which can be had where infinities are equal; None if elements are not."""
        if metrics.nonfinite_mismatched:
            return None
        return cls(metrics.max_abs_diff, metrics.rmse, metrics.reference_rms)


def quick_diffs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[QuickDiff | None]:
    """Compute the sizes of differences, each in one pass. A GPU is waited for once, however many pairs there are.

    Args:
        pairs: Reference and candidate: floating tensors of one shape and dtype, on one device.

    Returns:
        The sizes. None if only `measure` can tell: for other dtypes, for elements that are not finite (or sums of
        squares that overflow), for large tensors that are not dense in the same order.
    """
    with torch.no_grad():
        flat = [_comparable(*pair) for pair in pairs]
        reduced: dict[int, tuple[float, float, float]] = {}
        elsewhere: dict[torch.device, dict[int, tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)
        for place, both in enumerate(flat):
            if both is not None and (is_on_cpu(both[0]) or type(both[0]) is not torch.Tensor):
                reduced[place] = _reduce(*both)
            elif both is not None:
                elsewhere[both[0].device][place] = both
        for there in elsewhere.values():
            reduced.update(_reduce_on_device(there))
    return [_diff(*reduced[place], pair[0].numel()) if place in reduced else None for place, pair in enumerate(pairs)]


def _diff(greatest: float, squares: float, reference_squares: float, count: int) -> QuickDiff | None:
    if not greatest + squares + reference_squares < float("inf"):
        return None
    return QuickDiff(greatest, (squares / count) ** 0.5, (reference_squares / count) ** 0.5)


def _comparable(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both as flat views; None if only `measure` can tell."""
    if not reference.dtype.is_floating_point or reference.dtype.itemsize < 2 or type(reference) is not type(candidate):
        return None
    if reference.dtype != candidate.dtype or reference.layout is not torch.strided or not reference.numel():
        return None
    return _flat_alike(with_memory(reference.detach()), with_memory(candidate.detach()))


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


def _reduce_on_device(
    pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
) -> dict[int, tuple[float, float, float]]:
    """What `_reduce` gives, of pairs on one device: a few kernels for many tensors, and one wait for all numbers."""
    order: list[int] = []
    norms: list[torch.Tensor] = []
    for dtype in dict.fromkeys(one.dtype for one, _ in pairs.values()):
        places = [place for place, (one, _) in pairs.items() if one.dtype == dtype]
        order += places
        for slab in slabs(pairs[place][0].numel() for place in places):
            norms.append(_norms([pairs[places[number]] for number in slab]))
    numbers = torch.cat(norms, 1).tolist()
    return {
        place: (greatest, root * root, reference_root * reference_root)
        for place, greatest, root, reference_root in zip(order, *numbers, strict=True)
    }


def _norms(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Greatest difference, norm of the difference and norm of the reference: (3, pairs), float64, on the device."""
    references, candidates = [one for one, _ in pairs], [other for _, other in pairs]
    if references[0].dtype.itemsize == 2:
        references, candidates = [one.float() for one in references], [other.float() for other in candidates]
    gaps = differences_of(candidates, references)
    rows = norms_of(gaps, float("inf")), norms_of(gaps, 2), norms_of(references, 2)
    return torch.stack([torch.stack(row) for row in rows]).double()
