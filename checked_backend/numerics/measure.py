"""Measure how a candidate tensor differs from its reference, in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from checked_backend.findings import Metrics
from checked_backend.numerics.bits import FORMATS, FloatFormat, max_ulp_distance, numbers_up_to, with_memory
from checked_backend.numerics.chunks import Block, UnsupportedTensorError, pair_layout, require_plain
from checked_backend.numerics.exact import Classes, count, greatest_integer_gap, read_exactly
from checked_backend.numerics.fused import FUSED_ROW, FusedLoop, fused_loop
from checked_backend.numerics.workspace import GapStatistics, SizeStatistics, SumOfSquares, Workspace, sum_in_float32

__all__ = ["UnsupportedTensorError", "measure"]

_BLOCK = 1 << 16  # elements; two float64 buffers and a block of each tensor share a processor's cache
_DEVICE_BLOCK = 1 << 21  # elements, where starting a kernel costs more than cache misses do
_FUSED_BLOCKS = (1 << 22, 1 << 18, 1 << 15)
"""Elements read by one call of the compiled loop, which needs no buffers.

A block that the loop cannot handle is read again in smaller blocks, because the elements that it cannot handle are
mostly in one place. If it cannot handle a block of the last size, that block is read in float64. Calls for blocks of
``2 ** 20`` elements cost a tenth of reading them.
"""
_LARGE = 1 << 20  # elements; for tensors of this size the compiled loop is worth the time that compiling it takes


def measure(*, reference: torch.Tensor, candidate: torch.Tensor, _block_size: int | None = None) -> Metrics:
    """Measure how two tensors differ.

    Both tensors are read once, in blocks that stay in the processor's cache. Only buffers of the size of a few blocks
    are allocated. The compiled loop that `quick_diff` also uses reads large dense float32, bfloat16 and float16 tensors
    on the CPU. All others are read in float64. All strides are taken as they are: expanded elements count as often as
    they occur. Neither tensor is written to, and neither needs to be detached.

    Counts are exact. Greatest differences and ratios are computed in float64, at the element that was found to hold the
    greatest one. The compiled loop finds that element in float32 (where the difference of two numbers within a factor 2
    of each other is exact), and its ``rmse`` and ``reference_rms`` are good to about ``1e-6`` relative. Integer
    differences are exact before they become a float. A difference or modulus beyond the float64 range is infinite, and
    numbers derived from it mean nothing more than that. ``max_rel_diff`` and ``max_ulp`` are skipped in blocks where a
    cheap bound shows that they cannot grow; they remain exact.

    A complex element is NaN if a part of it is, else infinite if a part of it is. Its class differs if the class of a
    part does. Its difference is the modulus. If a part is infinite, a difference in the other part is only counted as a
    mismatch. ``max_ulp`` is None for complex, integer and bool. ``index`` is that of the first element whose class
    differs, else of the greatest difference, else of the first complex element that differs beside an infinity.

    Args:
        reference: A plain strided tensor of any floating (float8 included), complex, integer or bool dtype.
        candidate: A tensor of the same shape and dtype, on the same device.

    Returns:
        The metrics; all zero for empty tensors.

    Raises:
        ValueError: Shape, dtype or device differ (compare the structure first).
        UnsupportedTensorError: Sparse, nested, quantised, packed, ``meta`` or subclassed tensors.
    """
    require_plain(reference, "reference")
    require_plain(candidate, "candidate")
    for aspect in ("shape", "dtype", "device"):
        expected, actual = getattr(reference, aspect), getattr(candidate, aspect)
        if expected != actual:
            message = f"reference and candidate differ in {aspect}: {expected} and {actual}"
            raise ValueError(f"{message}. Values are measured only where the structure is the same.")
    with _plain_arithmetic(reference.device):
        return _Measurement(with_memory(reference.detach()), with_memory(candidate.detach()), _block_size).run()


@contextmanager
def _plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch off autograd, autocast and NumPy's warnings: a measurement counts NaNs and overflows, and expects them."""
    with torch.no_grad(), np.errstate(all="ignore"):
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


