"""The probe: compile a graph once with its intermediate tensors as further outputs, and check every operator.

The graph is walked in order. Each operator is run in eager on the compiled program's own inputs. So only an operator's
local error shows, and an inherited error is no finding about an ill-conditioned successor. Values are freed after their
last use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import OpOverload
from checked_backend.diagnose.localize.flow import error_flow
from checked_backend.diagnose.localize.subgraph import (
    bytes_of,
    calls_of,
    is_view,
    maker_of,
    part_of,
    tensors_made,
    unshared,
)
from checked_backend.diagnose.oracle import find_apart
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding, Kind
from checked_backend.graphs.effects import writes
from checked_backend.graphs.nodes import recorded_value
from checked_backend.graphs.operators import OperatorKind, describe_operator
from checked_backend.numerics.bits import slabs
from checked_backend.numerics.measure import measure
from checked_backend.process.job import JobEnd
from checked_backend.regions.compile import Compiler, compile_again
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.operator_check.findings import error_message
from checked_backend.regions.operator_check.probe import Exposed, Probed
from checked_backend.regions.operator_check.tensor_checks import Wrong
from checked_backend.regions.operator_check.walk import Walk
from checked_backend.regions.torch_state import modes_restored

CLEAR = 1e-2
"""An operator that is off by this share of its result, in rms, is at fault whatever comes after it."""

PROBE_LIMIT = 120.0
"""Seconds after which the compiler counts as hung."""

MUCH = 10.0
"""A later operator is at fault rather than an earlier one if it is more than this many times as far off.

Compilers compute some functions (``erf`` on CPU, for example) with a little less precision than eager.
"""


@dataclass(frozen=True, slots=True)
class FaultyOperator:
    """An operator with a local error. The finding says how the error flows on, as far as the values are known."""

    node: fx.Node
    finding: Finding


def share_of(finding: Finding) -> float:
    """An error's share of its result, in rms; infinite if the error is not one of finite values."""
    metrics = finding.metrics
    if metrics is None or metrics.nonfinite_mismatched or not metrics.reference_rms:
        return math.inf
    share = metrics.rmse / metrics.reference_rms
    return share if share == share else math.inf


def faulty_operator(wrong: Wrong) -> FaultyOperator:
    """The operator that an error of a walk accuses."""
    node = maker_of(wrong.node)
    what, found, metrics = f"what {node.name} computes", wrong.found, None
    if math.isinf(wrong.error.relative):
        message = f"{what} is not of the shape and dtype that eager's has, or is not a number where eager's is one"
    else:
        metrics = measure(reference=wrong.right, candidate=found)
        message = error_message(what, str(found.dtype).removeprefix("torch."), wrong.error, found.numel())
    return FaultyOperator(node, Finding(Kind.LOGIC, "output[0]", message, metrics=metrics))


def is_clear(wrong: Wrong) -> bool:
    """Whether an operator is so far off that it is at fault whatever comes after it."""
    return share_of(faulty_operator(wrong).finding) >= CLEAR


def probe(gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, *, limit: int) -> FaultyOperator | None:
    """Find the first operator whose own inputs do not explain its result; a gross error later wins over a slight one.

    Args:
        gm: A functional ATen graph.
        limit: Bytes that the exposed tensors of one compilation may take. A graph with more is compiled in segments.

    Returns:
        The faulty operator; None if every operator is right when all are exposed.
    """
    inputs = unshared(gm, inputs)
    compiled = _Compiled(gm, inputs, compiler, limit)
    probed = Probed(inputs, compiled.results, {}, {}, {})
    best: FaultyOperator | None = None

    def enough(wrong: Wrong) -> bool:
        nonlocal best
        faulty = faulty_operator(wrong)
        if best is None or share_of(faulty.finding) > MUCH * share_of(best.finding):
            best = faulty
        return share_of(best.finding) >= CLEAR

    walk = Walk(gm, compiled.exposed, probed, strict=True, before=compiled.run, enough=enough)
    with torch.no_grad(), modes_restored():
        walk.run()
    if best is None:
        return None
    flow = error_flow(gm, inputs, compiled.kept, best.node.name)
    return replace(best, finding=replace(best.finding, flow=flow))


