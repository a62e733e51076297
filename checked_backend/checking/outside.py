"""Places outside of a program's functions where code that is not copied finds tensors.

A copy of a function has globals and closures of its own. A method belongs to its class, of which there is one: it reads
its module's globals, the class's attributes, cells and defaults. So do functions of other modules. While a run's
program runs, those places hold the run's copies.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

__all__ = ["Outside", "Place", "codes_of", "is_installed", "is_library", "places_outside"]

_LIBRARIES = sys.stdlib_module_names | {"checked_backend", "functorch", "numpy", "pytest", "_pytest", "sympy", "torch"}
"""Packages whose code and tensors are not the program's."""

_CALLED_UNNAMED = frozenset({"__call__", "forward", "backward", "setup_context", "jvp", "vmap"})
"""Methods that torch calls."""

_NEVER_CALLED = frozenset({"__class__", "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"})

_ATOMS = (str, bytes, int, float, complex, type(None), ModuleType, torch.Tensor, torch.Generator, torch.dtype)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_MODULES = ("_parameters", "_buffers", "_modules", *_HOOKS)

_DEEPEST = 4
"""How many objects and containers inside of each other are searched for something that can be called."""

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Place:
    """A place that holds something.

    Attributes:
        owner: The globals of a module or the attributes of a function (a dict), a class, a cell, or a function, whose
            defaults are meant.
        name: The name there.
        home: Text that distinguishes it from other places of that name.
    """

    owner: Any
    name: str
    home: str

    def get(self) -> Any:
        """The value that it holds, or a mark if it holds nothing."""
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, _MISSING)
        if isinstance(self.owner, CellType):
            try:
                return self.owner.cell_contents
            except ValueError:  # a variable that is not assigned yet
                return _MISSING
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.name, _MISSING)
        return getattr(self.owner, self.name)

    def put(self, value: Any) -> None:
        """Make it hold something else."""
        if isinstance(self.owner, dict):
            if value is _MISSING:
                self.owner.pop(self.name, None)
            else:
                self.owner[self.name] = value
        elif isinstance(self.owner, CellType):
            if value is _MISSING:
                del self.owner.cell_contents
            else:
                self.owner.cell_contents = value
        elif value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Outside:
    """Puts a run's copies into the places outside while the run is active."""

    def __init__(self, copies: Sequence[tuple[Place, Any]]) -> None:
        self._places = [place for place, _ in copies]
        self._mine = [copy for _, copy in copies]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the copies into their places. Values that the program leaves there are kept for the next time."""
        before = [place.get() for place in self._places]
        try:
            for place, mine in zip(self._places, self._mine, strict=True):
                place.put(mine)
            yield
        finally:
            self._mine = [place.get() for place in self._places]
            for place, original in zip(self._places, before, strict=True):
                place.put(original)


def places_outside(
    roots: Iterable[Any], holds_tensors: Callable[[Any], bool], is_ours: Callable[[Any], bool]
) -> list[Place]:
    """The places with tensors that a program's code may read, besides those of its own copies.

    Code is followed by the names in it, so it may never read some of these places.

    Args:
        roots: The copied function or module, and arguments that may be called.
        holds_tensors: Whether a value holds tensors, modules or generators.
        is_ours: Whether an object is a copy, whose contents need no other copy.
    """
    return _Search(holds_tensors, is_ours).run(roots)


class _Search:
    """Follows code by the names in it."""

    def __init__(self, holds_tensors: Callable[[Any], bool], is_ours: Callable[[Any], bool]) -> None:
        self._holds_tensors = holds_tensors
        self._is_ours = is_ours
        self._places: dict[tuple[int, str], Place] = {}
        self._todo: list[tuple[Any, int]] = []
        self._seen: dict[int, Any] = {}  # keeps what it names by identity
        self._names: set[str] = set()
        self._members: dict[str, list[Any]] = {}

    def run(self, roots: Iterable[Any]) -> list[Place]:
        self._add(roots, 0)
        while self._todo:
            value, depth = self._todo.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._look(value, depth)
        return list(self._places.values())

    def _add(self, values: Iterable[Any], depth: int = 0) -> None:
        if depth <= _DEEPEST:
            self._todo += [(value, depth) for value in values if not isinstance(value, _ATOMS)]

    def _look(self, value: Any, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self._add((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._add((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, (staticmethod, classmethod)):
            self._add((value.__func__,))
        elif isinstance(value, property):
            self._add((value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.cached_property):
            self._add((value.func,))
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, torch.nn.Module):
            for module in value.modules():
                self._add((type(module),))
                self._add((inner for name, inner in vars(module).items() if name not in _OF_MODULES), 1)
                self._add(hook for name in _HOOKS for hook in vars(module).get(name, {}).values())
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            self._add(value, depth + 1)
        elif isinstance(value, dict):
            self._add(value.values(), depth + 1)
        else:
            self._object(value, depth)

    def _object(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind.__module__ == "functools":  # of a cache
            self._add((getattr(value, "__wrapped__", None),))
        elif not is_library(kind.__module__):
            self._add((kind,))
            attributes = getattr(value, "__dict__", None)
            self._add(attributes.values() if isinstance(attributes, dict) else (), depth + 1)

    def _class(self, kind: type) -> None:
        for owner in kind.__mro__:
            if is_library(owner.__module__) or (owner is not kind and id(owner) in self._seen):
                continue
            self._seen[id(owner)] = owner
            for name, member in vars(owner).items():
                if name in _NEVER_CALLED:
                    continue
                place = Place(owner, name, owner.__qualname__)
                unnamed = name in _CALLED_UNNAMED or (name.startswith("__") and not is_installed(owner.__module__))
                if name in self._names or unnamed:
                    self._member(place, member)
                else:
                    self._members.setdefault(name, []).append((place, member))

    def _member(self, place: Place, member: Any) -> None:
        if not isinstance(member, (FunctionType, staticmethod, classmethod, property)):
            self._note(place, member)
        self._add((member,))

    def _function(self, function: FunctionType) -> None:
        library = is_library(function.__globals__.get("__name__"))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = Place(cell, name, function.__qualname__)
            if (content := place.get()) is not _MISSING:
                if not library:
                    self._note(place, content)
                self._add((content,))
        if library:
            return
        for name in ("__defaults__", "__kwdefaults__"):
            if (defaults := getattr(function, name)) is not None:
                self._note(Place(function, name, function.__qualname__), defaults)
                self._add((defaults,))
        self._attributes(vars(function), function.__qualname__, vars(function))
        for code in codes_of(function.__code__):
            self._code(code, function)
        self._reach(self._new_names(function.__code__))

    def _code(self, code: CodeType, function: FunctionType) -> None:
        namespace = function.__globals__
        module = str(namespace.get("__name__") or function.__module__)
        for name in code.co_names:
            value = namespace.get(name, _MISSING)
            if value is _MISSING:
                imported = sys.modules.get(name)  # inside of the function
                if isinstance(imported, ModuleType) and not is_library(name):
                    self._attributes(vars(imported), name, code.co_names)
            elif isinstance(value, ModuleType):
                if not is_library(value.__name__):
                    self._attributes(vars(value), value.__name__, code.co_names)
            else:
                self._global(Place(namespace, name, module), value, code)

    def _global(self, place: Place, value: Any, code: CodeType) -> None:
        if self._is_ours(place.owner) or not self._holds_tensors(value):
            self._add((value,))
        elif place.name in _globals_read(code):  # not an attribute of that name
            self._note(place, value)
            self._add((value,))

    def _attributes(self, owner: dict[str, Any], home: str, names: Iterable[str]) -> None:
        """The values of a module or a function under some names."""
        for name in names:
            if (value := owner.get(name, _MISSING)) is not _MISSING:
                self._note(Place(owner, name, home), value)
                self._add((value,))

    def _note(self, place: Place, value: Any) -> None:
        if not self._is_ours(place.owner) and not self._is_ours(value) and self._holds_tensors(value):
            self._places.setdefault((id(place.owner), place.name), place)

    def _new_names(self, code: CodeType) -> set[str]:
        """Names, and words that may be names for ``getattr``."""
        found: set[str] = set()
        for each in codes_of(code):
            found.update(each.co_names)
            found.update(constant for constant in each.co_consts if isinstance(constant, str))
        new = found - self._names
        self._names |= new
        return new

    def _reach(self, names: Iterable[str]) -> None:
        for name in names:
            for place, member in self._members.pop(name, ()):
                self._member(place, member)


def is_library(module: object) -> bool:
    """Whether a module, by its name, is of Python, torch or this package."""
    return str(module).partition(".")[0] in _LIBRARIES


def is_installed(module: str) -> bool:
    """Whether a module belongs to an installed package. Such code seldom reads globals that require grad."""
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def _globals_read(code: CodeType) -> frozenset[str]:
    return frozenset(
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