class _Measurement:
    """One measurement: the totals so far, and the buffers."""

    def __init__(self, reference: torch.Tensor, candidate: torch.Tensor, block_size: int | None) -> None:
        self.reference, self.candidate = reference, candidate
        self.total = reference.numel()
        self.float_format: FloatFormat | None = FORMATS.get(reference.dtype)
        if block_size is None:
            block_size = _BLOCK if reference.device.type == "cpu" else _DEVICE_BLOCK
        self.block_size = max(1, min(block_size, self.total))
        self.workspace: Workspace | None = None
        self.mismatched = self.nonfinite_mismatched = self.compared = self.reference_finite = 0
        self.nans, self.infs = [0, 0], [0, 0]
        self.squares, self.reference_squares = SumOfSquares(), SumOfSquares()
        self.reference_max = self.max_abs = self.max_rel = 0.0
        self.max_ulp = 0
        self.max_abs_block: Block | None = None
        self.max_rel_block: Block | None = None
        self.first_class_difference: int | None = None
        self.first_beside: int | None = None

    def run(self) -> Metrics:
        if self.total == 0:
            return self._metrics(None)
        layout = pair_layout(self.reference, self.candidate)
        loop = fused_loop(self.reference.dtype) if self.total >= _LARGE and layout.is_dense() else None
        if loop is None:
            self._add_all(layout.blocks(self.block_size))
        else:
            self.block_size = max(self.block_size, min(FUSED_ROW, self.total))  # rows are read again
            self._add_all_fused(layout.blocks(_FUSED_BLOCKS[0]), loop, _FUSED_BLOCKS[1:])
        if self.mismatched == 0:
            return self._metrics(None)
        position = self._refine()
        return self._metrics(layout.index(position))

    def _add_all(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._add(block)

    def _add_all_fused(self, blocks: Iterable[Block], loop: FusedLoop, smaller: Sequence[int]) -> None:
        for block in blocks:
            if self._add_fused(block, loop):
                continue
            if smaller:
                self._add_all_fused(block.blocks(smaller[0]), loop, smaller[1:])
            else:
                self._add_all(block.blocks(self.block_size))

    def _add_fused(self, block: Block, loop: FusedLoop) -> bool:
        """Add a block by one loop over it. If float32 is not enough for the block, add nothing and return False."""
        found = loop(block.reference, block.candidate, self.max_rel, self.max_ulp)
        length = block.reference.numel()
        squares = sum_in_float32(found.squares, found.peak, length)
        reference_squares = sum_in_float32(found.reference_squares, found.top, length)
        ratio_unknown = found.overflows > 0 and not math.isinf(self.max_rel)
        if squares is None or reference_squares is None or ratio_unknown:
            return False
        if found.ratio > self.max_rel:
            self._offer_ratio(found.ratio, block.row(found.ratio_row, FUSED_ROW))
        self.max_ulp = max(self.max_ulp, found.ulp)
        gap_statistics = GapStatistics(found.peak, found.differing, squares)
        size_statistics = SizeStatistics(0.0, found.top, reference_squares)
        row = block.row(found.peak_row, FUSED_ROW) if found.peak > self.max_abs else block
        self._commit(row, length, gap_statistics, size_statistics, None)
        return True

    def _read(self, block: Block) -> tuple[Workspace, Classes | None]:
        """Read a block into the buffers. Returns them, and the classes of its elements if some are not finite."""
        if self.workspace is None:
            self.workspace = Workspace(self.block_size, self.reference.device)
        self.workspace.fit(block.reference.shape)
        return self.workspace, read_exactly(block.reference, block.candidate, self.workspace.gap, self.workspace.size)

    def _add(self, block: Block) -> None:
        """Add a block in float64, with masks for elements that are not finite."""
        workspace, classes = self._read(block)
        gap_statistics, size_statistics = workspace.gap_statistics(), workspace.size_statistics()
        if gap_statistics.differing:
            ratio = _ratio_bound(gap_statistics, size_statistics)
            if ratio > self.max_rel:
                ratio = workspace.max_ratio()
                self._offer_ratio(ratio, block)
            if self.float_format is not None and self._ulp_may_grow(ratio, self.float_format):
                scratch = workspace.scratch(self.float_format.bits)
                self._offer_ulp(block, self.float_format, scratch, gap_statistics.peak, classes)
        self._commit(block, block.reference.numel(), gap_statistics, size_statistics, classes)

    def _commit(
        self,
        block: Block,
        length: int,
        gap_statistics: GapStatistics,
        size_statistics: SizeStatistics,
        classes: Classes | None,
    ) -> None:
        """Add the statistics of ``length`` elements; those with the greatest difference are in ``block``."""
        self.mismatched += gap_statistics.differing
        self.squares.add(gap_statistics.squares)
        self.reference_squares.add(size_statistics.squares)
        self.reference_max = max(self.reference_max, size_statistics.peak)
        if gap_statistics.peak > self.max_abs:
            self.max_abs, self.max_abs_block = gap_statistics.peak, block
        if classes is None:
            self.compared += length
            self.reference_finite += length
        else:
            self._commit_classes(block, classes)

    def _commit_classes(self, block: Block, classes: Classes) -> None:
        self.compared += count(classes.compared)
        self.reference_finite += count(classes.reference_finite)
        for side in (0, 1):
            self.nans[side] += classes.nans[side]
            self.infs[side] += classes.infs[side]
        differing = count(classes.differs)
        self.nonfinite_mismatched += differing
        self.mismatched += differing + count(classes.beside)
        if self.first_class_difference is None and differing:
            self.first_class_difference = block.start + _first(classes.differs)
        if self.first_beside is None and bool(classes.beside.any()):
            self.first_beside = block.start + _first(classes.beside)

    def _offer_ratio(self, ratio: float, block: Block) -> None:
        if ratio > self.max_rel:
            self.max_rel, self.max_rel_block = ratio, block

    def _ulp_may_grow(self, ratio: float, float_format: FloatFormat) -> bool:
        """Whether a block whose ratios are at most ``ratio`` can hold a greater distance in representable numbers.

        Below a ratio of 1/2 at most one power of two lies between both numbers, so their distance is at most ``ratio *
        2 ** precision``. A distance beyond ``max_ulp`` then has a ratio of at least ``(max_ulp + 1) * 2 **
        -precision``. That number is representable, so rounding cannot take the ratio below it. Below a ratio of 1 the
        signs are equal, and at most as many powers of two lie between both numbers as the working dtype has significant
        bits, and one more.
        """
        if ratio < 0.5 and ratio < math.ldexp(self.max_ulp + 1, -float_format.precision):
            return False
        return not (ratio < 1.0 and self.max_ulp >= 64 << (float_format.precision - 1))

    def _offer_ulp(
        self,
        block: Block,
        float_format: FloatFormat,
        scratch: tuple[torch.Tensor, torch.Tensor],
        peak: float,
        classes: Classes | None,
    ) -> None:
        # the magnitudes of two numbers of opposite sign add up to their difference; equal halves are farthest apart
        dtype = block.reference.dtype
        if self.max_ulp >= 2 * numbers_up_to(peak / 2, dtype):
            return
        reference, candidate = block.reference.view(float_format.bits), block.candidate.view(float_format.bits)
        if classes is not None:
            left_out = ~classes.compared
            reference, candidate = reference.masked_fill(left_out, 0), candidate.masked_fill(left_out, 0)
        same_sign = self.max_ulp < numbers_up_to(peak, dtype)
        distance = max_ulp_distance(reference, candidate, float_format, scratch, same_sign=same_sign)
        self.max_ulp = max(self.max_ulp, distance)

    def _refine(self) -> int:
        """Compute the greatest difference and ratio again in float64. Return the position to report."""
        position = self.first_beside or 0
        if self.max_abs_block is not None:
            block = self.max_abs_block
            position, self.max_abs = self._read(block)[0].greatest_gap()
            if block.reference.dtype in (torch.int64, torch.uint64):
                position = greatest_integer_gap(block.reference, block.candidate)
            position += block.start
        if self.max_rel_block is not None:
            self.max_rel = self._read(self.max_rel_block)[0].max_ratio()
        return position if self.first_class_difference is None else self.first_class_difference

    def _metrics(self, index: tuple[int, ...] | None) -> Metrics:
        return Metrics(
            total=self.total,
            mismatched=self.mismatched,
            max_abs_diff=self.max_abs,
            max_rel_diff=self.max_rel,
            max_ulp=None if self.float_format is None else self.max_ulp,
            rmse=self.squares.root_mean(self.compared),
            reference_rms=self.reference_squares.root_mean(self.reference_finite),
            reference_max=self.reference_max,
            nonfinite_mismatched=self.nonfinite_mismatched,
            nan_reference=self.nans[0],
            nan_candidate=self.nans[1],
            inf_reference=self.infs[0],
            inf_candidate=self.infs[1],
            dtype=str(self.reference.dtype).removeprefix("torch."),
            index=index,
            reference_value=None if index is None else self.reference[index].item(),
            candidate_value=None if index is None else self.candidate[index].item(),
        )


def _first(mask: torch.Tensor) -> int:
    """Position of the first element that is true. There must be one."""
    return int(mask.reshape(-1).to(torch.uint8).argmax().item())


def _ratio_bound(gap: GapStatistics, size: SizeStatistics) -> float:
    """A number that no ratio of a block's differences to its reference exceeds."""
    return gap.peak / size.floor * (1.0 + 2.0**-20) if size.floor else math.inf
