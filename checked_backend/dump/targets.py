"""Convert the target of a node to text and back. Only names on a list and operators registered here are allowed.

A dump may come from a stranger. Its text is never imported, evaluated or looked up by attribute. It is a key of a table
of functions that compute, or the name of an operator in torch's own registry.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from checked_backend._torch.operators import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    custom_op_module,
    find_op_packet,
)
from checked_backend.dump.functions import function_names, functions, is_allowed_method
from checked_backend.dump.imported import may_provide, own_function, registers
from checked_backend.dump.operators import checked_form, is_custom, operator_problem, refusal_by_name

__all__ = [
    "Trusted",
    "Unresolved",
    "checked_target",
    "encode_target",
    "is_importable",
    "known_function",
    "leaves_uninitialized",
    "needed_import",
    "resolve_target",
]

_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,200}"
_OP = re.compile(rf"op:({_NAME})\.({_NAME})\.({_NAME})")
_PACKET = re.compile(rf"(?:packet|higher_order):({_NAME}(?:\.{_NAME})?)")
_FUNCTION = re.compile(rf"function:({_NAME}(?:\.{_NAME}){{0,20}}):({_NAME}(?:\.{_NAME}){{0,20}})")
_EMPTY = r"(?:empty|empty_like|empty_strided|empty_permuted|new_empty|new_empty_strided)"
_UNINITIALIZED = re.compile(
    rf"op:(?:aten|prims)\.{_EMPTY}\.\w+|packet:(?:aten|prims)\.{_EMPTY}|function:torch[\w.]*:{_EMPTY}|method:{_EMPTY}"
)
_METHOD = re.compile(rf"method:({_NAME})")
_LISTED = "it is not among the functions of torch and Python that a dump may call"


class Unresolved(Exception):
    """Raised for a target that does not exist here, or that a dump may not call."""


@dataclass(frozen=True, slots=True)
class Trusted:
    """The operators and functions that a dump may call besides torch's own.

    Attributes:
        modules: Modules that the user named.
        operators: The operators that were registered while these modules were imported, as ``namespace::name``; None
            if every operator that this program registered is trusted.
    """

    modules: frozenset[str] = frozenset()
    operators: frozenset[str] | None = None

    def operator(self, name: str) -> bool:
        """Whether an operator that is not torch's, ``namespace::name``, may be called."""
        return self.operators is None or registers(name, self.modules, self.operators)


def encode_target(op: str, target: Any) -> str:
    """The text of a node's target.

    Args:
        op: The node's opcode.

    Returns:
        ``op:aten.add.Tensor``, ``packet:mylib.foo``, ``higher_order:cond``, ``function:torch:cat``, ``method:view``,
        or the name itself for placeholders, attributes and the output.
    """
    if op in ("placeholder", "get_attr", "output", "call_module"):
        return str(target)
    if op == "call_method":
        return f"method:{target}"
    if isinstance(target, OpOverload):
        return f"op:{target}"
    if isinstance(target, HigherOrderOperator):
        return f"higher_order:{target.name()}"
    if isinstance(target, OpOverloadPacket):
        return f"packet:{target}"
    known = known_function(target)
    if known is not None:
        return f"function:{known}"
    module = getattr(target, "__module__", None) or type(target).__module__
    return f"function:{module}:{getattr(target, '__qualname__', type(target).__qualname__)}"


def needed_import(text: str) -> str | None:
    """The module that must be imported before a target can be resolved or run; None if torch is enough.

    Args:
        text: The result of `encode_target`.
    """
    if match := _OP.fullmatch(text) or _PACKET.fullmatch(text):
        name = ".".join(match.groups()[:2])
        if text.startswith("higher_order:") or not is_custom(name):
            return None
        return custom_op_module(name.replace(".", "::", 1)) or f"the module that registers {name.partition('.')[0]}::"
    match = _FUNCTION.fullmatch(text)
    if match and f"{match[1]}:{match[2]}" not in functions():
        return match[1]
    return None


