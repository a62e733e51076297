"""Triton kernels of a user's own."""

from __future__ import annotations

import torch
import triton
from triton import language as tl


@triton.jit
def _row_sum(x, out, width, stride, BLOCK: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    if MASKED:
        values = tl.load(x + row * stride + columns, mask=columns < width, other=0.0)
    else:
        values = tl.load(x + row * stride + columns)
    tl.store(out + row, tl.sum(values))


def row_sum(x: torch.Tensor, *, masked: bool) -> torch.Tensor:
    """The sums of the rows; without the mask, of what lies behind each row too, up to a power of two."""
    out = torch.empty(len(x), device=x.device, dtype=x.dtype)
    block = triton.next_power_of_2(x.shape[1])
    _row_sum[(len(x),)](x, out, x.shape[1], x.stride(0), BLOCK=block, MASKED=masked)
    return out


@triton.jit
def _doubled(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < count), mask=at < count)


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Twice the values, by a kernel that Dynamo puts into its graph."""
    out = torch.empty_like(x)
    _doubled[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)
    return out
