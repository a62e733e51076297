"""Calls that give another view of a tensor, and some that look like it."""

from __future__ import annotations

from typing import Any

from checked_backend.fuzz.generate.draft import Draft
from checked_backend.fuzz.program import Ref, Size, Statement

__all__ = ["VIEWS", "VIEWS_IN_PLACE", "make", "make_in_place"]

_NAMES = (
    "view reshape flatten unsqueeze squeeze transpose permute t expand movedim narrow select unbind split chunk "
    "tensor_split unfold diagonal view_as expand_as broadcast_to swapaxes unflatten repeat tile repeat_interleave "
    "rot90 ravel split_with_sizes"
)
VIEWS = tuple(f"Tensor.{name}" for name in _NAMES.split())
"""Operations on the shape."""

VIEWS_IN_PLACE = tuple(f"Tensor.{name}" for name in ["unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_"])
"""Operations that change the shape of the tensor itself."""


def make(draft: Draft, op: str) -> Statement | None:
    """A call of one of `VIEWS`."""
    own = op.removeprefix("Tensor.")
    ref = draft.at_least(_LEAST.get(own, 1))
    tensor = draft.value(ref)
    arguments = _ARGUMENTS[own](draft, ref, tensor)
    return None if arguments is None else Statement(op, (ref, *arguments))


def make_in_place(draft: Draft, op: str) -> Statement | None:
    """A call of one of `VIEWS_IN_PLACE`: on a computed tensor, mostly."""
    ref = draft.any(lambda tensor: not (tensor.is_leaf and tensor.requires_grad) and tensor.dim() > 0)
    if ref is None:
        return None
    tensor = draft.value(ref)
    match op.removeprefix("Tensor."):
        case "unsqueeze_":
            return Statement(op, (ref, _dim(draft, tensor)))
        case "squeeze_":
            return Statement(op, (ref, _dim(draft, tensor)) if draft.chance(0.5) else (ref,))
        case "t_":
            return Statement(op, (ref,))
    return Statement(op, (ref, _dim(draft, tensor), _dim(draft, tensor)))


_LEAST = {"diagonal": 2, "rot90": 2, "transpose": 2, "permute": 2, "movedim": 2, "swapaxes": 2, "flatten": 1}


def _dim(draft: Draft, tensor: Any) -> int:
    return draft.rng.randrange(-tensor.dim(), tensor.dim()) if tensor.dim() else 0


def _size(draft: Draft, ref: Ref, dim: int) -> Any:
    """The size of a dimension: in a dynamic program as an expression."""
    return Size(ref.value, dim) if draft.dynamic and draft.chance(0.7) else draft.value(ref).shape[dim]


