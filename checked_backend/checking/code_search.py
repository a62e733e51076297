"""Follow a program's code by the names in it: which variables may it read or change, besides those it is given?

There is one of each function, which reads its module's globals, cells and defaults; a method also reads its class's
attributes. A run has copies of what these variables hold, which are put in place while it runs.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from traceback import walk_stack
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from checked_backend.checking.tree import has_tensors

MISSING = object()
"""The value of a variable that holds nothing."""

_LIBRARIES = sys.stdlib_module_names | {"checked_backend", "functorch", "numpy", "pytest", "_pytest", "sympy", "torch"}
"""Packages whose code and tensors are not the program's."""

_CALLED_UNNAMED = frozenset({"__call__", "forward", "backward", "setup_context", "jvp", "vmap"})
"""Methods that torch calls."""

_ATOMS = (str, bytes, int, float, complex, type(None), ModuleType, torch.Tensor, torch.Generator, torch.dtype)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_CHANGEABLE = (list, set, deque, dict, OrderedDict, defaultdict, Counter)
_METHODS = (FunctionType, staticmethod, classmethod, property)
_WRAPPERS = (MethodType, staticmethod, classmethod, property, functools.cached_property)

_ASSIGNING = frozenset(f"{verb}_{what}" for verb in ("STORE", "DELETE") for what in ("GLOBAL", "DEREF", "ATTR"))

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_MODULES = ("_parameters", "_buffers", "_modules", *_HOOKS)

_DEEPEST = 4
"""How many objects and containers inside of each other are followed."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A place that holds something.

    Attributes:
        owner: The globals of a module or the attributes of a function (a dict), a class, a cell, or a function, whose
            defaults are meant.
        home: Text that distinguishes it from other places of that name.
    """

    owner: Any
    name: str
    home: str

    def get(self) -> Any:
        """The value that it holds, or `MISSING`."""
        if isinstance(self.owner, CellType):
            return content_of(self.owner)
        namespace = vars(self.owner) if isinstance(self.owner, type) else self.owner
        if isinstance(namespace, Mapping):
            return namespace.get(self.name, MISSING)
        return getattr(self.owner, self.name)

    def put(self, value: Any) -> None:
        """Make it hold something else, or nothing."""
        if isinstance(self.owner, dict):
            if value is MISSING:
                self.owner.pop(self.name, None)
            else:
                self.owner[self.name] = value
            return
        name = "cell_contents" if isinstance(self.owner, CellType) else self.name
        if value is MISSING:
            delattr(self.owner, name)
        else:
            setattr(self.owner, name, value)


def content_of(cell: CellType) -> Any:
    """The content of a closure's cell, or `MISSING`."""
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return MISSING