def known_function(function: Any) -> str | None:
    """``module:name`` of a function that a dump may call; None for any other function."""
    return function_names().get(function) if callable(function) and type(function).__hash__ is not None else None


def is_importable(text: str, target: Any) -> bool:
    """Whether a function's text, from `encode_target`, leads to it again in a process that imports its module."""
    match = _FUNCTION.fullmatch(text)
    if match is None:
        return False
    value: Any = sys.modules.get(match[1])
    for step in match[2].split("."):
        value = getattr(value, step, None)
    return value is target


def leaves_uninitialized(text: str) -> bool:
    """Whether a target's result is uninitialised memory."""
    return _UNINITIALIZED.fullmatch(text) is not None


def checked_target(text: str) -> None:
    """Refuse a target that no dump may call, whether or not it is registered here.

    Raises:
        Unresolved: The text is no target, or a forbidden one.
    """
    if match := _OP.fullmatch(text):
        why = refusal_by_name(f"{match[1]}.{match[2]}")
    elif match := _PACKET.fullmatch(text):
        why = refusal_by_name(match[1])
    elif match := _METHOD.fullmatch(text):
        why = None if is_allowed_method(match[1]) else "a dump may not call this method"
    elif match := _FUNCTION.fullmatch(text):
        torchs = match[1].partition(".")[0] == "torch" and f"{match[1]}:{match[2]}" not in functions()
        why = f"a dump may not call this function; {_LISTED}" if torchs else None
    else:
        why = "it names no operator, function or method"
    if why is not None:
        raise Unresolved(f"{text[:300]!r}: {why}")


def resolve_target(text: str, trusted: Trusted | None = None) -> Any:
    """The target for a text of `encode_target`.

    Args:
        trusted: The targets allowed besides torch's own; by default every operator that this program registered.

    Raises:
        Unresolved: The target is not registered here, or a dump may not call it.
    """
    checked_target(text)
    trusted = trusted or Trusted()
    if match := _OP.fullmatch(text):
        packet = _packet(text, f"{match[1]}.{match[2]}", trusted)
        overload = getattr(packet, match[3], None) if match[3] in packet.overloads() else None
        if not isinstance(overload, OpOverload):
            raise Unresolved(f"{text!r} is not registered here{_hint(text)}")
        return _computing(text, overload)
    if match := _PACKET.fullmatch(text):
        if text.startswith("packet:") and "." in match[1]:
            return _computing(text, _packet(text, match[1], trusted))
        operator = find_op_packet("higher_order", match[1].rpartition(".")[2])
        if not isinstance(operator, HigherOrderOperator):
            raise Unresolved(f"{text!r} is not registered here{_hint(text)}")
        return _computing(text, operator)
    if match := _METHOD.fullmatch(text):
        return match[1]
    name = text.removeprefix("function:")
    if name in functions():
        return functions()[name]
    module, _, path = name.partition(":")
    if module not in trusted.modules:
        raise Unresolved(f"{text!r}: {_LISTED}{_hint(text)}")
    found = own_function(module, path)
    if isinstance(found, str):
        raise Unresolved(f"{text!r}: {found}")
    return found


def _packet(text: str, name: str, trusted: Trusted) -> OpOverloadPacket:
    namespace, _, rest = checked_form(name).partition(".")
    packet = find_op_packet(namespace, rest)
    if not isinstance(packet, OpOverloadPacket):
        raise Unresolved(f"{text!r} is not registered here{_hint(text)}")
    if is_custom(name) and not trusted.operator(name.replace(".", "::", 1)):
        raise Unresolved(f"{text!r} is not an operator of a module that you named{_hint(text)}")
    return packet


def _computing(text: str, operator: Any) -> Any:
    why = operator_problem(operator)
    if why is not None:
        raise Unresolved(f"{text!r}: {why}")
    return operator


def _hint(text: str) -> str:
    function = _FUNCTION.fullmatch(text)
    if function and not may_provide(function[1], function[2]):
        return ", whatever is imported"
    needed = needed_import(text)
    return "" if needed is None else f". Import {needed} first, if you trust it"
