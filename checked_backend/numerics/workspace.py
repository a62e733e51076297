"""Reused float64 buffers for one block, and the reductions that make up a measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["GapStatistics", "SizeStatistics", "SumOfSquares", "Workspace", "sum_in_float32"]

_SCALED = 1000
"""The greatest exponent of two by which numbers are scaled."""


@dataclass(slots=True)
class SumOfSquares:
    """A sum of squares that neither overflows nor underflows: ``value * 2 ** exponent``, with an even exponent."""

    value: float = 0.0
    exponent: int = 0

    def add(self, other: SumOfSquares) -> None:
        """Add another sum."""
        if other.value == 0.0:
            return
        if self.value == 0.0:
            self.value, self.exponent = other.value, other.exponent
            return
        exponent = max(self.exponent, other.exponent)
        self.value = math.ldexp(self.value, self.exponent - exponent)
        self.value += math.ldexp(other.value, other.exponent - exponent)
        self.exponent = exponent

    def root_mean(self, count: int) -> float:
        """The root of the mean over ``count`` numbers; 0 if there are none."""
        if count == 0:
            return 0.0
        return math.ldexp(math.sqrt(self.value / count), self.exponent // 2)


def sum_in_float32(total: float, peak: float, length: int) -> SumOfSquares | None:
    """A sum of squares of float32 numbers; None if the range of float32 may have been too small for it.

    Args:
        total: The sum.
        peak: The greatest of the numbers.
        length: How many numbers there are.
    """
    if peak == 0.0:
        return SumOfSquares()
    # a sum in this range did not overflow in a row, and lost at most 2 ** -20 of itself to underflow
    limits = torch.finfo(torch.float32)
    return SumOfSquares(total) if limits.tiny * 2.0**20 * length <= total <= limits.max / 2.0**8 else None


class GapStatistics(NamedTuple):
    """Statistics of a block's absolute differences.

    Attributes:
        peak: The greatest difference.
        differing: Number of differences that are not 0.
        squares: Sum of the squares.
    """

    peak: float
    differing: int
    squares: SumOfSquares


class SizeStatistics(NamedTuple):
    """Statistics of the magnitudes of a block's reference.

    Attributes:
        floor: The least magnitude.
        peak: The greatest magnitude.
        squares: Sum of the squares.
    """

    floor: float
    peak: float
    squares: SumOfSquares


class Workspace:
    """Float64 buffers for the absolute differences of a block (``gap``) and the reference's magnitudes (``size``).

    Attributes:
        gap: Buffer of the present block's shape; its numbers are 0 or more, possibly infinite.
        size: Buffer of the present block's shape, likewise.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self._buffers = torch.empty(2, length, dtype=torch.float64, device=device).unbind()
        self.fit(torch.Size([length]))

    def fit(self, shape: torch.Size) -> None:
        """Make both buffers' views fit a block."""
        self.gap, self.size = (buffer[: shape.numel()].view(shape) for buffer in self._buffers)

    def gap_statistics(self) -> GapStatistics:
        """Reduce ``gap``."""
        peak = float(self.gap.max().item())
        return GapStatistics(peak, int(torch.count_nonzero(self.gap).item()), _squares(self.gap, peak))

    def size_statistics(self) -> SizeStatistics:
        """Reduce ``size``."""
        floor, peak = (float(limit.item()) for limit in torch.aminmax(self.size))
        return SizeStatistics(floor, peak, _squares(self.size, peak))

    def max_ratio(self) -> float:
        """The greatest ``gap / size``, where 0 / 0 counts as 0. Overwrites ``gap``."""
        return float(self.gap.div_(self.size).nan_to_num_(nan=0.0, posinf=math.inf).max().item())

    def greatest_gap(self) -> tuple[int, float]:
        """Position and value of the greatest element of ``gap``."""
        flat = self.gap.view(-1)
        position = int(flat.argmax().item())
        return position, float(flat[position].item())

    def scratch(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of ``gap`` and ``size`` as integers, of the present block's shape."""
        gap, size = (buffer.view(dtype)[: self.gap.numel()].view(self.gap.shape) for buffer in self._buffers)
        return gap, size


def _squares(values: torch.Tensor, peak: float) -> SumOfSquares:
    """The sum of squares of numbers up to ``peak``, scaled by a power of two so that none leaves the range."""
    if peak == 0.0 or not math.isfinite(peak):
        return SumOfSquares(peak)
    exponent = max(-_SCALED, min(_SCALED, math.frexp(peak)[1]))
    scaled = (values * 2.0**-exponent).view(-1)
    return SumOfSquares(float(torch.dot(scaled, scaled).item()), 2 * exponent)
