"""The probe of a region: its graph with the tensors inside of it, and the gradients that reach them, handed out too.

A tensor is handed out as a copy without history. To see its gradient, an input of zeros (a *tap*) is added to it: the
gradient of the tap is the one that the compiled backward pass has there, whatever compiler made it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.symbols import evaluate_expression, size_hint
from checked_backend.graphs.effects import has_effects, sets_mode, written_by
from checked_backend.graphs.nodes import outputs_of, recorded_value
from checked_backend.regions.compile import copy_graph
from checked_backend.regions.execution import Call
from checked_backend.regions.inputs import storage_key

CALLS = ("call_function", "call_method", "call_module")


@dataclass(frozen=True, slots=True)
class Exposed:
    """A probe, and the places of its results.

    Attributes:
        graph: The graph to compile: the region's own results come first, its own inputs too.
        outputs: Number of the region's own results.
        values: For each node that is handed out, its place among the results.
        versions: For each node that writes to a tensor which is used afterwards: the nodes that made such tensors, and
            where what they hold then is among the results.
        taps: For each node with a tap, the tap's recorded value.
        size: Bytes of what is handed out.
    """

    graph: fx.GraphModule
    outputs: int
    values: Mapping[str, int]
    versions: Mapping[str, Mapping[str, int]]
    taps: Mapping[str, torch.Tensor]
    size: int

    def make_taps(self, example_inputs: Sequence[Any], inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Taps for one call, by node.

        Args:
            example_inputs: The recorded values of the region's placeholders.

        Raises:
            KeyError: A size follows from no input.
        """
        known = dict(_symbols(example_inputs, inputs))
        return {name: _zeros(recorded, known) for name, recorded in self.taps.items()}


@dataclass(slots=True)
class Probed:
    """The results of one run of a region, or of its probe.

    Attributes:
        inputs: The inputs it was called with, as they were before.
        wanted: Positions of the inputs whose gradients were taken.
        results: All that the probe returned.
        cotangents: The gradients sent in, by place among the results.
        gradients: The gradients of the inputs, by position.
        taps: The gradients of the taps, by node.
    """

    inputs: Sequence[Any]
    wanted: frozenset[int]
    results: list[Any]
    cotangents: Mapping[int, torch.Tensor]
    gradients: Mapping[int, torch.Tensor | None]
    taps: Mapping[str, torch.Tensor | None]

    def shows_values(self) -> bool:
        """Whether each tensor that came out has a finite number in it other than zero: in others nothing is seen."""
        came_out = (*self.results, *self.gradients.values(), *self.taps.values())
        rounded = (one for one in came_out if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel())
        return all(bool((value.isfinite() & (value != 0)).any()) for value in map(torch.Tensor.float, rounded))


def run_region(
    region: Callable[..., Any],
    call: Call,
    cotangents: Callable[[Sequence[Any]], Mapping[int, torch.Tensor]],
    make_taps: Callable[[Sequence[Any]], Mapping[str, torch.Tensor]] = lambda _arguments: {},
    modes: Sequence[AbstractContextManager[Any]] = (),
) -> Probed:
    """Run a region, or its probe, on copies of its inputs; backward, too, where gradients are asked for.

    Args:
        make_taps: Makes the taps of a probe.
        modes: Modes to run it in.
    """
    arguments, leaves = call.fresh()
    taps = make_taps(arguments)
    names: list[str | int] = [*taps, *leaves]
    wanted = dict(zip(names, [*taps.values(), *leaves.values()], strict=True))
    gradients: dict[str | int, torch.Tensor | None] = {}
    call.rng.restore()
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        results = list(region(*arguments, *taps.values()))
        sent = cotangents(results) if wanted else {}
        if sent:
            roots = [results[place] for place in sent]
            found = torch.autograd.grad(roots, list(wanted.values()), list(sent.values()), allow_unused=True)
            gradients.update(zip(wanted, found, strict=True))
    return Probed(
        inputs=(),
        wanted=frozenset(leaves if sent else ()),
        results=[bare(value) for value in results],
        cotangents=sent,
        gradients={place: gradients.get(place) for place in leaves},
        taps={name: gradients.get(name) for name in taps},
    )


