"""How an error flows through a graph: at which operator it begins, and how large it is at each operator after that.

The graph is compiled once more with its intermediate tensors as further outputs, and run in eager and in float64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import fx

from checked_backend.diagnose.localize.graph_modes import modes_left
from checked_backend.diagnose.localize.probe import bytes_of, compile_graph, worth_exposing
from checked_backend.diagnose.localize.subgraph import (
    called_name,
    calls_of,
    can_be_walked,
    is_item,
    tensors_made,
    with_outputs,
)
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import NodeError
from checked_backend.graphs.effects import writes
from checked_backend.graphs.source_line import source_line
from checked_backend.modes.float64 import Float64Mode, to_float64
from checked_backend.modes.random_tape import RandomTape, RecordRandom
from checked_backend.process.worker import Death, cannot_fork, run_in_worker
from checked_backend.regions.compile import Compiler
from checked_backend.regions.inputs import copy_values

__all__ = ["FLOW_LIMIT", "MOST_BYTES", "MOST_NODES", "error_flow", "error_flow_isolated"]

MOST_BYTES = 1 << 28
"""Bytes of the exposed tensors of a graph. What takes more is not drawn."""

MOST_NODES = 80
"""Operators of a flow. Of a larger graph those around the operator at fault are kept."""

FLOW_LIMIT = 60.0
"""Seconds after which the compiler counts as hung."""

_COPIES = frozenset({"aten.clone.default", "aten._unsafe_view.default"})
"""Operators that change no value. They are drawn only if they err."""

_Values = Mapping[fx.Node, torch.Tensor]


def error_flow_isolated(
    gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, at_fault: str
) -> tuple[NodeError, ...]:
    """Run `error_flow` in a worker process, if one can be forked. The arguments are the same.

    Raises:
        CheckedBackendError: The compiler raised, died or hung.
        Exception: If no process can be forked: whatever the compiler or the graph raises.
    """
    if cannot_fork():
        return error_flow(gm, inputs, compiler, at_fault)
    answer = run_in_worker(
        lambda: json.dumps([asdict(one) for one in error_flow(gm, inputs, compiler, at_fault)]), timeout=FLOW_LIMIT
    )
    if isinstance(answer, Death):
        raise CheckedBackendError(f"its process died: {answer.words}")
    return tuple(NodeError(**{**one, "inputs": tuple(one["inputs"])}) for one in json.loads(answer))


def error_flow(gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, at_fault: str) -> tuple[NodeError, ...]:
    """Return each operator's error, in the graph's order.

    Args:
        at_fault: The name of the node that errs.

    Returns:
        The errors; empty if the graph cannot be walked, or is too large, or shows no error with its tensors exposed.
    """
    exposed = [
        made
        for node in calls_of(gm)
        if worth_exposing(node) and (str(node.target) not in _COPIES or node.name == at_fault)
        for made in tensors_made(node)
    ]
    if not can_be_walked(gm) or not 0 < sum(map(bytes_of, exposed)) <= MOST_BYTES:
        return ()
    instrumented, places = with_outputs(gm, exposed)

    def values(results: Sequence[Any]) -> _Values:
        found = {node: results[place] for node, place in zip(exposed, places, strict=True)}
        return {node: value for node, value in found.items() if isinstance(value, torch.Tensor)}

    with torch.no_grad(), modes_left():
        candidate = values(_seeded(compile_graph(compiler, instrumented, inputs), copy_values(inputs)))
        reference = values(_seeded(fx.Interpreter(instrumented).run, copy_values(inputs)))
        own = {} if any(map(writes, calls_of(gm))) else _own_errors(gm, copy_values(inputs), candidate)
        noise = _noise(instrumented, inputs, reference, values)
    kept = _kept([node for node in exposed if node in candidate and node in reference], at_fault)
    errors = tuple(
        NodeError(
            name=node.name,
            op=called_name(_maker(node)),
            inputs=_nearest(node, kept),
            error=relative(reference[node], candidate[node]),
            own=own.get(node),
            noise=noise.get(node),
            source=source_line(_maker(node)) or "",
        )
        for node in kept
    )
    return errors if any(one.name == at_fault and one.error > 0 for one in errors) else ()


def relative(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """How far a tensor is off, relative to the expected one, in root mean square."""
    if expected.shape != actual.shape or not expected.numel():
        return math.inf if expected.shape != actual.shape else 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, two = expected.detach().to(wide), actual.detach().to(wide)
    same = (one == two) | (one.isnan() & two.isnan())
    if bool(same.all()):
        return 0.0
    apart = torch.where(same, torch.zeros_like(one), one - two).abs()
    finite = one.isfinite()
    size = float(one[finite].abs().square().mean().sqrt()) if bool(finite.any()) else 0.0
    error = float(apart.square().mean().sqrt())
    return error / size if size and math.isfinite(error) else math.inf


def _seeded(run: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Run a program with the same random numbers each time. The caller puts the random state back."""
    torch.manual_seed(0)
    results: Sequence[Any] = run(*inputs)
    return results


