"""A torch program as plain data: inputs, calls, and what it returns. It is stored as JSON, which is not trusted.

Values are numbered: first the inputs, then the result of each statement. A call names an operation of
`checked_backend.fuzz.known`, so that a program from disk can call nothing else. Other statements make loops and
branches (`checked_backend.fuzz.control`).
"""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from checked_backend.errors import FuzzError

DTYPES = (
    *("float32", "float64", "bfloat16", "float16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
"""The dtypes of inputs."""

CONSTANTS = frozenset({*DTYPES, "channels_last", "contiguous_format", "preserve_format", "strided"})
"""The attributes of ``torch`` that may be arguments."""

FILLS = ("normal", "range", "edges", "distinct")

_MARKS = frozenset({"else", "end", "let", "flag"})

CONTROL = _MARKS | {"for", "if"}
"""Statements that are no calls: see `checked_backend.fuzz.control`."""

_VERSION = 1
_MOST_ELEMENTS = 2**22
_MOST_VALUES = 1000
_DEEPEST = 6


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

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    shares: int | None = None
    fill: str = "normal"
    low: float = -3.0
    high: float = 3.0
    seed: int = 0
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


@dataclass(frozen=True, slots=True)
class FuzzProgram:
    """A program.

    Attributes:
        returns: The numbers of the values that it returns.
    """

    inputs: tuple[Input, ...]
    calls: tuple[Statement, ...]
    returns: tuple[int, ...]
    gradients: bool = False
    dynamic: bool = False

    @property
    def ops(self) -> tuple[str, ...]:
        """The names of the operations, in order; ``for`` and ``if`` are among them."""
        return tuple(call.op for call in self.calls if call.op not in _MARKS)

    @property
    def size(self) -> tuple[int, int, int, int]:
        """A measure: statements, inputs, results, elements."""
        elements = sum(math.prod(given.shape) for given in self.inputs)
        return len(self.calls), len(self.inputs), len(self.returns), elements

    def unused_dropped(self) -> FuzzProgram:
        """The same without inputs that nothing uses."""
        used = set(self.returns) | {ref.value for call in self.calls for ref in refs_of(call)}
        used |= {given.shares for place, given in enumerate(self.inputs) if place in used and given.shares is not None}
        kept = [place for place in range(len(self.inputs)) if place in used]
        where = {old: new for new, old in enumerate(kept)}
        shift = len(self.inputs) - len(kept)

        def moved(number: int) -> int:
            return where[number] if number < len(self.inputs) else number - shift

        inputs = [self.inputs[place] for place in kept]
        return replace(
            self,
            inputs=tuple(i if i.shares is None else replace(i, shares=where[i.shares]) for i in inputs),
            calls=tuple(map_refs(call, moved) for call in self.calls),
            returns=tuple(moved(number) for number in self.returns),
        )


def refs_of(call: Statement) -> list[Ref | Size]:
    """The earlier values that a call uses."""
    return [leaf for leaf in leaves_of(call) if isinstance(leaf, Ref | Size)]


def map_refs(call: Statement, moved: Callable[[int], int]) -> Statement:
    """The same call, with other numbers for values."""

    def change(leaf: Any) -> Any:
        return replace(leaf, value=moved(leaf.value)) if isinstance(leaf, Ref | Size) else leaf

    return Statement(call.op, map_leaves(call.args, change), map_leaves(dict(call.kwargs), change))


def map_leaves(raw: Any, change: Callable[[Any], Any]) -> Any:
    """The same argument with its leaves changed: what is in tuples, lists, dicts and slices, or the argument itself."""
    match raw:
        case tuple():
            return tuple(map_leaves(item, change) for item in raw)
        case list():
            return [map_leaves(item, change) for item in raw]
        case dict():
            return {key: map_leaves(item, change) for key, item in raw.items()}
        case slice():
            return slice(*(map_leaves(part, change) for part in (raw.start, raw.stop, raw.step)))
    return change(raw)


def leaves_of(call: Statement) -> list[Any]:
    """What is in the arguments of a call."""
    found: list[Any] = []
    map_leaves((call.args, dict(call.kwargs)), found.append)
    return found


def encode_program(program: FuzzProgram) -> str:
    """A program as JSON."""
    raw = {
        "version": _VERSION,
        "inputs": [_encode_input(given) for given in program.inputs],
        "calls": [[call.op, _encode(list(call.args)), _encode(dict(call.kwargs))] for call in program.calls],
        "returns": list(program.returns),
        "gradients": program.gradients,
        "dynamic": program.dynamic,
    }
    return json.dumps(raw, separators=(",", ":"), allow_nan=False)


def _encode_input(given: Input) -> dict[str, Any]:
    raw = {entry.name: getattr(given, entry.name) for entry in fields(given)}
    usual = {entry.name: entry.default for entry in fields(given)}
    return {name: value for name, value in raw.items() if value != usual[name]}


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


def decode_program(text: str) -> FuzzProgram:
    """Read what `encode_program` wrote. Every field is checked; a stranger may have written it.

    Raises:
        FuzzError: The text is no program; the message names the field.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FuzzError(f"a program: not JSON: {error}") from None
    if not isinstance(raw, dict) or raw.get("version") != _VERSION:
        raise FuzzError(f"a program: expected an object of version {_VERSION}")
    inputs: list[Input] = []
    for item in _list(raw.get("inputs"), "inputs"):
        inputs.append(_decode_input(item, inputs))
    calls: list[Statement] = []
    for item in _list(raw.get("calls"), "calls"):
        calls.append(_decode_call(item, len(inputs) + len(calls)))
    there = len(inputs) + len(calls)
    returns = tuple(_whole(item, "returns", there) for item in _list(raw.get("returns"), "returns"))
    return FuzzProgram(tuple(inputs), tuple(calls), returns, _flag(raw, "gradients"), _flag(raw, "dynamic"))


def _decode_input(raw: Any, before: Sequence[Input]) -> Input:
    if not isinstance(raw, dict):
        raise FuzzError(f"a program: inputs: expected an object, got {raw!r:.80}")
    where = f"a program: inputs[{len(before)}]"
    if raw.get("dtype") not in DTYPES:
        raise FuzzError(f"{where}: dtype got {raw.get('dtype')!r:.80}; expected one of {', '.join(DTYPES)}")
    if raw.get("fill", "normal") not in FILLS:
        raise FuzzError(f"{where}: fill got {raw.get('fill')!r:.80}; expected one of {', '.join(FILLS)}")
    shares = raw.get("shares")
    given = Input(
        raw["dtype"],
        tuple(_whole(item, "shape") for item in _list(raw.get("shape"), "shape")),
        tuple(_whole(item, "stride") for item in _list(raw.get("stride"), "stride")),
        _whole(raw.get("offset", 0), "offset"),
        None if shares is None else _whole(shares, "shares", len(before)),
        raw.get("fill", "normal"),
        _number(raw.get("low", -3.0), "low"),
        _number(raw.get("high", 3.0), "high"),
        _whole(raw.get("seed", 0), "seed", 2**63),
        _flag(raw, "requires_grad"),
    )
    if len(given.shape) != len(given.stride):
        raise FuzzError(f"{where}: shape and stride have {len(given.shape)} and {len(given.stride)} dimensions")
    if given.extent > _MOST_ELEMENTS or math.prod(given.shape) > _MOST_ELEMENTS:
        raise FuzzError(f"{where}: more than {_MOST_ELEMENTS} elements")
    if given.shares is not None:
        other = before[given.shares]
        if other.dtype != given.dtype or other.shares is not None:
            raise FuzzError(f"{where}: it shares memory with an input of another dtype, or one that shares itself")
    return given


def _decode_call(raw: Any, there: int) -> Statement:
    if not (isinstance(raw, list) and len(raw) == 3 and isinstance(raw[0], str)):
        raise FuzzError(f"a program: calls: expected [operation, arguments, named arguments], got {raw!r:.80}")
    args, kwargs = _decode(raw[1], there), _decode(raw[2], there)
    if not (isinstance(args, list) and isinstance(kwargs, dict)):
        raise FuzzError(f"a program: calls: {raw[0]:.80}: expected a list and an object of arguments")
    if not all(map(_is_name, kwargs)):  # it would be code in the graph that calls it
        raise FuzzError(f"a program: calls: {raw[0]:.80}: expected names of arguments, got {list(kwargs)!r:.80}")
    return Statement(raw[0], tuple(args), kwargs)


def _is_name(key: str) -> bool:
    return key.isidentifier() and not keyword.iskeyword(key)


def _decode(raw: Any, there: int, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise FuzzError("a program: arguments are nested too deep")
    if raw is None or isinstance(raw, bool | str):
        return raw
    if isinstance(raw, int | float):
        return _number(raw, "an argument")
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


def _list(raw: Any, what: str) -> list[Any]:
    if not isinstance(raw, list) or len(raw) > _MOST_VALUES:
        raise FuzzError(f"a program: {what}: expected a list of at most {_MOST_VALUES}, got {raw!r:.80}")
    return raw


def _whole(raw: Any, what: str, end: int = _MOST_ELEMENTS + 1) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw < end:
        raise FuzzError(f"a program: {what} got {raw!r:.80}; expected a number from 0 to {end - 1}")
    return raw


def _number(raw: Any, what: str) -> Any:
    if not isinstance(raw, int | float) or isinstance(raw, bool) or not abs(raw) <= 1.8e308:
        raise FuzzError(f"a program: {what} got {raw!r:.80}; expected a finite number")
    return raw


def _flag(raw: Mapping[str, Any], what: str) -> bool:
    value = raw.get(what, False)
    if not isinstance(value, bool):
        raise FuzzError(f"a program: {what} got {value!r:.80}; expected true or false")
    return value


def merge(programs: Sequence[FuzzProgram]) -> FuzzProgram:
    """One program that does what several do, one after the other, with the inputs and the results of all.

    Args:
        programs: At least one. All are differentiated or none, all are dynamic or none.
    """
    inputs: list[Input] = []
    calls: list[Statement] = []
    returns: list[int] = []
    count = sum(len(program.inputs) for program in programs)
    for program in programs:
        numbers = [*range(len(inputs), len(inputs) + len(program.inputs))]
        numbers += range(count + len(calls), count + len(calls) + len(program.calls))
        inputs += [
            given if given.shares is None else replace(given, shares=numbers[given.shares]) for given in program.inputs
        ]
        calls += [map_refs(call, numbers.__getitem__) for call in program.calls]
        returns += [numbers[value] for value in program.returns]
    first = programs[0]
    return FuzzProgram(tuple(inputs), tuple(calls), tuple(returns), first.gradients, first.dynamic)
