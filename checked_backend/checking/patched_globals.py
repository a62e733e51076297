"""Have code that is not copied find a run's copies of tensors in its own places while that run's program runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from checked_backend.checking.code_search import CodeSearch, Variable
from checked_backend.checking.tree import has_tensors

__all__ = ["PatchedGlobals", "TensorVariables"]


class TensorVariables(CodeSearch):
    """The variables with tensors that a program's code may read, besides those of its own copies.

    Code is followed by the names in it, so it may never read some of these.
    """

    def __init__(self, roots: Iterable[Any], ours: Collection[int]) -> None:
        """Search.

        Args:
            roots: The copied function or module, and arguments that may be called.
            ours: The identities of copies, whose contents need no other copy.
        """
        super().__init__()
        self.variables: dict[tuple[int, str], Variable] = {}
        self._ours = ours
        self.follow(roots)

    def variable(self, variable: Variable, value: Any) -> None:
        """Note a variable with tensors."""
        if id(variable.owner) not in self._ours and id(value) not in self._ours and has_tensors(value):
            self.variables.setdefault((id(variable.owner), variable.name), variable)


class PatchedGlobals:
    """Puts a run's copies into variables while the run is active."""

    def __init__(self, copies: Sequence[tuple[Variable, Any]]) -> None:
        self._copies = copies

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the copies into their places. Values that the program leaves there are kept for the next time."""
        before = [(variable, variable.get()) for variable, _ in self._copies]
        try:
            for variable, copy in self._copies:
                variable.put(copy)
            yield
        finally:
            self._copies = [(variable, variable.get()) for variable, _ in self._copies]
            for variable, original in before:
                variable.put(original)
