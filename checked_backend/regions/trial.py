"""A graph with inputs on which a compiler may be wrong: what localizing narrows down and reducing shrinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from checked_backend.options import CheckOptions
from checked_backend.record import Finding
from checked_backend.regions.backend import build_region
from checked_backend.regions.candidate import copy_graph
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.session import collect

__all__ = ["Trial"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A graph, its inputs, and the compiler that is tried on it.

    The graph is run without gradients; a backward pass is a graph of its own.

    Attributes:
        graph: Any FX graph that returns a flat tuple.
        inputs: One value for each placeholder: tensors, numbers. They are never changed.
        options: Name the candidate compiler and its options.
        dynamic: Compile for symbolic sizes.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    options: CheckOptions
    dynamic: bool = False

    def findings(self, *, thorough: bool = False) -> tuple[Finding, ...]:
        """Compile and run the graph, and run it in eager.

        Subjects are ``output[0]``, ...: the position in the graph's tuple. A compiler or a compiled program that raises
        is a finding too.

        Args:
            thorough: Compile the float64 twin for every difference.

        Raises:
            Exception: Whatever the graph raises in eager.
        """
        options = self.options.model_copy(
            update={"on_divergence": "record", "layout": "raise", "localize": False, "ignore": ()}
        )
        backend = partial(_region, options=options, thorough=thorough)
        graph = copy_graph(self.graph)
        with torch.no_grad(), collect(alone=True) as session:
            compiled = torch.compile(graph, backend=backend, dynamic=self.dynamic, fullgraph=True)
            compiled(*copy_values(self.inputs))
        return session.report.findings


def _region(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: CheckOptions, thorough: bool) -> Any:
    return build_region(gm, example_inputs, options, None, thorough=thorough, silent=True)
