"""Programs as the text of a Python function: the code that is compiled, and that people read.

The text is built from the program's data: texts in it are constants, and names are those of known operations.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from typing import Any

from checked_backend.fuzz.control import Block, blocks_of, items_of
from checked_backend.fuzz.known import INFIX, METHOD, OPERATORS, operation
from checked_backend.fuzz.program import Constant, FuzzProgram, Ref, Size, Statement

NAME = "program"
"""The name of the function."""

_LETTERS = {"for": "i", "flag": "flag"}


def function_source(*programs: FuzzProgram) -> str:
    """One function for several programs. It takes the inputs of all, and returns a tuple of results for each.

    The result of one program is its tuple of results.
    """
    several = len(programs) > 1
    writers = [_Writer(one, f"p{number}_" if several else "") for number, one in enumerate(programs)]
    flags = [flag for writer in writers for flag in writer.flags]
    given = [name for writer in writers for name in writer.inputs] + (["*", *flags] if flags else [])
    results = [writer.results for writer in writers]
    lines = [line for writer in writers for line in writer.lines]
    text = [f"def {NAME}({', '.join(given)}):", *lines, f" return {_tuple(results) if several else results[0]}"]
    return ast.unparse(ast.parse("\n".join(text)))  # which leaves out what brackets are not needed


def _tuple(parts: Sequence[str]) -> str:
    return f"({' '.join(f'{part},' for part in parts)})"


class _Writer:
    """Writes one program.

    Attributes:
        flags: Its flags, with their values.
        lines: The function's lines.
        results: What it returns.
    """

    def __init__(self, program: FuzzProgram, prefix: str) -> None:
        self._blocks = blocks_of(program)
        self._program = program
        self.inputs = [f"{prefix}x{place}" for place in range(len(program.inputs))]
        calls = [f"{prefix}{_LETTERS.get(call.op, 'v')}{place}" for place, call in enumerate(program.calls)]
        self._names = [*self.inputs, *calls]
        self.flags = [
            f"{name}={call.args[0]}" for name, call in zip(calls, program.calls, strict=True) if call.op == "flag"
        ]
        self.lines = [*self._statements(range(len(program.calls)), " ")]
        self.results = _tuple([self._names[place] for place in program.returns]) if program.returns else "None"

    def _statements(self, places: range, indent: str) -> Iterator[str]:
        for item in items_of(self._blocks, places):
            if not isinstance(item, Block):
                yield from (f"{indent}{line}" for line in self._statement(item))
                continue
            call, name = self._program.calls[item.head], self._names[len(self.inputs) + item.head]
            if call.op == "if":
                yield f"{indent}if {' '.join(map(self._operand, call.args))}:"
            else:
                yield f"{indent}for {name} in range({self._expression(call.args[0])}):"
            yield from list(self._statements(item.body, f"{indent} ")) or [f"{indent} pass"]
            if otherwise := list(self._statements(item.otherwise, f"{indent} ")):
                yield from (f"{indent}else:", *otherwise)

    def _operand(self, raw: Any) -> str:
        """A part of a condition, among which is its operator."""
        return raw if isinstance(raw, str) else self._expression(raw)

    def _statement(self, place: int) -> Sequence[str]:
        call, target = self._program.calls[place], self._names[len(self.inputs) + place]
        if call.op == "flag":
            return []
        args = [self._expression(argument) for argument in call.args]
        if call.op == "let":
            return [f"{args[0]} = {args[1]}"]
        if call.op == "setitem":
            return [f"{args[0]}[{self._index(call.args[1])}] = {args[2]}"]
        if call.op in OPERATORS and call.op not in INFIX and call.op != "getitem":  # it is one like +=
            first, second = args
            return [f"{target} = {first}", f"{target} {call.op} {second}"]
        return [f"{target} = {self._called(call, args)}"]

    def _called(self, call: Statement, args: Sequence[str]) -> str:
        how, function = operation(call.op)
        if call.op == "getitem":
            return f"{args[0]}[{self._index(call.args[1])}]"
        if call.op in OPERATORS:
            left, right = args
            return f"({left}) {call.op} ({right})"
        words = [f"{key}={self._expression(value)}" for key, value in call.kwargs.items()]
        if how == METHOD:
            return f"({args[0]}).{function}({', '.join([*args[1:], *words])})"
        return f"{call.op}({', '.join([*args, *words])})"

    def _index(self, raw: Any) -> str:
        if isinstance(raw, tuple) and raw:
            return " ".join(f"{self._index(item)}," for item in raw)
        if isinstance(raw, slice):
            parts = ["" if part is None else self._expression(part) for part in (raw.start, raw.stop, raw.step)]
            return ":".join(parts if parts[2] else parts[:2])
        return self._expression(raw)

    def _expression(self, raw: Any) -> str:
        match raw:
            case Ref(value):
                return self._names[value]
            case Size(value, dim):
                return f"{self._names[value]}.size({dim})"
            case Constant(name):
                return f"torch.{name}"
            case tuple():
                return _tuple([self._expression(item) for item in raw])
            case list():
                return f"[{', '.join(map(self._expression, raw))}]"
            case dict():
                return f"{{{', '.join(f'{key!r}: {self._expression(item)}' for key, item in raw.items())}}}"
            case slice():
                return f"slice({', '.join(map(self._expression, (raw.start, raw.stop, raw.step)))})"
            case float() if not math.isfinite(raw):
                return f"float({str(raw)!r})"
        return "..." if raw is ... else repr(raw)
