"""Measure how a candidate tensor differs from its reference, in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from checked_backend.findings import Metrics
from checked_backend.numerics.bits import FORMATS, FloatFormat, max_ulp_distance, numbers_up_to, same_bits, with_memory
from checked_backend.numerics.chunks import Block, UnsupportedTensorError, pair_layout, require_plain
from checked_backend.numerics.exact import Classes, count, greatest_integer_gap, read_exactly
from checked_backend.numerics.fused import FUSED_ROW, FusedLoop, fused_loop
from checked_backend.numerics.workspace import GapStatistics, SizeStatistics, SumOfSquares, Workspace, sum_in_range

__all__ = ["UnsupportedTensorError", "measure"]

_BLOCK_BYTES = 1 << 19  # of one buffer; two buffers and a block of each tensor then share a processor's cache
_DEVICE_BLOCK_BYTES = 1 << 24  # where starting a kernel costs more than cache misses do
_FUSED_BLOCKS = (1 << 22, 1 << 18, 1 << 15)
"""Elements read by one call of the compiled loop, which needs no buffers.

A block that the loop cannot handle is read again in smaller blocks, and the smallest of these in another way. The
elements that the loop cannot handle are mostly in one place. Calls for blocks of ``2 ** 20`` elements cost a tenth of
reading them.
"""
_LARGE = 1 << 20  # elements; for tensors of this size the compiled loop is worth the time that compiling it takes
_SMALL = 4096  # elements; up to this size calls and buffers are the cost, and float64 needs one set of them, not two


def measure(*, reference: torch.Tensor, candidate: torch.Tensor, _block_size: int | None = None) -> Metrics:
    """Measure how two tensors differ.

    Both tensors are read once, in blocks that stay in the processor's cache. Only buffers of the size of a few blocks
    are allocated. One compiled loop reads large dense float32, bfloat16 and float16 tensors on the CPU. For all other
    tensors, blocks that are equal bit for bit are recognised first. All strides are taken as they are: expanded
    elements count as often as they occur. Neither tensor is written to, and neither needs to be detached.

    Counts are exact. Greatest differences and ratios are computed in float64, at the element that was found to hold the
    greatest one. That element is found in float32 for formats of up to 32 bits (where the difference of two numbers
    within a factor 2 of each other is exact), and in float64 for all others and for small tensors. Integer differences
    are exact before they become a float. A difference or modulus beyond the float64 range is infinite, and numbers
    derived from it mean nothing more than that. ``rmse`` and ``reference_rms`` are good to about ``1e-6`` relative for
    formats of up to 32 bits. ``max_rel_diff`` and ``max_ulp`` are skipped in blocks where a cheap bound shows that they
    cannot grow; they remain exact.

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
    """Switch off autograd, autocast and numpy's warnings: NaNs and overflows are what is looked for."""
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
        small = block_size is None and self.total <= _SMALL
        narrow = self.float_format is not None and reference.dtype is not torch.float64 and not small
        self.work_dtype = torch.float32 if narrow else torch.float64
        if block_size is None:
            block_bytes = _BLOCK_BYTES if reference.device.type == "cpu" else _DEVICE_BLOCK_BYTES
            block_size = block_bytes // self.work_dtype.itemsize
        self.block_size = max(1, min(block_size, self.total))
        self.workspaces: dict[torch.dtype, Workspace] = {}
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
        loop = None
        if self.total >= _LARGE and self.work_dtype is torch.float32 and layout.is_dense():
            loop = fused_loop(self.reference.dtype)
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
        look_for_equal = True
        for block in blocks:
            if look_for_equal and same_bits(block.reference, block.candidate):
                self._add(block, equal=True)
            else:
                # after a block that differs, the next ones mostly differ; look again after a block that is equal
                look_for_equal = not self._add(block)

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
        squares = sum_in_range(found.squares, found.peak, torch.float32, length)
        reference_squares = sum_in_range(found.reference_squares, found.top, torch.float32, length)
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

    def _workspace(self, dtype: torch.dtype, block: Block) -> Workspace:
        if dtype not in self.workspaces:
            self.workspaces[dtype] = Workspace(self.block_size, dtype, self.reference.device)
        workspace = self.workspaces[dtype]
        workspace.fit(block.reference.shape)
        return workspace

    def _add(self, block: Block, *, equal: bool = False) -> bool:
        """Add a block. Return whether any of its elements differ."""
        if self.float_format is None:
            return self._add_exactly(block)
        workspace = self._workspace(self.work_dtype, block)
        gap, size = workspace.gap, workspace.size
        if block.reference.dtype is self.work_dtype:
            if not equal:
                torch.sub(block.candidate, block.reference, out=gap).abs_()
                gap_statistics = workspace.gap_statistics()
            torch.abs(block.reference, out=size)
        else:
            size.copy_(block.reference)
            if not equal:
                gap.copy_(block.candidate).sub_(size).abs_()
                gap_statistics = workspace.gap_statistics()
            size.abs_()
        if equal:
            gap_statistics = GapStatistics(0.0, 0, SumOfSquares())
        size_statistics = workspace.size_statistics()
        if not (math.isfinite(gap_statistics.peak) and math.isfinite(size_statistics.peak)):
            return self._add_exactly(block)
        if gap_statistics.differing:
            ratio = _ratio_bound(gap_statistics, size_statistics)
            if ratio > self.max_rel and not math.isinf(self.max_rel):
                ratio = workspace.max_ratio()
                if math.isinf(ratio) and self.work_dtype is torch.float32:
                    return self._add_exactly(block)  # the reference is 0, or the ratio is beyond float32
                self._offer_ratio(ratio, block)
            if self._ulp_may_grow(ratio, self.float_format):
                scratch = workspace.scratch(self.float_format.bits)
                self._offer_ulp(block, self.float_format, scratch, gap_statistics.peak, None)
        self._commit(block, block.reference.numel(), gap_statistics, size_statistics, None)
        return gap_statistics.differing > 0

    def _add_exactly(self, block: Block) -> bool:
        """Add a block in float64 with masks: integers, complex numbers, NaN, infinities, overflow."""
        workspace = self._workspace(torch.float64, block)
        classes = read_exactly(block.reference, block.candidate, workspace.gap, workspace.size)
        gap_statistics, size_statistics = workspace.gap_statistics(), workspace.size_statistics()
        if gap_statistics.differing:
            if _ratio_bound(gap_statistics, size_statistics) > self.max_rel:
                self._offer_ratio(workspace.max_ratio(), block)
            if self.float_format is not None:
                scratch = workspace.scratch(self.float_format.bits)
                self._offer_ulp(block, self.float_format, scratch, gap_statistics.peak, classes)
        self._commit(block, block.reference.numel(), gap_statistics, size_statistics, classes)
        return gap_statistics.differing > 0 or (classes is not None and count(classes.differs | classes.beside) > 0)

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
            workspace = self._read_again(block)
            position, self.max_abs = workspace.greatest_gap()
            if block.reference.dtype in (torch.int64, torch.uint64):
                position = greatest_integer_gap(block.reference, block.candidate)
            position += block.start
        if self.max_rel_block is not None and self.work_dtype is torch.float32:
            if self.max_rel_block is not self.max_abs_block:
                workspace = self._read_again(self.max_rel_block)
            self.max_rel = workspace.max_ratio()
        return position if self.first_class_difference is None else self.first_class_difference

    def _read_again(self, block: Block) -> Workspace:
        workspace = self._workspace(torch.float64, block)
        read_exactly(block.reference, block.candidate, workspace.gap, workspace.size)
        return workspace

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
    """Position of the first element that is true, of at least one."""
    return int(mask.reshape(-1).to(torch.uint8).argmax().item())


def _ratio_bound(gap: GapStatistics, size: SizeStatistics) -> float:
    """A number that no ratio of a block's differences to its reference exceeds."""
    return gap.peak / size.floor * (1.0 + 2.0**-20) if size.floor else math.inf