class CodeSearch:
    """Follows what a program may call, and tells what its code may read and change on the way.

    Args:
        holdings: Follow also what modules hold, and not their code alone.

    Attributes:
        names: Names in the code, and words that may be names for ``getattr``.
        assigned: Names of globals, of variables of closures and of attributes that code assigns to.
        variables: The variables that code names, and attributes of classes, by their owner's identity and name.
        holders: Containers and the attributes of objects, each with a name for people.
    """

    def __init__(self, roots: Iterable[Any], *, holdings: bool = True) -> None:
        self.names: set[str] = set()
        self.assigned: set[str] = set()
        self.variables: dict[tuple[int, str], Variable] = {}
        self.holders: list[tuple[Any, str]] = []
        self._holdings = holdings
        self._todo: list[tuple[Any, str, int]] = []
        self._seen: dict[int, Any] = {}  # keeps what it names by identity
        self._members: dict[str, list[Variable]] = {}  # of classes, that no code has named yet
        self._add("", roots)
        while self._todo:
            value, name, depth = self._todo.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._look(value, name, depth)

    def now(self) -> Remembered:
        """What all of it is now."""
        variables = [(variable, variable.get()) for variable in self.variables.values()]
        return Remembered(self, variables, [(holder, name, _items(holder)) for holder, name in self.holders])

    def _add(self, name: str, values: Iterable[Any], depth: int = 0) -> None:
        if depth <= _DEEPEST:
            self._todo += [(value, name, depth) for value in values if not isinstance(value, _ATOMS)]

    def _found(self, variable: Variable) -> None:
        self.variables.setdefault((id(variable.owner), variable.name), variable)
        self._add(f"{variable.home}.{variable.name}", (variable.get(),))

    def _look(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, functools.partial):
            self._add(name, (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, _WRAPPERS) or type(value).__module__ == "functools":  # of a cache
            parts = ("__func__", "__self__", "fget", "fset", "fdel", "func", "__wrapped__")
            self._add(name, (getattr(value, part, None) for part in parts))
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, torch.nn.Module):
            self._module(value, name)
        elif isinstance(value, _CONTAINERS):
            if type(value) in _CHANGEABLE:
                self.holders.append((value, name))
            # its class may import what it gives
            kind: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))
            values = dict.values(value) if isinstance(value, dict) else kind.__iter__(value)
            self._add(name, [*values], depth + 1)
        elif isinstance(value, SimpleNamespace) or not is_library(type(value).__module__):
            self._add("", (type(value),))
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                self.holders.append((attributes, f"the attributes of {name}"))
                for key, inner in tuple(attributes.items()):
                    self._add(f"{name}.{key}", (inner,), depth + 1)

    def _module(self, module: torch.nn.Module, name: str) -> None:
        """Follow the code of a module and of those inside of it, their hooks, and what they call by attributes."""
        for each in module.modules():
            self._add("", (type(each),))
            if not self._holdings:
                continue
            self._add(name, (inner for key, inner in vars(each).items() if key not in _OF_MODULES), 1)
            self._add(name, (hook for key in _HOOKS for hook in vars(each).get(key, {}).values()))

    def _class(self, kind: type) -> None:
        for owner in kind.__mro__:
            if is_library(owner.__module__) or (owner is not kind and id(owner) in self._seen):
                continue
            self._seen[id(owner)] = owner
            for name, member in tuple(vars(owner).items()):
                special = name.startswith("__")
                if special and not isinstance(member, _METHODS):
                    continue
                unnamed = name in _CALLED_UNNAMED or (special and not is_installed(owner.__module__))
                variable = Variable(owner, name, owner.__qualname__)
                if unnamed or name in self.names:
                    self._member(variable)
                else:
                    self._members.setdefault(name, []).append(variable)

    def _member(self, variable: Variable) -> None:
        if isinstance(member := variable.get(), _METHODS):
            self._add("", (member,))
        else:
            self._found(variable)

    def _function(self, function: FunctionType) -> None:
        home, code, namespace = function.__qualname__, function.__code__, function.__globals__
        library, is_ours = is_library(namespace.get("__name__")), _root(namespace.get("__name__")) == "checked_backend"
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            variable = Variable(cell, name, home)
            content = variable.get()
            # a wrapper calls it, or hands it on; what one of this package's holds besides is not the program's
            if not library or callable(content) or (has_tensors(content) and not is_ours):
                self._found(variable)
        if library:
            return
        for name in ("__defaults__", "__kwdefaults__"):
            self._found(Variable(function, name, home))
        for name in tuple(vars(function)):
            self._found(Variable(vars(function), name, home))
        new = _names_in(code) - self.names
        self.names |= new
        for instruction, names in _names_by_instruction(code).items():
            if instruction in _ASSIGNING:
                self.assigned.update(names)
            if "GLOBAL" in instruction or instruction in ("LOAD_NAME", "IMPORT_NAME"):
                for name in names:
                    self._global(Variable(namespace, name, str(namespace.get("__name__") or function.__module__)), code)
        for name in new:
            for variable in self._members.pop(name, ()):
                self._member(variable)

    def _global(self, variable: Variable, code: CodeType) -> None:
        """A global, or a module that is imported inside of a function."""
        value = variable.owner.get(variable.name, sys.modules.get(variable.name, MISSING))
        if not isinstance(value, ModuleType):
            self._found(variable)
        elif not is_library(value.__name__):
            for name in _names_in(code):
                inner = Variable(vars(value), name, value.__name__)
                if not isinstance(inner.get(), ModuleType):
                    self._found(inner)


