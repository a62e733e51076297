"""Make a program of random choices."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from checked_backend.fuzz.generate.defined import draws, runs_alike
from checked_backend.fuzz.generate.draft import Choices, Draft, chance
from checked_backend.fuzz.generate.rules import COMMON, RULES, Rule, rules_of_samples
from checked_backend.fuzz.known import is_known, plain, spelled
from checked_backend.fuzz.program import RELATIONS, FuzzProgram, Input, Ref, Size, Statement, refs_of, written
from checked_backend.random_state import random_untouched

_MOST_TURNS = 4
_DEEPEST = 2


Extend = Callable[[bool], bool]
"""Adds a call to a draft, if asked one that changes a tensor, and says whether it did."""


def add_block(draft: Draft, extend: Extend, depth: int = 1) -> bool:
    """Add a loop or a branch that changes what was there before it, and say whether it runs and was added."""
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


_ATTEMPTS = 100
_TRIES = 40
_SHARE_OF_GRADIENTS = 0.35
_SHARE_OF_DYNAMIC = 0.06
_SHARE_OF_WANTED = 0.6
_SHARE_OF_BLOCKS = 0.25
_DUE = 3
_TRIES_OF_DUE = 8
_SHARE_OF_INNER = 0.8
_SHARE_OF_READING = 0.5
_WEIGHT_OF_COMMON = 4


def matches(op: str, patterns: Sequence[str]) -> bool:
    """Whether an operation is one that the user named: ``add*``, ``F.gelu``, ``Tensor.add_``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in (op, spelled(op), op.rpartition(".")[2]))


@functools.cache
def rules_for(patterns: tuple[str, ...]) -> tuple[Rule, ...]:
    """The rules with only those operations that patterns name; all rules if there are no patterns."""
    found = []
    for rule in (*RULES, *rules_of_samples()):
        ops = tuple(op for op in rule.ops if is_known(op) and (not patterns or matches(op, patterns)))
        found += [replace(rule, ops=ops)] if ops else []
    return tuple(found)


def make_program(seed: int, number: int, choices: Choices) -> FuzzProgram:
    """The program of a seed and a number: the same in any process, with the same version of torch.

    Raises:
        LookupError: No attempt gave one.
    """
    turn = [] if choices.ops else due(seed, number)
    for attempt in range(_ATTEMPTS):
        program = draw_program(random.Random(f"{seed} {number} {attempt}"), choices, turn)
        if program is not None:
            return program
    raise LookupError(f"none in {_ATTEMPTS} attempts")


def draw_program(rng: random.Random, choices: Choices, turn: Sequence[Sequence[Rule]]) -> FuzzProgram | None:
    """A program that eager runs, and repeats; None where these choices lead to none.

    Args:
        rng: The source of all choices; `checked_backend.fuzz.strategies` has Hypothesis's.
        turn: The operators whose turn it is, as of `due`.
    """
    with random_untouched():
        program = _attempt(rng, choices, turn)
        return program if program is not None and runs_alike(program) else None


def due(seed: int, number: int) -> list[list[Rule]]:
    """The operators whose turn it is, each as rules for all of its forms.

    Whatever the weights of rules are, each operator comes once before one comes again. The last is one of `COMMON`, so
    that these come more often.
    """
    forms = _forms()
    order, common = sorted(forms), [op for op in COMMON if op in forms]
    for ops in (order, common):
        random.Random(f"operators of seed {seed}").shuffle(ops)
    turns = [order[place % len(order)] for place in range(_DUE * number, _DUE * (number + 1))]
    return [forms[op] for op in (*turns, *(common[number % len(common)],) * bool(common))]


@functools.cache
def _forms() -> Mapping[str, list[Rule]]:
    """A rule for each form of an operator, by the operator."""
    forms: dict[str, list[Rule]] = {}
    for rule in rules_for(()):
        for op in dict.fromkeys(rule.ops):
            forms.setdefault(plain(op), []).append(replace(rule, ops=(op,)))
    return forms


