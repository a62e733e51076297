"""Walk two tensors of the same shape side by side in blocks, in memory order, without copying either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from checked_backend._torch.tensors import is_functorch_wrapped_tensor
from checked_backend.errors import CheckedBackendError
from checked_backend.numerics.bits import INTEGERS

__all__ = ["Block", "PairLayout", "UnsupportedTensorError", "pair_layout", "require_plain"]

_VIEWS_AT_ONCE = 64


class UnsupportedTensorError(CheckedBackendError):
    """A tensor whose elements cannot be read one by one: sparse, quantised, packed, without storage, a subclass."""


@dataclass(frozen=True, slots=True)
class Block:
    """The same elements of both tensors.

    Attributes:
        start: Position of the block's first element in the layout's order. The block's elements follow each other.
        reference: View of the reference, at least one-dimensional.
        candidate: View of the candidate, of the same shape.
    """

    start: int
    reference: torch.Tensor
    candidate: torch.Tensor

    def blocks(self, size: int) -> Iterator[Block]:
        """Cut this block into blocks of at most ``size`` elements."""
        return _cut(self.start, self.reference, self.candidate, size)

    def row(self, start: int, size: int) -> Block:
        """The ``size`` elements of a one-dimensional block from ``start`` on, or as many as there are."""
        window = slice(start, start + size)
        return Block(self.start + start, self.reference[window], self.candidate[window])


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Two tensors with their dimensions permuted to memory order and merged where both allow it.

    Attributes:
        reference: View of the reference, with as few dimensions as possible, but at least one.
        candidate: View of the candidate, of the same shape.
        shape: The tensors' own shape.
        order: The tensors' own dimensions, from outermost to innermost in memory.
    """

    reference: torch.Tensor
    candidate: torch.Tensor
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def is_dense(self) -> bool:
        """Whether both are one run of memory on the CPU, without a pending negation."""
        return all(
            side.device.type == "cpu" and side.dim() == 1 and side.stride() == (1,) and not side.is_neg()
            for side in (self.reference, self.candidate)
        )

    def index(self, position: int) -> tuple[int, ...]:
        """The tensors' own coordinates of the element at a position in the layout's order."""
        coordinates = [0] * len(self.shape)
        for dim in reversed(self.order):
            position, coordinates[dim] = divmod(position, self.shape[dim])
        return tuple(coordinates)

    def blocks(self, size: int) -> Iterator[Block]:
        """Cut both tensors into blocks of at most ``size`` elements, in the layout's order."""
        lazy = any(side.is_conj() or side.is_neg() for side in (self.reference, self.candidate))
        for block in _cut(0, self.reference, self.candidate, size):
            yield _resolved(block) if lazy else block


def _resolved(block: Block) -> Block:
    """Carry out a pending conjugation or negation, on a copy of this block only."""
    reference, candidate = (side.resolve_conj().resolve_neg() for side in (block.reference, block.candidate))
    return Block(block.start, reference, candidate)


def _cut(start: int, reference: torch.Tensor, candidate: torch.Tensor, size: int) -> Iterator[Block]:
    shape = reference.shape
    if reference.dim() == 1:
        # split() makes views quickly but all at once, so take a bounded stretch at a time
        stretch = size * _VIEWS_AT_ONCE
        for offset in range(0, reference.shape[0], stretch):
            length = min(stretch, reference.shape[0] - offset)
            parts = zip(
                reference.narrow(0, offset, length).split(size),
                candidate.narrow(0, offset, length).split(size),
                strict=True,
            )
            for reference_part, candidate_part in parts:
                yield Block(start, reference_part, candidate_part)
                start += reference_part.shape[0]
        return
    inner, dim = 1, len(shape)
    while dim > 0 and inner * shape[dim - 1] <= size:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield Block(start, reference, candidate)
        return
    step = max(1, size // inner)
    for outer in product(*(range(length) for length in shape[: dim - 1])):
        parts = zip(reference[outer].split(step), candidate[outer].split(step), strict=True)
        for reference_part, candidate_part in parts:
            yield Block(start, reference_part, candidate_part)
            start += reference_part.numel()


def pair_layout(reference: torch.Tensor, candidate: torch.Tensor) -> PairLayout:
    """Order and merge the dimensions of two non-empty tensors of one shape so that a walk follows memory.

    Dimensions that are expanded in both tensors come first. The others are ordered by the greater of both strides.
    Tensors with the same dense strides (contiguous, ``channels_last``, transposed) thus become one-dimensional views.
    """
    shape = tuple(reference.shape)
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
    return PairLayout(
        reference.as_strided(sizes, [stride[0] for _, stride in merged]),
        candidate.as_strided(sizes, [stride[1] for _, stride in merged]),
        shape,
        tuple(order),
    )


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
    elif not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype in INTEGERS) or (
        tensor.dtype in _PACKED
    ):
        reason = f"torch has no arithmetic for {tensor.dtype}; measure tensor.view(torch.uint8)"
    if reason:
        raise UnsupportedTensorError(f"cannot measure the {role} ({_describe(tensor)}): {reason}.")


_PACKED = frozenset((torch.float4_e2m1fn_x2,))


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}, {prod(tensor.shape)} elements" if not tensor.is_nested else f"{tensor.dtype}, nested"
