"""Take back what a run changes outside of its copies.

A copy of a program finds objects, classes and modules by global names, and there is one of each. A counter there would
count each run. What code reaches by the names in it is therefore remembered, and put back after the run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from checked_backend.checking.code_search import CodeSearch, Variable, is_installed, is_library


class SideEffects(CodeSearch):
    """What a program's code can change without being given it. What modules hold is copied."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__([function], holdings=False)

    def now(self) -> Remembered:
        """What all of it is now."""
        variables = [(variable, variable.get()) for variable, _ in self.variables.values()]
        return Remembered(self, variables, [(holder, name, _items(holder)) for holder, name in self.holders])


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a program's code could change, as it was at one moment."""

    reached: SideEffects
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
        others = bool(changed) and _other_threads()
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


def _other_threads() -> bool:
    """Whether other threads run code of the program. Those of libraries, as a compiler's, do not change its objects."""
    return any(
        _is_of_program(frame) for number, frame in sys._current_frames().items() if number != threading.get_ident()
    )


def _is_of_program(frame: FrameType | None) -> bool:
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not is_library(name) and not is_installed(name):
            return True
        frame = frame.f_back
    return False