@contextmanager
def put_in_place(copies: list[tuple[Variable, Any]]) -> Iterator[None]:
    """A block with a run's copies in their variables. What the program leaves there is in the list after it."""
    before = [(variable, variable.get()) for variable, _ in copies]
    try:
        for variable, copy in copies:
            variable.put(copy)
        yield
    finally:
        copies[:] = [(variable, variable.get()) for variable, _ in copies]
        for variable, original in before:
            variable.put(original)


@functools.lru_cache(maxsize=4096)
def _names_by_instruction(code: CodeType) -> Mapping[str, Collection[str]]:
    """The names in a function's code, and in that of functions inside of it, by the instructions that have them."""
    found: dict[str, dict[str, None]] = {}
    for each in _codes_of(code):
        for one in dis.get_instructions(each):
            if isinstance(one.argval, str):
                found.setdefault(one.opname, {})[one.argval] = None
    return found


def _names_in(code: CodeType) -> set[str]:
    """Names, and words that may be names for ``getattr``."""
    codes = list(_codes_of(code))
    words = {constant for each in codes for constant in each.co_consts if isinstance(constant, str)}
    return words.union(*(each.co_names for each in codes))


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)


def is_library(module: object) -> bool:
    """Whether a module, by its name, is of Python, torch or this package."""
    return _root(module) in _LIBRARIES


def _root(module: object) -> str:
    return str(module).partition(".")[0]


def is_installed(module: str) -> bool:
    """Whether a module belongs to an installed package. Such code seldom reads globals that require grad."""
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a program's code could change, as it was at one moment."""

    reached: CodeSearch
    variables: Sequence[tuple[Variable, Any]]
    holders: Sequence[tuple[Any, str, list[Any]]]

    @contextmanager
    def in_place(self, tell: Callable[[str], None]) -> Iterator[None]:
        """A block in which all of it is as at that moment, and after which it is as before the block.

        Args:
            tell: Receives the name of what changed and stays so, because other threads of the program may use it.
        """
        before = self.reached.now()
        self._put(tell)
        try:
            yield
        finally:
            before._put(tell)

    def _put(self, tell: Callable[[str], None]) -> None:
        changed: list[tuple[str, Callable[[], None]]] = []
        for variable, value in self.variables:
            if variable.get() is not value:
                changed.append((f"{variable.home}.{variable.name}", partial(variable.put, value)))
        for holder, name, items in self.holders:
            now = _items(holder)
            if len(items) != len(now) or any(a is not b for a, b in zip(items, now, strict=True)):
                changed.append((name, partial(_fill, holder, items)))
        others = bool(changed) and other_threads()
        for name, undo in changed:
            if others:
                tell(name)
            else:
                undo()


def _items(holder: Any) -> list[Any]:
    return [each for pair in holder.items() for each in pair] if isinstance(holder, dict) else list(holder)


def _fill(holder: Any, items: Sequence[Any]) -> None:
    holder.clear()
    if isinstance(holder, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):
            holder[key] = value
    elif isinstance(holder, set):
        holder.update(items)
    else:
        holder.extend(items)


def other_threads() -> bool:
    """Whether other threads run code of the program. Those of libraries, as a compiler's, do not change its objects."""
    stacks = [walk_stack(top) for number, top in sys._current_frames().items() if number != threading.get_ident()]
    names = (str(frame.f_globals.get("__name__")) for frame, _ in chain.from_iterable(stacks))
    return not all(is_library(name) or is_installed(name) for name in names)
