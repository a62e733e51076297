"""Loops and branches of a program: which statements belong to which, and the order in which they run.

A block is what stands between ``for`` or ``if`` and its ``end``. How often it runs depends on numbers, sizes, flags and
the turn, and on no tensor's values. What a block computes is known in it alone: the rest of the program sees what it
writes in place, and the values that ``let`` gives to an earlier name. So a program is also a straight line of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checked_backend.errors import FuzzError
from checked_backend.fuzz.known import OPERATORS
from checked_backend.fuzz.program import CONTROL, FuzzProgram, Ref, Size, Statement, refs_of, value_of

RELATIONS = ("<", "<=", "==", "!=", ">", ">=", "%")
"""The operators of a condition. A remainder is true unless it is 0."""

_MOST_TURNS = 64
_MOST_STEPS = 2000
_DEEPEST = 4
_COMPARISONS = ("<=", "==", "!=", ">=")


@dataclass(frozen=True, slots=True)
class Block:
    """A loop or a branch, by the positions of its statements.

    Attributes:
        middle: Its ``else``; its end, where it has none.
    """

    head: int
    middle: int
    end: int

    @property
    def body(self) -> range:
        """The positions of what runs in each turn, or if the condition holds."""
        return range(self.head + 1, self.middle)

    @property
    def otherwise(self) -> range:
        """The positions of what runs if it does not."""
        return range(self.middle + 1, self.end)

    @property
    def places(self) -> range:
        """The positions of all of its statements."""
        return range(self.head, self.end + 1)


def blocks_of(program: FuzzProgram) -> dict[int, Block]:
    """The loops and branches of a program by the positions where they begin, the outer before the inner.

    Raises:
        FuzzError: A block has no end, a loop is too long, a condition depends on data, or a value is not known where it
            is used.
    """
    calls, first = program.calls, len(program.inputs)
    known, turns = frozenset(range(first)), 1
    begun: list[tuple[int, int, frozenset[int], int]] = []  # its head, its else, and what was known and so on before
    found: dict[int, Block] = {}
    for place, call in enumerate(calls):
        where = f"a program: calls[{place}]"
        if call.op in ("else", "end"):
            if not begun:
                raise FuzzError(f"{where}: {call.op} without a beginning")
            head, middle, outer, turns_before = begun.pop()
            if call.op == "end":
                found[head] = Block(head, middle or place, place)
                turns = turns_before
            elif middle or calls[head].op == "for":
                raise _endless(calls, head)
            else:
                begun.append((head, place, outer, turns_before))
            known = outer
            continue
        _refuse(program, place, known)
        if call.op in ("for", "if"):
            if len(begun) == _DEEPEST:
                raise FuzzError(f"{where}: blocks are nested too deep")
            begun.append((place, 0, known, turns))
            turns *= call.args[0] if call.op == "for" and isinstance(call.args[0], int) else 1
            if turns > _MOST_TURNS:
                raise FuzzError(f"{where}: more than {_MOST_TURNS} turns")
        if call.op not in ("if", "let"):
            known |= {first + place}
    if begun:
        raise _endless(calls, begun[-1][0])
    if not known.issuperset(program.returns):
        raise FuzzError("a program: it returns a value that is known in a block alone")
    return dict(sorted(found.items()))


def _endless(calls: Sequence[Statement], head: int) -> FuzzError:
    return FuzzError(f"a program: calls[{head}]: {calls[head].op} without an end")


def _refuse(program: FuzzProgram, place: int, known: frozenset[int]) -> None:
    call = program.calls[place]
    for ref in refs_of(call):
        if ref.value not in known:
            raise FuzzError(f"a program: calls[{place}]: {call.op:.80} uses a value that is not known there")
    if call.op in CONTROL and not _is_well_formed(program, call):
        raise FuzzError(f"a program: calls[{place}]: {call.op} got {call.args!r:.80}, which it cannot take")


def _is_well_formed(program: FuzzProgram, call: Statement) -> bool:
    first = len(program.inputs)

    def op(value: int) -> str:
        return program.calls[value - first].op if value >= first else ""

    def is_number(raw: Any) -> bool:
        if isinstance(raw, Ref):
            return op(raw.value) == "for"
        return isinstance(raw, Size) or (isinstance(raw, int) and not isinstance(raw, bool))

    if call.kwargs:
        return False
    match call.op, call.args:
        case "flag", (bool(),):
            return True
        case "for", (Size(),):
            return True
        case "for", (int(turns),):
            return not isinstance(turns, bool) and turns >= 0
        case "if", (Ref(value),):
            return op(value) == "flag"
        case "if", (left, str(relation), right):
            return relation in RELATIONS and is_number(left) and is_number(right)
        case "let", (Ref(target), Ref(source)):
            computed = target >= first  # the caller's tensors keep their names
            return computed and not {op(one) for one in (target, source)} & CONTROL
    return False


def items_of(blocks: Mapping[int, Block], places: range) -> Iterator[int | Block]:
    """The statements at these positions in order; those of a block as that block."""
    place = places.start
    while place < places.stop:
        block = blocks.get(place)
        yield place if block is None else block
        place = place + 1 if block is None else block.end + 1


def run_in_order(program: FuzzProgram, known: list[Any], do: Callable[[int, Statement], None]) -> None:
    """Run the statements of a program as often and in the order as its loops and branches say.

    Args:
        known: The inputs. It gets a value for each statement: a turn's number, a flag, and what ``do`` puts there. None
            where a statement did not run.
        do: Runs a call or a ``let``, given its position.

    Raises:
        FuzzError: It is no program, or it takes too many steps.
    """
    blocks, first, steps = blocks_of(program), len(known), 0

    def holds(condition: Sequence[Any]) -> bool:
        left, *others = (value_of(leaf, known) for leaf in condition)
        return bool(OPERATORS[others[0]](left, others[1]) if others else left)

    def run(places: range) -> None:
        nonlocal steps
        for item in items_of(blocks, places):
            place = item.head if isinstance(item, Block) else item
            call = program.calls[place]
            if not isinstance(item, Block):
                steps += 1
                if steps > _MOST_STEPS:
                    raise FuzzError(f"a program takes more than {_MOST_STEPS} steps")
                if call.op == "flag":
                    known[first + place] = call.args[0]
                else:
                    do(place, call)
            elif call.op == "if":
                run(item.body if holds(call.args) else item.otherwise)
            else:
                turns = value_of(call.args[0], known)
                if turns > _MOST_TURNS:
                    raise FuzzError(f"a program: calls[{place}]: more than {_MOST_TURNS} turns")
                for turn in range(turns):
                    known[first + place] = turn
                    run(item.body)

    known.extend([None] * len(program.calls))
    run(range(len(program.calls)))


def writes(call: Statement) -> bool:
    """Whether a statement may change an earlier value: a tensor's memory, or the tensor of a name."""
    in_place = call.op.endswith(("_", "=")) and call.op not in _COMPARISONS
    return in_place or call.op in ("setitem", "let") or "out" in call.kwargs


def made_from(program: FuzzProgram, wanted: Sequence[int]) -> set[int]:
    """The statements, by position, that values may depend on: also writes to memory that they may share.

    A block that holds one of them is needed, with its condition.
    """
    first = len(program.inputs)
    marks = {mark: b for b in blocks_of(program).values() for mark in (b.head, b.middle, b.end)}
    needed, found = set(wanted), set[int]()
    before = -1
    while before != len(found):
        before = len(found)
        for place, call in enumerate(program.calls):
            read = {ref.value for ref in refs_of(call)}
            block = marks.get(place)
            wants = first + place in needed or (writes(call) and bool(read & needed))
            if block is not None:
                wants = wants or not found.isdisjoint(block.places)
            if wants and place not in found:
                found.add(place)
                needed |= read | {first + place}
    return found
