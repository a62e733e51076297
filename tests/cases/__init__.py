"""Small programs that torch 2.13.0's CPU Inductor compiles wrongly, and clean ones that fail a plain tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch

__all__ = ["Case", "case", "cases_in", "normal", "seeded"]

Category = Literal["bug", "noise", "nondeterministic"]
Where = Literal["output", "grad", "mutation", "metadata", "exception"]
Made = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        name: Its name.
        category: ``bug`` must fail, ``noise`` must pass, ``nondeterministic`` must not fail.
        where: What a bug spoils.
        make: Makes the function and fresh, always identical arguments.
        dynamic: Compile with ``dynamic=True``.
        train: Compare gradients too.
        note: What goes on in it.
    """

    name: str
    category: Category
    where: Where
    make: Callable[[], tuple[Any, ...]]
    dynamic: bool
    train: bool
    note: str

    def program(self) -> Made:
        """The function, its positional and its keyword arguments."""
        function, *arguments = self.make()
        return function, tuple(arguments), {}


def case(
    category: Category, where: Where = "output", *, dynamic: bool = False, train: bool = False
) -> Callable[[Callable[[], tuple[Any, ...]]], Case]:
    """Declare a case: the decorated function returns the program and its arguments, its docstring is the note."""

    def declare(make: Callable[[], tuple[Any, ...]]) -> Case:
        return Case(make.__name__, category, where, make, dynamic, train, make.__doc__ or "")

    return declare


def cases_in(module: ModuleType) -> tuple[Case, ...]:
    """All cases that a module declares, in their order."""
    return tuple(value for value in vars(module).values() if isinstance(value, Case))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed values that depend on nothing but the seed."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def seeded(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A module whose weights depend on nothing but this."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return make()
