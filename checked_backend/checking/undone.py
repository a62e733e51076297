"""Take back what a run changes outside of its copies.

A copy of a program finds objects, classes and modules by global names, and there is one of each. A counter there would
count each run. What code reaches by the names in it is therefore remembered, and put back after the run.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from checked_backend.checking.outside import Place, codes_of, is_installed, is_library

__all__ = ["Reached", "Remembered", "reached_by"]

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)
_ATOMS = (str, bytes, int, float, complex, type(None), torch.Tensor, torch.Generator, torch.dtype)

_DEEPEST = 4
"""How many objects and containers inside of each other are followed."""


@dataclass(frozen=True, slots=True)
class Reached:
    """What a program's code can change without being given it.

    Attributes:
        places: Variables of modules and closures, and attributes of classes.
        holders: Containers and the attributes of objects, each with a name for people.
        names: The names in the program's code.
    """

    places: Sequence[Place]
    holders: Sequence[tuple[Any, str]]
    names: frozenset[str] = frozenset()

    def now(self) -> Remembered:
        """What all of it is now."""
        places = [(place, place.get()) for place in self.places]
        return Remembered(self, places, [(holder, name, _items(holder)) for holder, name in self.holders])


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a program's code could change, as it was at one moment.

    Attributes:
        reached: What it can change.
        places: The places, each with its value.
        holders: The containers, each with a name for people and its items.
    """

    reached: Reached
    places: Sequence[tuple[Place, Any]]
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
        put = tell if _other_threads() else None
        for place, value in self.places:
            if place.get() is not value:
                _either(put, f"{place.home}.{place.name}", partial(place.put, value))
        for holder, name, items in self.holders:
            if not _same(items, _items(holder)):
                _either(put, name, partial(_fill, holder, items))


def reached_by(function: Callable[..., Any]) -> Reached:
    """Follow a program's code by the names in it.

    Args:
        function: The function or module.
    """
    search = _Search()
    search.follow(function, "", 0)
    return Reached(list(search.places.values()), search.holders, frozenset(search.names))


class _Search:
    def __init__(self) -> None:
        self.places: dict[tuple[int, str], Place] = {}
        self.holders: list[tuple[Any, str]] = []
        self.names: set[str] = set()
        self._seen: dict[int, Any] = {}  # keeps what it names by identity
        self._todo: list[tuple[Any, str, int]] = []

    def follow(self, value: Any, name: str, depth: int) -> None:
        self._todo.append((value, name, depth))
        while self._todo:
            value, name, depth = self._todo.pop()
            if isinstance(value, (*_ATOMS, ModuleType)) or id(value) in self._seen or depth > _DEEPEST:
                continue
            self._seen[id(value)] = value
            self._look(value, name, depth)

    def _look(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self._add(((value.__func__, name), (value.__self__, name)), 0)
        elif isinstance(value, partial):
            self._add(((each, name) for each in (value.func, *value.args, *value.keywords.values())), 0)
        elif isinstance(value, (staticmethod, classmethod)):
            self._add([(value.__func__, name)], 0)
        elif isinstance(value, property):
            self._add(((each, name) for each in (value.fget, value.fset)), 0)
        elif isinstance(value, type):
            self._class(value)
        elif type(value).__module__ == "functools":  # of a cache
            self._add([(getattr(value, "__wrapped__", None), name)], 0)
        elif isinstance(value, torch.nn.Module):  # it is copied, and its code is not
            for module in value.modules():
                self._add([(type(module), "")], 0)
        elif type(value) in (*_MAPPINGS, *_SEQUENCES, set, tuple):
            if not isinstance(value, tuple):
                self.holders.append((value, name))
            inner = value.values() if isinstance(value, dict) else value
            self._add(((each, name) for each in tuple(inner)), depth + 1)
        elif type(value) is SimpleNamespace or (not is_library(type(value).__module__) and _attributes(value)):
            self.holders.append((_attributes(value), f"the attributes of {name}"))
            self._add(((each, f"{name}.{key}") for key, each in tuple(_attributes(value).items())), depth + 1)
            self._add([(type(value), "")], 0)

    def _add(self, values: Iterable[tuple[Any, str]], depth: int) -> None:
        self._todo += [(value, name, depth) for value, name in values]

    def _function(self, function: FunctionType) -> None:
        library = is_library(function.__globals__.get("__name__"))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = Place(cell, name, function.__qualname__)
            content = place.get()
            if not library:
                self.places[id(cell), ""] = place
                self._add([(content, name)], 0)
            elif isinstance(content, (FunctionType, MethodType)):  # that a wrapper calls
                self._add([(content, name)], 0)
        if library:
            return
        for defaults in (function.__defaults__ or (), (function.__kwdefaults__ or {}).values()):
            self._add(((each, f"a default of {function.__qualname__}") for each in defaults), 1)
        namespace = function.__globals__
        for code in codes_of(function.__code__):
            self.names.update(code.co_names)
            for name in code.co_names:
                self._named(namespace, name, code.co_names)

    def _named(self, namespace: dict[str, Any], name: str, names: Sequence[str]) -> None:
        """A name in a function's code, which may also be that of an attribute."""
        home = str(namespace.get("__name__"))
        place = Place(namespace, name, home)
        value = namespace[name] if name in namespace else sys.modules.get(name)
        if not isinstance(value, ModuleType):
            self.places[id(namespace), name] = place
            self._add([(value, f"{home}.{name}")], 0)
        elif not is_library(value.__name__):
            for attribute in names:
                inner = vars(value).get(attribute)
                if not isinstance(inner, ModuleType):
                    self.places[id(vars(value)), attribute] = Place(vars(value), attribute, value.__name__)
                    self._add([(inner, f"{value.__name__}.{attribute}")], 0)

    def _class(self, kind: type) -> None:
        for owner in kind.__mro__:
            if is_library(owner.__module__) or (owner is not kind and id(owner) in self._seen):
                continue
            self._seen[id(owner)] = owner
            for name, member in tuple(vars(owner).items()):
                if name.startswith("__") and not isinstance(member, FunctionType):
                    continue
                if not isinstance(member, (FunctionType, staticmethod, classmethod, property)):
                    self.places[id(owner), name] = Place(owner, name, owner.__qualname__)
                self._add([(member, f"{owner.__qualname__}.{name}")], 0)


def _attributes(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _items(holder: Any) -> list[Any]:
    return [each for pair in holder.items() for each in pair] if isinstance(holder, dict) else list(holder)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _fill(holder: Any, items: Sequence[Any]) -> None:
    holder.clear()
    if isinstance(holder, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):
            holder[key] = value
    elif isinstance(holder, set):
        holder.update(items)
    else:
        holder.extend(items)


def _either(tell: Callable[[str], None] | None, name: str, undo: Callable[[], None]) -> None:
    if tell is None:
        undo()
    else:
        tell(name)


def _other_threads() -> bool:
    """Whether other threads run code of the program. Those of libraries, as a compiler's, do not change its objects."""
    frames: Mapping[int, FrameType] = sys._current_frames()
    return any(_is_of_program(frame) for number, frame in frames.items() if number != threading.get_ident())


def _is_of_program(frame: FrameType | None) -> bool:
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not is_library(name) and not is_installed(name):
            return True
        frame = frame.f_back
    return False
