"""The values of symbolic sizes: what a graph's run learns of them, and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from checked_backend._torch.symbols import evaluate_number
from checked_backend.metadata.expected import Size

__all__ = ["UNKNOWN", "Lesson", "SizeValues", "Symbols"]

UNKNOWN = math.nan  # NaN differs from every size
_REMEMBERED = 10_000


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
        self._used: dict[sympy.Basic, tuple[Any, ...]] = {}  # the symbols of each expression
        self._values: dict[tuple[sympy.Basic, tuple[Any, ...]], Any] = {}

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

    def value(self, size: sympy.Basic, known: Mapping[sympy.Basic, Any]) -> Any:
        """The value of an expression; `UNKNOWN` if it has none. Most calls have the sizes of earlier ones."""
        symbols = self._used.get(size)
        if symbols is None:
            symbols = self._used[size] = tuple(size.free_symbols)
        given = tuple(known.get(symbol, UNKNOWN) for symbol in symbols)
        if not given or any(one != one for one in given):
            return UNKNOWN
        value = self._values.get((size, given))
        if value is None:
            if len(self._values) >= _REMEMBERED:
                self._values.clear()
            try:
                value = evaluate_number(size, dict(zip(symbols, given, strict=True)))
            except Exception:  # the expression has no value here
                value = UNKNOWN
            self._values[size, given] = value
        return value


class SizeValues(dict[sympy.Basic, Any]):
    """The values of sizes in one run. An expression of known symbols is computed when it is first asked for."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__()
        self._symbols = symbols
        self._tuples: dict[int, tuple[Any, ...]] = {}

    def __missing__(self, size: sympy.Basic) -> Any:
        self[size] = value = self._symbols.value(size, self)
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
