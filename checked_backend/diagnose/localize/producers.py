"""Find the faulty one of two operators that are wrong only together: the producer of a value, or its reader?

A compiler fuses an operator with its reader. The value that the reader gets there may differ from the stored value: an
index expression that wraps around, an integer that is wider than its dtype. The stored value is right, and the reader
is right by itself. So the reader seems to be wrong, although it only shows the error. Therefore other readers are put
in its place. If they get wrong values too, the producer is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from checked_backend.diagnose.localize.cut import CallOracle, Cut
from checked_backend.diagnose.localize.subgraph import (
    calls_of,
    is_item,
    is_view,
    part_of,
    sources_through,
    tensors_made,
)
from checked_backend.findings import Finding
from checked_backend.graphs.effects import writes
from checked_backend.graphs.nodes import recorded_value
from checked_backend.regions.graph_case import GraphCase

aten = torch.ops.aten

_READERS_TRIED = 12
"""Producers that are tried with other readers for one cut. Each try is a compilation."""


def wrong_producer(
    cut: Cut, oracle: CallOracle, explains: Callable[[Finding, Finding], bool] = lambda _found, _wanted: True
) -> tuple[str, Finding] | None:
    """Find an operator before a cut's last one, which is right by itself, that gives wrong values to every reader.

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
