"""Decide what a dump may call of a module that the user names with ``--import``: its own operators and functions.

A dump may not call names that the module merely imports, nor anything behind an attribute: ``from os import system`` in
the module gives a dump no shell.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from checked_backend._torch.operators import custom_op_module, registration_file

__all__ = ["may_provide", "own_function", "provides_nothing", "registers"]

_NEVER = ("torch", "checked_backend", "builtins", *sys.stdlib_module_names)


def provides_nothing(module: str) -> bool:
    """Whether naming a module allows nothing more. Of torch and Python, a dump may call only the listed functions."""
    return module.partition(".")[0] in _NEVER and module != "__main__"


def may_provide(module: str, name: str) -> bool:
    """Whether a dump could call a function of this name, if the user named the module."""
    return not provides_nothing(module) and "." not in name and not name.startswith("__")


def own_function(module: str, name: str) -> Callable[..., Any] | str:
    """A function that a module defines itself; or the reason why there is none, as the end of a sentence.

    Args:
        module: The module's name, which the user gave.
    """
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


def registers(name: str, imported: Collection[str], new: Collection[str]) -> bool:
    """Whether one of the modules that the user named registered an operator.

    Args:
        name: ``namespace::name``.
        imported: The modules.
        new: The operators that were registered while they were imported.
    """
    home = custom_op_module(name)
    if home is not None:
        return any(_belongs(home, module) for module in imported)
    file = registration_file(name)
    if file.endswith(".py") and not _is_torchs(file):
        return any(_has_file(module, file) for module in imported)
    # registered in C++, or by torch for another module: its owner is unknown, but not when it was registered
    return name in new or any(_plain(name.partition("::")[0]) == _plain(_top(module)) for module in imported)


def _belongs(home: str, module: str) -> bool:
    return _top(home) == _top(module)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _is_torchs(file: str) -> bool:
    return any(file == str(where) or file.startswith(f"{where}/") for where in _folders("torch"))


def _has_file(module: str, file: str) -> bool:
    own = getattr(sys.modules.get(module), "__file__", None)
    inside = any(file.startswith(f"{where}/") for where in _folders(_top(module)))
    return inside or (own is not None and Path(own) == Path(file))


def _folders(package: str) -> list[Path]:
    return [Path(path) for path in getattr(sys.modules.get(package), "__path__", ())]
