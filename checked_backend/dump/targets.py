"""Convert the target of a node to text and back. Only names on a list and operators registered here are allowed.

A dump may come from a stranger. Its text is never imported, evaluated or looked up by attribute. It is a key of a table
of functions that compute, or the name of an operator in torch's own registry. Of a module that the user names with
``--import`` it may call the module's own operators and functions, and neither names that the module merely imports, nor
anything behind an attribute: ``from os import system`` in the module gives a dump no shell.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from checked_backend._torch.operators import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    custom_op_module,
    find_op_packet,
    registration_file,
)
from checked_backend.dump.allowed import (
    checked_form,
    function_names,
    functions,
    is_allowed_method,
    is_custom,
    operator_problem,
    refusal_by_name,
)

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
_PATH = rf"{_NAME}(?:\.{_NAME}){{0,20}}"
_TARGET = re.compile(
    rf"op:(?P<operator>{_NAME}\.{_NAME})\.(?P<overload>{_NAME})|packet:(?P<packet>{_NAME}\.{_NAME})"
    rf"|higher_order:(?P<higher_order>{_NAME})|method:(?P<method>{_NAME})|function:(?P<module>{_PATH}):(?P<function>{_PATH})"
)
_EMPTY = r"(?:empty|empty_like|empty_strided|empty_permuted|new_empty|new_empty_strided)"
_UNINITIALIZED = re.compile(
    rf"op:(?:aten|prims)\.{_EMPTY}\.\w+|packet:(?:aten|prims)\.{_EMPTY}|function:torch[\w.]*:{_EMPTY}|method:{_EMPTY}"
)
_LISTED = "it is not among the functions of torch and Python that a dump may call"
_NEVER = ("torch", "checked_backend", "builtins", *sys.stdlib_module_names)


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
        return self.operators is None or _registers(name, self.modules, self.operators)


def encode_target(op: str, target: Any) -> str:
    """The text of the target of a node with this opcode.

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
    """The module that must be imported before a target can be resolved or run; None if torch is enough."""
    match = _TARGET.fullmatch(text)
    name = match and (match["operator"] or match["packet"])
    if name and is_custom(name):
        return custom_op_module(name.replace(".", "::", 1)) or f"the module that registers {name.partition('.')[0]}::"
    return match["module"] if match and text.removeprefix("function:") not in functions() else None


def known_function(function: Any) -> str | None:
    """``module:name`` of a function that a dump may call; None for any other function."""
    return function_names().get(function) if callable(function) and type(function).__hash__ is not None else None


def is_importable(text: str, target: Any) -> bool:
    """Whether a function's text, from `encode_target`, leads to it again in a process that imports its module."""
    match = _TARGET.fullmatch(text)
    if match is None or match["function"] is None:
        return False
    value: Any = sys.modules.get(match["module"])
    for step in match["function"].split("."):
        value = getattr(value, step, None)
    return value is target


def leaves_uninitialized(text: str) -> bool:
    """Whether a target's result is uninitialised memory."""
    return _UNINITIALIZED.fullmatch(text) is not None


def checked_target(text: str) -> re.Match[str]:
    """The parts of a target that a dump may call, whether or not it is registered here.

    Raises:
        Unresolved: The text is no target, or a forbidden one.
    """
    match = _TARGET.fullmatch(text)
    if match is None:
        why: str | None = "it names no operator, function or method"
    elif match["method"]:
        why = None if is_allowed_method(match["method"]) else "a dump may not call this method"
    elif match["function"]:
        torchs = _top(match["module"]) == "torch" and text.removeprefix("function:") not in functions()
        why = f"a dump may not call this function; {_LISTED}" if torchs else None
    else:
        why = refusal_by_name(match["operator"] or match["packet"] or match["higher_order"])
    if match is None or why is not None:
        raise Unresolved(f"{text[:300]!r}: {why}")
    return match