class _Compiled:
    """A graph compiled in segments, each when a walk comes to it, with what its operators compute as results.

    Attributes:
        exposed: The places of the results.
        results: What was computed so far: the tensors, and each input that was written to.
        kept: The tensors by name, if they are few enough to show how an error flows.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, limit: int) -> None:
        self._gm = gm
        self._inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        self._compiler = compiler
        self._parts = {part[0]: part for part in segments(gm, limit)}
        calls = calls_of(gm)
        made = [made.name for node in calls if worth_exposing(node) for made in tensors_made(node)]
        written = {_written_input(node): node for node in calls if _written_input(node) is not None}
        values = {name: place for place, name in enumerate(made)}
        versions = {node.name: (f"{source}", len(made) + place) for place, (source, node) in enumerate(written.items())}
        self.exposed = Exposed(gm, 0, values, versions, {}, 0)
        self.results: list[Any] = [None] * (len(made) + len(written))
        self.kept: dict[str, torch.Tensor] = {}

    def run(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        """Compile and run the segment that begins with a node, if one does, on the values in front of it."""
        part = self._parts.get(node)
        if part is None:
            return
        inside = set(part)  # the segment returns the values that later calls use, so that fusion stays as it was
        wanted = [made for made in part if not inside.issuperset(made.users)]
        returned = [made for made in wanted if isinstance(recorded_value(made), torch.Tensor)]
        exposed = [made for node in part if worth_exposing(node) for made in tensors_made(node)]
        places = dict[str, int]()

        def with_exposed(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
            outputs = [*nodes[: len(returned)]]
            for each, value in zip(exposed, nodes[len(returned) :], strict=True):
                if "example_value" in value.meta:  # a value that is written to later must be copied before
                    with graph.inserting_after(value):
                        value = graph.call_method("clone", (value,))
                if value not in outputs:
                    outputs.append(value)
                places[each.name] = outputs.index(value)
            return outputs

        instrumented, sources = part_of(self._gm, part, [*returned, *exposed], finish=with_exposed)
        # the walk takes up an input where it is first read
        given = copy_values([values[source] if source in values else self._inputs[source] for source in sources])
        traced = [recorded_value(node) for node in instrumented.graph.find_nodes(op="placeholder")]
        compiled = compile_again(self._compiler, instrumented, traced, given)
        torch.manual_seed(0)  # the caller puts the random state back
        results = compiled(*given)
        for name, place in places.items():
            self.results[self.exposed.values[name]] = results[place]
        if len(self._parts) == 1:
            self.kept.update((name, results[place]) for name, place in places.items())
        for node in part:
            if node.name in self.exposed.versions:
                source, place = self.exposed.versions[node.name]
                self.results[place] = given[[each.name for each in sources].index(source)]


def _written_input(node: fx.Node) -> fx.Node | None:
    """The input of the graph that a call writes to."""
    source = node.all_input_nodes[0] if writes(node) and node.all_input_nodes else None
    return source if source is not None and source.op == "placeholder" else None


def segments(gm: fx.GraphModule, limit: int) -> Iterator[list[fx.Node]]:
    """Split a graph's calls into runs whose exposed tensors together take at most ``limit`` bytes."""
    calls = calls_of(gm)
    sizes = [sum(map(bytes_of, tensors_made(node))) if worth_exposing(node) else 0 for node in calls]
    return ([calls[place] for place in slab] for slab in slabs(sizes, limit))


def worth_exposing(node: fx.Node) -> bool:
    """Whether a node's value should be exposed. Views and writes to inputs show in the values made from them."""
    if isinstance(node.target, OpOverload):
        operator = describe_operator(node.target)
        return not (is_view(node) or operator.mutated or operator.kind is OperatorKind.UNINITIALISED)
    return True


def probe_isolated(
    gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, *, limit: int
) -> FaultyOperator | None:
    """Run `probe` in a worker process, if one can be forked. The arguments are the same.

    Raises:
        CheckedBackendError: The probe raised, died or hung.
        Exception: If no process can be forked: whatever the compiler or the graph raises.
    """

    def find() -> Iterator[Finding]:
        faulty = probe(gm, inputs, compiler, limit=limit)
        if faulty is not None:
            yield replace(faulty.finding, node=faulty.node.name)

    found = find_apart(find, PROBE_LIMIT)
    if isinstance(found, JobEnd):
        raise CheckedBackendError(f"its process died: {found.cause}")
    named = ((node, finding) for finding in found for node in gm.graph.nodes if node.name == finding.node)
    return next((FaultyOperator(*pair) for pair in named), None)
