"""Calls that read or write a part of a tensor: indices, masks, gather and scatter."""

from __future__ import annotations

from typing import Any

from checked_backend.fuzz.generate.draft import Draft
from checked_backend.fuzz.program import Ref, Size, Statement

__all__ = ["INDEXING", "make", "make_assignment"]

INDEXING = (
    *("getitem", "getitem", "getitem", "torch.index_select", "torch.gather", "torch.take", "Tensor.scatter"),
    *("Tensor.scatter_add", "Tensor.index_add", "Tensor.index_fill", "Tensor.index_copy", "Tensor.masked_fill"),
    *("Tensor.masked_fill_", "Tensor.scatter_", "Tensor.index_add_", "Tensor.index_put_", "torch.select_scatter"),
    *("torch.slice_scatter", "torch.diagonal_scatter", "Tensor.fill_diagonal_", "torch.take_along_dim", "F.embedding"),
)
"""Operations that read or write parts."""


def make(draft: Draft, op: str) -> Statement | None:
    """A call of one of `INDEXING`."""
    ref = draft.at_least(1)
    tensor = draft.value(ref)
    dim = draft.rng.randrange(tensor.dim())
    size = tensor.shape[dim]
    if op == "getitem":
        return Statement(op, (ref, _index(draft, ref)))
    if not size:
        return None
    match op.rpartition(".")[2]:
        case "index_select":
            return Statement(op, (ref, dim, _indices(draft, size, (draft.rng.choice((1, 2, 5)),))))
        case "gather" | "take_along_dim":
            index = _indices(draft, size, tensor.shape)
            return Statement(op, (ref, dim, index) if op.endswith("gather") else (ref, index, dim))
        case "take":
            return Statement(op, (ref, _indices(draft, tensor.numel(), (2, 3)))) if tensor.numel() else None
        case "embedding":
            return Statement(op, (_indices(draft, size, (3,)), ref)) if tensor.dim() == 2 and dim == 0 else None
        case "scatter" | "scatter_" | "scatter_add":
            shape = tuple(tensor.shape)
            source = draft.any(lambda one: tuple(one.shape) == shape and one.dtype == tensor.dtype) or ref
            index = _indices(draft, size, (*shape[:dim], 1, *shape[dim + 1 :]))
            return Statement(op, (ref, dim, index, source))
        case "index_add" | "index_add_" | "index_copy":
            source = draft.new_input(_name(tensor), tensor.shape)
            distinct = draft.new_input("int64", (size,), fill="distinct", low=0)
            return Statement(op, (ref, dim, distinct, source))
        case "index_fill":
            return Statement(op, (ref, dim, _indices(draft, size, (1,)), draft.rng.choice((0, 1, 2))))
        case "masked_fill" | "masked_fill_":
            return Statement(op, (ref, draft.fitting(tensor.shape, "bool"), draft.rng.choice((0, 1, -1, 0.5))))
        case "index_put_":
            values = draft.new_input(_name(tensor), (1,)) if draft.chance(0.5) else draft.new_input(_name(tensor), ())
            if not tensor.shape[0]:
                return None
            first = _indices(draft, tensor.shape[0], (1,))
            return Statement(op, (ref, (first,), values), {"accumulate": draft.chance(0.5)})
        case "select_scatter":
            shape = tuple(s for d, s in enumerate(tensor.shape) if d != dim)
            return Statement(op, (ref, draft.new_input(_name(tensor), shape), dim, draft.rng.randrange(size)))
        case "slice_scatter":
            start = draft.rng.randrange(size)
            shape = tuple(size - start if d == dim else s for d, s in enumerate(tensor.shape))
            return Statement(op, (ref, draft.new_input(_name(tensor), shape), dim, start))
        case "diagonal_scatter":
            return (
                Statement(op, (ref, draft.new_input(_name(tensor), tensor.diagonal().shape)))
                if tensor.dim() == 2
                else None
            )
    return Statement(op, (ref, draft.rng.choice((0, 1, 2))))


def make_assignment(draft: Draft, op: str) -> Statement | None:
    """An assignment ``x[index] = value``: now and then from the same tensor, or to one place after another."""
    ref = draft.any(lambda tensor: tensor.dim() > 0 and not (tensor.is_leaf and tensor.requires_grad))
    if ref is None:
        return None
    tensor = draft.value(ref)
    index = _index(draft, ref)
    if draft.chance(0.25):
        mask = draft.fitting(tensor.shape, "bool")
        if draft.value(mask).shape == tensor.shape:
            return Statement(op, (ref, mask, draft.rng.choice((0, 1, -1, 2.5))))
    if draft.chance(0.4):
        return Statement(op, (ref, index, draft.scalar()))
    shape = draft.value(ref)[_eager(draft, index)].shape
    same = draft.any(lambda one: one.shape == shape and one.dtype == tensor.dtype)
    value = same if same is not None and draft.chance(0.6) else draft.fitting(shape, _name(tensor))
    return Statement(op, (ref, index, value))


def _eager(draft: Draft, index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_eager(draft, item) for item in index)
    if isinstance(index, slice):
        return slice(*(_eager(draft, part) for part in (index.start, index.stop, index.step)))
    if isinstance(index, Ref):
        return draft.values[index.value]
    return draft.value(Ref(index.value)).shape[index.dim] if isinstance(index, Size) else index


def _index(draft: Draft, ref: Ref) -> Any:
    """A basic index, with a tensor of indices now and then."""
    tensor = draft.value(ref)
    parts: list[Any] = []
    for size in tensor.shape:
        if draft.turns and draft.chance(0.4):
            turn = draft.rng.choice(draft.turns)
            parts.append(draft.rng.choice((turn, turn, slice(turn, None), slice(None, turn))))
            continue
        way = draft.rng.choices(("all", "one", "slice", "step", "tensor", "end"), (34, 22, 25, 12, 6, 12))[0]
        if way == "end":
            break
        if not size:
            way = "all"
        start = draft.rng.randrange(size) if size else 0
        match way:
            case "one":
                parts.append(start if draft.chance(0.7) else start - size)
            case "slice":
                stop = draft.rng.randint(start, size)
                parts.append(slice(start or None, -1 if draft.chance(0.2) else stop if draft.chance(0.6) else None))
            case "step":
                parts.append(slice(start, None, draft.rng.choice((2, 3))))
            case "tensor":
                parts.append(
                    draft.new_input("int64", (draft.rng.randint(1, size),), fill="distinct", low=0, stride=(1,))
                )
            case _:
                parts.append(slice(None))
    if draft.chance(0.12):
        parts.insert(draft.rng.randint(0, len(parts)), None)
    if draft.chance(0.15) and len(parts) < tensor.dim():
        parts.append(...)
    return parts[0] if len(parts) == 1 else tuple(parts)


def _indices(draft: Draft, size: int, shape: Any) -> Ref:
    """A new tensor of indices into a dimension."""
    return draft.new_input("int64", shape, fill="range", low=0, high=size - 1)


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
