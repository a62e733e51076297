"""Loops and branches of a program: which statements belong to which, and the order in which they run.

A block is what stands between ``for`` or ``if`` and its ``end``. How often it runs depends on numbers, sizes, flags and
the turn, and on no tensor's values. What a block computes is known in it alone: the rest of the program sees what it
writes in place, and the values that ``let`` gives to an earlier name. So a program is also a straight line of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        middle: Its ``else``; None without one.
        otherwise: What it holds after that.
    """

    head: int
    body: tuple[Item, ...]
    end: int
    middle: int | None = None
    otherwise: tuple[Item, ...] = ()

    @property
    def marks(self) -> set[int]:
        """The positions of the statements that make it a block."""
        return {self.head, self.end} | ({self.middle} if self.middle is not None else set())

    @property
    def places(self) -> range:
        """The positions of all of its statements."""
        return range(self.head, self.end + 1)


Item = int | Block


def parse(program: FuzzProgram) -> tuple[Item, ...]:
    """The statements of a program as a tree.

    Raises:
        FuzzError: A block has no end, a loop is too long, a condition depends on data, or a value is not known where it
            is used.
    """
    parser = _Parser(program.calls, len(program.inputs))
    items, stop, known = parser.items(0, frozenset(range(len(program.inputs))), 0, 1)
    if stop != len(program.calls):
        raise FuzzError(f"a program: calls[{stop}]: {program.calls[stop].op} without a beginning")
    if not known.issuperset(program.returns):
        raise FuzzError("a program: it returns a value that is known in a block alone")
    return items


class _Parser:
    def __init__(self, calls: Sequence[Statement], inputs: int) -> None:
        self._calls, self._first = calls, inputs

    def items(
        self, start: int, known: frozenset[int], depth: int, turns: int
    ) -> tuple[tuple[Item, ...], int, frozenset[int]]:
        """The statements from one position to the end of their block, where that is, and the values known there."""
        found: list[Item] = []
        place = start
        while place < len(self._calls) and self._calls[place].op not in ("else", "end"):
            call = self._calls[place]
            self._refuse(place, known)
            if call.op in ("for", "if"):
                block = self._block(place, known, depth + 1, turns)
                found.append(block)
                place = block.end
            else:
                found.append(place)
                if call.op != "let":
                    known |= {self._first + place}
            place += 1
        return tuple(found), place, known

    def _block(self, head: int, known: frozenset[int], depth: int, turns: int) -> Block:
        call = self._calls[head]
        if depth > _DEEPEST:
            raise FuzzError(f"a program: calls[{head}]: blocks are nested too deep")
        if call.op == "for":
            known |= {self._first + head}
            if isinstance(call.args[0], int):
                turns *= call.args[0]
            if turns > _MOST_TURNS:
                raise FuzzError(f"a program: calls[{head}]: more than {_MOST_TURNS} turns")
        body, stop, _ = self.items(head + 1, known, depth, turns)
        middle: int | None = None
        otherwise: tuple[Item, ...] = ()
        if call.op == "if" and self._op(stop) == "else":
            middle = stop
            otherwise, stop, _ = self.items(stop + 1, known, depth, turns)
        if self._op(stop) != "end":
            raise FuzzError(f"a program: calls[{head}]: {call.op} without an end")
        return Block(head, body, stop, middle, otherwise)

    def _op(self, place: int) -> str:
        return self._calls[place].op if 0 <= place < len(self._calls) else ""

    def _refuse(self, place: int, known: frozenset[int]) -> None:
        call = self._calls[place]
        for ref in refs_of(call):
            if ref.value not in known:
                raise FuzzError(f"a program: calls[{place}]: {call.op:.80} uses a value that is not known there")
        if call.op in CONTROL and not self._is_well_formed(call):
            raise FuzzError(f"a program: calls[{place}]: {call.op} got {call.args!r:.80}, which it cannot take")

    def _is_well_formed(self, call: Statement) -> bool:
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
                return self._op(value - self._first) == "flag"
            case "if", (left, str(relation), right):
                return relation in RELATIONS and self._is_number(left) and self._is_number(right)
            case "let", (Ref(target), Ref(source)):
                computed = target >= self._first  # the caller's tensors keep their names
                return computed and not {self._op(one - self._first) for one in (target, source)} & CONTROL
        return False

    def _is_number(self, raw: Any) -> bool:
        if isinstance(raw, Ref):
            return raw.value >= self._first and self._op(raw.value - self._first) == "for"
        return isinstance(raw, Size) or (isinstance(raw, int) and not isinstance(raw, bool))


def blocks_of(items: Sequence[Item]) -> Iterator[Block]:
    """All blocks of a tree, the outer before the inner."""
    for item in items:
        if isinstance(item, Block):
            yield item
            yield from blocks_of((*item.body, *item.otherwise))


def run_in_order(program: FuzzProgram, known: list[Any], do: Callable[[int, Statement], None]) -> None:
    """Run the statements of a program as often and in the order as its loops and branches say.

    Args:
        known: The inputs. It gets a value for each statement: a turn's number, a flag, and what ``do`` puts there. None
            where a statement did not run.
        do: Runs a call or a ``let``, given its position.

    Raises:
        FuzzError: It is no program, or it takes too many steps.
    """
    first, steps = len(known), 0

    def holds(condition: Sequence[Any]) -> bool:
        left, *others = (value_of(leaf, known) for leaf in condition)
        return bool(OPERATORS[others[0]](left, others[1]) if others else left)

    def run(items: Sequence[Item]) -> None:
        nonlocal steps
        for item in items:
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

    items = parse(program)
    known.extend([None] * len(program.calls))
    run(items)


def writes(call: Statement) -> bool:
    """Whether a statement may change an earlier value: a tensor's memory, or the tensor of a name."""
    in_place = call.op.endswith(("_", "=")) and call.op not in _COMPARISONS
    return in_place or call.op in ("setitem", "let") or "out" in call.kwargs


def made_from(program: FuzzProgram, wanted: Sequence[int]) -> set[int]:
    """The statements, by position, that values may depend on: also writes to memory that they may share.

    A block that holds one of them is needed, with its condition.
    """
    first = len(program.inputs)
    blocks = list(blocks_of(parse(program)))
    marks = {mark: block for block in blocks for mark in block.marks}
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
