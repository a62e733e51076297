"""Read tensors element by element: differences, magnitudes, root mean squares, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from checked_backend.numerics.bits import unit_roundoff
from checked_backend.verdict import thresholds


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values in a real dtype that allows differences.

    float64 and integers become float64, complex numbers become pairs of reals, everything else becomes float32.
    """
    tensor = tensor.detach()
    if tensor.dtype.is_complex:
        wide = torch.complex128 if tensor.dtype == torch.complex128 else torch.complex64
        return torch.view_as_real(tensor.resolve_conj().resolve_neg().to(wide))
    if tensor.dtype == torch.float64 or not tensor.dtype.is_floating_point:
        return tensor.to(torch.float64)
    return tensor.to(torch.float32)


def difference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Absolute difference, element by element.

    Returns:
        A tensor in the wider of the two widened dtypes. It is 0 where the values are equal (NaN equals NaN, an infinity
        equals itself), ``inf`` where one is NaN or infinite and the other is not the same, and at least 1 where
        integers differ.
    """
    one, two = widened(first), widened(second)
    if one.dtype != two.dtype:
        one, two = one.to(torch.float64), two.to(torch.float64)
    result = (one - two).abs_()
    if all_finite(result):
        finite = result
    else:
        same = (one == two) | (one.isnan() & two.isnan())
        finite = torch.where(same, 0.0, torch.where(one.isfinite() & two.isfinite(), result, torch.inf))
    if not (first.dtype.is_floating_point or first.dtype.is_complex):
        # int64 beyond 2**53 can differ where its float64 values do not
        finite = torch.where(first != second, finite.clamp_min(1.0), 0.0)
    return finite


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Absolute values in the widened dtype, element by element; 0 for NaN and infinities."""
    return widened(tensor).abs().nan_to_num_(nan=0.0, posinf=0.0)


def all_finite(values: torch.Tensor) -> bool:
    """Whether all numbers are finite, or a false "no": their sum is read, which may overflow."""
    return math.isfinite(values.sum().item())


def least_number(dtype: torch.dtype) -> float:
    """The magnitude that counts as zero: a dtype's least normal number, because some processors flush subnormal ones.

    No processor flushes the subnormal numbers of float16, which begin at 6e-5. There it is the step between them.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    limits = torch.finfo(dtype)
    return limits.tiny if limits.tiny <= torch.finfo(torch.float32).tiny else limits.tiny * limits.eps


def rounding(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far apart two roundings of the same numbers to a dtype may lie; 0 for integers."""
    return 2 * unit_roundoff(dtype) * magnitude + least_number(dtype)


_BLOCK = 1 << 16
"""Elements of a block. The temporaries of a block stay in the processor's cache."""

_DEVICE_BLOCK = 1 << 22
"""Elements of a block on a device, where starting a kernel costs more than reading from memory does."""

_Tensor = TypeVar("_Tensor", bound=torch.Tensor | None)


def blocks(*tensors: _Tensor) -> Iterator[tuple[_Tensor, ...]]:
    """Walk tensors side by side, so that no temporary is as large as they are.

    Args:
        tensors: The first says how many elements there are. Others have as many, or pairs for its complex elements.

    Yields:
        The same elements of each tensor: one-dimensional, or pairs. None stays None.
    """
    first = tensors[0]
    if first is None:
        raise TypeError("the first of the tensors says how many elements there are; it is None")
    count = first.numel()
    flat = [None if tensor is None else _flat(tensor.detach(), count) for tensor in tensors]
    size = _BLOCK if first.device.type == "cpu" else _DEVICE_BLOCK
    for start in range(0, count, size):
        yield tuple(None if tensor is None else tensor[start : start + size] for tensor in flat)  # type: ignore[misc]