def bare(value: Any) -> Any:
    """A value without its history."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def expose(gm: fx.GraphModule, *, gradients: bool) -> Exposed:
    """Make the probe of a region.

    Args:
        gradients: Whether to tap.
    """
    probe = copy_graph(gm)
    graph = probe.graph
    exposed, tapped, rewritten = _planned(probe, gradients=gradients)
    values: dict[str, int] = {}
    versions: dict[str, dict[str, int]] = {}
    taps: dict[str, torch.Tensor] = {}
    behind = {node: node for node in exposed}  # where a node's own value is handed out: after its tap
    for node in tapped:
        taps[node.name] = recorded_value(node)
        behind[node] = _tapped(graph, node, len(taps))
    results = outputs_of(graph)
    count = len(results)
    for node in exposed:
        values[node.name] = len(results)
        results.append(_copied(graph, behind[node], behind[node]))
    for writer, owners in rewritten.items():
        versions[writer.name] = {}
        for owner in owners:
            versions[writer.name][owner.name] = len(results)
            results.append(_copied(graph, behind.get(owner, owner), writer))
    graph.output_node().args = (tuple(results),)
    probe.recompile()
    handed = [*exposed, *(owner for owners in rewritten.values() for owner in owners)]
    return Exposed(probe, count, values, versions, taps, sum(map(_bytes, handed)))


def _planned(
    gm: fx.GraphModule, *, gradients: bool
) -> tuple[list[fx.Node], list[fx.Node], dict[fx.Node, list[fx.Node]]]:
    """The nodes to hand out, those to tap, and for each that writes to a tensor which is used later: what made that."""
    exposed: list[fx.Node] = []
    tapped: list[fx.Node] = []
    rewritten: dict[fx.Node, list[fx.Node]] = {}
    symbols = {
        symbol for symbol, _ in _symbols([recorded_value(node) for node in gm.graph.find_nodes(op="placeholder")], ())
    }
    written = {key for node in gm.graph.nodes for key in _written(node)}
    owners: dict[int, fx.Node] = {}
    for node in gm.graph.nodes:
        value = recorded_value(node)
        for memory in _written(node):
            owner = owners.get(memory)
            if owner is not None and any(_reads(later, memory) for later in _later(node)):
                rewritten.setdefault(node, []).append(owner)
        if not isinstance(value, torch.Tensor):
            continue
        key = storage_key(value)
        if key is None or key in owners:
            continue
        owners[key] = node
        if node.op not in CALLS or sets_mode(node) or has_effects(node) or not _is_plain(value):
            continue
        exposed.append(node)
        floating = value.is_floating_point() and value.requires_grad
        if gradients and floating and key not in written and _is_known(value, symbols):
            tapped.append(node)
    return exposed, tapped, rewritten


def _written(node: fx.Node) -> list[int]:
    """The memory that a node writes to, as far as its name tells."""
    target = written_by(node)
    value = None if target is None else recorded_value(target)
    key = storage_key(value) if isinstance(value, torch.Tensor) else None
    return [] if key is None else [key]


def _later(node: fx.Node) -> Iterator[fx.Node]:
    after = node.next
    while after.op != "root":
        yield after
        after = after.next


def _reads(node: fx.Node, key: int) -> bool:
    values = [recorded_value(source) for source in node.all_input_nodes]
    return any(isinstance(value, torch.Tensor) and storage_key(value) == key for value in values)


def _is_plain(value: torch.Tensor) -> bool:
    return type(value) in (FakeTensor, torch.Tensor) and value.layout is torch.strided and not value.is_quantized


def _is_known(value: torch.Tensor, symbols: set[sympy.Basic]) -> bool:
    """Whether a tensor's sizes follow from the inputs', so that a tap can be made before the region is run."""
    return all(
        size.node.expr.free_symbols <= symbols
        for size in (*value.shape, *value.stride())
        if isinstance(size, torch.SymInt)
    )


def _tapped(graph: fx.Graph, node: fx.Node, number: int) -> fx.Node:
    last = [each for each in graph.nodes if each.op == "placeholder"][-1:]
    with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
        tap = graph.placeholder(f"operator_tap_{number}")
    tap.meta["example_value"] = recorded_value(node)
    with graph.inserting_after(node):
        total = graph.call_function(operator.add, (node, tap))
    total.meta = {name: node.meta[name] for name in ("example_value", "stack_trace") if name in node.meta}
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    return total


def _copied(graph: fx.Graph, node: fx.Node, after: fx.Node) -> fx.Node:
    with graph.inserting_after(after):
        detached = graph.call_method("detach", (node,))
    with graph.inserting_after(detached):
        copy = graph.call_method("clone", (detached,))
    value = recorded_value(node)
    for made in (detached, copy):
        made.meta["example_value"] = bare(value)
    return copy


def _symbols(recorded: Sequence[Any], real: Sequence[Any]) -> Iterator[tuple[sympy.Basic, int]]:
    """The symbols that stand for inputs' sizes, with their values (0 where there are no real inputs)."""
    for place, value in enumerate(recorded):
        own = real[place] if real else value
        pairs: list[tuple[Any, Any]] = [(value, own)]
        if isinstance(value, torch.Tensor):
            pairs = list(zip((*value.shape, *value.stride()), (*own.shape, *own.stride()), strict=True))
        for size, number in pairs:
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                yield size.node.expr, int(number) if real else 0


def _zeros(recorded: torch.Tensor, known: Mapping[Any, int]) -> torch.Tensor:
    def number(size: Any) -> int:
        return evaluate_expression(size.node.expr, known) if isinstance(size, torch.SymInt) else int(size)

    sizes, strides = [number(size) for size in recorded.shape], [number(stride) for stride in recorded.stride()]
    zeros = torch.empty_strided(sizes, strides, dtype=recorded.dtype, device=recorded.device).zero_()
    return zeros.requires_grad_()


def _bytes(node: fx.Node) -> int:
    value = recorded_value(node)
    sizes = [size if isinstance(size, int) else int(size_hint(size) or 1) for size in value.shape]
    return math.prod(sizes) * int(value.element_size())
