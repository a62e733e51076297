"""Make a failing program smaller, as a program: fewer results, fewer statements, plainer inputs.

This comes before the package's own reducer (`checked_backend.diagnose.reduce`), which works on one region's graph. A
small program is cheap to check again, has few operators that may be at fault, and shows what no region shows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from checked_backend.fuzz.build import dtype_name, make_inputs, run_call, run_eager, strides_of
from checked_backend.fuzz.generate.defined import runs_alike
from checked_backend.fuzz.program import (
    CONTROL,
    DTYPES,
    FuzzProgram,
    Input,
    Ref,
    Size,
    Statement,
    blocks_of,
    encode_program,
    made_from,
    refs_of,
    run_in_order,
    value_of,
)

_BLOCKS = ("for", "if", "else", "end")

Interesting = Callable[[FuzzProgram], bool]


def shrink(program: FuzzProgram, is_interesting: Interesting, deadline: float) -> FuzzProgram:
    """The smallest program found that still goes wrong in the same way, until this moment of `time.monotonic`."""
    best, before = program, None
    tried = {encode_program(program)}

    def is_better(candidate: FuzzProgram) -> bool:
        text = encode_program(candidate)
        if text in tried or _cost(candidate) >= _cost(best):
            return False
        tried.add(text)
        return bool(candidate.calls and candidate.returns) and runs_alike(candidate) and is_interesting(candidate)

    while before != best:
        before = best
        for step in (_straighter, _fewer_results, _needed_only, _plainer, _fewer_calls, _plainer_inputs):
            better: FuzzProgram | None = best
            while better is not None:  # the first smaller program that a step finds; then the step is asked again
                best = better
                in_time = takewhile(lambda _: time.monotonic() <= deadline, step(best))
                better = next(filter(is_better, (candidate.unused_dropped() for candidate in in_time)), None)
    return best


def _cost(program: FuzzProgram) -> tuple[Any, ...]:
    odd = sum(_oddity(given) for given in program.inputs)
    control = sum(call.op in CONTROL for call in program.calls)
    turns = sum(call.args[0] for call in program.calls if call.op == "for" and isinstance(call.args[0], int))
    return (
        control,
        len(program.calls),
        turns,
        program.dynamic + program.gradients,
        len(program.returns),
        len(program.inputs),
        odd,
    )


def _oddity(given: Input) -> int:
    layout = given.stride != strides_of(given.shape) or given.offset > 0
    return layout + (given.shares is not None) + (given.fill == "edges") + given.requires_grad


def _straighter(program: FuzzProgram) -> Iterator[FuzzProgram]:
    """Leave out loops and branches: the calls as they run in order; or one block is left out, or runs once or twice."""
    blocks = list(blocks_of(program).values())
    if blocks:
        with contextlib.suppress(Exception):  # whatever torch raises: what does not run in eager is no program
            yield straightened(program)
    for block in blocks:
        yield _without(program, set(block.places))
        halves = (block.body, block.otherwise) if program.calls[block.head].op == "if" else ()
        for half in halves:
            yield _without(program, set(block.places) - set(half))
        for turns in (1, 2, 3) if not halves else ():
            head, calls = Statement("for", (turns,)), program.calls
            yield replace(program, calls=(*calls[: block.head], head, *calls[block.head + 1 :]))


def straightened(program: FuzzProgram) -> FuzzProgram:
    """The same program without loops and branches: the calls that it makes with its inputs, in order."""
    first = len(program.inputs)
    known: list[Any] = list(make_inputs(program.inputs))
    made: list[Statement] = []
    now = {place: place for place in range(first)}

    def moved(leaf: Any) -> Any:
        """What the straight line has: another number of a value, and turns and flags as they are."""
        if not isinstance(leaf, Ref | Size):
            return leaf
        return replace(leaf, value=now[leaf.value]) if leaf.value in now else value_of(leaf, known)

    def do(place: int, call: Statement) -> None:
        if call.op == "let":
            target, source = (ref.value for ref in call.args)
            known[target], now[target] = known[source], now[source]
        else:
            known[first + place] = run_call(call, known)
            made.append(call.mapped(moved))
            now[first + place] = first + len(made) - 1

    run_in_order(program, known, do)
    returns = tuple(now[number] for number in program.returns)
    return replace(program, calls=tuple(made), returns=returns).unused_dropped()


def _fewer_results(program: FuzzProgram) -> Iterator[FuzzProgram]:
    """Fewer results by ever shorter runs, and the calls that these need; last, one result and all calls."""
    returns = program.returns
    for size in _halved(len(returns) // 2):
        for start in range(0, len(returns), size):
            yield _with_needed_calls(replace(program, returns=returns[:start] + returns[start + size :]))
    if len(returns) > 1:
        yield replace(program, returns=returns[:1])


def _halved(size: int) -> Iterator[int]:
    while size > 0:
        yield size
        size //= 2


def _needed_only(program: FuzzProgram) -> Iterator[FuzzProgram]:
    """Drop the calls that no result may depend on, at once; or the last calls, which may end what comes before."""
    yield _with_needed_calls(program)
    last = max(program.returns, default=0) - len(program.inputs)
    for size in _halved(len(program.calls) - 1 - last):
        yield _without(program, set(range(len(program.calls) - size, len(program.calls))))


def _with_needed_calls(program: FuzzProgram) -> FuzzProgram:
    return _without(program, set(range(len(program.calls))) - made_from(program, program.returns))


def _plainer(program: FuzzProgram) -> Iterator[FuzzProgram]:
    if program.dynamic:
        yield replace(program, dynamic=False)
    if program.gradients:
        inputs = tuple(replace(given, requires_grad=False) for given in program.inputs)
        yield replace(program, gradients=False, inputs=inputs)


def _fewer_calls(program: FuzzProgram) -> Iterator[FuzzProgram]:
    """Leave a call out: nothing uses it, an operand takes its place, or a new input does."""
    first = len(program.inputs)
    used = {ref.value for call in program.calls for ref in refs_of(call)} | set(program.returns)
    for place in reversed(range(len(program.calls))):
        if program.calls[place].op in _BLOCKS:
            continue
        if first + place not in used:
            yield _without(program, {place})
            continue
        for ref in refs_of(program.calls[place]):
            yield _without(_instead(program, first + place, ref.value), {place})
        given = _recorded(program, first + place)
        if given is not None:
            shifted = program.renumbered(lambda number: number + (number >= first))
            shifted = replace(shifted, inputs=(*program.inputs, given))
            yield _without(_instead(shifted, first + 1 + place, first), {place})


def _plainer_inputs(program: FuzzProgram) -> Iterator[FuzzProgram]:
    for place, given in enumerate(program.inputs):
        shared = any(other.shares == place for other in program.inputs)
        for plain in (
            replace(given, stride=strides_of(given.shape), offset=0, shares=None),
            replace(given, fill="range") if given.fill == "edges" else given,
            replace(given, requires_grad=False),
        ):
            if plain != given and not (shared and plain.stride != given.stride):
                yield replace(program, inputs=(*program.inputs[:place], plain, *program.inputs[place + 1 :]))


def _instead(program: FuzzProgram, old: int, new: int) -> FuzzProgram:
    """The same program with one value in the place of another."""
    return program.renumbered(lambda number: new if number == old else number)


def _without(program: FuzzProgram, dropped: set[int]) -> FuzzProgram:
    """The same without some calls; unchanged where a call that stays uses one of them."""
    first = len(program.inputs)
    try:
        return program.keeping(set(range(first + len(program.calls))) - {first + place for place in dropped})
    except KeyError:
        return program


def _recorded(program: FuzzProgram, number: int) -> Input | None:
    """An input with the dtype, shape and strides that a value has in eager; None if it is no such tensor."""
    try:
        with torch.no_grad():
            value = run_eager(program)[number]
    except Exception:  # it ran before; if it does not now, there is nothing to take its place
        return None
    if not isinstance(value, torch.Tensor) or dtype_name(value) not in DTYPES:
        return None
    low, high = -3.0, 3.0
    if value.numel() and not value.is_complex():
        finite = value.double()[value.double().isfinite()]
        if finite.numel():
            low, high = float(finite.min()), float(finite.max())
    grad = program.gradients and (value.is_floating_point() or value.is_complex())
    return Input(
        dtype_name(value), tuple(value.shape), value.stride(), fill="range", low=low, high=high, requires_grad=grad
    )
