"""The source of a user's function, with everything that it refers to, for a script that cannot import it."""

from __future__ import annotations

import ast
import inspect
import math
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from checked_backend._torch.operators import OperatorDefinition, operator_definition
from checked_backend.diagnose.repro.spelling import name_of
from checked_backend.scripts.values import Untranslatable


@dataclass(slots=True)
class Source:
    """The imports, assignments and definitions that functions and classes need, in order.

    Attributes:
        tensors: Tensors that these refer to, and that a script must make.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _imports: dict[str, None] = field(default_factory=dict)
    _assignments: dict[str, str] = field(default_factory=dict)
    _definitions: dict[str, str] = field(default_factory=dict)

    @property
    def imports(self) -> list[str]:
        """Lines for the top of a script that has ``import torch``."""
        return [line for line in self._imports if line != "import torch"]

    @property
    def lines(self) -> list[str]:
        """Assignments and definitions."""
        assigned = [f"{name} = {text}" for name, text in self._assignments.items()]
        return [*assigned, *(f"\n{text}\n" for text in self._definitions.values())]

    def add(self, function: Callable[..., Any]) -> str:
        """Note everything that a function needs, and return its name.

        Args:
            function: A plain function, or a class. It may refer to modules, importable functions of torch, literals,
                tensors, and functions and classes of this kind.

        Raises:
            Untranslatable: It is something else, or refers to something else.
        """
        if not isinstance(function, (types.FunctionType, type)):
            raise Untranslatable(f"what is compiled is a {type(function).__name__}, and no plain function")
        name = function.__name__
        if name in self._definitions:
            return name
        self._definitions[name] = text = _definition(function)
        for other, value in _referred(function, text):
            self._note(other, value)
        del self._definitions[name]
        self._definitions[name] = text  # after the definitions that it needs
        return name

    def add_operator(self, definition: OperatorDefinition) -> str:
        """Note what registers a custom operator, with its fake and its gradient, and return its function's name.

        Raises:
            Untranslatable: The operator needs something else, or refers to something else.
        """
        own = definition.name.partition("::")[2]
        if own in self._definitions:
            return own
        if definition.more:
            raise Untranslatable(f"{definition.name} has {definition.more}")
        parts = {"": definition.function, "_fake": definition.fake, "_backward": definition.backward}
        parts["_setup_context"] = definition.setup
        texts: list[str] = []
        self._definitions[own] = ""
        for suffix, function in parts.items():
            if function is None:
                continue
            if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
                raise Untranslatable(f"{definition.name} is made of what is no plain function, or is wrapped by one")
            text = _definition(function)
            for other, value in _referred(function, text):
                if other != function.__name__:
                    self._note(other, value)
            texts.append(text.replace(f"def {function.__name__}(", f"def {own}{suffix}(", 1).rstrip() + "\n\n")
        given = f"{definition.name!r}, {own}, mutates_args={definition.mutated!r}, schema={definition.schema!r}"
        texts.append(f"{own} = torch.library.custom_op({given})")
        if definition.fake is not None:
            texts.append(f"{own}.register_fake({own}_fake)")
        if definition.backward is not None:
            setup = f", setup_context={own}_setup_context" if definition.setup is not None else ""
            texts.append(f"{own}.register_autograd({own}_backward{setup})")
        del self._definitions[own]
        self._definitions[own] = "\n".join(texts)
        return own

    def _note(self, name: str, value: Any) -> None:
        if (definition := operator_definition(value)) is not None and not isinstance(value, str):
            made = self.add_operator(definition)
            if made != name:
                raise Untranslatable(f"it calls the operator {definition.name} by the name {name}")
        elif isinstance(value, types.ModuleType):
            self._import(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
        elif isinstance(value, torch.Tensor):
            self.tensors[name] = value.detach()
        elif (
            value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
        ):
            self._assignments[name] = repr(value)
        elif isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            self._assignments[name] = str(value)
        elif isinstance(value, (types.FunctionType, type)) and value.__name__ == name and not _is_torchs(value):
            self.add(value)
        elif callable(value) and _is_torchs(value) and (known := name_of(value)) is not None:
            if known.text.startswith("F."):
                self._import("import torch.nn.functional as F")
            if known.module is not None:
                self._import(f"import {known.module}")
            if known.text != name:
                self._assignments[name] = known.text
        else:
            raise Untranslatable(f"it refers to {name}, a {type(value).__name__}")

    def _import(self, line: str) -> None:
        self._imports[line] = None


def _definition(function: types.FunctionType | type) -> str:
    try:
        text = textwrap.dedent(inspect.getsource(function))
        [tree] = ast.parse(text).body
    except (OSError, SyntaxError, TypeError, ValueError):
        raise Untranslatable(f"the source of {function.__name__} is not known") from None
    if not isinstance(tree, (ast.FunctionDef, ast.ClassDef)):
        raise Untranslatable(f"{function.__name__} is no plain function")
    if isinstance(tree, ast.ClassDef):
        return text
    return "\n".join(text.splitlines()[tree.lineno - 1 :])  # without decorators, which may register the function


def _referred(function: types.FunctionType | type, text: str) -> Iterator[tuple[str, Any]]:
    """The names that a function or a class looks up outside itself, with their values."""
    if isinstance(function, type):
        held = vars(sys.modules[function.__module__])
        names = [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
        for method in vars(function).values():
            if isinstance(method, types.FunctionType) and set(method.__code__.co_freevars) - {"__class__"}:
                raise Untranslatable(f"the class {function.__name__} was made in a function")
    else:
        held = function.__globals__
        names = list(_names(function.__code__))
        yield from inspect.getclosurevars(function).nonlocals.items()
    for name in dict.fromkeys(names):
        if name in held:
            yield name, held[name]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_torchs(value: Any) -> bool:
    home = str(getattr(value, "__module__", None) or "torch")
    return home.partition(".")[0] in ("torch", "math", "operator", "builtins")
