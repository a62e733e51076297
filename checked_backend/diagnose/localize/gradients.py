"""The search for an operator whose gradient is wrong only if forward and backward are compiled together.

A compiler may choose in the forward graph which values the backward graph gets: offsets instead of indices, one output
of an operator and not its sibling. Each of the two graphs is right by itself then. So Dynamo's graph, which has the
user's calls, is taken apart, and its parts are compiled and differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checked_backend._torch.pytree import tree_map_only
from checked_backend.diagnose.localize.cut import CallOracle, Cut, bisected, prefix_of, widening
from checked_backend.diagnose.localize.subgraph import called_name, calls_of, maker_of, part_of, tensors_made
from checked_backend.graphs.effects import writes
from checked_backend.graphs.nodes import outputs_of
from checked_backend.options import CheckOptions
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.torch_state import modes_restored


@dataclass(frozen=True, slots=True)
class GradientSearch:
    """Differentiates parts of Dynamo's graph to find a wrong gradient.

    Attributes:
        graph: Dynamo's graph, as it is called: with the grad modes that it sets.
        wanted: Positions of the inputs whose gradients are wanted.
        cotangents: The gradients that arrived at its outputs, by the outputs' index.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    wanted: frozenset[int]
    cotangents: Mapping[int, torch.Tensor]
    options: CheckOptions
    dynamic: bool

    def run(self, oracle: CallOracle, tell: Callable[[str], None]) -> Cut | None:
        """Bisect for the first operator up to which a gradient is wrong, and cut it out.

        Raises:
            Exception: The graph cannot be run again.
        """
        tell("bisecting Dynamo's graph, with its gradients")
        values = _Values.of(self)
        calls = calls_of(self.graph)
        prefix = bisected(len(calls), lambda count: self._prefix(calls[:count], values, oracle))
        if prefix is None:
            return None
        tell(f"the gradient of {prefix.node.name} ({called_name(prefix.node)}) is wrong; cutting it out")
        for nodes in widening(self.graph, prefix.node):
            cut = self._tried(nodes, prefix.node, values, oracle)
            if cut is not None:
                return cut
        return prefix

    def _prefix(self, calls: Sequence[fx.Node], values: _Values, oracle: CallOracle) -> Cut | None:
        chosen, frontier = prefix_of(self.graph, calls)
        return self._checked(chosen, frontier, calls[-1], values.given, values, oracle)

    def _tried(self, nodes: Sequence[fx.Node], node: fx.Node, values: _Values, oracle: CallOracle) -> Cut | None:
        made = tensors_made(node)
        chosen = [*nodes, *(one for one in made if one not in nodes)]
        if any(writes(one) for one in chosen):
            return None  # the values after a write are not those before it
        return self._checked(chosen, made, node, values.made, values, oracle)

    def _checked(
        self,
        chosen: Sequence[fx.Node],
        returned: Sequence[fx.Node],
        node: fx.Node,
        given: Mapping[fx.Node, Any],
        values: _Values,
        oracle: CallOracle,
    ) -> Cut | None:
        returned = [one for one in returned if one in values.differentiable]
        if not returned:
            return None
        part, sources = part_of(self.graph, chosen, returned)
        if any(source not in given for source in sources):
            return None
        case = GraphCase(
            part,
            tuple(given[source] for source in sources),
            self.options,
            self.dynamic,
            tuple(values.cotangent(one) for one in returned),
            frozenset(place for place, source in enumerate(sources) if source in values.differentiable),
        )
        findings = [finding for finding in oracle(case) if finding.about.is_gradient]
        return Cut(case, maker_of(node), findings[0]) if findings else None


@dataclass(frozen=True, slots=True)
class _Values:
    """The values that eager computed.

    Attributes:
        made: Values of all nodes, as they were made.
        differentiable: Nodes that a gradient goes through.
        arriving: The gradients that arrive at these nodes in the backward pass, as far as they are known.
    """

    given: Mapping[fx.Node, Any]
    made: Mapping[fx.Node, Any]
    differentiable: frozenset[fx.Node]
    arriving: Mapping[fx.Node, torch.Tensor]

    @classmethod
    def of(cls, search: GradientSearch) -> _Values:
        """Run the graph in eager, forward and backward."""
        gm = search.graph
        placeholders = gm.graph.find_nodes(op="placeholder")
        given = dict(zip(placeholders, search.inputs, strict=True))
        interpreter, made, live = fx.Interpreter(gm), dict[fx.Node, Any](), dict[fx.Node, torch.Tensor]()
        leaves = copy_values(search.inputs)
        written = {node.args[0] for node in calls_of(gm) if writes(node) and node.args}
        with torch.enable_grad(), modes_restored():
            for place, node in enumerate(placeholders):
                if place in search.wanted and isinstance(leaves[place], torch.Tensor):
                    leaves[place].requires_grad_()
                    live[node] = leaves[place]
                # a leaf must not be written to in place, but its copy may be
                interpreter.env[node] = leaves[place].clone() if node in live and node in written else leaves[place]
                made[node] = given[node]
            for node in gm.graph.nodes:
                if node.op in ("placeholder", "output"):
                    continue
                value = interpreter.env[node] = interpreter.run_node(node)
                made[node] = tree_map_only(torch.Tensor, lambda tensor: copy_values([tensor])[0], value)
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    live[node] = value
            roots = [
                (interpreter.env[node], search.cotangents[place])
                for place, node in enumerate(outputs_of(gm.graph))
                if place in search.cotangents and isinstance(node, fx.Node) and interpreter.env[node].requires_grad
            ]
            found: Sequence[torch.Tensor | None] = torch.autograd.grad(
                [root for root, _ in roots],
                [*live.values()],
                [cotangent.to(root.dtype) for root, cotangent in roots],
                allow_unused=True,
            )
        arriving = {node: gradient for node, gradient in zip(live, found, strict=True) if gradient is not None}
        kept = {node for node in live if node not in written or node.op != "placeholder"}
        return cls(given, made, frozenset(kept), arriving)

    def cotangent(self, node: fx.Node) -> torch.Tensor | None:
        """The gradient that arrives at a node; random numbers if eager has none there, or only zeros."""
        found = self.arriving.get(node)
        if found is not None and bool(found.any()):
            return found
        value = self.made[node]
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return None
        return torch.randn_like(value)
