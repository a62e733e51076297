"""Measure how a candidate tensor differs from its reference, in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from checked_backend._torch.tensors import is_functorch_wrapped_tensor
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Metrics
from checked_backend.numerics.bits import (
    FORMATS,
    INTEGERS,
    flip_sign_bit,
    max_ulp_distance,
    unsigned_gap,
    unsigned_to_float64,
    with_memory,
)

_BLOCK = 1 << 16  # elements; two float64 buffers and a block of each tensor share a processor's cache
_DEVICE_BLOCK = 1 << 21  # elements, where starting a kernel costs more than cache misses do


class UnsupportedTensorError(CheckedBackendError):
    """A tensor whose elements cannot be read one by one: sparse, quantised, packed, without storage, a subclass."""


def measure(*, reference: torch.Tensor, candidate: torch.Tensor, _block_size: int | None = None) -> Metrics:
    """Measure how two tensors differ.

    Both tensors are read once, in float64, in blocks that stay in the processor's cache. Only buffers of the size of a
    few blocks are allocated. All strides are taken as they are: expanded elements count as often as they occur. Neither
    tensor is written to, and neither needs to be detached.

    Counts are exact. Integer differences are exact before they become a float. A difference or modulus beyond the
    float64 range is infinite, and numbers derived from it mean nothing more than that.

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
    _require_plain(reference, "reference")
    _require_plain(candidate, "candidate")
    for aspect in ("shape", "dtype", "device"):
        expected, actual = getattr(reference, aspect), getattr(candidate, aspect)
        if expected != actual:
            message = f"reference and candidate differ in {aspect}: {expected} and {actual}"
            raise ValueError(f"{message}. Values are measured only where the structure is the same.")
    size = _block_size or (_BLOCK if reference.device.type == "cpu" else _DEVICE_BLOCK)
    with _plain_arithmetic(reference.device):
        return _measure(with_memory(reference.detach()), with_memory(candidate.detach()), size)


def _require_plain(tensor: torch.Tensor, role: str) -> None:
    """Refuse a tensor whose elements cannot be read one by one; ``role`` is its name in the message."""
    reason = ""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        reason = f"it is a {type(tensor).__name__}; unwrap it and measure its plain tensors"
    elif is_functorch_wrapped_tensor(tensor):
        reason = "a functorch transform wraps it; measure outside of the transform"
    elif tensor.is_nested:
        reason = "it is nested; measure its components (tensor.unbind())"
    elif tensor.layout is not torch.strided:
        reason = f"its layout is {tensor.layout}; measure its values and indices, or tensor.to_dense()"
    elif tensor.is_quantized:
        reason = "it is quantised; measure tensor.int_repr(), or tensor.dequantize()"
    elif tensor.device.type == "meta":
        reason = "it is on the meta device and has no values"
    elif tensor.dtype not in (*FORMATS, *INTEGERS) and not tensor.dtype.is_complex:
        reason = f"torch has no arithmetic for {tensor.dtype}; measure tensor.view(torch.uint8)"
    if reason:
        elements = "nested" if tensor.is_nested else f"{tensor.numel()} elements"
        raise UnsupportedTensorError(f"cannot measure the {role} ({tensor.dtype}, {elements}): {reason}.")


@contextmanager
def _plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch off autograd, autocast and NumPy's warnings: a measurement counts NaNs and overflows, and expects them."""
    with torch.no_grad(), np.errstate(all="ignore"):
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


def _measure(reference: torch.Tensor, candidate: torch.Tensor, size: int) -> Metrics:
    totals = _Totals()
    # dimensions in the order of memory, so that a walk follows it
    strides = list(zip(reference.stride(), candidate.stride(), strict=True))
    order = sorted(range(reference.dim()), key=lambda dim: -max(strides[dim]))
    start = 0
    for one, other in _blocks(reference.permute(order), candidate.permute(order), size) if reference.numel() else ():
        totals.add(start, one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg())
        start += one.numel()
    places = (totals.class_at, totals.greatest_at, totals.beside_at)
    index = None
    if (position := next((place for place in places if place is not None), None)) is not None:
        walked = np.unravel_index(position, [reference.shape[dim] for dim in order])
        index = tuple(int(walked[order.index(dim)]) for dim in range(reference.dim()))
    return Metrics(
        total=reference.numel(),
        mismatched=totals.mismatched,
        max_abs_diff=totals.max_abs,
        max_rel_diff=totals.max_rel,
        max_ulp=totals.max_ulp if reference.dtype in FORMATS else None,
        rmse=totals.rmse,
        reference_rms=totals.reference_rms,
        reference_max=totals.reference_max,
        nonfinite_mismatched=totals.nonfinite_mismatched,
        nan_reference=totals.nans[0],
        nan_candidate=totals.nans[1],
        inf_reference=totals.infs[0],
        inf_candidate=totals.infs[1],
        dtype=str(reference.dtype).removeprefix("torch."),
        index=index,
        reference_value=None if index is None else reference[index].item(),
        candidate_value=None if index is None else candidate[index].item(),
    )


