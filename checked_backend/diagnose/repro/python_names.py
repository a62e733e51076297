"""The names and signs by which Python code calls the functions of a Dynamo graph."""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from checked_backend._torch.operators import HigherOrderOperator, OpOverloadPacket

__all__ = ["IN_PLACE_SIGNS", "SIGNS", "UNARY_SIGNS", "Name", "name_of"]

SIGNS: Mapping[Any, str] = MappingProxyType(
    {
        operator.add: "+",
        operator.and_: "&",
        operator.eq: "==",
        operator.floordiv: "//",
        operator.ge: ">=",
        operator.gt: ">",
        operator.le: "<=",
        operator.lshift: "<<",
        operator.lt: "<",
        operator.matmul: "@",
        operator.mod: "%",
        operator.mul: "*",
        operator.ne: "!=",
        operator.or_: "|",
        operator.pow: "**",
        operator.rshift: ">>",
        operator.sub: "-",
        operator.truediv: "/",
        operator.xor: "^",
    }
)
"""Functions of two arguments that have a sign."""

UNARY_SIGNS: Mapping[Any, str] = MappingProxyType(
    {operator.neg: "-", operator.invert: "~", operator.pos: "+", operator.not_: "not "}
)
"""Functions of one argument that have a sign."""

IN_PLACE_SIGNS: Mapping[Any, str] = MappingProxyType(
    {
        operator.iadd: "+=",
        operator.iand: "&=",
        operator.ifloordiv: "//=",
        operator.ilshift: "<<=",
        operator.imatmul: "@=",
        operator.imod: "%=",
        operator.imul: "*=",
        operator.ior: "|=",
        operator.ipow: "**=",
        operator.irshift: ">>=",
        operator.isub: "-=",
        operator.itruediv: "/=",
        operator.ixor: "^=",
    }
)
"""Functions that are statements. They change their first argument and return it."""


_HOMES: tuple[tuple[str, Any, str], ...] = (
    ("torch", torch, ""),
    ("F", F, ""),
    ("torch.linalg", torch.linalg, "linalg_"),
    ("torch.special", torch.special, "special_"),
    ("torch.fft", torch.fft, "fft_"),
    ("torch.nested", torch.nested, "nested_"),
)


@dataclass(frozen=True, slots=True)
class Name:
    """The code that names a function.

    Attributes:
        text: The expression.
        module: A module that must be imported for it; None if ``import torch`` is enough.
    """

    text: str
    module: str | None = None


_HIGHER_ORDER: Mapping[str, Name] = MappingProxyType(
    {
        "cond": Name("torch.cond"),
        "while_loop": Name("torch.ops.higher_order.while_loop", "torch._higher_order_ops"),
    }
)
"""Functions that take functions, by the name of their operator."""


def name_of(function: Callable[..., Any]) -> Name | None:
    """Find the name under which a fresh process finds a function.

    Args:
        function: A function that a Dynamo graph calls: of torch, of Python, or of a module that can be imported.

    Returns:
        Its plainest name; None if it has none, because it was made at run time or in the main program.
    """
    if isinstance(function, OpOverloadPacket):
        return Name(f"torch.ops.{function!s}")
    if isinstance(function, HigherOrderOperator):
        return _HIGHER_ORDER.get(function.name())
    own = str(getattr(function, "__name__", ""))
    if not own:
        return None
    for text, home, prefix in _HOMES:
        short = own.removeprefix(prefix)
        if getattr(home, short, None) is function:
            return Name(f"{text}.{short}")
    if getattr(builtins, own, None) is function:
        return Name(own)
    for module, holder in (("math", math), ("operator", operator)):
        if getattr(holder, own, None) is function:
            return Name(f"{module}.{own}", module)
    return _imported(function, own)


def _imported(function: Callable[..., Any], own: str) -> Name | None:
    module = str(getattr(function, "__module__", None) or "")
    path = str(getattr(function, "__qualname__", own))
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    if found is not function or module in ("", "__main__"):
        return None
    return Name(f"{module}.{path}", None if module.partition(".")[0] == "torch" and module.count(".") == 0 else module)