def _own_errors(gm: fx.GraphModule, inputs: Sequence[Any], candidate: _Values) -> dict[fx.Node, float]:
    """Each operator's error, given the compiled program's own inputs."""
    interpreter = fx.Interpreter(gm)
    env: dict[fx.Node, Any] = {}
    interpreter.env = env
    given, own = iter(inputs), {}
    drawn: set[fx.Node] = set()  # the numbers drawn here are not those that the compiled program drew
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        tape = RandomTape()
        with RecordRandom(tape):
            env[node] = next(given) if node.op == "placeholder" else interpreter.run_node(node)
        draws = not tape.empty or any(source in drawn for source in node.all_input_nodes if is_item(node))
        if draws:
            drawn.add(node)
        if node in candidate:
            if not draws:
                own[node] = relative(env[node], candidate[node])
            env[node] = candidate[node]
    return own


def _noise(
    instrumented: fx.GraphModule, inputs: Sequence[Any], reference: _Values, values: Callable[[Sequence[Any]], _Values]
) -> dict[fx.Node, float]:
    """How far eager is from float64; empty if the graph does not run there."""
    given = copy_values(inputs)
    places = [place for place, value in enumerate(given) if isinstance(value, torch.Tensor)]
    try:
        for place, wide in zip(places, to_float64([given[place] for place in places]), strict=True):
            given[place] = wide
        with Float64Mode(default_dtype=False):
            exact = values(_seeded(fx.Interpreter(instrumented).run, given))
    except Exception:  # the picture has no noise in it
        return {}
    return {node: relative(exact[node], reference[node]) for node in reference if node in exact}


def _maker(node: fx.Node) -> fx.Node:
    """The call that makes a tensor; for an item of a tuple, the call that returns the tuple."""
    source = node.args[0] if node.args else None
    return source if node not in tensors_made(node) and isinstance(source, fx.Node) else node


def _kept(nodes: Sequence[fx.Node], at_fault: str) -> Sequence[fx.Node]:
    """The nodes to draw: of many, those before and after the operator at fault, and the last ones."""
    place = next((place for place, node in enumerate(nodes) if node.name == at_fault), 0)
    if len(nodes) <= MOST_NODES:
        return nodes
    begin = max(0, min(place - MOST_NODES // 4, len(nodes) - MOST_NODES))
    end = begin + MOST_NODES - MOST_NODES // 8
    return [*nodes[begin:end], *nodes[max(end, len(nodes) - MOST_NODES // 8) :]]


def _nearest(node: fx.Node, kept: Sequence[fx.Node]) -> tuple[str, ...]:
    """The kept nodes that a node's inputs come from, through those that are not kept."""
    wanted, seen = set(kept), set()
    found: dict[str, None] = {}
    pending = list(reversed(node.all_input_nodes))
    while pending:
        source = pending.pop()
        if source in seen:
            continue
        seen.add(source)
        if source in wanted:
            found[source.name] = None
        else:
            pending.extend(reversed(source.all_input_nodes))
    return tuple(found)
