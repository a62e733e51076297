"""A checksum of a tensor's memory, to notice that something wrote to it."""

from __future__ import annotations

import torch

from checked_backend.numerics.bits import resolved
from checked_backend.numerics.fused import Checksum, checksum_loop

__all__ = ["LARGE", "fingerprint"]

_CHUNK = 1 << 17

LARGE = 1 << 14
"""Elements. For smaller tensors alone the compiled loop is not worth compiling."""

_MIXING = ((16, 2146121005), (15, -2073254261))
"""Shifts and odd factors, as in ``fused.c``: no two numbers become the same."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor) -> int | None:
    """Checksum a tensor's elements, in order.

    The bits of each element are mixed with its place before they are added up, so that permuted values change the sum,
    and so do values that are all negated or doubled. The tensor is read once, with a few chunks of extra memory.

    Args:
        tensor: Any plain dense tensor. A tensor that is not contiguous in some order of its dimensions is copied.

    Returns:
        The sum modulo 2**64; None for a tensor whose bits cannot be read (sparse, quantised, on the ``meta`` device).
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        return None
    with torch.no_grad():
        plain = resolved(tensor)
        if plain.dtype.is_complex:
            plain = torch.view_as_real(plain)
        flat = _flat(plain)
        size = flat.element_size()
        if size not in _INTEGERS:
            return None
        if flat.numel() < 2:  # its stride may be anything, which a view as smaller integers does not take
            flat = flat.as_strided(flat.shape, (1,))
        bits = flat.view(_INTEGERS[size])
        if size == 8:
            bits = bits.view(torch.int32)
        checksum = (_compiled(bits) if bits.numel() >= LARGE else None) or _chunk_by_chunk(bits)
        total = 0
        for number, start in enumerate(range(0, bits.numel(), _CHUNK)):
            total += (2 * number + 1) * checksum(bits[start : start + _CHUNK])
        return total & (2**64 - 1)


def _compiled(bits: torch.Tensor) -> Checksum | None:
    return checksum_loop(bits.dtype) if bits.device.type == "cpu" else None


def _chunk_by_chunk(bits: torch.Tensor) -> Checksum:
    count = min(_CHUNK, bits.numel())
    places = torch.arange(1, count + 1, dtype=torch.int32, device=bits.device).mul_(-1640531535)
    work, high = (torch.empty(count, dtype=torch.int32, device=bits.device) for _ in range(2))

    def checksum(chunk: torch.Tensor) -> int:
        size = chunk.numel()
        mixed, other = work[:size], high[:size]
        torch.bitwise_xor(chunk, places[:size], out=mixed)
        for shift, factor in _MIXING:
            torch.bitwise_right_shift(mixed, shift, out=other).bitwise_and_((1 << (32 - shift)) - 1)
            mixed.bitwise_xor_(other).mul_(factor)
        return int(mixed.sum(dtype=torch.int64).item()) & (2**32 - 1)

    return checksum


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in memory order if they fill their memory, else a copy in logical order."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
    permuted = tensor.permute(order)
    return permuted.view(-1) if permuted.is_contiguous() else tensor.contiguous().view(-1)
