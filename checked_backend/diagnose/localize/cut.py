"""Try parts of a graph: bisect for the operator that errs, and cut it out with as many neighbours as it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.pytree import tree_map_only
from checked_backend.diagnose.localize.subgraph import (
    Finish,
    calls_of,
    is_item,
    is_symbolic,
    is_view,
    maker_of,
    part_of,
    sources_through,
    tensors_made,
    unshared,
)
from checked_backend.findings import Finding, Kind
from checked_backend.graphs.effects import has_effects, writes
from checked_backend.graphs.nodes import outputs_of, recorded_value
from checked_backend.options import CheckOptions
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.torch_state import modes_restored

aten = torch.ops.aten

CallOracle = Callable[[GraphCase], Sequence[Finding]]
"""Tries a case and gives its failing findings. An error of the attempt itself is not a finding of the case."""

_WIDTHS = (1, 2, 4, 8, 16, 32, 64, sys.maxsize)
"""Operators in front of the faulty operator that a cut may have, tried in this order."""


_READERS_TRIED = 12
"""Producers that are tried with other readers for one cut. Each try is a compilation."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A small case that fails, the node of the whole graph that errs, and how the case fails."""

    case: GraphCase
    node: fx.Node
    finding: Finding


@dataclass(frozen=True, slots=True)
class GradientValues:
    """The values and gradients that eager computed in Dynamo's graph, on which its parts are differentiated.

    A compiler may choose in the forward graph which values the backward graph gets: offsets instead of indices, one
    output of an operator and not its sibling. Each of the two graphs is right by itself then. So Dynamo's graph, which
    has the user's calls, is taken apart, and its parts are compiled and differentiated.

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
        """A case that is differentiated, as its part is in the whole graph; it returns some nodes, given others."""
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


@dataclass(frozen=True, slots=True)
class Parts:
    """A graph of which parts are tried.

    Attributes:
        gradients: What eager computed in the whole graph, if parts are differentiated: their gradients are compared.
    """

    graph: fx.GraphModule
    inputs: Sequence[Any]
    options: CheckOptions
    oracle: CallOracle
    gradients: GradientValues | None = None

    def shortest_wrong_prefix(
        self,
        killing: CallOracle | None = None,
        narrowed: Callable[[Cut, fx.Node | None], None] = lambda _wrong, _right: None,
    ) -> Cut | None:
        """Bisect for the first operator up to which the compiled graph is wrong.

        This finds bugs that hide when every tensor is exposed: a prefix returns only the values that the rest of the
        graph needs. The graph is not taken apart, so operators may write to tensors that others read.

        Args:
            killing: Like the oracle, but a case that kills its process is a finding too. It is asked about the whole
                graph, and about parts if that dies.
            narrowed: Called with the shortest wrong prefix so far, and the last node of the longest right one.

        Returns:
            The shortest prefix found to be wrong, with its last operator; None if the whole graph is right.
        """
        calls, tries = calls_of(self.graph), replace(self, oracle=killing or self.oracle)
        found = tries.prefix(calls)
        if found is None:
            return None
        if found.finding.kind is not Kind.CRASH:
            tries = self
        low, high = 0, len(calls)
        while high - low > 1:
            narrowed(found, calls[low - 1] if low else None)
            middle = (low + high) // 2
            shorter = tries.prefix(calls[:middle])
            if shorter is not None:
                high, found = middle, shorter
            else:
                low = middle
        return found

    def cut_out(self, node: fx.Node, sure: Callable[[Finding], bool] = lambda _finding: True) -> Cut | None:
        """Find the smallest run of operators up to a node that fails by itself, on recorded values.

        The values come from eager, so the operators before the run are right by definition.

        Args:
            node: The node whose compiled value is wrong, in a functional graph.
            sure: Whether a finding is surely the wanted one. A case with another finding is only taken if there is no
                better one.

        Returns:
            The case; None if no run of up to 64 operators fails by itself, nor the run of all the node's ancestors.
        """
        values = self._values_before(node) if self.gradients is None else self.gradients.made
        viewed = [source for source in _views_behind(node) if not is_item(source)]
        spare: Cut | None = None
        alone, *wider = self._widening(node)
        # a wrong view shows in whatever reads it
        for nodes, last in [(alone, node), *(([view], view) for view in viewed), *((nodes, node) for nodes in wider)]:
            if self.gradients is not None and any(map(writes, nodes)):
                continue  # the values after a write are not those before it
            made = tensors_made(last)
            chosen = [*nodes, *(one for one in made if one not in nodes)]
            cut = self._tried(chosen, made, last, values, finish=None if last is node else _copies) if made else None
            if cut is not None and sure(cut.finding):
                return cut
            spare = spare or cut
        return spare

    def alone(self, node: fx.Node) -> GraphCase:
        """A node alone, on the values that eager has when it reaches the node."""
        part, sources = part_of(self.graph, [node], [node])
        return self._case(part, sources, self._values_before(node))

    def prefix(self, calls: Sequence[fx.Node]) -> Cut | None:
        """The first calls of the graph as a case, if that fails."""
        nodes, frontier = _needed_later(self.graph, calls)
        if not frontier and not any(map(has_effects, nodes)):
            return None
        given = dict(zip(self.graph.graph.find_nodes(op="placeholder"), self.inputs, strict=True))
        return self._tried(nodes, frontier, calls[-1], given)

    def _tried(
        self,
        nodes: Sequence[fx.Node],
        returned: Sequence[fx.Node],
        last: fx.Node,
        values: Mapping[fx.Node, Any],
        finish: Finish | None = None,
    ) -> Cut | None:
        """Try some calls by themselves, on values that are known."""
        gradients = self.gradients
        if gradients is None:
            case = self._case(*part_of(self.graph, nodes, returned, finish=finish), values)
            findings = self.oracle(case)
        else:
            returned = [one for one in returned if one in gradients.differentiable]
            part, sources = part_of(self.graph, nodes, returned)
            if not returned or any(source not in values for source in sources):
                return None
            case = gradients.differentiated(self._case(part, sources, values), returned, sources)
            findings = [finding for finding in self.oracle(case) if finding.about.is_gradient]
        return Cut(case, maker_of(last), findings[0]) if findings else None

    def _case(self, part: fx.GraphModule, sources: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> GraphCase:
        return GraphCase(part, tuple(values[source] for source in sources), self.options, is_symbolic(self.graph))

    def _widening(self, node: fx.Node) -> Iterator[list[fx.Node]]:
        """Runs of calls that end at a node: the node alone, then with its views, then with its nearest ancestors."""
        order = {call: place for place, call in enumerate(calls_of(self.graph))}
        yield [node]
        views = [source for source in _views_behind(node) if source in order]
        if views:
            yield sorted([*views, node], key=order.__getitem__)
        last = 0
        for width in _WIDTHS:
            nearest = _nearest_ancestors(node, width + len(views), order)
            if len(nearest) == last:
                return
            last = len(nearest)
            yield sorted([*nearest, node], key=order.__getitem__)

    def _values_before(self, node: fx.Node) -> dict[fx.Node, Any]:
        """The values that eager has when it reaches a node."""
        interpreter, values = fx.Interpreter(self.graph), dict[fx.Node, Any]()
        interpreter.env, interpreter.args_iter = values, iter(unshared(self.graph, self.inputs))
        with torch.no_grad(), modes_restored():
            for each in self.graph.graph.nodes:
                if each is node:
                    break
                values[each] = interpreter.run_node(each)
        return values


def _needed_later(gm: fx.GraphModule, calls: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The first calls of a graph with the items of their results, and those of them that the rest of it needs."""
    # an operator with several results is compared by its items; without them, it would be dead code
    items = [made for node in calls for made in tensors_made(node)]
    chosen = [*calls, *(made for made in dict.fromkeys(items) if made not in set(calls))]
    inside = set(chosen)
    results = {node for node in outputs_of(gm.graph) if isinstance(node, fx.Node)}
    results.update((calls[-1], *tensors_made(calls[-1])))
    frontier = [
        node
        for node in chosen
        if isinstance(recorded_value(node), torch.Tensor)
        and (node in results or any(user not in inside for user in node.users))
    ]
    return chosen, frontier


