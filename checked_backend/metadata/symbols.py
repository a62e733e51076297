"""Symbolic sizes as plain Python: the variable that holds each expression, and the code that computes its value."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy

from checked_backend._torch.symbols import evaluate_number, python_expression
from checked_backend.metadata.expected import Size

__all__ = ["UNKNOWN", "SymbolTable", "evaluator"]

UNKNOWN = math.nan  # NaN differs from every size, and arithmetic with it gives NaN again
_NAME = re.compile(r"[A-Za-z]\w*")
_CALLS = frozenset({"abs", "bool", "float", "int", "max", "min", "math", "round"})


class SymbolTable:
    """The symbols and expressions of one graph, in the order in which its run learns their values.

    Generated code holds each value in a variable: a symbol's own name, or ``_e0``, ``_e1``, ... for expressions. A
    value that is not known at run time is `UNKNOWN`.
    """

    def __init__(self) -> None:
        self.variables: dict[sympy.Basic, str] = {}
        self.functions: dict[str, Callable[..., object]] = {}
        self._reserved = 0

    def known(self, size: Size) -> bool:
        """Whether the value of a size is known by now, or can be computed."""
        return not isinstance(size, sympy.Basic) or size in self.variables or self._computable(size)

    def _computable(self, size: sympy.Basic) -> bool:
        return all(symbol in self.variables for symbol in size.free_symbols)

    def bind(self, size: sympy.Basic, source: str) -> Iterator[str]:
        """Learn a size that is not yet known from a real value, ``source``.

        Yields:
            Lines of code. If the size is linear in its only unknown symbol, the code computes that symbol. Else the
            expression itself gets the value, and nothing else is learnt.
        """
        unknown = [symbol for symbol in size.free_symbols if symbol not in self.variables]
        if size.is_Symbol:
            yield f"{self._variable(size)} = {source}"
            return
        if len(unknown) == 1 and not isinstance(size, sympy.logic.boolalg.Boolean):
            factor = size.coeff(unknown[0])
            rest = sympy.expand(size - factor * unknown[0])
            if factor.is_Integer and factor != 0 and unknown[0] not in rest.free_symbols:
                yield f"{self._variable(unknown[0])} = ({source} - {self.code(rest)}) // {int(factor)}"
                return
        yield f"{self._variable(size)} = {source}"

    def bind_truth(self, size: sympy.Basic, source: str) -> Iterator[str]:
        """Learn from a bool. A trace writes a bool that depends on data as ``u0 == 1``."""
        if isinstance(size, sympy.Eq) and size.lhs.is_Symbol and size.rhs == 1 and size.lhs not in self.variables:
            yield f"{self._variable(size.lhs)} = {source}"
        else:
            yield f"{self._variable(size)} = {source}"

    def define(self, size: Size) -> Iterator[str]:
        """Compute a size once, if it is not a plain number and nothing has computed it before.

        Yields:
            Lines of code to run before the size's variable is used.
        """
        if not isinstance(size, sympy.Basic) or size in self.variables or not self._computable(size):
            return
        expression = self.code(size)
        variable = self._variable(size)
        if re.search(r"[/%(]", expression[1:-1]):  # it may divide by zero, or call a function that refuses UNKNOWN
            yield "try:"
            yield f"    {variable} = {expression}"
            yield "except (ArithmeticError, ValueError):"
            yield f"    {variable} = UNKNOWN"
        else:
            yield f"{variable} = {expression}"

    def text(self, size: Size) -> str:
        """A size as code: a number, or the variable that holds it."""
        return self.variables[size] if isinstance(size, sympy.Basic) else repr(size)

    def code(self, size: Size) -> str:
        """A size as Python, in terms of the variables of its symbols."""
        if not isinstance(size, sympy.Basic):
            return repr(size)
        named = {symbol: sympy.Symbol(self.variables[symbol], **symbol.assumptions0) for symbol in size.free_symbols}
        try:
            renamed = size if all(str(s) == str(n) for s, n in named.items()) else size.xreplace(named)
            expression = python_expression(renamed)
            if self._plain(expression):
                return f"({expression})"
        except Exception:
            expression = ""  # torch's printer lacks a function; the expression is interpreted instead
        symbols = sorted(size.free_symbols, key=str)
        name = f"_f{len(self.functions)}"
        self.functions[name] = evaluator(size, symbols)
        return f"{name}({', '.join(self.variables[symbol] for symbol in symbols)})"

    def _plain(self, expression: str) -> bool:
        """Whether printed code is an expression of this table's variables and nothing else."""
        allowed = {*self.variables.values(), *_CALLS}
        try:
            tree = ast.parse(expression, mode="eval")
        except SyntaxError:
            return False
        return all(node.id in allowed for node in ast.walk(tree) if isinstance(node, ast.Name))

    def _variable(self, size: sympy.Basic) -> str:
        if size.is_Symbol and _NAME.fullmatch(str(size)) and str(size) not in {"self", "run", "args_list", *_CALLS}:
            name = str(size)
        else:
            name = f"_e{self._reserved}"
            self._reserved += 1
        self.variables[size] = name
        return name


def evaluator(size: sympy.Basic, symbols: list[sympy.Basic]) -> Callable[..., object]:
    """A function of the symbols' values that interprets an expression which has no plain Python form."""

    def evaluate(*values: float) -> object:
        bound: Mapping[Any, Any] = dict(zip(symbols, values, strict=True))
        if any(value != value for value in values):
            return UNKNOWN
        try:
            return evaluate_number(size, bound)
        except Exception:  # torch's interpreter lacks a function, or the function has no value here
            return UNKNOWN

    return evaluate