def picked(mask: torch.Tensor, *tensors: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
    """The elements at some places of each tensor, as in `blocks`.

    Args:
        mask: One-dimensional, or pairs: then an element is picked if one of its pair is.
        tensors: As for `blocks`.
    """
    places = (mask if mask.dim() == 1 else mask.any(-1)).nonzero().flatten()
    for tensor in tensors:
        yield None if tensor is None else _flat(tensor.detach(), len(mask))[places]


def _flat(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.reshape(count) if tensor.numel() == count else tensor.reshape(count, -1)


def unconfirmed(reference: torch.Tensor, high_precision: torch.Tensor) -> torch.Tensor | None:
    """Mask the elements of which eager has a number and float64 has none, so that float64 confirms nothing.

    A matrix that is singular in float64 may be not quite singular in float32. A program may overflow, or take the
    logarithm of zero, in float64 alone. Where the reference and the twin are both infinite, they agree whatever they
    compute.

    Args:
        high_precision: The reference in float64; beyond the range of the tensor's dtype it counts as infinite.

    Returns:
        A mask, of the shape of `difference`; None where there is no such element.
    """
    rounded = widened(high_precision.to(reference.dtype))
    if all_finite(rounded):
        return None
    none = ~rounded.isfinite() & widened(reference).isfinite()
    return none if bool(none.any()) else None


def root_mean_square(values: torch.Tensor) -> float:
    """Root mean square of the finite elements; 0 if there are none."""
    wide = widened(values)
    count = wide.numel()
    norm = float(torch.linalg.vector_norm(wide, dtype=torch.float64).item())
    if not math.isfinite(norm):
        wide = wide.to(torch.float64)
        wide = wide[wide.isfinite()]
        count = wide.numel()
        greatest = float(wide.abs().max().item()) if count else 0.0  # the squares may overflow
        norm = float(torch.linalg.vector_norm(wide / greatest).item()) * greatest if greatest else 0.0
    return norm / math.sqrt(count) if count else 0.0


class LocalScale:
    """For each element, the root mean square of the values of elements that are not much larger than it.

    One huge element, for example of a mask, says nothing about the noise of the others.

    Args:
        parts: Values and magnitudes (0 and more) of elements, of equal shapes.
        greatest: The greatest finite absolute value.
    """

    def __init__(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], greatest: float) -> None:
        self._greatest = greatest
        squares = elements = present = torch.zeros(EXPONENTS, dtype=torch.float64, device="cpu")
        for values, magnitude in parts if greatest else ():
            places = exponents(magnitude)
            scaled = values.reshape(-1).to(torch.float64).div(greatest).square_()
            here = _summed(torch.ones_like(scaled), places)
            present = present + here
            if not all_finite(scaled):
                finite = scaled.isfinite()
                scaled = torch.where(finite, scaled, 0.0)
                here = _summed(finite.to(torch.float64), places)
            elements = elements + here
            squares = squares + _summed(scaled, places)
        sized = present[1:-1].nonzero()
        self._last = int(sized.max()) + 1 if len(sized) else 0
        self._means = squares[1:-1].cumsum(0) / elements[1:-1].cumsum(0).clamp_min(1.0)
        self._overall = squares[:-1].sum() / elements[:-1].sum().clamp_min(1.0)

    @classmethod
    def of_sizes(cls, tensor: torch.Tensor) -> LocalScale:
        """The scale of a tensor's own elements."""
        sizes = (widened(part).abs() for (part,) in blocks(tensor))
        greatest = max((float(size.nan_to_num(nan=0.0, posinf=0.0).max()) for size in sizes), default=0.0)
        sizes = (widened(part).abs() for (part,) in blocks(tensor))
        return cls(((size, size) for size in sizes), greatest)

    def at(self, magnitude: torch.Tensor, reach: int = thresholds.NEIGHBOUR_BITS) -> torch.Tensor:
        """The root mean square for each element.

        Args:
            magnitude: The magnitudes of some or all elements.
            reach: How much larger an element may be, as a power of two.

        Returns:
            A float64 tensor of that shape: the root mean square over the finite elements of up to ``2 ** reach`` times
            the element's magnitude. For elements that are zero or not finite it is over all finite elements.
        """
        table = self._overall.repeat(EXPONENTS)
        within = max(0, self._last - reach - 1)  # so many exponents do not reach the greatest element
        table[1 : 1 + within] = self._means[reach : reach + within]
        table = table.sqrt_().mul_(self._greatest).to(magnitude.device)
        return table.index_select(0, exponents(magnitude)).reshape(magnitude.shape)


EXPONENTS = 1 << 11
"""The exponents of float64 as they are stored: the first is that of 0, the last that of NaN and infinities."""


def exponents(magnitude: torch.Tensor) -> torch.Tensor:
    """The stored exponents of numbers that are 0 or more; float64's subnormal numbers count as 0."""
    return magnitude.reshape(-1).to(torch.float64).view(torch.int64).bitwise_right_shift(52).bitwise_and_(EXPONENTS - 1)


def _summed(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sums of float64 numbers by exponent, as `torch.bincount` has them in twice the time."""
    return values.new_zeros(EXPONENTS).scatter_add_(0, places, values).cpu()


def local_root_mean_square(values: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """The `LocalScale` of values, at each of them."""
    finite = values.abs().nan_to_num(nan=0.0, posinf=0.0) * magnitude.isfinite()
    greatest = float(finite.max().item()) if values.numel() else 0.0
    return LocalScale([(values, magnitude)], greatest).at(magnitude)
