"""Reused buffers for one block, and the few fast reductions that make up a measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["GapStatistics", "SizeStatistics", "SumOfSquares", "Workspace", "sum_in_range"]

_ROW = 4096

_Array = npt.NDArray[Any]


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


def sum_in_range(total: float, peak: float, dtype: torch.dtype, length: int) -> SumOfSquares | None:
    """A sum of squares that was computed in a dtype; None if the dtype's range may have been too small for it.

    Args:
        total: The sum.
        peak: The greatest of the numbers.
        dtype: The floating dtype in which they were squared and, row by row, added.
        length: How many numbers there are.
    """
    if peak == 0.0:
        return SumOfSquares()
    # a sum in this range did not overflow in a row, and lost at most 2 ** -20 of itself to underflow
    format_info = torch.finfo(dtype)
    return SumOfSquares(total) if format_info.tiny * 2.0**20 * length <= total <= format_info.max / 2.0**8 else None


class GapStatistics(NamedTuple):
    """The results of the cheap passes over a block's absolute differences.

    Attributes:
        peak: The greatest difference; NaN or infinite if one is.
        differing: Number of differences that are not 0.
        squares: Sum of the squares.
    """

    peak: float
    differing: int
    squares: SumOfSquares


class SizeStatistics(NamedTuple):
    """The results of the cheap passes over the magnitudes of a block's reference.

    Attributes:
        floor: The least magnitude.
        peak: The greatest magnitude; NaN or infinite if one is.
        squares: Sum of the squares.
    """

    floor: float
    peak: float
    squares: SumOfSquares


class Workspace:
    """Buffers for the absolute differences of a block (``gap``) and the reference's magnitudes (``size``).

    Both hold numbers >= 0 (or NaN), so their bit patterns taken as integers are in the order of the numbers. Integer
    reductions need no NaN handling and run about twice as fast. NaN comes out as the greatest.

    Sums of squares are dot products in the buffers' dtype over rows of 4096 elements, added up in float64. They are
    good to about ``1e-6`` relative in float32. On the CPU, numpy's dot product and non-zero count work on the same
    memory; they are about twice as fast as torch's.

    Attributes:
        gap: Buffer of the present block's shape.
        size: Buffer of the present block's shape.
    """

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._buffers = torch.empty(2, length, dtype=dtype, device=device).unbind()
        self._integer = torch.int32 if dtype is torch.float32 else torch.int64
        scalars = torch.empty(2, dtype=dtype, device=device)
        self._low, self._high = scalars.unbind()
        self._low_bits, self._high_bits = scalars.view(self._integer).unbind()
        self._on_cpu = device.type == "cpu"
        self._fit(torch.Size([length]))

    def fit(self, shape: torch.Size) -> None:
        """Make both buffers' views fit a block. Views are kept as long as the shape stays, as it mostly does."""
        if shape != self.gap.shape:
            self._fit(shape)

    def _fit(self, shape: torch.Size) -> None:
        self._length = shape.numel()
        self._gap, self._size = (buffer[: self._length] for buffer in self._buffers)
        self.gap, self.size = self._gap.view(shape), self._size.view(shape)
        self._gap_bits, self._size_bits = self._gap.view(self._integer), self._size.view(self._integer)
        self._gap_array: _Array | None = self._gap.numpy() if self._on_cpu else None
        self._size_array: _Array | None = self._size.numpy() if self._on_cpu else None
        self._gap_bits_array: _Array | None = self._gap_bits.numpy() if self._on_cpu else None

    def gap_statistics(self) -> GapStatistics:
        """Reduce ``gap``."""
        peak = self._gap_peak()
        squares = self._squares(self._gap, self._gap_array, peak)
        if self._gap_bits_array is None:
            return GapStatistics(peak, int(torch.count_nonzero(self._gap_bits).item()), squares)
        return GapStatistics(peak, int(np.count_nonzero(self._gap_bits_array)), squares)

    def size_statistics(self) -> SizeStatistics:
        """Reduce ``size``."""
        torch.aminmax(self._size_bits, out=(self._low_bits, self._high_bits))
        peak = float(self._high.item())
        return SizeStatistics(float(self._low.item()), peak, self._squares(self._size, self._size_array, peak))

    def max_ratio(self) -> float:
        """The greatest ``gap / size``, where 0 / 0 counts as 0. Overwrites ``gap``."""
        self._gap.div_(self._size)
        peak = self._gap_peak()
        # on x86, 0 / 0 is a NaN whose sign bit is set, so a negative integer; elsewhere the NaNs must be replaced
        if math.isnan(peak) and math.copysign(1.0, peak) > 0:
            self._gap.nan_to_num_(nan=0.0, posinf=math.inf)
            peak = self._gap_peak()
        return 0.0 if math.isnan(peak) else peak

    def greatest_gap(self) -> tuple[int, float]:
        """Position and value of the greatest element of ``gap``."""
        position = int(self._gap.argmax().item())
        return position, float(self._gap[position].item())

    def scratch(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of ``gap`` and ``size`` as integers, of the present block's shape."""
        gap, size = (buffer.view(dtype)[: self._length].view(self.gap.shape) for buffer in self._buffers)
        return gap, size

    def _gap_peak(self) -> float:
        torch.amax(self._gap_bits, 0, out=self._high_bits)
        return float(self._high.item())

    def _squares(self, values: torch.Tensor, array: _Array | None, peak: float) -> SumOfSquares:
        if peak == 0.0 or not math.isfinite(peak):
            return SumOfSquares(peak)
        total = float(torch.dot(values, values).item()) if array is None else _dot(array)
        direct = sum_in_range(total, peak, self.dtype, len(values))
        if direct is not None:
            return direct
        limit = 120 if self.dtype is torch.float32 else 1000
        exponent = max(-limit, min(limit, math.frexp(peak)[1]))
        scaled = values * 2.0**-exponent
        total = float(torch.dot(scaled, scaled).item()) if array is None else _dot(scaled.numpy())
        return SumOfSquares(total, 2 * exponent)


def _dot(array: _Array) -> float:
    # rows this short stay on one thread in every BLAS, and their rounding errors stay small
    whole = len(array) - len(array) % _ROW
    rest = array[whole:]
    total = float(np.dot(rest, rest)) if len(rest) else 0.0
    if whole:
        rows = array[:whole].reshape(-1, _ROW)
        total += math.fsum(np.matmul(rows[:, None, :], rows[:, :, None]).reshape(-1).tolist())
    return total
