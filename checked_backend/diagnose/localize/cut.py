"""Cut a small case out of a graph: the operator that errs, with as many of its neighbours as the error needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import OpOverload
from checked_backend.diagnose.localize.subgraph import (
    calls_of,
    is_item,
    is_symbolic,
    is_view,
    maker_of,
    part_of,
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

CallOracle = Callable[[GraphCase], Sequence[Finding]]
"""Tries a case and gives its failing findings. An error of the attempt itself is not a finding of the case."""

_WIDTHS = (1, 2, 4, 8, 16, 32, 64, sys.maxsize)
"""Operators in front of the faulty operator that a cut may have, tried in this order."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A small case that fails.

    Attributes:
        node: The node that errs, in the whole graph.
        finding: How the case fails.
    """

    case: GraphCase
    node: fx.Node
    finding: Finding


def cut_out(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    node: fx.Node,
    options: CheckOptions,
    oracle: CallOracle,
    sure: Callable[[Finding], bool] = lambda _finding: True,
) -> Cut | None:
    """Find the smallest run of operators up to a node that fails by itself, on recorded values.

    The values come from eager, so the operators before the run are right by definition.

    Args:
        gm: A functional ATen graph.
        node: The node whose compiled value is wrong.
        sure: Whether a finding is surely the wanted one. A case with another finding is only taken if there is no
            better one.

    Returns:
        The case; None if no run of up to 64 operators fails by itself, nor the run of all the node's ancestors.
    """
    values = _eager_values(gm, inputs, node)
    viewed = [source for source in _views_behind(node) if not is_item(source)]
    spare: Cut | None = None
    alone, *wider = widening(gm, node)
    # a wrong view shows in whatever reads it
    for nodes, last in [(alone, node), *(([view], view) for view in viewed), *((nodes, node) for nodes in wider)]:
        cut = _tried(gm, nodes, last, values, options, oracle, copied=last is not node)
        if cut is not None and sure(cut.finding):
            return cut
        spare = spare or cut
    return spare


def cut_before(
    gm: fx.GraphModule, inputs: Sequence[Any], node: fx.Node, options: CheckOptions, finding: Finding
) -> Cut:
    """Cut out a node alone, on the values that eager has when it reaches the node: for a node that raises there."""
    values: dict[fx.Node, Any] = {}
    interpreter = fx.Interpreter(gm)
    interpreter.env = values
    given = iter(inputs)
    with torch.no_grad(), modes_restored():
        for each in gm.graph.nodes:
            if each is node:
                break
            values[each] = next(given) if each.op == "placeholder" else interpreter.run_node(each)
    part, sources = part_of(gm, [node], [node])
    case = GraphCase(part, tuple(copy_values([values[source] for source in sources])), options, is_symbolic(gm))
    return Cut(case, node, finding)


def shortest_wrong_prefix(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: CheckOptions,
    oracle: CallOracle,
    killing: CallOracle | None = None,
    narrowed: Callable[[Cut, fx.Node | None], None] = lambda _wrong, _right: None,
) -> Cut | None:
    """Bisect for the first operator up to which the compiled graph is wrong.

    This finds bugs that hide when every tensor is exposed: a prefix returns only the values that the rest of the graph
    needs. The graph is not taken apart, so operators may write to tensors that others read.

    Args:
        killing: Like `oracle`, but a case that kills its process is a finding too. It is asked about the whole graph.
        narrowed: Called with the shortest wrong prefix so far, and the last node of the longest right one.

    Returns:
        The shortest prefix found to be wrong, with its last operator; None if the whole graph is right.
    """
    calls = calls_of(gm)
    tries = killing or oracle

    def wrong(count: int) -> Cut | None:
        nonlocal tries
        found = _checked_prefix(gm, inputs, calls[:count], options, tries)
        if count == len(calls) and (found is None or found.finding.kind is not Kind.CRASH):
            tries = oracle
        return found

    return bisected(len(calls), wrong, lambda found, low: narrowed(found, calls[low - 1] if low else None))


def bisected(
    count: int,
    wrong: Callable[[int], Cut | None],
    narrowed: Callable[[Cut, int], None] = lambda _wrong, _right: None,
) -> Cut | None:
    """Bisect for the least number of calls that are wrong together.

    Args:
        count: The number of all calls.
        wrong: Tries the first calls: that many of them.
        narrowed: Called with the shortest wrong case so far, and the greatest number of calls that are right.
    """
    low, high, found = 0, count, wrong(count)
    while found is not None and high - low > 1:
        narrowed(found, low)
        middle = (low + high) // 2
        shorter = wrong(middle)
        if shorter is not None:
            high, found = middle, shorter
        else:
            low = middle
    return found


def wrong_prefix(
    gm: fx.GraphModule, inputs: Sequence[Any], node: fx.Node, options: CheckOptions, oracle: CallOracle
) -> Cut | None:
    """All calls of a graph up to a node, as a case, if that case fails. The arguments are those of `cut_out`."""
    calls = calls_of(gm)
    return _checked_prefix(gm, inputs, calls[: calls.index(node) + 1], options, oracle)


def _checked_prefix(
    gm: fx.GraphModule, inputs: Sequence[Any], calls: Sequence[fx.Node], options: CheckOptions, oracle: CallOracle
) -> Cut | None:
    last = calls[-1]
    calls, frontier = prefix_of(gm, calls)
    if not frontier and not any(map(has_effects, calls)):
        return None
    part, sources = part_of(gm, calls, frontier)
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    case = GraphCase(part, tuple(values[source] for source in sources), options, is_symbolic(gm))
    findings = oracle(case)
    return Cut(case, maker_of(last), findings[0]) if findings else None


def prefix_of(gm: fx.GraphModule, calls: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
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


def _tried(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    node: fx.Node,
    values: Mapping[fx.Node, Any],
    options: CheckOptions,
    oracle: CallOracle,
    *,
    copied: bool = False,
) -> Cut | None:
    returned = tensors_made(node)
    if not returned:
        return None
    chosen = [*nodes, *(made for made in returned if made not in nodes)]
    part, sources = part_of(gm, chosen, returned, finish=_copy if copied else None)
    case = GraphCase(part, tuple(values[source] for source in sources), options, is_symbolic(gm))
    findings = oracle(case)
    return Cut(case, node, findings[0]) if findings else None


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Read a view inside the compiled code. If the view were an output, AOT autograd would make it anew in eager."""
    copy = graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta = {"val": recorded_value(node)}
    return copy


def widening(gm: fx.GraphModule, node: fx.Node) -> Iterator[list[fx.Node]]:
    """Runs of calls that end at a node: the node alone, then with its views, then with its nearest ancestors."""
    order = {call: place for place, call in enumerate(calls_of(gm))}
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
    views: dict[fx.Node, None] = {}
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        if source not in views and isinstance(source.target, OpOverload) and is_view(source):
            views[source] = None
            pending.extend(source.all_input_nodes)
    return list(reversed(views))


def _eager_values(gm: fx.GraphModule, inputs: Sequence[Any], last: fx.Node) -> dict[fx.Node, Any]:
    """Values of all nodes up to a node, computed in eager. Inputs that this node writes to keep their old values."""
    interpreter = fx.Interpreter(gm)
    given = iter(unshared(gm, inputs))
    values: dict[fx.Node, Any] = {}
    interpreter.env = values
    with torch.no_grad(), modes_restored():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
                continue
            written = [source for source in node.all_input_nodes if source.op == "placeholder" and writes(node)]
            before = copy_values([values[source] for source in written])
            values[node] = interpreter.run_node(node)
            if node is last:
                values.update(zip(written, before, strict=True))
                break
    return values
