"""The probe: compile a graph once with its intermediate tensors as further outputs, and check every operator.

The graph is walked in order. Each operator is run in eager on the compiled program's own inputs. So only an operator's
local error shows, and an inherited error is no finding about an ill-conditioned successor. Values are freed after their
last use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import TracingContext, compiling, tracing
from checked_backend._torch.fake_tensors import detect_fake_mode
from checked_backend._torch.operators import OpOverload
from checked_backend._torch.pytree import tree_flatten, tree_unflatten
from checked_backend.diagnose.localize.bodies import is_higher_order
from checked_backend.diagnose.localize.graph_modes import modes_before, modes_left
from checked_backend.diagnose.localize.local import OperatorCall, call_oracle
from checked_backend.diagnose.localize.subgraph import calls_of, is_view, part_of, tensors_made, unshared, with_outputs
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Coverage, Finding
from checked_backend.graphs.effects import sets_mode, writes
from checked_backend.graphs.nodes import recorded_value
from checked_backend.graphs.operators import OperatorKind, describe_operator
from checked_backend.modes.random_tape import RandomTape, RecordRandom
from checked_backend.process.worker import Death, cannot_fork, run_in_worker
from checked_backend.regions.compile import Compiler, compile_candidate, copy_graph
from checked_backend.regions.inputs import copy_values
from checked_backend.report import Report

__all__ = [
    "CLEAR",
    "MUCH",
    "FaultyOperator",
    "bytes_of",
    "compile_graph",
    "probe",
    "probe_isolated",
    "segments",
    "share_of",
    "worth_exposing",
]


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
    """An operator with a local error."""

    node: fx.Node
    finding: Finding

    @property
    def size(self) -> float:
        """The error's share of the result, in rms; infinite if the error is not one of finite values."""
        return share_of(self.finding)


def share_of(finding: Finding) -> float:
    """An error's share of its result, in rms; infinite if the error is not one of finite values."""
    metrics = finding.metrics
    if metrics is None or metrics.nonfinite_mismatched or not metrics.reference_rms:
        return math.inf
    share = metrics.rmse / metrics.reference_rms
    return share if share == share else math.inf


