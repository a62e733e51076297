"""Run the graphs that Inductor lowered a region to, operator by operator, where the region would call its kernels.

In float64 this shows what decompositions and graph passes made of the region, without its roundings and without
another compile. The kernels themselves are checked as they run, each by itself (`in_place`).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import fx

from checked_backend._torch.generated_modules import GeneratedModule
from checked_backend._torch.modes import dispatch_modes
from checked_backend._torch.settings import without_autocast
from checked_backend.regions.operator_check.recorder import Change, code_of, exchanged

_NAME = "checked_backend_graph"


@dataclass(frozen=True, slots=True)
class LoweredRegion:
    """A region whose generated code can be replaced by the graphs that it was generated from.

    Attributes:
        modules: The code of the region, forward and backward.
    """

    region: Callable[..., Any]
    modules: Sequence[GeneratedModule]

    @contextmanager
    def interpreted(self, mode: AbstractContextManager[Any]) -> Iterator[None]:
        """Run graphs in place of generated code in this block, wherever a dispatch mode is active.

        Other threads go on calling kernels. A backward pass takes the mode along to its own threads.
        """
        changes = [
            Change(function, partial(_code, function, definition), _Graph(module.graph, mode), _Graph(module.graph))
            for module in self.modules
            for function, definition in module.functions
            if definition.name == "call"
        ]
        with exchanged(_NAME, changes):
            yield


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph as generated code sees it.

    Attributes:
        mode: The dispatch mode under which it runs; None: it runs nowhere.
    """

    graph: fx.GraphModule
    mode: AbstractContextManager[Any] | None = None

    def runs_here(self) -> bool:
        return any(mode is self.mode for mode in dispatch_modes())

    def run(self, arguments: list[Any]) -> Any:
        with without_autocast():
            return fx.Interpreter(self.graph).boxed_run(arguments)


def _code(function: FunctionType, definition: ast.FunctionDef) -> CodeType:
    changed = copy.deepcopy(definition)
    run = f"if {_NAME}.runs_here():\n    return {_NAME}.run({definition.args.args[-1].arg})"
    changed.body[:0] = ast.parse(run).body
    return code_of(function, changed)
