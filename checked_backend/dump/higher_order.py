"""Check the tables of blocks that higher-order operators take. Compiled kernels use them without a check.

Eager does not read these tables, so running the graph in eager does not show that they are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["higher_order_problem"]

_TABLES = 10
"""The number of first entries of a block mask that are the same in all versions of torch."""

_LARGEST = 2**30
"""The number of rows of the single block that stands for "no mask"."""


def higher_order_problem(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why a higher-order operator would leave its memory; None if it does not, as far as is known."""
    if name not in ("flex_attention", "flex_attention_backward"):
        return None
    mask = kwargs.get("block_mask")
    if mask is None:
        mask = next((arg for arg in args if isinstance(arg, (tuple, list)) and len(arg) > _TABLES), None)
    if mask is None or len(mask) <= _TABLES + 2:
        return "it has no block mask"
    try:
        return next(_mask_problems(args[0], args[1], mask), None)
    except (IndexError, TypeError, AttributeError, ValueError) as error:
        return f"its block mask is none ({type(error).__name__}: {error})"


def _mask_problems(query: torch.Tensor, key: torch.Tensor, mask: Any) -> Iterator[str]:
    sizes = {what: mask[at] for what, at in (("rows", -3), ("columns", -2))}
    for what, size in sizes.items():
        if not isinstance(size, int) or not 1 <= size <= _LARGEST:
            yield f"a block of its mask has {size!r} {what}"
            return
    rows = -(-query.shape[-2] // sizes["rows"])
    columns = -(-key.shape[-2] // sizes["columns"])
    pairs = (
        ("kv", rows, columns, 2),
        ("full_kv", rows, columns, 4),
        ("q", columns, rows, 6),
        ("full_q", columns, rows, 8),
    )
    for what, height, width, at in pairs:
        counts, indices = mask[at], mask[at + 1]
        if counts is not None or indices is not None:
            yield from _table_problems(what, counts, indices, (query.shape[0], query.shape[1], height), width)


def _table_problems(
    what: str, counts: torch.Tensor, indices: torch.Tensor, needed: tuple[int, int, int], end: int
) -> Iterator[str]:
    """Problems of one table. Each row of blocks has a count of the indices that are read; later ones are not read."""
    batch, heads, height = needed
    if counts.dtype != torch.int32 or indices.dtype != torch.int32:
        yield f"{what}_indices and their numbers are {counts.dtype} and {indices.dtype}, not torch.int32"
    shape = tuple(counts.shape)
    if tuple(indices.shape[:-1]) != shape or len(shape) != 3:
        yield f"{what}_indices is of shape {tuple(indices.shape)}, and the numbers of {shape}"
        return
    if shape[0] not in (1, batch) or not shape[1] or heads % shape[1] or shape[2] < height:
        yield f"{what}_num_blocks is of shape {shape}, where {needed} is needed"
    if not counts.numel():
        return
    least, most = (int(bound) for bound in counts.aminmax())
    if least < 0 or most > indices.shape[-1]:
        yield f"{what}_num_blocks from {least} to {most}, where {what}_indices has {indices.shape[-1]} in a row"
        return
    read = indices[torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)]
    if read.numel():
        least, most = (int(bound) for bound in read.aminmax())
        if least < 0 or most >= end:
            yield f"{what}_indices from {least} to {most}, where blocks 0 to {end - 1} are there"