def _copies(graph: fx.Graph, nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Read views inside the compiled code. If a view were an output, AOT autograd would make it anew in eager."""
    for node in nodes:
        copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        copy.meta = {"val": recorded_value(node)}
        yield copy


def _nearest_ancestors(node: fx.Node, count: int, order: Mapping[fx.Node, int]) -> list[fx.Node]:
    seen: dict[fx.Node, None] = {}
    layer = [node]
    while layer and len(seen) < count:
        sources = {source for one in layer for source in one.all_input_nodes if source in order and source not in seen}
        layer = sorted(sources, key=order.__getitem__, reverse=True)
        seen.update(dict.fromkeys(layer[: count - len(seen)]))
    return list(seen)


def _views_behind(node: fx.Node) -> list[fx.Node]:
    """The views between a node and the values that were really computed before it, nearest last."""
    return [source for source in reversed(sources_through(node, is_view)) if is_view(source)]


def wrong_producer(
    cut: Cut, oracle: CallOracle, explains: Callable[[Finding, Finding], bool] = lambda _found, _wanted: True
) -> tuple[str, Finding] | None:
    """Find an operator before a cut's last one, which is right by itself, that gives wrong values to every reader.

    A compiler fuses an operator with its reader, which may get another value than the one that is stored: an index that
    wraps around, an integer that is wider than its dtype. The reader seems to be wrong, though it only shows the error.
    Therefore other readers are put in its place. If they get wrong values too, the producer is at fault.

    Args:
        explains: Whether a finding of another reader may explain the finding of the cut.

    Returns:
        The name of the node, and the finding about its value; None if the last operator itself is at fault, or if only
        the two together are wrong.
    """
    gm = cut.case.graph
    current: fx.Node | None = next((node for node in calls_of(gm) if node.name == cut.node.name), None)
    blamed: tuple[str, Finding] | None = None
    tries = _READERS_TRIED
    while current is not None and not writes(current):
        following: fx.Node | None = None
        for producer in _producers(current, through_views=cut.case.cotangents is None):
            if not tries:
                return blamed
            tries -= 1
            found = [one for one in _for_other_readers(cut.case, producer, oracle) if explains(one, cut.finding)]
            if found:
                following, blamed = producer, (producer.name, found[0])
                break
        current = following
    return blamed


def _producers(node: fx.Node, *, through_views: bool) -> list[fx.Node]:
    """The calls that computed a node's inputs, the latest first."""

    def hands_on(source: fx.Node) -> bool:
        return is_item(source) or (through_views and is_view(source))

    calls = [one for one in sources_through(node, hands_on) if one.op.startswith("call_") and not hands_on(one)]
    order = {each: place for place, each in enumerate(node.graph.nodes)}
    return sorted((one for one in calls if not writes(one) and tensors_made(one)), key=order.__getitem__, reverse=True)


def _for_other_readers(case: GraphCase, producer: fx.Node, oracle: CallOracle) -> Sequence[Finding]:
    """The findings if other operators read a value, and the value itself is not stored."""
    made = tensors_made(producer)
    if not any(_readers(recorded_value(node)) for node in made):
        return ()
    calls = calls_of(case.graph)
    before = calls[: calls.index(producer) + 1]
    chosen = [*before, *(node for node in made if node not in before)]
    part, sources = part_of(case.graph, chosen, made, finish=_read if case.cotangents is None else _read_together)
    values = dict(zip(case.graph.graph.find_nodes(op="placeholder"), case.inputs, strict=True))
    places = {source: place for place, source in enumerate(values)}
    cotangents = None if case.cotangents is None else (torch.ones((), dtype=torch.float64),)
    try:
        return oracle(
            replace(
                case,
                graph=part,
                inputs=tuple(values[source] for source in sources),
                cotangents=cotangents,
                wanted=frozenset(place for place, source in enumerate(sources) if places[source] in case.wanted),
            )
        )
    except Exception:  # the readers do not fit, so nothing is known
        return ()


def _read(graph: fx.Graph, nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Nodes that read values, and take their places among the results."""
    for node in nodes:
        readers = _readers(recorded_value(node))
        for target, kwargs in readers:
            reader = graph.call_function(target, (node,), kwargs)
            reader.meta = {"val": target(recorded_value(node), **kwargs)}
            yield reader
        if not readers:
            yield node


def _readers(value: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Operators that show a value exactly as a fused reader gets it, without losing or adding a digit."""
    if not isinstance(value, torch.Tensor) or type(value).__name__ not in ("Tensor", "FakeTensor", "Parameter"):
        return []
    if value.dtype is torch.bool:
        return [(aten.logical_not.default, {}), (aten._to_copy.default, {"dtype": torch.int64})]
    wider = [(aten._to_copy.default, {"dtype": torch.float64})]
    if value.dtype.is_complex:
        return [(aten.neg.default, {})]
    if value.dtype.is_floating_point:
        return [(aten.neg.default, {}), *(wider if value.dtype.itemsize < 8 else [])]
    exact = [] if value.dtype is torch.int64 else [(aten._to_copy.default, {"dtype": torch.int64})]
    return [(aten.neg.default, {}), *exact, *wider]


def _read_together(graph: fx.Graph, nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The sum of the squares of what reads values: one result, so that the gradients of siblings meet."""
    sums = [
        graph.call_function(aten.sum.default, (graph.call_function(aten.mul.Tensor, (value, value)),))
        for value in _read(graph, nodes)
        if recorded_value(value).dtype.is_floating_point
    ]
    total = graph.call_function(aten.scalar_tensor.default, (0.0,), {"dtype": torch.float64})
    for each in sums:
        total = graph.call_function(aten.add.Tensor, (total, each))
    yield total
