"""The operations that a program may call, by name. A name that is not here is refused.

Known are the functions and methods that torch lists as overridable for tensors, functions that create tensors, and
Python's operators. None of them reads or writes files.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from checked_backend.errors import FuzzError

INFIX: Mapping[str, tuple[str, str]] = {
    "+": ("add", "add"),
    "-": ("sub", "sub"),
    "*": ("mul", "mul"),
    "/": ("truediv", "div"),
    "//": ("floordiv", "floor_divide"),
    "%": ("mod", "remainder"),
    "**": ("pow", "pow"),
    "@": ("matmul", "matmul"),
    "&": ("and_", "bitwise_and"),
    "|": ("or_", "bitwise_or"),
    "^": ("xor", "bitwise_xor"),
    "<<": ("lshift", "bitwise_left_shift"),
    ">>": ("rshift", "bitwise_right_shift"),
    "<": ("lt", "<"),
    "<=": ("le", "<="),
    "==": ("eq", "=="),
    "!=": ("ne", "!="),
    ">": ("gt", ">"),
    ">=": ("ge", ">="),
}
"""Operators between two operands: the name of their function in `operator`, and that of torch's own."""

OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{symbol: getattr(operator, name) for symbol, (name, _) in INFIX.items()},
    **{f"{symbol}=": getattr(operator, f"i{INFIX[symbol][0].strip('_')}") for symbol in "+-*/&|^"},
    "getitem": operator.getitem,
    "setitem": operator.setitem,
}
"""Python's operators."""

_UNARY: Mapping[Callable[..., Any], str] = {
    operator.neg: "torch.neg",
    operator.pos: "torch.positive",
    operator.invert: "torch.bitwise_not",
}
"""Operators of one operand, which graphs have, by the function of torch that does the same."""

_ROOMS: Mapping[str, Any] = {
    "torch.": torch,
    "torch.linalg.": torch.linalg,
    "torch.special.": torch.special,
    "torch.fft.": torch.fft,
    "F.": torch.nn.functional,
    "Tensor.": torch.Tensor,
}
_ALSO = frozenset(
    {
        *(f"torch.{name}" for name in ("arange", "zeros", "ones", "full", "eye", "linspace", "logspace")),
        *(f"torch.{name}" for name in ("tril_indices", "triu_indices", "rand_like", "randn_like")),
        *(f"Tensor.{name}" for name in ("new_zeros", "new_ones", "new_full", "unflatten")),
        *("F.hardswish", "F.hardsigmoid"),
    }
)
"""Harmless ones that torch does not list as overridable."""
_PLAIN = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
_UNDEFINED = re.compile(
    r"empty.*|resize.*|new_empty.*|set_|data_ptr|share_memory_|storage.*|.*hook|backward|numpy|map2?_"
)
"""Functions that read memory which nothing has written, or that compute nothing."""


@functools.cache
def _overridable() -> Mapping[str, frozenset[int]]:
    """The identities of the functions that torch lists, by the prefix of their names."""
    listed = torch.overrides.get_overridable_functions()  # torch keeps this, so identities stay
    found = {prefix: frozenset(map(id, listed.get(room, ()))) for prefix, room in _ROOMS.items()}
    found["torch."] |= frozenset(map(id, listed.get(torch.functional, ())))
    return found


@functools.cache
def operation(name: str) -> Callable[..., Any]:
    """The function that is called ``torch.add``, ``Tensor.add_``, ``+=`` and so on."""
    if name in OPERATORS:
        return OPERATORS[name]
    prefix, dot, own = name.rpartition(".")
    prefix += dot
    if prefix in _ROOMS and _PLAIN.fullmatch(own) and not _UNDEFINED.fullmatch(own):
        function: Callable[..., Any] | None = getattr(_ROOMS[prefix], own, None)
        if callable(function) and (name in _ALSO or id(function) in _overridable()[prefix]):
            return function
    raise FuzzError(f"a program: {name!r:.80} is no operation that may be called")


def is_known(name: str) -> bool:
    """Whether an operation may be called."""
    try:
        operation(name)
    except FuzzError:
        return False
    return True


@functools.cache
def _names() -> Mapping[int, str]:
    """The names of known functions by their identities. A function of several names has the first."""
    found = {id(function): name for name, function in OPERATORS.items()}
    found |= {id(function): name for function, name in _UNARY.items()}
    for prefix, room in _ROOMS.items():
        for own in dir(room) if room is not torch.Tensor else ():
            if is_known(prefix + own):
                found.setdefault(id(getattr(room, own)), prefix + own)
    return found


def name_of(function: Any) -> str | None:
    """The name of a known function, as it stands in a graph; None if it may not be called."""
    return _names().get(id(function))


def spelled(name: str) -> str:
    """How a report names an operation: ``add_``, ``F.relu``, ``x[...] = ``."""
    if name in ("getitem", "setitem"):
        return {"getitem": "x[...]", "setitem": "x[...] = y"}[name]
    return name.removeprefix("Tensor.").removeprefix("torch.")


def plain(op: str) -> str:
    """The operator behind a name: ``add`` of ``+``, ``torch.add``, ``Tensor.add_``, ``aten.add.Tensor``."""
    if op.startswith("aten."):
        return op.split(".")[1].strip("_")
    if op in ("getitem", "setitem"):
        return spelled(op)
    if op[0].isalpha():
        own = spelled(op).rpartition(".")[2]
        return "div" if own == "true_divide" else own.rstrip("_")
    infix = INFIX.get(op) or INFIX.get(op[:-1])
    return op.rstrip("_") if infix is None else infix[1]