def compile_graph(compiler: Compiler, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile an ATen graph as it is, for symbolic sizes where it has them."""
    traced = [recorded_value(node) for node in gm.graph.find_nodes(op="placeholder")]
    fake_mode = detect_fake_mode(traced)
    # loops have values of unknown size; to trace them, the first trace's fake mode is needed
    needed = any(isinstance(value, torch.SymInt) for value in traced) or any(map(is_higher_order, calls_of(gm)))
    kept = fake_mode is not None and needed
    examples = traced if kept else list(inputs)
    with compiling(), tracing(TracingContext(fake_mode) if kept else None), torch.no_grad():
        return compile_candidate(compiler, copy_graph(gm), examples)


def probe(gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, *, limit: int) -> FaultyOperator | None:
    """Find the first operator whose own inputs do not explain its result; a gross error later wins over a slight one.

    Args:
        gm: A functional ATen graph.
        limit: Bytes that the exposed tensors of one compilation may take. A graph with more is compiled in segments.

    Returns:
        The faulty operator; None if every operator is right when all are exposed.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = dict(zip(placeholders, unshared(gm, inputs), strict=True))
    exact = frozenset(id(value) for value in values.values())
    uses = _last_uses(gm)
    best: FaultyOperator | None = None
    for part in segments(gm, limit):
        segment, sources = _segment(gm, part)
        exposed = [made for node in part if worth_exposing(node) for made in tensors_made(node)]
        instrumented, places = with_outputs(segment, [_find(segment, node) for node in exposed])
        arguments = [values[source] for source in sources]
        given = copy_values(arguments)
        with torch.no_grad():
            results = compile_graph(compiler, instrumented, arguments)(*given)
        candidate = {node: results[place] for node, place in zip(exposed, places, strict=True)}
        del results
        left = dict(zip(sources, given, strict=True))
        with modes_left():
            for faulty in _walk(part, gm, values, candidate, left, exact, uses):
                if best is None or faulty.size > MUCH * best.size:
                    best = faulty
                if best.size >= CLEAR:
                    return best
    return best


def segments(gm: fx.GraphModule, limit: int) -> Iterator[list[fx.Node]]:
    """Split a graph's calls into runs whose exposed tensors together take at most ``limit`` bytes."""
    part: list[fx.Node] = []
    size = 0
    for node in calls_of(gm):
        own = sum(bytes_of(made) for made in tensors_made(node)) if worth_exposing(node) else 0
        if part and size + own > limit:
            yield part
            part, size = [], 0
        part.append(node)
        size += own
    if part:
        yield part


def _segment(gm: fx.GraphModule, part: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """A run of calls as a graph. It returns the values that later calls use, so that fusion stays as it was."""
    inside = set(part)
    wanted = [node for node in part if any(user not in inside for user in node.users)]
    returned = [node for node in wanted if isinstance(recorded_value(node), torch.Tensor)]
    return part_of(gm, part, returned)


def _find(segment: fx.GraphModule, node: fx.Node) -> fx.Node:
    found: fx.Node = next(own for own in segment.graph.nodes if own.name == node.name)
    return found


def _walk(
    part: Sequence[fx.Node],
    gm: fx.GraphModule,
    values: dict[fx.Node, Any],
    candidate: dict[fx.Node, torch.Tensor],
    left: Mapping[fx.Node, Any],
    exact: frozenset[int],
    uses: Mapping[fx.Node, fx.Node],
) -> Iterator[FaultyOperator]:
    """Check each call of a part. ``left`` has the inputs as the compiled part left them."""
    interpreter = fx.Interpreter(gm)
    written: dict[fx.Node, tuple[OperatorCall, Any]] = {}
    for node in _with_modes(gm, part):
        if sets_mode(node):
            interpreter.env = values
            values[node] = interpreter.run_node(node)
            continue
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in values:
                values[source] = interpreter.run_node(source)
        interpreter.env = values
        args, kwargs = interpreter.fetch_args_kwargs_from_env(node)
        run = _runner(interpreter, node)
        call = OperatorCall(node, tuple(args), kwargs, run, exact)
        if writes(node):
            call = OperatorCall(node, *_copied(args, kwargs), partial(_on_copies, run), exact)
            written.update((source, (call, values[source])) for source in node.all_input_nodes[:1] if source in left)
        tape = RandomTape()
        with torch.no_grad(), RecordRandom(tape):
            expected = run(*args, **kwargs)
        made = tensors_made(node)
        known = {one: candidate.pop(one) for one in made if one in candidate}
        if not known:
            values[node] = expected
        else:
            actual = _assembled(node, expected, known)
            values[node] = actual
            # a draw depends on earlier draws, and a compiler may choose some of these; so draws are not compared
            finding = call_oracle(call, expected, actual) if tape.empty else None
            if finding is not None:
                yield FaultyOperator(node, finding)
        for source in node.all_input_nodes:
            if uses.get(source) is node:
                values.pop(source, None)
        if node not in uses:
            values.pop(node, None)
    for source, (call, expected) in written.items():
        finding = call_oracle(call, expected, left[source]) if isinstance(expected, torch.Tensor) else None
        if finding is not None:
            yield FaultyOperator(call.node, finding)


def _with_modes(gm: fx.GraphModule, part: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The calls of a part and the mode calls between them. The modes in force before the part come first."""
    yield from modes_before(gm, part[0])
    inside, begun = set(part), False
    for node in gm.graph.nodes:
        begun = begun or node is part[0]
        if node in inside or (begun and sets_mode(node)):
            yield node
        if node is part[-1]:
            return


def _runner(interpreter: fx.Interpreter, node: fx.Node) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(interpreter, node.op)(node.target, args, kwargs)

    return run


def _copied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    copies: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(copy_values(leaves), spec)
    return copies


def _on_copies(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an operator that writes to its arguments on copies, so that it can be run again."""
    own_args, own_kwargs = _copied(args, kwargs)
    return run(*own_args, **own_kwargs)


def _assembled(node: fx.Node, expected: Any, known: Mapping[fx.Node, torch.Tensor]) -> Any:
    """The candidate's result of a call, completed by eager's items where the candidate's were not exposed."""
    if node in known:
        return known[node]
    results = list(expected)
    for item, value in known.items():
        results[int(item.args[1])] = value  # type: ignore[arg-type]
    return type(expected)(results) if isinstance(expected, list) else tuple(results)


def worth_exposing(node: fx.Node) -> bool:
    """Whether a node's value should be exposed. Views and writes to inputs show in the values made from them."""
    if isinstance(node.target, OpOverload):
        operator = describe_operator(node.target)
        return not (is_view(node) or operator.mutated or operator.kind is OperatorKind.UNINITIALISED)
    return True


def bytes_of(node: fx.Node) -> int:
    """Bytes of the tensor that a node stands for, 0 if it is none."""
    value = recorded_value(node)
    if not isinstance(value, torch.Tensor):
        return 0
    elements = 1
    for size in value.shape:
        elements *= size if isinstance(size, int) else (size.node.hint or 1)
    return elements * value.element_size()


def _last_uses(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """For each node, the last call that takes its value. The graph's results are not kept."""
    return {source: node for node in calls_of(gm) for source in node.all_input_nodes}


def probe_isolated(
    gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, *, limit: int
) -> FaultyOperator | None:
    """Run `probe` in a worker process, if one can be forked. The arguments are the same.

    Raises:
        CheckedBackendError: The probe raised, died or hung.
        Exception: If no process can be forked: whatever the compiler or the graph raises.
    """
    if cannot_fork():
        return probe(gm, inputs, compiler, limit=limit)

    def produce() -> str:
        faulty = probe(gm, inputs, compiler, limit=limit)
        if faulty is None:
            return json.dumps(None)
        return json.dumps([faulty.node.name, Report((faulty.finding,), Coverage(), title="probe").to_json()])

    answer = run_in_worker(produce, timeout=PROBE_LIMIT)
    if isinstance(answer, Death):
        raise CheckedBackendError(f"its process died: {answer.words}")
    told = json.loads(answer)
    if told is None:
        return None
    name, report = told
    [finding] = Report.from_json(report).findings
    return FaultyOperator(next(node for node in gm.graph.nodes if node.name == name), finding)
