"""The values of symbolic sizes: what a graph's run learns of them, and in which order."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy

from checked_backend._torch.graph_code import forward_from_source
from checked_backend._torch.symbols import evaluate_number, python_expression
from checked_backend.metadata.expected import Size

UNKNOWN = math.nan  # NaN differs from every size
_CALLS = frozenset({"abs", "bool", "float", "int", "max", "min", "math", "round"})


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a real size tells: ``learnt`` is ``(size - rest) / factor``."""

    learnt: sympy.Basic
    rest: Size = 0
    factor: int = 1


class Symbols:
    """The symbols of one graph, in the order in which its run learns their values.

    Attributes:
        learnt: The symbols, and expressions whose symbols are not known, that a run has learnt so far.
    """

    def __init__(self) -> None:
        self.learnt: set[sympy.Basic] = set()
        self._functions: dict[sympy.Basic, Callable[..., Any]] = {}

    def known(self, size: Size) -> bool:
        """Whether the value of a size is known by now, or can be computed."""
        return not isinstance(size, sympy.Basic) or size in self.learnt or self.learnt.issuperset(size.free_symbols)

    def learn(self, size: sympy.Basic) -> Lesson:
        """Learn a size that is not known yet from a real one.

        A size that is linear in its only unknown symbol tells that symbol; else only the expression itself is learnt.
        A trace writes a bool that depends on data as ``u0 == 1``.
        """
        lesson = self._lesson(size)
        self.learnt.add(lesson.learnt)
        return lesson

    def _lesson(self, size: sympy.Basic) -> Lesson:
        unknown = [symbol for symbol in size.free_symbols if symbol not in self.learnt]
        if isinstance(size, sympy.logic.boolalg.Boolean):
            is_flag = isinstance(size, sympy.Eq) and size.lhs.is_Symbol and size.rhs == 1
            return Lesson(size.lhs if is_flag and size.lhs in unknown else size)
        if len(unknown) == 1 and not size.is_Symbol:
            factor = size.coeff(unknown[0])
            rest = sympy.expand(size - factor * unknown[0])
            if factor.is_Integer and factor != 0 and unknown[0] not in rest.free_symbols:
                return Lesson(unknown[0], rest, int(factor))
        return Lesson(size)

    def function(self, size: sympy.Basic) -> Callable[..., Any]:
        """A function that computes an expression of its symbols' values, in the order of their names."""
        if size not in self._functions:
            self._functions[size] = _compiled(size, sorted(size.free_symbols, key=str))
        return self._functions[size]


class SizeValues(dict[sympy.Basic, Any]):
    """The values of sizes in one run. An expression of known symbols is computed when it is first asked for."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__()
        self._symbols = symbols
        self._tuples: dict[int, tuple[Any, ...]] = {}

    def __missing__(self, size: sympy.Basic) -> Any:
        given = [self.get(symbol, UNKNOWN) for symbol in sorted(size.free_symbols, key=str)]
        value = UNKNOWN
        if size.free_symbols and all(one == one for one in given):
            try:
                value = self._symbols.function(size)(*given)
            except Exception:  # the expression has no value here
                value = UNKNOWN
        self[size] = value
        return value

    def of(self, size: Size) -> Any:
        """The value of a size, `UNKNOWN` if it is not known."""
        return self[size] if isinstance(size, sympy.Basic) else size

    def all_of(self, sizes: tuple[Size, ...] | None) -> tuple[Any, ...] | None:
        """The values of sizes that live as long as the graph; None if there are none."""
        if sizes is None:
            return None
        if id(sizes) not in self._tuples:
            self._tuples[id(sizes)] = tuple(map(self.of, sizes))
        return self._tuples[id(sizes)]

    def learn(self, lesson: Lesson, real: Any) -> None:
        """Learn from a real size."""
        if real == real and (lesson.rest or lesson.factor != 1):
            real = (real - self.of(lesson.rest)) // lesson.factor
        self[lesson.learnt] = real


def _compiled(size: sympy.Basic, symbols: list[sympy.Basic]) -> Callable[..., Any]:
    """An expression as a Python function; one that torch's printer does not know is interpreted."""
    names = [str(symbol) for symbol in symbols]
    try:
        expression = python_expression(size)
        used = {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
        if all(name.isidentifier() for name in names) and used <= {*names, *_CALLS} and not _CALLS & {*names}:
            source = f"def forward({', '.join(names)}):\n    return {expression}\n"
            return forward_from_source(source, {"math": math})
    except Exception:
        expression = ""  # torch's printer lacks a function
    return lambda *values: evaluate_number(size, dict(zip(symbols, values, strict=True)))
