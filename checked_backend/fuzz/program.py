"""A torch program as plain data: inputs, calls, and what it returns. It is stored as JSON, which is not trusted.

Values are numbered: first the inputs, then the result of each statement. A call names an operation of
`checked_backend.fuzz.known`, so that a program from disk can call nothing else.

A block is what stands between ``for`` or ``if`` and its ``end``. How often it runs depends on numbers, sizes, flags and
the turn, and on no tensor's values. What a block computes is known in it alone: the rest of the program sees what it
writes in place, and the values that ``let`` gives to an earlier name. So a program is also a straight line of calls.
"""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from torch.fx.node import map_aggregate

from checked_backend.errors import FuzzError, SuiteError
from checked_backend.fuzz.known import OPERATORS
from checked_backend.runs.case import STRICT, decode

DTYPES = (
    *("float32", "float64", "bfloat16", "float16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
"""The dtypes of inputs."""

CONSTANTS = frozenset({*DTYPES, "channels_last", "contiguous_format", "preserve_format", "strided"})
"""The attributes of ``torch`` that may be arguments."""

FILLS = ("normal", "range", "edges", "distinct")

MARKS = frozenset({"else", "end", "let", "flag"})
"""Statements that are no operations."""

CONTROL = MARKS | {"for", "if"}
"""Statements that are no calls: they make loops and branches."""

RELATIONS = ("<", "<=", "==", "!=", ">", ">=", "%")
"""The operators of a condition. A remainder is true unless it is 0."""

_VERSION = 1
_MOST_ELEMENTS = 2**22
_DEEPEST = 6
_MOST_TURNS = 64
_MOST_STEPS = 2000
_DEEPEST_BLOCK = 4
_COMPARISONS = ("<=", "==", "!=", ">=")

_MANY = Field(max_length=1000)
_Whole = Annotated[int, Field(ge=0, le=_MOST_ELEMENTS)]
_Number = Annotated[int | float, Field(ge=-1.8e308, le=1.8e308)]


def _one_of(names: Sequence[str]) -> Any:
    return Field(pattern=f"^({'|'.join(names)})$")


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument: an earlier value."""

    value: int


@dataclass(frozen=True, slots=True)
class Size:
    """An argument: the size of a dimension of an earlier tensor. It is symbolic in a dynamic program."""

    value: int
    dim: int


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument: a dtype, a memory format or a layout, by its name in ``torch``."""

    name: str


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the program is given.

    Attributes:
        stride: Its strides. 0 for an expanded dimension.
        shares: The number of an earlier input of the same dtype, whose memory it shares; that one has memory of its
            own. None for memory of its own.
        fill: ``normal``, ``range`` (from ``low`` to ``high``), ``edges`` (the same, with NaN, infinities, extremes), or
            ``distinct`` (no two elements are equal, from ``low`` on).
    """

    __pydantic_config__ = STRICT

    dtype: Annotated[str, _one_of(DTYPES)]
    shape: Annotated[tuple[_Whole, ...], _MANY]
    stride: Annotated[tuple[_Whole, ...], _MANY]
    offset: _Whole = 0
    shares: _Whole | None = None
    fill: Annotated[str, _one_of(FILLS)] = "normal"
    low: _Number = -3.0
    high: _Number = 3.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    requires_grad: bool = False

    @property
    def extent(self) -> int:
        """How many elements its storage must have."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement.

    Attributes:
        op: The name of an operation in `checked_backend.fuzz.known`, or of `CONTROL`: ``for`` (turns), ``if`` (flag, or
            number, relation, number), ``else``, ``end``, ``let`` (earlier value, its new one), ``flag`` (a bool). The
            value of a ``for`` is the number of the turn.
        args: ``None``, numbers, strings, slices, ``...``, `Ref`, `Size`, `Constant`, and tuples and lists of these.
    """

    op: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def mapped(self, change: Callable[[Any], Any]) -> Statement:
        """The same with the leaves of its arguments changed: what is in tuples, lists, dicts and slices."""
        return Statement(self.op, map_aggregate(self.args, change), map_aggregate(dict(self.kwargs), change))


@dataclass(frozen=True, slots=True)
class FuzzProgram:
    """A program. ``returns`` are the numbers of the values that it returns."""

    inputs: tuple[Input, ...]
    calls: tuple[Statement, ...]
    returns: tuple[int, ...]
    gradients: bool = False
    dynamic: bool = False

    @property
    def ops(self) -> tuple[str, ...]:
        """The names of the operations, in order; ``for`` and ``if`` are among them."""
        return tuple(call.op for call in self.calls if call.op not in MARKS)

    @property
    def size(self) -> tuple[int, int, int, int]:
        """A measure: statements, inputs, results, elements."""
        elements = sum(math.prod(given.shape) for given in self.inputs)
        return len(self.calls), len(self.inputs), len(self.returns), elements

    def unused_dropped(self) -> FuzzProgram:
        """The same without inputs that nothing uses."""
        used = set(self.returns) | {ref.value for call in self.calls for ref in refs_of(call)}
        used |= {given.shares for place, given in enumerate(self.inputs) if place in used and given.shares is not None}
        return self.keeping({*used, *range(len(self.inputs), len(self.inputs) + len(self.calls))})

    def keeping(self, kept: Collection[int]) -> FuzzProgram:
        """The same with these of its values alone, by their numbers; a KeyError if one of them uses another."""
        first = len(self.inputs)
        where = {old: new for new, old in enumerate(sorted(kept))}
        inputs = tuple(given for place, given in enumerate(self.inputs) if place in where)
        calls = tuple(call for place, call in enumerate(self.calls, first) if place in where)
        returns = tuple(number for number in self.returns if number in where)
        return replace(self, inputs=inputs, calls=calls, returns=returns).renumbered(where.__getitem__)

    def renumbered(self, moved: Callable[[int], int]) -> FuzzProgram:
        """The same with other numbers for the values that its inputs share, that its calls use and that it returns."""

        def change(leaf: Any) -> Any:
            return replace(leaf, value=moved(leaf.value)) if isinstance(leaf, Ref | Size) else leaf

        inputs = (one if one.shares is None else replace(one, shares=moved(one.shares)) for one in self.inputs)
        calls = (call.mapped(change) for call in self.calls)
        return replace(self, inputs=tuple(inputs), calls=tuple(calls), returns=tuple(map(moved, self.returns)))


def value_of(leaf: Any, known: Sequence[Any]) -> Any:
    """The value of an argument without parts, given all earlier values."""
    match leaf:
        case Ref(value):
            return known[value]
        case Size(value, dim):
            return known[value].size(dim)
    return leaf


def refs_of(call: Statement) -> list[Ref | Size]:
    """The earlier values that a call uses."""
    return [leaf for leaf in leaves_of(call) if isinstance(leaf, Ref | Size)]


def leaves_of(call: Statement) -> list[Any]:
    """What is in the arguments of a call."""
    found: list[Any] = []
    map_aggregate((call.args, dict(call.kwargs)), found.append)
    return found


@dataclass(frozen=True, slots=True)
class Block:
    """A loop or a branch, by the positions of its statements. ``middle`` is its ``else``, or its end."""

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
        if not known.issuperset(ref.value for ref in refs_of(call)):
            raise FuzzError(f"{where}: {call.op:.80} uses a value that is not known there")
        if call.op in CONTROL and not _is_well_formed(program, call):
            raise FuzzError(f"{where}: {call.op} got {call.args!r:.80}, which it cannot take")
        if call.op in ("for", "if"):
            if len(begun) == _DEEPEST_BLOCK:
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


def items_of(blocks: Mapping[int, Block], places: range) -> Iterator[tuple[int, Block | None]]:
    """The positions of the statements among these, in order. A block comes as its first one, with the block."""
    place = places.start
    while place < places.stop:
        block = blocks.get(place)
        yield place, block
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
        for place, block in items_of(blocks, places):
            call = program.calls[place]
            if block is None:
                steps += 1
                if steps > _MOST_STEPS:
                    raise FuzzError(f"a program takes more than {_MOST_STEPS} steps")
                if call.op == "flag":
                    known[first + place] = call.args[0]
                else:
                    do(place, call)
            elif call.op == "if":
                run(block.body if holds(call.args) else block.otherwise)
            else:
                turns = value_of(call.args[0], known)
                if turns > _MOST_TURNS:
                    raise FuzzError(f"a program: calls[{place}]: more than {_MOST_TURNS} turns")
                for turn in range(turns):
                    known[first + place] = turn
                    run(block.body)

    known.extend([None] * len(program.calls))
    run(range(len(program.calls)))


def written(call: Statement) -> Ref | None:
    """The earlier value that a statement may change: a tensor's memory, or the tensor of a name."""
    if isinstance(out := call.kwargs.get("out"), Ref):
        return out
    in_place = call.op.endswith(("_", "=")) and call.op not in _COMPARISONS
    in_place = in_place or call.op in ("setitem", "let") or call.kwargs.get("inplace") is True
    return call.args[0] if in_place and call.args and isinstance(call.args[0], Ref) else None


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
            wants = first + place in needed or (written(call) is not None and bool(read & needed))
            if block is not None:
                wants = wants or not found.isdisjoint(block.places)
            if wants and place not in found:
                found.add(place)
                needed |= read | {first + place}
    return found


def encode_program(program: FuzzProgram) -> str:
    """A program as JSON."""
    usual = {entry.name: entry.default for entry in fields(Input)}
    raw = {
        "version": _VERSION,
        "inputs": [
            {name: value for name, default in usual.items() if (value := getattr(given, name)) != default}
            for given in program.inputs
        ],
        "calls": [[call.op, _encode(list(call.args)), _encode(dict(call.kwargs))] for call in program.calls],
        "returns": list(program.returns),
        "gradients": program.gradients,
        "dynamic": program.dynamic,
    }
    return json.dumps(raw, separators=(",", ":"), allow_nan=False)


def _encode(raw: Any) -> Any:
    match raw:
        case Ref(value):
            return {"v": value}
        case Size(value, dim):
            return {"size": [value, dim]}
        case Constant(name):
            return {"torch": name}
        case slice():
            return {"slice": _encode([raw.start, raw.stop, raw.step])}
        case float() if not math.isfinite(raw):
            return {"float": repr(raw)}
        case complex():
            return {"complex": [raw.real, raw.imag]}
        case tuple():
            return {"tuple": [_encode(item) for item in raw]}
        case list():
            return [_encode(item) for item in raw]
        case dict():
            return {"dict": {key: _encode(item) for key, item in raw.items()}}
    if raw is ...:
        return {"ellipsis": True}
    if raw is None or isinstance(raw, bool | int | float | str):
        return raw
    raise FuzzError(f"an argument got {type(raw).__name__}; a program has numbers, strings, slices, dtypes and values")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A program as it is stored, with the arguments of its calls as they are encoded."""

    __pydantic_config__ = STRICT

    version: Literal[1]
    inputs: Annotated[list[Input], _MANY]
    calls: Annotated[list[tuple[str, list[Any], dict[Literal["dict"], dict[str, Any]]]], _MANY]
    returns: Annotated[list[_Whole], _MANY]
    gradients: bool = False
    dynamic: bool = False


_STORED = TypeAdapter(_Stored)


def decode_program(text: str) -> FuzzProgram:
    """Read what `encode_program` wrote. Every field is checked; a stranger may have written it.

    Raises:
        FuzzError: The text is no program; the message names the field.
    """
    try:
        raw = decode(_STORED, text, "a program")
    except SuiteError as error:
        raise FuzzError(str(error)) from None
    for place, given in enumerate(raw.inputs):
        _refuse_input(given, raw.inputs[:place])
    first = len(raw.inputs)
    calls = [_decode_call(name, args, kwargs, first + n) for n, (name, args, kwargs) in enumerate(raw.calls)]
    returns = tuple(_whole(item, "returns", first + len(calls)) for item in raw.returns)
    return FuzzProgram(tuple(raw.inputs), tuple(calls), returns, raw.gradients, raw.dynamic)


def _refuse_input(given: Input, before: Sequence[Input]) -> None:
    where = f"a program: inputs[{len(before)}]"
    if len(given.shape) != len(given.stride):
        raise FuzzError(f"{where}: shape and stride have {len(given.shape)} and {len(given.stride)} dimensions")
    if given.extent > _MOST_ELEMENTS or math.prod(given.shape) > _MOST_ELEMENTS:
        raise FuzzError(f"{where}: more than {_MOST_ELEMENTS} elements")
    if given.shares is not None:
        other = before[_whole(given.shares, "shares", len(before))]
        if other.dtype != given.dtype or other.shares is not None:
            raise FuzzError(f"{where}: it shares memory with an input of another dtype, or one that shares itself")


def _decode_call(name: str, raw_args: Any, raw_kwargs: Any, there: int) -> Statement:
    args, kwargs = _decode(raw_args, there), _decode(raw_kwargs, there)
    if not all(
        key.isidentifier() and not keyword.iskeyword(key) for key in kwargs
    ):  # it would be code in the graph that calls it
        raise FuzzError(f"a program: calls: {name:.80}: expected names of arguments, got {list(kwargs)!r:.80}")
    return Statement(name, tuple(args), kwargs)


def _decode(raw: Any, there: int, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise FuzzError("a program: arguments are nested too deep")
    if raw is None or isinstance(raw, bool | str):
        return raw
    if isinstance(raw, int | float) and abs(raw) <= 1.8e308:
        return raw
    if isinstance(raw, list):
        return [_decode(item, there, depth + 1) for item in raw]
    match raw:
        case {"v": value}:
            return Ref(_whole(value, "v", there))
        case {"size": [value, int(dim)]}:
            return Size(_whole(value, "size", there), dim)
        case {"torch": name} if name in CONSTANTS:
            return Constant(name)
        case {"slice": [_, _, _] as parts}:
            return slice(*(_decode(part, there, depth + 1) for part in parts))
        case {"float": "nan" | "inf" | "-inf" as name}:
            return float(name)
        case {"complex": [int() | float() as real, int() | float() as imag]}:
            return complex(real, imag)
        case {"tuple": list(items)}:
            return tuple(_decode(item, there, depth + 1) for item in items)
        case {"dict": dict(items)}:
            return {str(key): _decode(item, there, depth + 1) for key, item in items.items()}
        case {"ellipsis": True}:
            return ...
    raise FuzzError(f"a program: an argument got {raw!r:.80}")


def _whole(raw: Any, what: str, end: int = _MOST_ELEMENTS + 1) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw < end:
        raise FuzzError(f"a program: {what} got {raw!r:.80}; expected a number from 0 to {end - 1}")
    return raw


def merge(programs: Sequence[FuzzProgram]) -> FuzzProgram:
    """One program that does what several do, one after the other, with the inputs and the results of all.

    Args:
        programs: At least one. All are differentiated or none, all are dynamic or none.
    """
    merged = replace(programs[0], inputs=(), calls=(), returns=())
    count = sum(len(program.inputs) for program in programs)
    for program in programs:
        numbers = [*range(len(merged.inputs), len(merged.inputs) + len(program.inputs))]
        numbers += range(count + len(merged.calls), count + len(merged.calls) + len(program.calls))
        more = program.renumbered(numbers.__getitem__)
        merged = replace(
            merged,
            inputs=merged.inputs + more.inputs,
            calls=merged.calls + more.calls,
            returns=merged.returns + more.returns,
        )
    return merged
