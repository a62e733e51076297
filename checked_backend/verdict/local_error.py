"""Is one operator's result, over the whole tensor, within what its own inputs and its own precision allow?

An operator by itself has noise of a rounding or two. An error of a few units in the last place in every element is far
outside of that noise, although the noise of a whole program would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from checked_backend.verdict import thresholds
from checked_backend.verdict.elements import all_finite, least_number, local_root_mean_square, widened

_GREATEST_RATIO = 1e4
"""Ratios above this count as this, so that their squares can be added up."""

WHOLE, ROW, COLUMN = "its elements", "the elements of a row", "the elements of a column"
"""Parts of a tensor that may have a factor in common. A row is along the last dimension, a column along all others."""


@dataclass(frozen=True, slots=True)
class LocalError:
    """How far a result is from the exact result for its own inputs.

    Attributes:
        spread: Root mean square of the errors, in units of the elements' own noise, without the greatest few.
        spread_allowed: How large `spread` may be.
        bias: The factor that all elements have in common, less 1; that of one row or column, if it alone is too large.
        bias_allowed: How far from 0 `bias` may be.
        relative: Root mean square of the error, over that of the result.
        limit: The smallest relative error over the whole tensor that would have been found, whatever its signs; 0 for
            a tensor of zeros.
        outliers: The number of single elements that rounding does not explain.
        worst: The relative error of the worst of these elements.
        part: What has the factor of `bias` in common.
    """

    spread: float
    spread_allowed: float
    bias: float
    bias_allowed: float
    relative: float
    limit: float
    outliers: int = 0
    worst: float = 0.0
    part: str = WHOLE

    @property
    def in_few(self) -> bool:
        """Whether the tensor as a whole is right, and a few elements are wrong."""
        return self.outliers > 0 and self.excess <= 1.0

    @property
    def is_factor(self) -> bool:
        """Whether only a factor that elements have in common shows that the tensor is wrong."""
        return self.spread <= self.spread_allowed and abs(self.bias) > self.bias_allowed

    @property
    def excess(self) -> float:
        """The greater of spread and bias, each over what it is allowed; infinite if that is NaN."""
        found = max(self.spread / self.spread_allowed, abs(self.bias) / self.bias_allowed)
        return found if found == found else math.inf

    @property
    def wrong(self) -> bool:
        """Whether rounding does not explain the error."""
        return self.outliers > 0 or not self.excess <= 1.0


def local_error(
    *,
    candidate: torch.Tensor,
    reference: torch.Tensor,
    exact: torch.Tensor,
    samples: Sequence[torch.Tensor],
    roundoff: float,
    narrows: bool = False,
    jumps: bool = False,
    smooth: bool = False,
) -> LocalError | None:
    """Measure an operator's error on its own inputs.

    Args:
        reference: Eager's result from the same inputs.
        exact: Eager's result from them in float64.
        samples: Eager's results in float64, from inputs that were moved by a rounding.
        roundoff: Unit roundoff of the precision that the operator works in.
        narrows: Whether eager rounds inputs on the way, so that all of its own error is to be expected.
        jumps: Whether the operator chooses by floating-point values, so that rounding makes some elements jump.
        smooth: Whether no rounding makes any element jump, so that a single element far off is wrong.

    Returns:
        The error; None if nothing can be compared: no element is finite in all of these tensors, or too few elements
        of an operator that jumps are.
    """
    wide = [widened(tensor).to(torch.float64).flatten() for tensor in (candidate, reference, exact, *samples)]
    if not all(map(all_finite, wide)):
        finite = torch.stack([values.isfinite() for values in wide]).all(0)
        wide = [values[finite] for values in wide]
    found, eager, right, *moved = wide
    count = right.numel()
    if count == 0 or (jumps and count < thresholds.FEW_ELEMENTS):
        return None
    magnitude = right.abs()
    inside = (eager - right).abs_()  # what no rounding of the result explains arises inside the kernel
    if not narrows:
        inside.sub_(magnitude, alpha=roundoff).sub_(_quantum(candidate.dtype)).clamp_min_(0)
    noise = _noise(candidate.dtype, right, moved, magnitude, inside, roundoff)
    error = found - right
    own, relative = _root_mean_square(right), _root_mean_square(error)
    error.abs_()
    ratios = (error / noise).clamp_max_(_GREATEST_RATIO)
    outliers, worst = 0, 0.0
    if smooth and not jumps and float(ratios.max()) > thresholds.OUTLIER:
        outside = (ratios > thresholds.OUTLIER) & _is_large(error, right, moved, inside)
        outliers = int(outside.sum())
        sizes_there = torch.where(right == 0, own or 1.0, magnitude)
        worst = float((error / sizes_there)[outside].max()) if outliers else 0.0
    left_out = 0
    weights = 1 / noise
    bias_of = partial(_bias, found, eager, right, moved, roundoff, _quantum(candidate.dtype))
    by_part: dict[str, tuple[float, float]] = {}
    if smooth and not jumps and candidate.dim() > 1 and count == candidate.numel():
        each, width = weights.square().mul_(right), candidate.shape[-1]
        for name, dim, part_size in ((ROW, 1, width), (COLUMN, 0, count // width)):
            if thresholds.FEW_ELEMENTS <= part_size < count:
                factor, allowed = bias_of(part_size, partial(_sums, each, width, dim))
                by_part[name] = factor, allowed * thresholds.BIAS_OF_PART
    if count >= thresholds.FEW_ELEMENTS:
        left_out = max(1, count // (thresholds.TRIMMED_JUMPS if jumps else thresholds.TRIMMED))
        worst_places = ratios.topk(left_out, sorted=False).indices
        ratios[worst_places] = weights[worst_places] = 0.0
    kept = count - left_out
    spread = _root_mean_square(ratios, kept)
    allowed = thresholds.SPREAD_FACTOR + thresholds.SPREAD_OF_FEW / math.sqrt(count)
    size = _root_mean_square((magnitude * weights).clamp_max_(_GREATEST_RATIO * _GREATEST_RATIO), kept)
    weights.square_().mul_(right)
    bias, bias_allowed = bias_of(kept, lambda values: torch.dot(weights, values).view(1))
    part = WHOLE
    for name, (own_bias, own_allowed) in by_part.items():
        if abs(bias) <= bias_allowed and abs(own_bias) > own_allowed:
            bias, bias_allowed, part = own_bias, own_allowed, name
    relative, limit = relative / own if own else 0.0, allowed / size if size else 0.0
    return LocalError(spread, allowed, bias, bias_allowed, relative, limit, outliers, worst, part)


def _noise(
    dtype: torch.dtype,
    right: torch.Tensor,
    moved: Sequence[torch.Tensor],
    magnitude: torch.Tensor,
    inside: torch.Tensor,
    roundoff: float,
) -> torch.Tensor:
    """Each element's own noise: from its inputs' roundings, from its own, and from those inside eager's kernel."""
    squares = (magnitude * (thresholds.ROUNDING_RMS * roundoff)).square_().add_(_quantum(dtype) ** 2)
    shared = inside.square()
    if moved:
        spread = torch.zeros_like(right)
        for values in moved:
            spread.add_((values - right).square_(), alpha=1 / len(moved))
        squares += spread
        # by chance the runs may agree in an element; its neighbours show the noise then
        shared.add_(spread.sqrt_().sub_(magnitude, alpha=roundoff).clamp_min_(0).square_(), alpha=1 / 4)
    squares += local_root_mean_square(shared.sqrt_(), magnitude).square_()
    return squares.sqrt_().clamp_min_(torch.finfo(torch.float32).tiny)