def _other_shape(draft: Draft, ref: Ref, tensor: Any) -> Any:
    """Arguments for another shape of the same number of elements."""
    shape = list(tensor.shape)
    way = draft.rng.choice(("flat", "merge", "split", "rows"))
    if way == "flat" or not shape:
        return (-1,)
    if way == "merge" and len(shape) > 1:
        at = draft.rng.randrange(len(shape) - 1)
        return (*(_size(draft, ref, dim) for dim in range(at)), -1, *shape[at + 2 :])
    if way == "split":
        at = draft.rng.randrange(len(shape))
        for part in (2, 3, 4):
            if shape[at] and shape[at] % part == 0:
                return (*shape[:at], part, shape[at] // part, *shape[at + 1 :])
    return (_size(draft, ref, 0), -1) if shape[0] else None


def _part(draft: Draft, ref: Ref, tensor: Any) -> Any:
    dim = _dim(draft, tensor)
    size = tensor.shape[dim]
    if not size:
        return None
    start = draft.rng.randrange(size)
    return dim, start, draft.rng.randint(0 if draft.chance(0.1) else 1, size - start) if size > start else 0


def _window(draft: Draft, ref: Ref, tensor: Any) -> Any:
    dim = _dim(draft, tensor)
    size = tensor.shape[dim]
    return (dim, draft.rng.randint(1, min(size, 4)), draft.rng.choice((1, 1, 2, 3))) if size else None


def _expanded(draft: Draft, ref: Ref, tensor: Any) -> Any:
    more = (draft.rng.choice((1, 2, 3)),) if draft.chance(0.4) else ()
    sizes = (draft.rng.choice((2, 3, 4)) if size == 1 else (-1) for size in tensor.shape)
    return (*more, *sizes)


def _sections(draft: Draft, ref: Ref, tensor: Any) -> Any:
    return draft.rng.choice((1, 2, 3)), _dim(draft, tensor)


def _sizes_of_parts(draft: Draft, ref: Ref, tensor: Any) -> Any:
    dim = _dim(draft, tensor)
    size = tensor.shape[dim]
    first = draft.rng.randint(0, size)
    return [first, size - first], dim


def _like(draft: Draft, ref: Ref, tensor: Any) -> Any:
    other = draft.any(lambda one: one.numel() == tensor.numel())
    return None if other is None else (other,)


def _wider(draft: Draft, ref: Ref, tensor: Any) -> Any:
    other = draft.any(lambda one: one.dim() >= tensor.dim())
    return None if other is None else (other,)


def _times(draft: Draft, ref: Ref, tensor: Any) -> Any:
    return tuple(draft.rng.choice((1, 1, 2, 3)) for _ in range(tensor.dim() + draft.chance(0.2)))


def _split_dim(draft: Draft, ref: Ref, tensor: Any) -> Any:
    dim = _dim(draft, tensor)
    return (dim, (2, -1)) if tensor.shape[dim] and tensor.shape[dim] % 2 == 0 else (dim, (1, -1))


_ARGUMENTS: dict[str, Any] = {
    "view": _other_shape,
    "reshape": _other_shape,
    "flatten": lambda draft, ref, tensor: (draft.rng.randrange(tensor.dim()),),
    "unsqueeze": lambda draft, ref, tensor: (draft.rng.randint(-tensor.dim() - 1, tensor.dim()),),
    "squeeze": lambda draft, ref, tensor: () if draft.chance(0.4) else (_dim(draft, tensor),),
    "transpose": lambda draft, ref, tensor: (_dim(draft, tensor), _dim(draft, tensor)),
    "swapaxes": lambda draft, ref, tensor: (_dim(draft, tensor), _dim(draft, tensor)),
    "movedim": lambda draft, ref, tensor: (_dim(draft, tensor), _dim(draft, tensor)),
    "permute": lambda draft, ref, tensor: tuple(draft.rng.sample(range(tensor.dim()), tensor.dim())),
    "t": lambda draft, ref, tensor: (),
    "ravel": lambda draft, ref, tensor: (),
    "expand": _expanded,
    "broadcast_to": lambda draft, ref, tensor: (_expanded(draft, ref, tensor),),
    "narrow": _part,
    "select": lambda draft, ref, tensor: (part := _part(draft, ref, tensor)) and part[:2],
    "unbind": lambda draft, ref, tensor: (_dim(draft, tensor),),
    "split": _sections,
    "chunk": _sections,
    "tensor_split": _sections,
    "split_with_sizes": _sizes_of_parts,
    "unfold": _window,
    "diagonal": lambda draft, ref, tensor: (draft.rng.choice((0, 0, 1, -1)),),
    "view_as": _like,
    "expand_as": _wider,
    "unflatten": _split_dim,
    "repeat": _times,
    "tile": lambda draft, ref, tensor: (_times(draft, ref, tensor),),
    "repeat_interleave": lambda draft, ref, tensor: (draft.rng.choice((1, 2, 3)), _dim(draft, tensor)),
    "rot90": lambda draft, ref, tensor: (draft.rng.choice((0, 1, 2, 3)),),
}