def _attempt(rng: random.Random, choices: Choices, due_now: Sequence[Sequence[Rule]]) -> FuzzProgram | None:
    wanted = rules_for(choices.ops) if choices.ops else ()
    gradients = chance(rng, _SHARE_OF_GRADIENTS) if choices.training is None else choices.training
    dynamic = chance(rng, _SHARE_OF_DYNAMIC) if choices.dynamic is None else choices.dynamic
    for seed_all in (torch.manual_seed, random.seed, np.random.seed):  # torch's samples draw from each
        seed_all(rng.getrandbits(32))
    draft = Draft(rng, choices, gradients=gradients, dynamic=dynamic)
    draft.new_input()
    if draft.chance(0.3):
        draft.new_input()
    if draft.chance(0.12):
        draft.shared_input()
    made: list[Ref] = []
    length, asked = rng.randint(1, choices.longest), 0
    blocks = rng.choice((1, 1, 2)) if chance(rng, _SHARE_OF_BLOCKS) else 0

    def extend(changing: bool) -> bool:
        nonlocal asked
        from_wanted = bool(wanted) and (not asked or draft.chance(_SHARE_OF_WANTED))
        chosen: Sequence[Rule] = wanted if from_wanted else rules_for(())
        chosen = [rule for rule in chosen if rule.changes] or chosen if changing else chosen
        inner = bool(made) and not draft.in_block and draft.chance(_SHARE_OF_READING)
        ref = _extend(draft, chosen, rng.choice(made) if inner else None)
        if ref is not None:
            made.append(ref)
            asked += from_wanted
        return ref is not None

    late = [*due_now][-choices.longest :]
    for _ in range(_TRIES):
        if len(draft.calls) >= length and not blocks and not late:
            break
        if late and draft.chance(0.5):
            made += _extend_due(draft, late.pop(0), made)
        elif blocks and draft.chance(_SHARE_OF_BLOCKS):
            add_block(draft, extend)
            blocks -= 1
        else:
            extend(False)
    if not made or (wanted and not asked):
        return None
    program = draft.finish(_returned(draft, made))
    return program if program.calls else None


def _extend_due(draft: Draft, forms: Sequence[Rule], made: Sequence[Ref]) -> list[Ref]:
    """Add a call of an operator in any form that fits, now or with other arguments, and mostly one that reads it.

    Mostly it reads what the program computes, too: compilers fuse such operators. Returns the results of both.
    """
    added: list[Ref] = []
    rules = rules_for(())
    for wanted, sources in ((forms, made), (rules, added)):
        inner = bool(sources) and draft.chance(_SHARE_OF_INNER)
        for attempt in range(_TRIES_OF_DUE if inner or wanted is forms else 0):
            inner = inner and (wanted is rules or attempt < _TRIES_OF_DUE / 2)
            ref = _extend(draft, wanted, draft.rng.choice(sources) if inner else None)
            if ref is not None:
                added.append(ref)
                break
        if not added:
            break
    return added


def _extend(draft: Draft, rules: Sequence[Rule], reads: Ref | None = None) -> Ref | None:
    """Add a call. None if it would not be one, or would not read what it is to read."""
    rule = draft.rng.choices(rules, [rule.weight for rule in rules])[0]
    op = draft.rng.choices(rule.ops, _weights(rule.ops))[0]
    draft.read_next(reads)
    try:
        call = rule.make(draft, op)
    except (RuntimeError, ValueError, IndexError, TypeError):  # the rule asked torch for a shape that cannot be
        return None
    finally:
        draft.read_next(None)
    if call is None or (reads is not None and reads not in refs_of(call)):
        return None
    return draft.add(call)


@functools.cache
def _weights(ops: tuple[str, ...]) -> list[int]:
    """How often each operation of a rule is chosen."""
    return [_WEIGHT_OF_COMMON if plain(op) in COMMON else 1 for op in ops]


def _returned(draft: Draft, made: Sequence[Ref]) -> list[Ref]:
    """The values to return: most that no call uses or that change later, some others, an input now and then."""
    used = {ref.value for call in draft.calls for ref in refs_of(call)}
    writing = [call for call in draft.calls if written(call) is not None]
    changed = {ref.value for call in writing for ref in (*call.args[:1], written(call)) if isinstance(ref, Ref)}
    found = []
    for ref in draft.tensors():
        rarely = ref.value in used and ref.value not in changed
        probability = 0.08 if ref not in made else 0.25 if rarely else 0.85
        made_by = draft.entry(ref)
        if isinstance(made_by, Statement) and draws(made_by.op):
            probability = 1.0  # a compiler need not draw what nobody uses
        if draft.chance(probability):
            found.append(ref)
    draft.rng.shuffle(found)
    return found or draft.tensors()[-1:]
