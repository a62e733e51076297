"""The gradients that enter a backward pass at a program's outputs: their values, and their places in memory.

Two kinds of values find different faults. Full mantissas show a backward pass that computes at less precision than the
dtype has. None of them is zero, so that no wrong factor hides. Multiples of 1/8 are exact in every floating dtype, and
so are sums of them: a difference there is no rounding. Some of the exact values are zero.

Values with full mantissas come in three magnitudes. Large and small values are never mixed: among large values nobody
would see that small ones are lost. They also enter at some of several outputs alone, because a loss often uses one
output only, and nothing arrives at the others.

Some gradients are infinite or NaN. A loss scaler looks for them after the backward pass, so that must not lose them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TypeVar

import torch

from checked_backend.checking.strided import channels_last, expanded, transposed, with_gaps

__all__ = ["Incoming", "exact", "full_mantissa", "laid_out", "layouts_of", "overflowed"]

_NARROWER = (2, 3, 7, 10, 23)
"""Bits of mantissa of float8_e5m2, float8_e4m3, bfloat16, float16 (and TF32), float32."""

_OFFSET = 3

_SMALL = (-24, -10)
"""Exponents of two for small gradients, as of a mean over many elements: 3e-8 to 2e-3."""

_LARGE = (2, 14)
"""Exponents of two for large gradients, as of a loss that is scaled against underflow: 2 to 3e4."""

_SUMMED = 10
"""Gradients stay this many powers of two below the greatest number of a dtype, so that their sums do not overflow."""

_OVERFLOWED = 4
"""One of so many gradients is infinite or NaN, where some are."""

Given = TypeVar("Given")


class Incoming(str, Enum):
    """The magnitude, the memory layout, or the place of incoming gradients. The words are for people."""

    CONTIGUOUS = "contiguous"
    SMALL = "of small magnitudes"
    LARGE = "of large magnitudes"
    SPARED = "with gaps at an offset"
    EXPANDED = "expanded"
    FIRST = "at the first output alone"
    OTHERS = "at all outputs but the first"
    ROWS = "expanded along the first dimension"
    COLUMNS = "expanded along the last dimension"
    TRANSPOSED = "transposed"
    CHANNELS_LAST = "channels last"
    CONJUGATED = "conjugated lazily"
    INFINITE = "of which some are infinite"
    NAN = "of which some are NaN"

    @property
    def is_laid_out(self) -> bool:
        """Whether they lie otherwise in memory than a new tensor does."""
        places = (Incoming.CONTIGUOUS, Incoming.FIRST, Incoming.OTHERS)
        return self not in (*places, Incoming.SMALL, Incoming.LARGE) and self.is_finite

    @property
    def is_finite(self) -> bool:
        """Whether all of their numbers are finite."""
        return self not in (Incoming.INFINITE, Incoming.NAN)

    def at(self, outputs: Mapping[str, Given]) -> dict[str, Given]:
        """The outputs, of several, at which gradients enter."""
        places = list(outputs.items())
        if self is Incoming.FIRST:
            return dict(places[:1])
        return dict(places[1:] if self is Incoming.OTHERS else places)


_REPEATED = MappingProxyType(
    {Incoming.EXPANDED: slice(None), Incoming.ROWS: slice(1), Incoming.COLUMNS: slice(-1, None)}
)
"""The dimensions along which an expanded gradient repeats."""


def full_mantissa(
    shape: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
    incoming: Incoming = Incoming.CONTIGUOUS,
) -> torch.Tensor:
    """Random numbers of either sign that are not near any number of a narrower dtype.

    Args:
        dtype: The floating dtype whose mantissa they use in full.
        generator: Draws them.
        incoming: Whether their magnitudes are 1/2 to 2, or small, or large. Small and large ones span several powers
            of ten.

    Returns:
        A float64 tensor on the CPU; its numbers are exact in the dtype.
    """
    bits = round(-math.log2(torch.finfo(dtype).eps))
    mantissa = torch.randint(0, 1 << bits, tuple(shape), generator=generator) | 1
    for kept in _NARROWER:
        if kept + 2 <= bits:  # 01 or 10 after what a narrower dtype keeps: at least a quarter of its last place
            first = mantissa >> (bits - kept - 1) & 1
            place = 1 << (bits - kept - 2)
            mantissa = (mantissa & ~place) | (1 - first) * place
    sign_and_half = torch.randint(0, 4, tuple(shape), generator=generator)
    scale = (1 - 2 * (sign_and_half & 1)) / (1 + (sign_and_half >> 1))
    numbers = (1 + mantissa.to(torch.float64) / (1 << bits)) * scale
    if incoming not in (Incoming.SMALL, Incoming.LARGE):
        return numbers
    least, most = _exponents(dtype, incoming)
    return numbers.ldexp(torch.randint(least, most + 1, tuple(shape), generator=generator))


def _exponents(dtype: torch.dtype, incoming: Incoming) -> tuple[int, int]:
    """The least and the greatest exponent of two that gradients of a dtype get."""
    limits = torch.finfo(dtype)
    if incoming is Incoming.SMALL:
        least = max(_SMALL[0], math.ceil(math.log2(limits.tiny)) + 1)
        return least, max(least, _SMALL[1])
    most = max(1, min(_LARGE[1], math.floor(math.log2(limits.max)) - _SUMMED))
    return min(_LARGE[0], most), most


def exact(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Random multiples of 1/8 in [-2, 2], exact in every floating dtype; one alone is 1, as `backward` sends."""
    eighths = torch.randint(-16, 17, tuple(shape), generator=generator).to(torch.float64) / 8
    return torch.ones_like(eighths) if eighths.numel() == 1 else eighths


