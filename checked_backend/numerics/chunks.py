"""Walk two tensors of the same shape side by side in blocks, in memory order, without copying either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from checked_backend._torch.tensors import is_functorch_wrapped_tensor
from checked_backend.errors import CheckedBackendError
from checked_backend.numerics.bits import FORMATS, INTEGERS

__all__ = ["Block", "UnsupportedTensorError", "pair_layout", "require_plain"]


class UnsupportedTensorError(CheckedBackendError):
    """A tensor whose elements cannot be read one by one: sparse, quantised, packed, without storage, a subclass."""


@dataclass(frozen=True, slots=True)
class Block:
    """The same elements of both tensors.

    Attributes:
        start: Position of the block's first element in the order of memory. The block's elements follow each other.
        reference: View of the reference, at least one-dimensional.
        candidate: View of the candidate, of the same shape.
    """

    start: int
    reference: torch.Tensor
    candidate: torch.Tensor

    def blocks(self, size: int) -> Iterator[Block]:
        """Cut this block into blocks of at most ``size`` elements, in order."""
        if self.reference.numel() <= size:
            # a pending conjugation or negation is carried out on a copy of this block only
            reference, candidate = (side.resolve_conj().resolve_neg() for side in (self.reference, self.candidate))
            yield Block(self.start, reference, candidate)
            return
        inner = self.reference[0].numel()
        step = max(1, size // inner)
        for first in range(0, len(self.reference), step):
            place = first if inner > size else slice(first, first + step)
            yield from Block(self.start + first * inner, self.reference[place], self.candidate[place]).blocks(size)

    def row(self, start: int, size: int) -> Block:
        """The ``size`` elements of a one-dimensional block from ``start`` on, or as many as there are."""
        window = slice(start, start + size)
        return Block(self.start + start, self.reference[window], self.candidate[window])

    def is_dense(self) -> bool:
        """Whether both are one run of memory on the CPU, without a pending negation."""
        return all(
            side.device.type == "cpu" and side.dim() == 1 and side.stride() == (1,) and not side.is_neg()
            for side in (self.reference, self.candidate)
        )


def pair_layout(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[Block, list[int]]:
    """Order and merge the dimensions of two non-empty tensors of one shape so that a walk follows memory.

    Dimensions that are expanded in both tensors come first. The others are ordered by the greater of both strides.
    Tensors with the same dense strides (contiguous, ``channels_last``, transposed) thus become one-dimensional views.

    Returns:
        Both tensors without copies, and the dimensions of more than one element, from the outermost in memory.
    """
    shape = reference.shape
    strides = list(zip(reference.stride(), candidate.stride(), strict=True))
    order = sorted(
        (dim for dim in range(len(shape)) if shape[dim] > 1),
        key=lambda dim: (max(strides[dim]) > 0, -max(strides[dim])),
    )
    merged: list[tuple[int, tuple[int, int]]] = []
    for dim in order:
        size, stride = shape[dim], strides[dim]
        if merged:
            outer_size, outer_stride = merged[-1]
            if outer_stride == (stride[0] * size, stride[1] * size):
                merged[-1] = (outer_size * size, stride)
                continue
        merged.append((size, stride))
    merged = merged or [(1, (1, 1))]
    sizes = [size for size, _ in merged]
    views = (
        side.as_strided(sizes, [stride[number] for _, stride in merged])
        for number, side in enumerate((reference, candidate))
    )
    return Block(0, *views), order


def require_plain(tensor: torch.Tensor, role: str) -> None:
    """Refuse a tensor whose elements cannot be read one by one.

    Args:
        role: Its name in the message.

    Raises:
        UnsupportedTensorError: The tensor is a subclass (``torch.nn.Parameter`` is not counted as one), a functorch
            wrapper, sparse, nested, quantised, of an opaque layout or packed dtype, or on the ``meta`` device.
    """
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
        raise UnsupportedTensorError(f"cannot measure the {role} ({_describe(tensor)}): {reason}.")


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}, {prod(tensor.shape)} elements" if not tensor.is_nested else f"{tensor.dtype}, nested"
