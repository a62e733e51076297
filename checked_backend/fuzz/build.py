"""Make programs runnable: their inputs, and a Python function that calls what they name and nothing else.

The function's text is built from the program's data: texts in it are constants, and names those of known operations.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import linecache
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from checked_backend.fuzz.known import INFIX, OPERATORS, operation
from checked_backend.fuzz.program import (
    CONSTANTS,
    Constant,
    FuzzProgram,
    Input,
    Ref,
    Size,
    Statement,
    blocks_of,
    items_of,
    run_in_order,
    value_of,
)
from checked_backend.scripts.values import write_index, write_value

_EDGES = (0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 0.5, 1e-40, -1e-40, 65504.0, 1e-8, 2.5, -1.5)
"""The edge values that floating-point inputs get among others."""

_SHARE_OF_EDGES = 0.3


def make_inputs(inputs: Sequence[Input]) -> tuple[torch.Tensor, ...]:
    """The tensors of inputs. Those that share memory are views of one storage."""
    roots = [place if given.shares is None else given.shares for place, given in enumerate(inputs)]
    extents: dict[int, int] = defaultdict(int)
    for root, given in zip(roots, inputs, strict=True):
        extents[root] = max(extents[root], given.extent)
    storages = {root: _filled(inputs[root], extent) for root, extent in extents.items()}
    return tuple(
        storages[root].as_strided(given.shape, given.stride, given.offset).detach().requires_grad_(given.requires_grad)
        for root, given in zip(roots, inputs, strict=True)
    )


def _filled(given: Input, count: int) -> torch.Tensor:
    """The elements of a storage."""
    source = torch.Generator().manual_seed(given.seed)
    dtype: torch.dtype = getattr(torch, given.dtype)
    if dtype == torch.bool:
        return torch.rand(count, generator=source) < 0.5
    if given.fill == "distinct":
        return (torch.randperm(count, generator=source) + int(given.low)).to(dtype)
    edges: Sequence[float] = _EDGES
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        edges = (0, 1, limits.min, limits.max, limits.max - 1, limits.min + 1)
        low, high = (-3, 3) if given.fill == "normal" else (int(given.low), int(given.high))
        low, high = max(low, limits.min), min(high, limits.max)
        values = torch.randint(low, max(low, high) + 1, (count,), generator=source, dtype=torch.int64)
    elif given.fill == "normal":
        values = torch.randn(count, generator=source, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    else:
        values = torch.rand(count, generator=source, dtype=torch.float64) * (given.high - given.low) + given.low
    if given.fill == "edges":
        which = torch.randint(0, len(edges), values.shape, generator=source)
        here = torch.rand(values.shape, generator=source) < _SHARE_OF_EDGES
        values = torch.where(here, torch.tensor(edges, dtype=values.dtype)[which], values)
    return values.to(dtype)


def strides_of(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """The strides of a dense tensor."""
    order = range(len(shape)) if order is None else order
    return torch.empty_permuted(tuple(shape), tuple(order), device="meta").stride()


def dtype_name(tensor: torch.Tensor) -> str:
    """``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def argument_of(raw: Any) -> Any:
    """A value of torch's or Python's without parts, as programs have it; a TypeError if they cannot have it."""
    if isinstance(raw, torch.dtype | torch.memory_format) and (name := str(raw).removeprefix("torch.")) in CONSTANTS:
        return Constant(name)
    if raw is None or raw is ... or isinstance(raw, bool | int | float | complex | str):
        return raw
    raise TypeError(type(raw).__name__)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal: tensors of one dtype and shape with equal elements, or anything of one type."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other)
    one, other = one.detach(), other.detach()
    return one.dtype == other.dtype and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def build(program: FuzzProgram) -> Callable[..., Any]:
    """A program's function. The lines of its code are found where tracebacks look for source."""
    text = function_source(program)
    file = f"<fuzz {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "__builtins__": builtins}
    exec(compile(text, file, "exec", dont_inherit=True), names)  # noqa: S102  made of data, as function_source says
    function: Callable[..., Any] = names[NAME]
    return function


def run_call(call: Statement, known: Sequence[Any]) -> Any:
    """Run one call in eager, given all earlier values."""
    return operation(call.op)(*eager_value(call.args, known), **eager_value(dict(call.kwargs), known))


def eager_value(raw: Any, known: Sequence[Any]) -> Any:
    """An argument as eager takes it, given all earlier values."""

    def value(leaf: Any) -> Any:
        return getattr(torch, leaf.name) if isinstance(leaf, Constant) else value_of(leaf, known)

    return map_aggregate(raw, value)


