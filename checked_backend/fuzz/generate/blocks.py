"""Loops over the same storage, and branches that depend on sizes, flags and the turn of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checked_backend.fuzz.control import RELATIONS
from checked_backend.fuzz.generate.draft import Draft
from checked_backend.fuzz.program import Input, Size, Statement

__all__ = ["Extend", "add_block"]

_MOST_TURNS = 4
_DEEPEST = 2


Extend = Callable[[bool], bool]
"""Adds a call to a draft, if asked one that changes a tensor, and says whether it did."""


def add_block(draft: Draft, extend: Extend, depth: int = 1) -> bool:
    """Add a loop or a branch that changes what was there before it.

    Args:
        draft: The program so far.
        extend: Adds a call.
        depth: How many blocks there are around it, with it.

    Returns:
        Whether it was added: it may not run.
    """
    if draft.chance(0.6 if depth == 1 else 0.2):
        draft.begin(Statement("for", (_turns(draft),)))
        _fill(draft, extend, depth)
        return draft.end()
    draft.begin(Statement("if", _condition(draft)))
    _fill(draft, extend, depth)
    if draft.chance(0.7):
        draft.otherwise()
        _fill(draft, extend, depth)
    return draft.end()


def _turns(draft: Draft) -> Any:
    """How often a loop runs: mostly a number, now and then a size."""
    small = draft.any(lambda tensor: any(1 < size <= _MOST_TURNS for size in tensor.shape))
    if small is not None and draft.chance(0.3):
        dims = [dim for dim, size in enumerate(draft.value(small).shape) if 1 < size <= _MOST_TURNS]
        return Size(small.value, draft.rng.choice(dims))
    return draft.rng.randint(2, _MOST_TURNS)


def _condition(draft: Draft) -> tuple[Any, ...]:
    """A condition that says both yes and no, now and then."""
    relation = draft.rng.choice(RELATIONS)
    if draft.turns and draft.chance(0.6):
        return draft.rng.choice(draft.turns), relation, draft.rng.choice((1, 2) if relation != "%" else (2, 3))
    sized = draft.any(lambda tensor: tensor.dim() > 0)
    if sized is None or draft.chance(0.35):
        return (draft.flag(value=draft.chance(0.5)),)
    sizes = draft.value(sized).shape
    dim = draft.rng.randrange(len(sizes))
    if relation == "%":
        return Size(sized.value, dim), relation, draft.rng.choice((2, 3))
    if len(sizes) > 1 and draft.chance(0.3):
        return Size(sized.value, dim), relation, Size(sized.value, dim - 1)
    return Size(sized.value, dim), relation, max(0, sizes[dim] + draft.rng.choice((-1, 0, 0, 1, 2)))


def _fill(draft: Draft, extend: Extend, depth: int) -> None:
    """The calls of a block: one at least changes a tensor in place, or the tensor of a name."""
    before = len(draft.calls)
    if depth < _DEEPEST and draft.chance(0.35):
        add_block(draft, extend, depth + 1)
    for _ in range(draft.rng.choice((0, 1, 1, 2))):
        extend(False)
    if draft.chance(0.3) and _rename(draft, before):
        return
    for _ in range(4):
        if extend(True):
            return
    _rename(draft, before)


def _rename(draft: Draft, before: int) -> bool:
    """Give the name of an earlier value to one that the block computes: the next turn goes on with it."""
    inside = {id(call) for call in draft.calls[before:]}
    computed = draft.tensors()
    sources = [ref for ref in computed if id(draft.entry(ref)) in inside]
    draft.rng.shuffle(sources)
    for source in sources:
        made = draft.value(source)
        targets = [
            ref
            for ref in computed
            if ref not in sources
            and not isinstance(draft.entry(ref), Input)
            and draft.value(ref).shape == made.shape
            and draft.value(ref).dtype == made.dtype
        ]
        if targets:
            draft.let(draft.rng.choice(targets), source)
            return True
    return False
