"""The values and gradients that eager computes in Dynamo's graph, on which its parts are differentiated.

A compiler may choose in the forward graph which values the backward graph gets: offsets instead of indices, one output
of an operator and not its sibling. Each of the two graphs is right by itself then. So Dynamo's graph, which has the
user's calls, is taken apart, and its parts are compiled and differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.pytree import tree_map_only
from checked_backend.graphs.effects import writes
from checked_backend.graphs.nodes import outputs_of
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.torch_state import modes_restored


@dataclass(frozen=True, slots=True)
class GradientValues:
    """The values that eager computed.

    Attributes:
        made: Values of all nodes, as they were made.
        differentiable: Nodes that a gradient goes through.
        arriving: The gradients that arrive at these nodes in the backward pass, as far as they are known.
    """

    made: Mapping[fx.Node, Any]
    differentiable: frozenset[fx.Node]
    arriving: Mapping[fx.Node, torch.Tensor]

    @classmethod
    def of(
        cls, gm: fx.GraphModule, inputs: Sequence[Any], wanted: frozenset[int], cotangents: Mapping[int, torch.Tensor]
    ) -> GradientValues:
        """Run a graph in eager, forward and backward.

        Args:
            gm: Dynamo's graph, as it is called: with the grad modes that it sets.
            wanted: Positions of the inputs whose gradients are wanted.
            cotangents: The gradients that arrived at its outputs, by the outputs' index.

        Raises:
            Exception: The graph cannot be run again.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        interpreter, live = fx.Interpreter(gm), dict[fx.Node, torch.Tensor]()
        made: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
        leaves = copy_values(inputs)
        written = {node.args[0] for node in gm.graph.nodes if writes(node) and node.args}
        with torch.enable_grad(), modes_restored():
            for place, node in enumerate(placeholders):
                if place in wanted and isinstance(leaves[place], torch.Tensor):
                    leaves[place].requires_grad_()
                    live[node] = leaves[place]
                # a leaf must not be written to in place, but its copy may be
                interpreter.env[node] = leaves[place].clone() if node in live and node in written else leaves[place]
            for node in gm.graph.nodes:
                if node.op in ("placeholder", "output"):
                    continue
                value = interpreter.env[node] = interpreter.run_node(node)
                made[node] = tree_map_only(torch.Tensor, lambda tensor: copy_values([tensor])[0], value)
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    live[node] = value
            roots = [
                (interpreter.env[node], cotangents[place])
                for place, node in enumerate(outputs_of(gm.graph))
                if place in cotangents and isinstance(node, fx.Node) and interpreter.env[node].requires_grad
            ]
            found: Sequence[torch.Tensor | None] = torch.autograd.grad(
                [root for root, _ in roots],
                [*live.values()],
                [cotangent.to(root.dtype) for root, cotangent in roots],
                allow_unused=True,
            )
        arriving = {node: gradient for node, gradient in zip(live, found, strict=True) if gradient is not None}
        return cls(made, frozenset(node for node in live if node not in written or node.op != "placeholder"), arriving)

    def differentiated(self, case: GraphCase, returned: Sequence[fx.Node], sources: Sequence[fx.Node]) -> GraphCase:
        """A case that is differentiated, as its part is in the whole graph.

        Args:
            returned: The nodes that it returns.
            sources: The nodes that are its inputs.
        """
        wanted = frozenset(place for place, source in enumerate(sources) if source in self.differentiable)
        return replace(case, cotangents=tuple(map(self._cotangent, returned)), wanted=wanted)

    def _cotangent(self, node: fx.Node) -> torch.Tensor | None:
        """The gradient that arrives at a node; random numbers if eager has none there, or only zeros."""
        found = self.arriving.get(node)
        if found is not None and bool(found.any()):
            return found
        value = self.made[node]
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return None
        return torch.randn_like(value)