def run_eager(program: FuzzProgram, run: Callable[[Statement, Sequence[Any]], Any] = run_call) -> list[Any]:
    """Run a program in eager on fresh inputs, and return all of its values; ``run`` runs one call."""
    known: list[Any] = [*make_inputs(program.inputs)]

    def do(place: int, call: Statement) -> None:
        if call.op == "let":
            target, source = call.args
            known[target.value] = known[source.value]
        else:
            known[len(program.inputs) + place] = run(call, known)

    run_in_order(program, known, do)
    return known


NAME = "program"
"""The name of the function."""

_LETTERS = {"for": "i", "flag": "flag"}


def function_source(program: FuzzProgram) -> str:
    """A function that takes the inputs of a program, and returns a tuple of its results."""
    return ast.unparse(ast.parse("\n".join(_Writer(program).lines())))  # which leaves out brackets that are not needed


class _Writer:
    """Writes one program."""

    def __init__(self, program: FuzzProgram) -> None:
        self._blocks = blocks_of(program)
        self._program = program
        self._inputs = [f"x{place}" for place in range(len(program.inputs))]
        calls = [f"{_LETTERS.get(call.op, 'v')}{place}" for place, call in enumerate(program.calls)]
        self._names = [*self._inputs, *calls]

    def lines(self) -> Iterator[str]:
        """The lines of its function."""
        program, names = self._program, self._names
        named = zip(names[len(self._inputs) :], program.calls, strict=True)
        flags = [f"{name}={call.args[0]}" for name, call in named if call.op == "flag"]
        yield f"def {NAME}({', '.join([*self._inputs, *(['*', *flags] if flags else [])])}):"
        yield from self._statements(range(len(program.calls)), " ")
        returned = " ".join(f"{names[place]}," for place in program.returns)
        yield f" return {f'({returned})' if returned else None}"

    def _statements(self, places: range, indent: str) -> Iterator[str]:
        for place, block in items_of(self._blocks, places):
            if block is None:
                yield from (f"{indent}{line}" for line in self._statement(place))
                continue
            call, name = self._program.calls[place], self._names[len(self._inputs) + place]
            if call.op == "if":
                parts = (raw if isinstance(raw, str) else self._expression(raw) for raw in call.args)  # or a relation
                yield f"{indent}if {' '.join(parts)}:"
            else:
                yield f"{indent}for {name} in range({self._expression(call.args[0])}):"
            yield from list(self._statements(block.body, f"{indent} ")) or [f"{indent} pass"]
            if otherwise := list(self._statements(block.otherwise, f"{indent} ")):
                yield from (f"{indent}else:", *otherwise)

    def _statement(self, place: int) -> Sequence[str]:
        call, target = self._program.calls[place], self._names[len(self._inputs) + place]
        if call.op == "flag":
            return []
        args = [self._expression(argument) for argument in call.args]
        if call.op == "let":
            return [f"{args[0]} = {args[1]}"]
        if call.op == "setitem":
            return [f"{args[0]}[{write_index(call.args[1], self._own_expression)}] = {args[2]}"]
        if call.op in OPERATORS and call.op not in INFIX and call.op != "getitem":  # it is one like +=
            first, second = args
            return [f"{target} = {first}", f"{target} {call.op} {second}"]
        return [f"{target} = {self._called(call, args)}"]

    def _called(self, call: Statement, args: Sequence[str]) -> str:
        operation(call.op)  # refuses what may not be called
        if call.op == "getitem":
            return f"{args[0]}[{write_index(call.args[1], self._own_expression)}]"
        if call.op in OPERATORS:
            left, right = args
            return f"({left}) {call.op} ({right})"
        words = [f"{key}={self._expression(value)}" for key, value in call.kwargs.items()]
        if call.op.startswith("Tensor."):
            return f"({args[0]}){call.op.removeprefix('Tensor')}({', '.join([*args[1:], *words])})"
        return f"{call.op}({', '.join([*args, *words])})"

    def _expression(self, raw: Any) -> str:
        return write_value(raw, self._own_expression)

    def _own_expression(self, raw: Any) -> str | None:
        """What a program has and `write_value` does not know."""
        match raw:
            case Ref(value):
                return self._names[value]
            case Size(value, dim):
                return f"{self._names[value]}.size({dim})"
            case Constant(name):
                return f"torch.{name}"
            case dict():
                return f"{{{', '.join(f'{key!r}: {self._expression(item)}' for key, item in raw.items())}}}"
        return None