def _blocks(reference: torch.Tensor, candidate: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same elements of both tensors, at most ``size`` at once, in order and without copies."""
    if reference.numel() <= size:
        yield reference, candidate
        return
    inner = reference[0].numel()
    step = max(1, size // inner)
    for first in range(0, len(reference), step):
        place = first if inner > size else slice(first, first + step)
        yield from _blocks(reference[place], candidate[place], size)


@dataclass(slots=True)
class _Totals:
    """What the blocks so far have shown. Places are positions in the order of the blocks."""

    mismatched: int = 0
    nonfinite_mismatched: int = 0
    compared: int = 0
    reference_finite: int = 0
    nans: tuple[int, int] = (0, 0)
    infs: tuple[int, int] = (0, 0)
    rmse: float = 0.0
    reference_rms: float = 0.0
    reference_max: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int = 0
    greatest_at: int | None = None
    class_at: int | None = None
    beside_at: int | None = None

    def add(self, start: int, reference: torch.Tensor, candidate: torch.Tensor) -> None:
        """Add a block that begins at a position."""
        gap, size, classes = _read(reference, candidate)
        compared = reference_finite = reference.numel()
        if classes is not None:
            compared, reference_finite = _count(classes.compared), _count(classes.reference_finite)
            self._add_classes(start, classes)
        differing, peak, top = _count(gap), gap.max().item(), size.max().item()
        self.rmse = _joint_root_mean(self.rmse, self.compared, _root_mean(gap, peak, compared), compared)
        self.reference_rms = _joint_root_mean(
            self.reference_rms, self.reference_finite, _root_mean(size, top, reference_finite), reference_finite
        )
        self.compared += compared
        self.reference_finite += reference_finite
        self.reference_max = max(self.reference_max, top)
        if not differing:
            return
        self.mismatched += differing
        if peak > self.max_abs:
            exact = reference.dtype in (torch.int64, torch.uint64)
            greatest = flip_sign_bit(_integer_gap(reference, candidate)) if exact else gap
            self.max_abs, self.greatest_at = peak, start + int(greatest.reshape(-1).argmax().item())
        self.max_rel = max(self.max_rel, gap.div_(size).nan_to_num_(nan=0.0, posinf=math.inf).max().item())
        if (float_format := FORMATS.get(reference.dtype)) is not None:
            bits = reference.view(float_format.bits), candidate.view(float_format.bits)
            if classes is not None:
                left_out = ~classes.compared
                bits = bits[0].masked_fill(left_out, 0), bits[1].masked_fill(left_out, 0)
            self.max_ulp = max(self.max_ulp, max_ulp_distance(*bits, float_format))

    def _add_classes(self, start: int, classes: _Classes) -> None:
        self.nans = self.nans[0] + classes.nans[0], self.nans[1] + classes.nans[1]
        self.infs = self.infs[0] + classes.infs[0], self.infs[1] + classes.infs[1]
        differing, beside = _count(classes.differs), _count(classes.beside)
        self.nonfinite_mismatched += differing
        self.mismatched += differing + beside
        if self.class_at is None and differing:
            self.class_at = start + _first(classes.differs)
        if self.beside_at is None and beside:
            self.beside_at = start + _first(classes.beside)


def _first(mask: torch.Tensor) -> int:
    """Position of the first element that is true. There must be one."""
    return int(mask.reshape(-1).to(torch.uint8).argmax().item())


def _root_mean(values: torch.Tensor, peak: float, count: int) -> float:
    """The root of the mean square over ``count`` numbers up to ``peak``; in units of it, no square leaves the range."""
    if peak == 0.0 or not math.isfinite(peak):
        return peak
    scaled = (values / peak).reshape(-1)
    return peak * math.sqrt(torch.dot(scaled, scaled).item() / count)


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
        nans: Their number in the reference and in the candidate.
        infs: Their number in the reference and in the candidate.
    """

    differs: torch.Tensor
    beside: torch.Tensor
    compared: torch.Tensor
    reference_finite: torch.Tensor
    nans: tuple[int, int]
    infs: tuple[int, int]


def _read(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, _Classes | None]:
    """A block's ``|candidate - reference|`` and ``|reference|`` in float64, both 0 where a side of them is not finite.

    The classes come with them if a NaN or an infinity is present on either side.
    """
    if reference.dtype in (torch.int64, torch.uint64):
        gap = unsigned_to_float64(_integer_gap(reference, candidate))
        return gap, reference.to(torch.float64).abs_(), None
    if reference.is_complex():
        reference, candidate = torch.view_as_real(reference), torch.view_as_real(candidate)
    else:
        reference, candidate = reference.unsqueeze(-1), candidate.unsqueeze(-1)
    left, right = (side.to(torch.float64, copy=True) for side in (reference, candidate))
    classes = _classes(left, right)
    gap, size = (
        torch.hypot(parts[..., 0], parts[..., 1]) if parts.shape[-1] == 2 else parts[..., 0].abs_()
        for parts in (right.sub_(left), left)
    )
    if classes is not None:
        gap.masked_fill_(~classes.compared, 0.0)
        size.masked_fill_(~classes.reference_finite, 0.0)
    return gap, size, classes


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
