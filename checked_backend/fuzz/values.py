"""The tensors of a program's inputs: the same values from the same description, on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from checked_backend.fuzz.program import Input

__all__ = ["EDGES", "make_inputs", "same_value", "storage_sizes", "strides_of"]

EDGES = (0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 0.5, 1e-40, -1e-40, 65504.0, 1e-8, 2.5, -1.5)
"""The edge values that floating-point inputs get among others."""

_SHARE_OF_EDGES = 0.3


def make_inputs(inputs: Sequence[Input]) -> list[torch.Tensor]:
    """The tensors of inputs. Those that share memory are views of one storage."""
    extents = storage_sizes(inputs)
    storages: dict[int, torch.Tensor] = {}
    made: list[torch.Tensor] = []
    for place, given in enumerate(inputs):
        root = place if given.shares is None else given.shares
        if root not in storages:
            storages[root] = _filled(inputs[root], extents[root])
        view = storages[root].as_strided(given.shape, given.stride, given.offset)
        made.append(view.detach().requires_grad_(given.requires_grad))
    return made


def storage_sizes(inputs: Sequence[Input]) -> dict[int, int]:
    """The number of elements of each storage, by the first input in it."""
    found: dict[int, int] = {}
    for place, given in enumerate(inputs):
        root = place if given.shares is None else given.shares
        found[root] = max(found.get(root, 0), given.extent)
    return found


def _filled(given: Input, count: int) -> torch.Tensor:
    """The elements of a storage."""
    source = torch.Generator().manual_seed(given.seed)
    dtype: torch.dtype = getattr(torch, given.dtype)
    if dtype == torch.bool:
        return torch.rand(count, generator=source) < 0.5
    if given.fill == "distinct":
        return (torch.randperm(count, generator=source) + int(given.low)).to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return _integers(given, count, dtype, source)
    if given.fill == "normal":
        values = torch.randn(count, generator=source, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    else:
        values = torch.rand(count, generator=source, dtype=torch.float64) * (given.high - given.low) + given.low
    if given.fill == "edges":
        which = torch.randint(0, len(EDGES), (count,), generator=source)
        here = torch.rand(count, generator=source) < _SHARE_OF_EDGES
        values = torch.where(here, torch.tensor(EDGES, dtype=torch.float64)[which].to(values.dtype), values)
    return values.to(dtype)


def _integers(given: Input, count: int, dtype: torch.dtype, source: torch.Generator) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    low, high = (-3, 3) if given.fill == "normal" else (int(given.low), int(given.high))
    low, high = max(low, limits.min), min(high, limits.max)
    values = torch.randint(low, max(low, high) + 1, (count,), generator=source, dtype=torch.int64)
    if given.fill == "edges":
        edges = torch.tensor([0, 1, limits.min, limits.max, limits.max - 1, limits.min + 1])
        which = torch.randint(0, len(edges), (count,), generator=source)
        values = torch.where(torch.rand(count, generator=source) < _SHARE_OF_EDGES, edges[which], values)
    return values.to(dtype)


def strides_of(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """The strides of a dense tensor.

    Args:
        order: Its dimensions from the slowest to the fastest; default in order.
    """
    strides, step = [0] * len(shape), 1
    for dim in reversed(order if order is not None else range(len(shape))):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal: tensors of one dtype and shape with equal elements, or anything of one type."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other)
    one, other = one.detach(), other.detach()
    return one.dtype == other.dtype and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
