"""How an error flows through a graph: at which operator it begins, and how large it is at each operator after that.

The values are those that the search for the operator saw. The graph is run in eager and in float64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from checked_backend.diagnose.localize.subgraph import (
    bytes_of,
    called_name,
    calls_of,
    can_be_walked,
    is_item,
    maker_of,
    sources_through,
    tensors_made,
)
from checked_backend.findings import NodeError
from checked_backend.graphs.effects import writes
from checked_backend.graphs.source_line import source_line
from checked_backend.modes.float64 import Float64Mode, to_float64
from checked_backend.modes.random_tape import RandomTape, RecordRandom
from checked_backend.numerics.measure import measure
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.torch_state import modes_restored

MOST_BYTES = 1 << 28
"""Bytes of the exposed tensors of a graph. What takes more is not drawn."""

MOST_NODES = 80
"""Operators of a flow. Of a larger graph those around the operator at fault are kept."""

_COPIES = frozenset({"aten.clone.default", "aten._unsafe_view.default"})
"""Operators that change no value. They are drawn only if they err."""

_Values = Mapping[fx.Node, torch.Tensor]


def error_flow(
    gm: fx.GraphModule, inputs: Sequence[Any], candidate: Mapping[str, torch.Tensor], at_fault: str
) -> tuple[NodeError, ...]:
    """Return the error of each operator whose value in the compiled program is known, in the graph's order.

    Args:
        candidate: Values of the compiled program in one call of the graph, by the names of nodes.

    Returns:
        The errors; empty if the graph cannot be run or walked, or the values take too much memory or show no error.
    """
    with suppress(Exception):  # a report without this picture says the same
        nodes = [
            made
            for node in calls_of(gm)
            if str(node.target) not in _COPIES or node.name == at_fault
            for made in tensors_made(node)
            if isinstance(candidate.get(made.name), torch.Tensor)
        ]
        if not can_be_walked(gm) or not 0 < sum(map(bytes_of, nodes)) <= MOST_BYTES:
            return ()
        found = {node: candidate[node.name] for node in nodes}
        with torch.no_grad(), modes_restored():
            reference, _ = _values(gm, copy_values(inputs), nodes)
            expected, drawn = ({}, set()) if any(map(writes, calls_of(gm))) else _values(gm, copy_values(inputs), found)
            noise = _noise(gm, inputs, reference)
        kept = dict.fromkeys(_kept(nodes, at_fault))
        errors = tuple(
            NodeError(
                name=node.name,
                op=called_name(maker_of(node)),
                inputs=tuple(
                    source.name for source in sources_through(node, lambda one: one not in kept) if source in kept
                ),
                error=relative(reference[node], found[node]),
                own=relative(expected[node], found[node]) if node in expected and node not in drawn else None,
                noise=noise.get(node),
                source=source_line(maker_of(node)) or "",
            )
            for node in kept
        )
        return errors if any(one.name == at_fault and one.error > 0 for one in errors) else ()
    return ()


def relative(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """How far a tensor is off, relative to the expected one, in root mean square."""
    if expected.shape != actual.shape:
        return math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    metrics = measure(reference=expected.to(wide), candidate=actual.to(wide))
    if not metrics.mismatched:
        return 0.0
    size = 0.0 if metrics.nonfinite_mismatched else metrics.reference_rms
    return metrics.rmse / size if size else math.inf


def _values(
    gm: fx.GraphModule, inputs: Sequence[Any], nodes: Collection[fx.Node]
) -> tuple[dict[fx.Node, torch.Tensor], set[fx.Node]]:
    """The values of nodes in eager, and the nodes that draw random numbers: the same in each run.

    Args:
        nodes: The nodes; or a mapping from them to values of the compiled program, with which eager goes on.
    """
    torch.manual_seed(0)  # the caller puts the random state back
    interpreter = fx.Interpreter(gm)
    env: dict[fx.Node, Any] = {}
    interpreter.env = env
    given, values = iter(inputs), dict[fx.Node, torch.Tensor]()
    drawn: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        tape = RandomTape()
        with RecordRandom(tape):
            env[node] = next(given) if node.op == "placeholder" else interpreter.run_node(node)
        if not tape.empty or any(source in drawn for source in node.all_input_nodes if is_item(node)):
            drawn.add(node)
        if node in nodes:
            values[node] = env[node].clone()  # it may be written to later
            env[node] = nodes[node] if isinstance(nodes, Mapping) else env[node]
    return values, drawn


def _noise(gm: fx.GraphModule, inputs: Sequence[Any], reference: _Values) -> dict[fx.Node, float]:
    """How far eager is from float64; empty if the graph does not run there."""
    try:
        wide = to_float64(copy_values(inputs))
        with Float64Mode(default_dtype=False):
            exact, _ = _values(gm, wide, reference.keys())
    except Exception:  # the picture has no noise in it
        return {}
    return {node: relative(exact[node], value) for node, value in reference.items()}


def _kept(nodes: Sequence[fx.Node], at_fault: str) -> Sequence[fx.Node]:
    """The nodes to draw: of many, those before and after the operator at fault, and the last ones."""
    place = next((place for place, node in enumerate(nodes) if node.name == at_fault), 0)
    if len(nodes) <= MOST_NODES:
        return nodes
    begin = max(0, min(place - MOST_NODES // 4, len(nodes) - MOST_NODES))
    end = begin + MOST_NODES - MOST_NODES // 8
    return [*nodes[begin:end], *nodes[max(end, len(nodes) - MOST_NODES // 8) :]]
