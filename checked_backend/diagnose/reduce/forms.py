"""Short ways to write a tensor's values: zeros, a constant, a range, a seeded generator, a list of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["LITERAL_ELEMENTS", "Form", "form_of", "ramp", "seeded"]

LITERAL_ELEMENTS = 32
"""Tensors of up to this many elements are written out."""

_SEARCHED = 2**20
"""In tensors with more elements, only a constant is looked for: other forms would cost more than they give."""

_LONG = 10_000


@dataclass(frozen=True, slots=True)
class Form:
    """How a tensor's values can be written.

    Attributes:
        rank: Smaller is simpler.
        text: Code of a contiguous tensor with these values; None if it is too long.
    """

    rank: int
    text: str | None


def form_of(tensor: torch.Tensor) -> Form:
    """The simplest form that gives a tensor's values bit for bit. Its strides are not part of it."""
    values = tensor.detach()
    if type(values) is not torch.Tensor or values.layout is not torch.strided or values.is_quantized:
        return Form(_LONG * 10, None)
    shape, dtype = list(values.shape), _dtype_argument(values.dtype)
    sizes = ", ".join(map(str, shape)) if shape else "()"
    if values.numel() == 0:
        return Form(0, f"torch.empty({sizes}{dtype})")
    flat = values.contiguous().cpu().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # one element of an expanded tensor is contiguous with a stride of 0
    if not values.dtype.is_complex:
        first = flat[0].item()
        if _same(flat, torch.full_like(flat, first)):
            if not shape:
                return _literal(values)
            if first == 0 and not torch.signbit(flat[0].double()):
                return Form(1, f"torch.zeros({sizes}{dtype})")
            if first == 1:
                return Form(2, f"torch.ones({sizes}{dtype})")
            number = _number(first, values.dtype)
            return Form(3 + len(number), f"torch.full({tuple(shape)}, {number}, dtype={values.dtype})")
        if flat.numel() > _SEARCHED:
            return Form(_LONG, None)
        if values.dtype is not torch.bool and _same(flat, ramp(flat.numel(), values.dtype)):
            last = "" if len(shape) == 1 else f".reshape({sizes})"
            kind = "" if values.dtype is torch.int64 else f", dtype={values.dtype}"
            end = f"{kind})" if _counts(values.dtype) else f").to({values.dtype})"
            return Form(20, f"torch.arange({flat.numel()}{end}{last}")
    if flat.numel() <= LITERAL_ELEMENTS:
        return _literal(values)
    if values.dtype.is_floating_point and _same(flat, seeded(values.shape, values.dtype).reshape(-1)):
        cast = "" if values.dtype is torch.float32 else f".to({values.dtype})"
        return Form(40, f"torch.randn({sizes}, generator=torch.Generator().manual_seed(0)){cast}")
    return Form(_LONG, None)


def ramp(count: int, dtype: torch.dtype) -> torch.Tensor:
    """0, 1, 2, ... as ``torch.arange`` makes it."""
    if dtype is torch.bool or dtype.is_complex:
        return torch.zeros(count, dtype=dtype)
    return torch.arange(count, dtype=torch.int64).to(dtype)


def _counts(dtype: torch.dtype) -> bool:
    """Whether ``torch.arange`` makes this dtype by itself."""
    if dtype.is_floating_point:
        return dtype.itemsize > 1
    return dtype not in (torch.uint16, torch.uint32, torch.uint64)


def seeded(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Normal random numbers from a fixed seed, as a script can draw them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _literal(values: torch.Tensor) -> Form:
    numbers = _nested(values.tolist(), values.dtype)
    natural = values.dtype in (torch.float32, torch.int64, torch.bool)  # torch.tensor gives such numbers this dtype
    text = f"torch.tensor({numbers}{'' if natural else f', dtype={values.dtype}'})"
    distinct = len(set(map(str, values.reshape(-1).tolist())))
    return Form((2 if not values.dim() else 30) + len(numbers) + distinct, text)


def _nested(value: object, dtype: torch.dtype) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_nested(item, dtype) for item in value)}]"
    return _number(value, dtype)


def _number(value: object, dtype: torch.dtype) -> str:
    if isinstance(value, complex):
        return f"complex({_number(value.real, torch.float64)}, {_number(value.imag, torch.float64)})"
    if not isinstance(value, float):
        return repr(value)
    if not math.isfinite(value):
        return f'float("{value}")'
    for digits in range(1, 17):  # the fewest digits that give this very number in its dtype
        text = repr(float(f"{value:.{digits}g}"))
        if torch.tensor(float(text), dtype=dtype).item() == value:
            return text
    return repr(value)


def _dtype_argument(dtype: torch.dtype) -> str:
    return "" if dtype is torch.float32 else f", dtype={dtype}"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, also in signs of zeros and in NaN."""
    if one.dtype is not other.dtype:
        return False
    return bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))
