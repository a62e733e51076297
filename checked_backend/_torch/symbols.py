"""Symbolic sizes: their values, the facts that tracing learned about them, and their text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis


def evaluate_expression(expression: sympy.Expr, values: Mapping[sympy.Symbol, int]) -> int:
    """The value of a symbolic size, in plain Python integers (no sympy simplification).

    Raises:
        KeyError: A symbol of the expression has no value.
    """
    return int(sympy_interp(PythonReferenceAnalysis, dict(values), expression))


def evaluate_number(expression: sympy.Basic, values: Mapping[sympy.Symbol, float]) -> int | float | bool:
    """The value of a symbolic number: an integer where it must be one, else a float or a bool.

    Raises:
        Exception: A symbol of the expression has no value, or torch's interpreter lacks one of its functions.
    """
    value = sympy_interp(PythonReferenceAnalysis, dict(values), expression)
    if expression.is_integer:
        return int(value)
    return bool(value) if isinstance(value, bool) or getattr(value, "is_Boolean", False) else float(value)


def python_expression(expression: sympy.Basic) -> str:
    """A symbolic size as Python over plain numbers; names of symbols are variables, ``math`` is the module.

    Raises:
        Exception: The expression has a function that torch's printer does not know.
    """
    text = str(PythonPrinter().doprint(expression))
    return text.replace("torch.sym_float(", "float(").replace("torch._sym_sqrt(", "math.sqrt(")


def deferred_asserts(shape_env: Any) -> list[tuple[sympy.Basic, str]]:
    """The conditions that a trace assumed about sizes that depend on data, each with its message."""
    found = getattr(shape_env, "deferred_runtime_asserts", None) or {}
    return [(check.expr, str(check.msg)) for checks in found.values() for check in checks]


def size_hint(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool | None:
    """The value that a symbolic size had while tracing; None if it depends on data. Adds no guard."""
    node: Any = value.node
    hint = node.hint if node.has_hint() else None
    return hint if isinstance(hint, (int, float, bool)) else None


def hint_of(value: Any) -> int:
    """A size as an integer: its value while tracing, or 1 if that is unknown."""
    if isinstance(value, torch.SymInt):
        hint = size_hint(value)
        return 1 if hint is None else int(hint)
    return int(value)


def tensor_bytes(value: Any) -> int | None:
    """Size in memory of a recorded tensor, with hints for symbolic sizes; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    return math.prod(map(hint_of, value.shape)) * value.dtype.itemsize


def shape_facts(value: Any, symbols: set[str]) -> tuple[dict[str, tuple[int | None, int | None]], list[str]]:
    """The facts that tracing learned about symbols: the range of each, and the relations that it relied on.

    Args:
        value: Any symbolic size of the graph.
        symbols: The names of the graph's symbols; relations that are about others too are left out.
    """
    environment: Any = value.node.shape_env
    if environment is None:
        return {}, []

    def bound(end: Any) -> int | None:
        return int(end) if getattr(end, "is_Integer", False) else None

    ranges = {str(symbol): (bound(r.lower), bound(r.upper)) for symbol, r in environment.var_to_range.items()}
    guards = [guard.expr for guard in environment.guards]
    relations = [str(guard) for guard in guards if {str(symbol) for symbol in guard.free_symbols} <= symbols]
    relations += [
        f"Eq({symbol}, {other})"
        for symbol, other in environment.replacements.items()
        if {str(symbol), *(str(symbol) for symbol in other.free_symbols)} <= symbols
    ]
    return {name: ends for name, ends in ranges.items() if name in symbols}, list(dict.fromkeys(relations))
