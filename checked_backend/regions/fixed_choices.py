"""A region with given choices: values that it chooses by floating-point numbers are inputs instead.

If a choice is a tie (a bucket's edge, equal candidates for a maximum), eager and a compiler may rightly choose
differently even in float64, and later values differ by any amount. Given the same choices, both must compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend.modes.choice_tape import CHOOSING
from checked_backend.numerics.bits import holds_floats
from checked_backend.regions.compile import Compiler, copy_graph, eager_graph
from checked_backend.regions.float64_twin import compile_twin

__all__ = ["FixedChoices"]

Region = Callable[..., Any]


class FixedChoices:
    """A region's graph, cut at its choices.

    Args:
        gm: The region's Dynamo graph; it is not changed.
        example_inputs: The fake values of its placeholders as Dynamo traced them.
    """

    def __init__(self, compiler: Compiler, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self._compiler = compiler
        self._graph = gm
        self._example_inputs = list(example_inputs)
        self._names = [node.name for node in gm.graph.nodes if _is_choice(node)]

    def __bool__(self) -> bool:
        """Whether there is any choice to give."""
        return bool(self._names)

    def choose(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """The choices that eager makes for given inputs, in whatever precision it runs."""
        gm = eager_graph(self._graph)
        copies = []
        for node in _named(gm, self._names):
            with gm.graph.inserting_after(node):
                copies.append(gm.graph.call_function(torch.clone, (node,)))  # it may be written to later
        next(iter(gm.graph.find_nodes(op="output"))).args = (tuple(copies),)
        gm.recompile()
        chosen: tuple[torch.Tensor, ...] = gm.forward(*inputs)
        return chosen

    def eager(self, choices: Sequence[torch.Tensor]) -> Region:
        """The region in eager, with these choices. The graph has its own dtypes, so that it can run in these too."""
        gm = eager_graph(self._cut())
        dtypes = [node.meta["example_value"].dtype for node in _named(self._graph, self._names)]
        own = [choice.to(dtype) for choice, dtype in zip(choices, dtypes, strict=True)]
        return lambda *inputs: gm.forward(*inputs, *own)

    def twin(self, choices: Sequence[torch.Tensor], inputs64: Sequence[Any]) -> Region:
        """The region compiled in float64, with these choices.

        Raises:
            TwinError: The region cannot be rewritten in float64.
        """
        fakes = [node.meta["example_value"] for node in _named(self._graph, self._names)]
        compiled = compile_twin(
            self._compiler, self._cut(), [*self._example_inputs, *fakes], [*inputs64, *(one.clone() for one in choices)]
        )
        return lambda *inputs: compiled(*inputs, *choices)

    def _cut(self) -> fx.GraphModule:
        gm = copy_graph(self._graph)
        last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1:]
        for node in _named(gm, self._names):
            with gm.graph.inserting_after(last[0]) if last else gm.graph.inserting_before(next(iter(gm.graph.nodes))):
                given = gm.graph.placeholder(f"given_{node.name}")
            given.meta["example_value"] = node.meta["example_value"]
            last = [given]
            with gm.graph.inserting_after(node):
                copy = gm.graph.call_function(torch.clone, (given,))  # it may be written to
            copy.meta["example_value"] = node.meta["example_value"]
            node.replace_all_uses_with(copy)
            gm.graph.erase_node(node)
        gm.recompile()
        return gm


def _named(gm: fx.GraphModule, names: Sequence[str]) -> list[fx.Node]:
    nodes = {node.name: node for node in gm.graph.nodes}
    return [nodes[name] for name in names]


def _is_choice(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if node.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor) or not node.users:
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if value.layout is not torch.strided or "out" in node.kwargs or (name.endswith("_") and not name.endswith("__")):
        return False
    if not any(holds_floats(source.meta.get("example_value")) for source in node.all_input_nodes):
        return False
    if value.is_floating_point() or value.is_complex():
        return name in CHOOSING or node.kwargs.get("rounding_mode") is not None
    return True