def overflowed(numbers: torch.Tensor, generator: torch.Generator, incoming: Incoming) -> torch.Tensor:
    """The same numbers, of which the first and about a quarter of the others are infinite or NaN."""
    chosen = torch.randint(0, _OVERFLOWED, tuple(numbers.shape), generator=generator) == 0
    chosen.view(-1)[:1] = True
    wrong = torch.copysign(torch.full_like(numbers, math.inf if incoming is Incoming.INFINITE else math.nan), numbers)
    return torch.where(chosen, wrong, numbers)


def laid_out(values: torch.Tensor, layout: Incoming) -> torch.Tensor:
    """The same values in another layout; the tensor itself if its shape has no such layout.

    Expanded values repeat the first of the values, divided by a power of two so that sums over them keep their size.
    """
    if layout in _REPEATED and values.numel():
        dims = range(values.dim())[_REPEATED[layout]]
        repeated = math.prod(values.shape[dim] for dim in dims)
        scale = 2.0 ** -min(round(math.log2(repeated) / 2), 10)
        some = torch.where(values == 0, torch.ones_like(values), values) * scale
        made = expanded(some, dims)
    elif layout is Incoming.CONJUGATED:
        made = values.conj().resolve_conj().conj() if values.is_complex() else None
    elif layout is Incoming.SPARED:
        made = with_gaps(values, _OFFSET)
    elif layout is Incoming.TRANSPOSED:
        made = transposed(values)
    else:
        made = channels_last(values) if layout is Incoming.CHANNELS_LAST else None
    return values if made is None else made


def layouts_of(roots: Sequence[torch.Tensor]) -> list[Incoming]:
    """The magnitudes, values, layouts and places, besides the usual ones, that gradients of these outputs can have.

    Those that find most faults come first, because there may be no time for all.
    """
    plain = [root for root in roots if root.layout is torch.strided and not root.is_nested and root.numel()]
    several = [root for root in plain if root.numel() > 1]
    tables = [root for root in several if root.dim() > 1]
    possible: dict[Incoming, Sequence[torch.Tensor]] = {
        Incoming.SMALL: roots,
        Incoming.LARGE: roots,
        Incoming.SPARED: plain,
        Incoming.EXPANDED: several,
        Incoming.FIRST: roots[1:],
        Incoming.OTHERS: roots[1:],
        Incoming.INFINITE: roots,
        Incoming.NAN: roots,
        Incoming.ROWS: [root for root in tables if 1 < root.shape[0] < root.numel()],
        Incoming.COLUMNS: [root for root in tables if 1 < root.shape[-1] < root.numel()],
        Incoming.TRANSPOSED: [root for root in tables if min(root.shape[-2:]) > 1],
        Incoming.CHANNELS_LAST: [root for root in several if root.dim() in (4, 5) and root.shape[1] > 1],
        Incoming.CONJUGATED: [root for root in plain if root.is_complex()],
    }
    return [layout for layout, ones in possible.items() if ones]
