"""The record of a tensor: checksums, a sample, and sums of its values in their logical order, whatever the device."""

from __future__ import annotations

import sys

import torch

from checked_backend.numerics.bits import unit_roundoff
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.program.records import TensorRecord

__all__ = ["describe"]

_SAMPLE = 64
_PROJECTIONS = 4
_CHUNK = 1 << 18

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def describe(region: str, call: int, subject: str, tensor: torch.Tensor) -> TensorRecord:
    """The record of a tensor. What cannot be read must not stop the program; the comparison tells it."""
    if type(tensor) not in _PLAIN:
        why = f"a tensor of the class {type(tensor).__qualname__}"
    elif tensor.layout is not torch.strided or tensor.device.type == "meta":
        why = f"a tensor with layout {tensor.layout} on device {tensor.device.type}"
    else:
        try:
            return _values(region, call, subject, tensor.detach())
        except (RuntimeError, TypeError) as error:  # a dtype for which torch has no arithmetic
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
    kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(int(size) for size in tensor.shape)
    return TensorRecord(region, call, subject, kind, shape, None, 0.0, 0.0, 0, 0.0, (), tensor.device.type, why)


def _values(region: str, call: int, subject: str, tensor: torch.Tensor) -> TensorRecord:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    bits = fingerprint(tensor)
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    floating, roundoff = real.is_floating_point(), 0.0
    if floating:
        roundoff = unit_roundoff(real.dtype)
        real = real.float() if real.element_size() == 1 else real  # torch has no arithmetic in 8 bits
    finite = real.isfinite() if floating else None
    nonfinite = 0 if finite is None else int((~finite).sum().item())
    plain = real if finite is None or not nonfinite else torch.where(finite, real, torch.zeros((), dtype=real.dtype))
    wide = torch.float64 if real.device.type != "mps" else torch.float32
    norm = float(torch.linalg.vector_norm(plain.to(wide)).item()) if plain.numel() else 0.0
    flat = real.reshape(-1)
    count = min(_SAMPLE, flat.numel())
    places = torch.tensor([at * flat.numel() // count for at in range(count)], device=flat.device, dtype=torch.long)
    wider = plain.reshape(-1).to(wide)
    return TensorRecord(
        region=region,
        call=call,
        subject=subject,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(int(size) for size in tensor.shape),
        bits=bits,
        rms=min(norm / max(1, plain.numel()) ** 0.5, sys.float_info.max),  # squares of float64 may overflow
        max=float(plain.abs().max().to(wide).item()) if plain.numel() and floating else 0.0,
        nonfinite=nonfinite,
        roundoff=roundoff,
        sample=tuple(flat[places].to(wide).tolist()) if count else (),
        device=tensor.device.type,
        projections=_projections(wider) if count else (),
    )


def _projections(flat: torch.Tensor) -> tuple[float, ...]:
    """Sums of the elements with signs that follow from their places, over the root of their number."""
    sums = torch.zeros(_PROJECTIONS, dtype=flat.dtype, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        mixed = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 31)) * 0x3F58476D1CE4E5B9
        for number in range(_PROJECTIONS):
            minus = ((mixed >> (40 + number)) & 1).bool()
            sums[number] += torch.where(minus, -part, part).sum()
    return tuple((sums / flat.numel() ** 0.5).tolist())
