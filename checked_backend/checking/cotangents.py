"""The gradients that enter a backward pass at a program's outputs: their values, and their places in memory.

Two kinds of values find different faults. Full mantissas show a backward pass that computes at less precision than the
dtype has. None of them is zero, so that no wrong factor hides. Multiples of 1/8 are exact in every floating dtype, and
so are sums of them: a difference there is no rounding. Some of the exact values are zero.

Gradients also enter at some of several outputs alone, because a loss often uses one output only, and nothing arrives at
the others. Some are infinite or NaN: a loss scaler looks for them after the backward pass, so that must not lose them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypeVar

import torch

_NARROWER = (2, 3, 7, 10, 23)
"""Bits of mantissa of float8_e5m2, float8_e4m3, bfloat16, float16 (and TF32), float32."""

_OFFSET = 3

_OVERFLOWED = 4
"""One of so many gradients is infinite or NaN, where some are."""

Given = TypeVar("Given")


class Incoming(str, Enum):
    """A kind of incoming gradients. The words are for people."""

    CONTIGUOUS = "contiguous"
    STRIDED = "transposed with gaps at an offset"
    EXPANDED = "expanded"
    FIRST_OUTPUT_ONLY = "at the first output alone"
    ALL_BUT_FIRST = "at all outputs but the first"
    INFINITE = "of which some are infinite"
    NAN = "of which some are NaN"

    @property
    def is_laid_out(self) -> bool:
        """Whether they lie otherwise in memory than a new tensor does."""
        return self in (Incoming.STRIDED, Incoming.EXPANDED)

    @property
    def is_finite(self) -> bool:
        """Whether all of their numbers are finite."""
        return self not in (Incoming.INFINITE, Incoming.NAN)

    def at(self, outputs: Mapping[str, Given]) -> dict[str, Given]:
        """The outputs, of several, at which gradients enter."""
        places = list(outputs.items())
        if self is Incoming.FIRST_OUTPUT_ONLY:
            return dict(places[:1])
        return dict(places[1:] if self is Incoming.ALL_BUT_FIRST else places)


def draw(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, incoming: Incoming = Incoming.CONTIGUOUS
) -> torch.Tensor:
    """Random gradients that are exact in a floating dtype, as a float64 tensor on the CPU."""
    if incoming.is_laid_out:
        eighths = torch.randint(-16, 17, tuple(shape), generator=generator).to(torch.float64) / 8
        return torch.ones_like(eighths) if eighths.numel() == 1 else eighths  # as `loss.backward()` sends
    numbers = _full_mantissa(shape, dtype, generator)
    if incoming.is_finite:
        return numbers
    chosen = torch.randint(0, _OVERFLOWED, tuple(shape), generator=generator) == 0
    chosen.view(-1)[:1] = True
    wrong = torch.full_like(numbers, math.inf if incoming is Incoming.INFINITE else math.nan)
    return torch.where(chosen, torch.copysign(wrong, numbers), numbers)


def _full_mantissa(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Numbers of either sign, of magnitudes from 1/2 to 2, that are not near any number of a narrower dtype."""
    bits = round(-math.log2(torch.finfo(dtype).eps))
    mantissa = torch.randint(0, 1 << bits, tuple(shape), generator=generator) | 1
    for kept in _NARROWER:
        if kept + 2 <= bits:  # 01 or 10 after what a narrower dtype keeps: at least a quarter of its last place
            first = mantissa >> (bits - kept - 1) & 1
            place = 1 << (bits - kept - 2)
            mantissa = (mantissa & ~place) | (1 - first) * place
    sign_and_half = torch.randint(0, 4, tuple(shape), generator=generator)
    scale = (1 - 2 * (sign_and_half & 1)) / (1 + (sign_and_half >> 1))
    return (1 + mantissa.to(torch.float64) / (1 << bits)) * scale


def laid_out(values: torch.Tensor, incoming: Incoming) -> torch.Tensor:
    """The same values in another layout.

    Expanded ones repeat the first value, divided by a power of two so that sums over them keep their size.
    """
    if incoming is Incoming.STRIDED:
        order = tuple(reversed(range(values.dim())))
        return with_gaps(values.permute(order), _OFFSET).permute(order)
    if incoming is Incoming.EXPANDED and values.numel():
        first = values[(slice(1),) * values.dim()]
        scale = 2.0 ** -min(round(math.log2(values.numel()) / 2), 10)
        return (torch.where(first == 0, torch.ones_like(first), first) * scale).expand(values.shape)
    return values


def with_gaps(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A copy in every other element of memory of twice its size, from an offset on."""
    memory = tensor.new_zeros(2 * tensor.numel() + offset)
    return memory[offset:].view(*tensor.shape, 2)[..., 0].copy_(tensor)


def variants_of(roots: Sequence[torch.Tensor]) -> list[Incoming]:
    """The kinds, besides the usual one, that gradients of these outputs can have.

    Those that find most faults come first, because there may be no time for all.
    """
    plain = [root for root in roots if root.layout is torch.strided and not root.is_nested and root.numel()]
    possible: dict[Incoming, Sequence[torch.Tensor]] = {
        Incoming.STRIDED: plain,
        Incoming.EXPANDED: [root for root in plain if root.numel() > 1],
        Incoming.FIRST_OUTPUT_ONLY: roots[1:],
        Incoming.ALL_BUT_FIRST: roots[1:],
        Incoming.INFINITE: roots,
        Incoming.NAN: roots,
    }
    return [incoming for incoming, ones in possible.items() if ones]