def resolve_target(text: str, trusted: Trusted | None = None) -> Any:
    """The target for a text of `encode_target`. By default every operator that this program registered is trusted.

    Raises:
        Unresolved: The target is not registered here, or a dump may not call it.
    """
    match = checked_target(text)
    trusted = trusted or Trusted()
    if match["method"]:
        return match["method"]
    if match["function"]:
        return _function(text, match["module"], match["function"], trusted)
    name = match["operator"] or match["packet"]
    found: Any = find_op_packet(*(checked_form(name).split(".") if name else ("higher_order", match["higher_order"])))
    if match["overload"]:
        known = isinstance(found, OpOverloadPacket) and match["overload"] in found.overloads()
        found = getattr(found, match["overload"]) if known else None
    if not isinstance(found, (OpOverload, OpOverloadPacket) if name else HigherOrderOperator):
        raise Unresolved(f"{text!r} is not registered here{_hint(text)}")
    if name and is_custom(name) and not trusted.operator(name.replace(".", "::", 1)):
        raise Unresolved(f"{text!r} is not an operator of a module that you named{_hint(text)}")
    why = operator_problem(found)
    if why is not None:
        raise Unresolved(f"{text!r}: {why}")
    return found


def provides_nothing(module: str) -> bool:
    """Whether naming a module allows nothing more. Of torch and Python, a dump may call only the listed functions."""
    return _top(module) in _NEVER and module != "__main__"


def _function(text: str, module: str, name: str, trusted: Trusted) -> Callable[..., Any]:
    known = functions().get(f"{module}:{name}")
    if known is not None:
        return known
    if module not in trusted.modules:
        raise Unresolved(f"{text!r}: {_LISTED}{_hint(text)}")
    found = _own_function(module, name)
    if isinstance(found, str):
        raise Unresolved(f"{text!r}: {found}")
    return found


def _own_function(module: str, name: str) -> Callable[..., Any] | str:
    """A function that a module defines itself; or the reason why there is none, as the end of a sentence."""
    if provides_nothing(module):
        return f"of {module}, a dump may call what is on the list only"
    home = sys.modules.get(module)
    found = vars(home).get(name) if isinstance(home, ModuleType) else None
    if found is None:
        return f"{module} has no function {name!r}"
    if name.startswith("__") or not isinstance(found, FunctionType):
        return f"{module}.{name} is no plain function"
    # A decorator may wrap the function, but the function inside must be the module's own. Its ``__module__`` does not
    # show that: numpy.load, which opens files, has the ``__module__`` numpy.
    namespace = getattr(inspect.unwrap(found), "__globals__", {})
    if found.__module__ != module or found.__qualname__ != name or namespace is not vars(home):
        return f"{module}.{name} is defined elsewhere, in {namespace.get('__name__', found.__module__)}"
    return found


def _registers(name: str, imported: Collection[str], new: Collection[str]) -> bool:
    """Whether one of the modules that the user named registered the operator ``namespace::name``.

    Args:
        new: The operators that were registered while the modules were imported.
    """
    home = custom_op_module(name)
    if home is not None:
        return any(_top(home) == _top(module) for module in imported)
    file = registration_file(name)
    if file.endswith(".py") and not _is_in_package(file, "torch"):
        return any(_is_in_package(file, _top(module)) or _is_file_of(file, module) for module in imported)
    # registered in C++, or by torch for another module: its owner is unknown, but not when it was registered
    return name in new or any(_plain(name.partition("::")[0]) == _plain(_top(module)) for module in imported)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _is_in_package(file: str, package: str) -> bool:
    return any(Path(file).is_relative_to(path) for path in getattr(sys.modules.get(package), "__path__", ()))


def _is_file_of(file: str, module: str) -> bool:
    own = getattr(sys.modules.get(module), "__file__", None)
    return own is not None and Path(own) == Path(file)


def _hint(text: str) -> str:
    match = _TARGET.fullmatch(text)
    if match and match["function"]:
        name = match["function"]
        if provides_nothing(match["module"]) or "." in name or name.startswith("__"):
            return ", whatever is imported"
    needed = needed_import(text)
    return "" if needed is None else f". Import {needed} first, if you trust it"