def _is_large(
    error: torch.Tensor, right: torch.Tensor, moved: Sequence[torch.Tensor], inside: torch.Tensor
) -> torch.Tensor:
    """A mask of elements that are further off than rounding takes elements elsewhere in the tensor.

    Where a kernel cancels inside, a few elements are far off in eager, and others in a compiled program. Most of these
    are small.
    """
    small = right.abs() < thresholds.SMALL_ELEMENT * _root_mean_square(right)
    elsewhere = torch.stack([inside.max(), *((values - right).abs().max() for values in moved)]).max()
    allowed = torch.where(small, elsewhere, inside.max())
    return error > thresholds.OUTLIER_OF_TENSOR * allowed


def _bias(
    found: torch.Tensor,
    eager: torch.Tensor,
    right: torch.Tensor,
    moved: Sequence[torch.Tensor],
    roundoff: float,
    quantum: float,
    size: int,
    sums: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[float, float]:
    """The common factor less 1 of the worst part (row, column, whole tensor), and how far from 0 it may be.

    A kernel that is wrong in one block or behind the last whole tile is wrong in few elements, by a common factor.

    Args:
        size: The number of elements of a part.
        sums: Multiplies values by weights, and adds them up over each part. A weight is the exact result over the
            square of its noise, and 0 for an element that is left out.
    """
    signals = sums(right)  # of each part the elements' number, times the square of signal over noise
    total = signals.clamp_min(torch.finfo(torch.float64).tiny)
    chance = total.rsqrt() + size / total
    # by chance the runs may agree in one part; the others show the noise then
    control, by_eager = (
        max((float((sums(values - right).abs_() / total / chance).max()) for values in runs), default=0.0)
        for runs in (moved, (eager,))
    )
    allowed = thresholds.BIAS_ROUNDOFFS * roundoff + chance * (thresholds.BIAS_FACTOR * (1 + control) + 2 * by_eager)
    allowed += quantum * sums(right.sign()) / total  # subnormals all round the same way
    known = signals.isfinite() & (signals > 0)
    factors, allowed = torch.where(known, sums(found - right) / total, 0.0), torch.where(known, allowed, 1.0)
    place = (factors.abs() / allowed).nan_to_num_(0.0).argmax()
    return float(factors[place]), float(allowed[place])


def _sums(weights: torch.Tensor, width: int, dim: int, values: torch.Tensor) -> torch.Tensor:
    """The weighted sums of the rows or the columns of a table that is ``width`` wide."""
    return (weights * values).view(-1, width).sum(dim)


def _quantum(dtype: torch.dtype) -> float:
    """Half the step between subnormal numbers; the least normal number if some processors flush those to zero."""
    least = least_number(dtype)
    return least if least == torch.finfo(dtype).tiny else least / 2


def _root_mean_square(values: torch.Tensor, count: int | None = None) -> float:
    """Root mean square of values; the ``count`` is lower if some are left out as 0."""
    return float(torch.linalg.vector_norm(values)) / math.sqrt(max(values.numel() if count is None else count, 1))
