"""Floating-point formats as integers: distance in representable numbers, bitwise equality, wide integer gaps."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch

from checked_backend._torch.tensors import is_zero_tensor


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A floating-point format.

    Attributes:
        bits: Integer dtype of the same size.
        largest: Bit pattern of the greatest finite number.
        signed: Whether the format is sign and magnitude (``float8_e8m0fnu`` is an exponent only).
    """

    bits: torch.dtype
    largest: int
    signed: bool = True


FORMATS = {
    torch.float64: FloatFormat(torch.int64, 0x7FEFFFFFFFFFFFFF),
    torch.float32: FloatFormat(torch.int32, 0x7F7FFFFF),
    torch.float16: FloatFormat(torch.int16, 0x7BFF),
    torch.bfloat16: FloatFormat(torch.int16, 0x7F7F),
    torch.float8_e5m2: FloatFormat(torch.int8, 0x7B),
    torch.float8_e5m2fnuz: FloatFormat(torch.int8, 0x7F),
    torch.float8_e4m3fn: FloatFormat(torch.int8, 0x7E),
    torch.float8_e4m3fnuz: FloatFormat(torch.int8, 0x7F),
    torch.float8_e8m0fnu: FloatFormat(torch.uint8, 0xFE, signed=False),
}
"""The real floating-point formats of torch that have an arithmetic."""

INTEGERS = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
"""The dtypes of integers that have an arithmetic, and bool."""

_SLAB = 1 << 22  # elements; up to 24 bytes are needed for each
_memcmp = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None).memcmp  # many times as fast as torch.equal
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor's bit patterns as integers, without a copy."""
    return tensor.view(_BITS_OF_SIZE[tensor.element_size()])


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; an expanded zero for a tensor of zeros that torch keeps without memory."""
    if not is_zero_tensor(tensor):
        return tensor
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The values in memory as they are read, without history: nothing waits to be conjugated or negated."""
    return with_memory(tensor.detach()).resolve_conj().resolve_neg()


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """A one-dimensional view in memory order; None if the tensor has gaps or overlaps itself."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    ordered = tensor.permute(sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True))
    return ordered.view(-1) if ordered.is_contiguous() else None


def is_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers can be read without waiting for a device."""
    return tensor.is_cpu


def slabs(sizes: Iterable[int], most: int = _SLAB) -> Iterator[list[int]]:
    """Places of the tensors that a GPU works on at once: so many elements, or a single tensor."""
    slab: list[int] = []
    total = 0
    for place, size in enumerate(sizes):
        if slab and total + size > most:
            yield slab
            slab, total = [], 0
        slab.append(place)
        total += size
    if slab:
        yield slab


def same_bits(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bit patterns, as they are read."""
    reference, candidate = resolved(reference), resolved(candidate)
    sides = reference, candidate
    if all(is_on_cpu(side) and side.is_contiguous() and side.data_ptr() for side in sides):  # a wrapper has no memory
        return not _memcmp(reference.data_ptr(), candidate.data_ptr(), reference.nbytes)
    if reference.is_complex():
        reference, candidate = torch.view_as_real(reference), torch.view_as_real(candidate)
    return torch.equal(bit_view(reference), bit_view(candidate))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must outlive it.

    ``tensor.numpy()`` would make its storage one that cannot be resized, and a program may do that later: FSDP frees
    its parameters so.
    """
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b"").cast("B")


def unsigned_gap(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """The distance of two signed integer tensors, as unsigned numbers of the same width kept in the signed dtype."""
    return torch.maximum(reference, candidate).sub_(torch.minimum(reference, candidate))


def unsigned_to_float64(gap: torch.Tensor) -> torch.Tensor:
    """Convert unsigned 64-bit numbers kept in an int64 tensor to float64, with one rounding."""
    high = (gap >> 32) & 0xFFFFFFFF
    return (high.to(torch.float64) * 2.0**32).add_((gap & 0xFFFFFFFF).to(torch.float64))


def flip_sign_bit(tensor: torch.Tensor) -> torch.Tensor:
    """Flip the sign bits, so that unsigned numbers kept in a signed dtype compare in their order, and the reverse."""
    return tensor ^ torch.iinfo(tensor.dtype).min


def max_unsigned(gap: torch.Tensor) -> int:
    """The greatest of unsigned numbers kept in a signed dtype."""
    # a number with the upper bit set is stored as a negative one; the greatest of these is the nearest to 0
    low, high = torch.aminmax(gap)
    if low.item() >= 0:
        return int(high.item())
    return int(flip_sign_bit(gap).amax().item()) - torch.iinfo(gap.dtype).min


def max_ulp_distance(reference: torch.Tensor, candidate: torch.Tensor, float_format: FloatFormat) -> int:
    """The greatest distance in representable numbers between finite elements, exactly; +0 and -0 are equal.

    Args:
        reference: Bit patterns as ``float_format.bits``, finite numbers only.
    """
    if not float_format.signed:
        return max_unsigned(unsigned_gap(reference.to(torch.int16), candidate.to(torch.int16)))
    sign = torch.iinfo(float_format.bits).min
    low, high = torch.aminmax(candidate - reference)
    distance = max(-int(low.item()), int(high.item()))
    if distance < -sign - float_format.largest:  # as long as this is so, no two numbers have opposite signs
        return distance
    # patterns in the order of the numbers: those of negative numbers grow with the magnitude
    return max_unsigned(unsigned_gap(*(torch.where(side < 0, sign - side, side) for side in (reference, candidate))))


def is_floating(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor whose elements are rounded: real or complex floating point."""
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def holds_floats(value: object) -> bool:
    """Whether a value is a floating tensor, or a tuple or list that holds one."""
    if isinstance(value, (tuple, list)):
        return any(holds_floats(item) for item in value)
    return is_floating(value)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number; 0 for integers and bools, which do not round."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return torch.finfo(dtype).eps / 2
