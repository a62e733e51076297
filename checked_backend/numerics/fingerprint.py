"""A checksum of a tensor's memory, to notice that something wrote to it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from checked_backend.numerics.bits import flat_view, is_on_cpu, memory_of, resolved, slabs

_CHUNK = 1 << 17

_MIXING = ((16, 2146121005), (15, -2073254261))
"""Shifts and odd factors, with which no two numbers become the same."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor) -> int | None:
    """Checksum a tensor's elements, in order.

    In the processor's memory it is a CRC. On a device the bits of each element are mixed with its place before they are
    added up, so that permuted values change the sum, and so do values that are all negated or doubled. The tensor is
    read once, with a few chunks of extra memory. Equal tensors have equal checksums on devices of one type.

    Args:
        tensor: Any plain dense tensor. A tensor that is not contiguous in some order of its dimensions is copied.

    Returns:
        The checksum; None for a tensor whose bits cannot be read (sparse, quantised, on the ``meta`` device).
    """
    return fingerprints([tensor])[0]


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Checksum tensors as `fingerprint` does. A GPU is waited for once, however many tensors there are."""
    with torch.no_grad():
        of_all = [_bits(tensor) for tensor in tensors]
        found = [None if bits is None or not is_on_cpu(bits) else zlib.crc32(memory_of(bits)) for bits in of_all]
        elsewhere = {place: bits for place, bits in enumerate(of_all) if bits is not None and not is_on_cpu(bits)}
        for device in {bits.device for bits in elsewhere.values()}:
            there = {place: bits for place, bits in elsewhere.items() if bits.device == device}
            for place, total in _on_device(there).items():
                found[place] = total
    return found


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has elements, and their memory was freed, as FSDP frees parameters."""
    return bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def _bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements in memory order, as integers of at most 32 bits; None if they cannot be read."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        return None
    if is_freed(tensor):
        return None
    plain = resolved(tensor)
    if plain.dtype.is_complex:
        plain = torch.view_as_real(plain)
    flat = flat_view(plain)
    flat = plain.contiguous().view(-1) if flat is None else flat
    size = flat.element_size()
    if flat.numel() < 2:  # its stride may be anything, which a view as smaller integers does not take
        flat = flat.as_strided(flat.shape, (1,))
    bits = flat.view(_INTEGERS[size])
    return bits.view(torch.int32) if size == 8 else bits


def _on_device(of_all: Mapping[int, torch.Tensor]) -> dict[int, int]:
    """The checksums of tensors on one device: as few kernels as may be, and one wait for the sums of all chunks."""
    chunks = [(place, chunk) for place, bits in of_all.items() for chunk in bits.split(_CHUNK) if chunk.numel()]
    sums: list[int] = []
    if chunks:
        places = torch.arange(1, _CHUNK + 1, dtype=torch.int32, device=chunks[0][1].device).mul_(-1640531535)
        of_slabs = slabs(chunk.numel() for _, chunk in chunks)
        sums = torch.cat([_sums([chunks[number][1] for number in slab], places) for slab in of_slabs]).tolist()
    found: dict[int, list[int]] = {place: [] for place in of_all}
    for (place, _), total in zip(chunks, sums, strict=True):
        found[place].append(total & (2**32 - 1))
    return {
        place: sum((2 * number + 1) * total for number, total in enumerate(totals)) & (2**64 - 1)
        for place, totals in found.items()
    }


def _sums(slab: Sequence[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
    """The sum of each chunk's mixed bits, on the device."""
    mixed = torch.cat([places[: chunk.numel()] for chunk in slab]).bitwise_xor_(torch.cat(list(slab)))
    other = torch.empty_like(mixed)
    for shift, factor in _MIXING:
        torch.bitwise_right_shift(mixed, shift, out=other).bitwise_and_((1 << (32 - shift)) - 1)
        mixed.bitwise_xor_(other).mul_(factor)
    ends = torch.tensor(list(accumulate(chunk.numel() for chunk in slab))) - 1
    ends = ends.pin_memory().to(mixed.device, non_blocking=True) if mixed.is_cuda else ends.to(mixed.device)
    return mixed.cumsum(0, dtype=torch.int64)[ends].diff(prepend=mixed.new_zeros(1, dtype=torch.int64))
