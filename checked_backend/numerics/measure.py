"""Measure how a candidate tensor differs from its reference, in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from checked_backend.findings import Metrics
from checked_backend.numerics.bits import (
    FORMATS,
    FloatFormat,
    flip_sign_bit,
    max_ulp_distance,
    unsigned_gap,
    unsigned_to_float64,
    with_memory,
)
from checked_backend.numerics.chunks import Block, UnsupportedTensorError, pair_layout, require_plain
from checked_backend.numerics.fused import FUSED_ROW, FusedLoop, fused_loop

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
        self.buffers: torch.Tensor | None = None
        self.mismatched = self.nonfinite_mismatched = self.compared = self.reference_finite = 0
        self.nans, self.infs = [0, 0], [0, 0]
        self.rmse = self.reference_rms = self.reference_max = self.max_abs = self.max_rel = 0.0
        self.max_ulp = 0
        self.max_abs_block: Block | None = None
        self.max_rel_block: Block | None = None
        self.first_class_difference: int | None = None
        self.first_beside: int | None = None

    def run(self) -> Metrics:
        if self.total == 0:
            return self._metrics(None)
        whole, order = pair_layout(self.reference, self.candidate)
        loop = fused_loop(self.reference.dtype) if self.total >= _LARGE and whole.is_dense() else None
        if loop is None:
            self._add_all(whole)
        else:
            self.block_size = max(self.block_size, min(FUSED_ROW, self.total))  # rows are read again
            self._add_all_fused(whole, loop, _FUSED_BLOCKS)
        if self.mismatched == 0:
            return self._metrics(None)
        position = self._refine()
        index = [0] * self.reference.dim()
        for dim in reversed(order):
            position, index[dim] = divmod(position, self.reference.shape[dim])
        return self._metrics(tuple(index))

    def _add_all(self, whole: Block) -> None:
        for block in whole.blocks(self.block_size):
            self._add(block)

    def _add_all_fused(self, whole: Block, loop: FusedLoop, sizes: Sequence[int]) -> None:
        for block in whole.blocks(sizes[0]):
            if self._add_fused(block, loop):
                continue
            if sizes[1:]:
                self._add_all_fused(block, loop, sizes[1:])
            else:
                self._add_all(block)

    def _add_fused(self, block: Block, loop: FusedLoop) -> bool:
        """Add a block by one loop over it. If float32 is not enough for the block, add nothing and return False."""
        found = loop(block.reference, block.candidate, self.max_rel, self.max_ulp)
        length = block.reference.numel()
        rmse = _root_mean_in_float32(found.squares, found.peak, length)
        reference_rms = _root_mean_in_float32(found.reference_squares, found.top, length)
        ratio_unknown = found.overflows > 0 and not math.isinf(self.max_rel)
        if rmse is None or reference_rms is None or ratio_unknown:
            return False
        if found.ratio > self.max_rel:
            self.max_rel, self.max_rel_block = found.ratio, block.row(found.ratio_row, FUSED_ROW)
        self.max_ulp = max(self.max_ulp, found.ulp)
        row = block.row(found.peak_row, FUSED_ROW) if found.peak > self.max_abs else block
        self._commit(row, found.differing, found.peak, found.top)
        self._commit_means(rmse, length, reference_rms, length)
        return True

    def _read(self, block: Block) -> tuple[torch.Tensor, torch.Tensor, _Classes | None]:
        """A block's absolute differences and the reference's magnitudes, and its classes if some are not finite."""
        if self.buffers is None:
            self.buffers = torch.empty(2, self.block_size, dtype=torch.float64, device=self.reference.device)
        shape = block.reference.shape
        gap, size = (buffer[: shape.numel()].view(shape) for buffer in self.buffers)
        return gap, size, _read_exactly(block.reference, block.candidate, gap, size)

    def _add(self, block: Block) -> None:
        """Add a block in float64, with masks for elements that are not finite."""
        gap, size, classes = self._read(block)
        differing, peak = _count(gap), gap.max().item()
        floor, top = (limit.item() for limit in torch.aminmax(size))
        self._commit(block, differing, peak, top)
        compared = reference_finite = block.reference.numel()
        if classes is not None:
            compared, reference_finite = _count(classes.compared), _count(classes.reference_finite)
            self._commit_classes(block, classes)
        self._commit_means(
            _root_mean(gap, peak, compared), compared, _root_mean(size, top, reference_finite), reference_finite
        )
        if not differing:
            return
        ratio = peak / floor * (1.0 + 2.0**-20) if floor else math.inf  # no ratio of the block exceeds it
        if ratio > self.max_rel:
            ratio = _max_ratio(gap, size)
            if ratio > self.max_rel:
                self.max_rel, self.max_rel_block = ratio, block
        if self.float_format is not None and self._ulp_may_grow(ratio, self.float_format):
            bits = self.float_format.bits
            reference, candidate = block.reference.view(bits), block.candidate.view(bits)
            if classes is not None:
                left_out = ~classes.compared
                reference, candidate = reference.masked_fill(left_out, 0), candidate.masked_fill(left_out, 0)
            self.max_ulp = max(self.max_ulp, max_ulp_distance(reference, candidate, self.float_format))

    def _commit(self, block: Block, differing: int, peak: float, top: float) -> None:
        """Add a block's statistics. The greatest difference is in the given part of it."""
        self.mismatched += differing
        self.reference_max = max(self.reference_max, top)
        if peak > self.max_abs:
            self.max_abs, self.max_abs_block = peak, block

    def _commit_means(self, rmse: float, compared: int, reference_rms: float, reference_finite: int) -> None:
        self.rmse = _joint_root_mean(self.rmse, self.compared, rmse, compared)
        self.reference_rms = _joint_root_mean(
            self.reference_rms, self.reference_finite, reference_rms, reference_finite
        )
        self.compared += compared
        self.reference_finite += reference_finite

    def _commit_classes(self, block: Block, classes: _Classes) -> None:
        for side in (0, 1):
            self.nans[side] += classes.nans[side]
            self.infs[side] += classes.infs[side]
        differing, beside = _count(classes.differs), _count(classes.beside)
        self.nonfinite_mismatched += differing
        self.mismatched += differing + beside
        if self.first_class_difference is None and differing:
            self.first_class_difference = block.start + _first(classes.differs)
        if self.first_beside is None and beside:
            self.first_beside = block.start + _first(classes.beside)

    def _ulp_may_grow(self, ratio: float, float_format: FloatFormat) -> bool:
        """Whether a block whose ratios are at most ``ratio`` can hold a greater distance in representable numbers.

        Below a ratio of 1/2 at most one power of two lies between both numbers, so their distance is at most ``ratio *
        2 ** precision``. A distance beyond ``max_ulp`` then has a ratio of at least ``(max_ulp + 1) * 2 **
        -precision``. That number is representable, so rounding cannot take the ratio below it.
        """
        return ratio >= 0.5 or ratio >= math.ldexp(self.max_ulp + 1, -float_format.precision)

    def _refine(self) -> int:
        """Compute the greatest difference and ratio again in float64. Return the position to report."""
        position = self.first_beside or 0
        if self.max_abs_block is not None:
            block = self.max_abs_block
            gap = self._read(block)[0].view(-1)
            position = int(gap.argmax().item())
            self.max_abs = gap[position].item()
            if block.reference.dtype in (torch.int64, torch.uint64):
                position = _greatest_integer_gap(block.reference, block.candidate)
            position += block.start
        if self.max_rel_block is not None:
            gap, size, _ = self._read(self.max_rel_block)
            self.max_rel = _max_ratio(gap, size)
        return position if self.first_class_difference is None else self.first_class_difference

    def _metrics(self, index: tuple[int, ...] | None) -> Metrics:
        return Metrics(
            total=self.total,
            mismatched=self.mismatched,
            max_abs_diff=self.max_abs,
            max_rel_diff=self.max_rel,
            max_ulp=None if self.float_format is None else self.max_ulp,
            rmse=self.rmse,
            reference_rms=self.reference_rms,
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


def _max_ratio(gap: torch.Tensor, size: torch.Tensor) -> float:
    """The greatest ``gap / size``, where 0 / 0 counts as 0. Overwrites ``gap``."""
    return gap.div_(size).nan_to_num_(nan=0.0, posinf=math.inf).max().item()


def _root_mean(values: torch.Tensor, peak: float, count: int) -> float:
    """The root of the mean square over ``count`` numbers up to ``peak``; in units of it, no square leaves the range."""
    if peak == 0.0 or not math.isfinite(peak):
        return peak
    scaled = (values / peak).view(-1)
    return peak * math.sqrt(torch.dot(scaled, scaled).item() / count)


def _root_mean_in_float32(squares: float, peak: float, count: int) -> float | None:
    """The same of a sum of squares in float32; None if the range of float32 may have been too small for it."""
    if peak == 0.0:
        return 0.0
    # a sum in this range did not overflow in a row, and lost at most 2 ** -20 of itself to underflow
    limits = torch.finfo(torch.float32)
    fits = limits.tiny * 2.0**20 * count <= squares <= limits.max / 2.0**8
    return math.sqrt(squares / count) if fits else None


def _joint_root_mean(one: float, count: int, other: float, more: int) -> float:
    """The root of the mean square over the numbers of both; 0 if there are none."""
    total = max(1, count + more)
    return math.hypot(one * math.sqrt(count / total), other * math.sqrt(more / total))


@dataclass(frozen=True, slots=True)
class _Classes:
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


def _read_exactly(
    reference: torch.Tensor, candidate: torch.Tensor, gap: torch.Tensor, size: torch.Tensor
) -> _Classes | None:
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


def _greatest_integer_gap(reference: torch.Tensor, candidate: torch.Tensor) -> int:
    """Position of the greatest difference within a block of int64 or uint64, found without rounding."""
    return int(flip_sign_bit(_integer_gap(reference, candidate)).reshape(-1).argmax().item())


def _integer_gap(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    if reference.dtype is torch.uint64:
        reference, candidate = (flip_sign_bit(side.view(torch.int64)) for side in (reference, candidate))
    return unsigned_gap(reference, candidate)


def _classes(reference: torch.Tensor, candidate: torch.Tensor) -> _Classes | None:
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
    return _Classes(
        differs=differs,
        beside=infs[0] & ~differs & parts_differ,
        compared=reference_finite & candidate_finite,
        reference_finite=reference_finite,
        nans=(_count(nans[0]), _count(nans[1])),
        infs=(_count(infs[0]), _count(infs[1])),
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


def _count(mask: torch.Tensor) -> int:
    """Number of elements that are true."""
    return int(torch.count_nonzero(mask).item())
