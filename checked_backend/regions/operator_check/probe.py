"""The probe of a region: its graph with the tensors inside of it, and the gradients that reach them, handed out too.

A tensor is handed out as a copy without history. To see its gradient, an input of zeros (a *tap*) is added to it: the
gradient of the tap is the one that the compiled backward pass has there, whatever compiler made it.

Before that, writes in place become calls that make a new tensor, where that is the same program: a tap before a write
would change the tensor that is written to, and gradients that pass a write have no tensor at which they can be seen.
And what a region repeats is left out where the values do not matter.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.symbols import evaluate_expression, size_hint
from checked_backend.graphs.effects import has_effects, mode_name, sets_mode, written_by
from checked_backend.graphs.nodes import outputs_of, recorded_value
from checked_backend.regions.compile import copy_graph
from checked_backend.regions.execution import Call
from checked_backend.regions.inputs import storage_key

CALLS = ("call_function", "call_method", "call_module")

# Autocast leaves all of these alone: where it casts, a new tensor would have another dtype than the one written to.
_SAME = frozenset(
    {
        "abs", "add", "addcdiv", "addcmul", "celu", "clamp", "clamp_max", "clamp_min", "div", "dropout", "elu",
        "feature_alpha_dropout", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "masked_fill", "mish", "mul",
        "neg", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "sqrt", "square", "sub", "tanh", "threshold",
    }
)  # fmt: skip
_OPERATORS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


@dataclass(frozen=True, slots=True)
class Exposed:
    """A probe, and the places of its results.

    Attributes:
        graph: The graph to compile: the region's own results come first, its own inputs too.
        outputs: Number of the region's own results.
        values: For each node that is handed out, its place among the results.
        versions: For each node that writes to a tensor which is used afterwards: the node that made the tensor, and
            where what it holds then is among the results.
        taps: For each node with a tap, the tap's recorded value.
        size: Bytes of what is handed out.
    """

    graph: fx.GraphModule
    outputs: int
    values: Mapping[str, int]
    versions: Mapping[str, tuple[str, int]]
    taps: Mapping[str, torch.Tensor]
    size: int

    def make_taps(self, example_inputs: Sequence[Any], inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Taps for one call, by node.

        Args:
            example_inputs: The recorded values of the region's placeholders.

        Raises:
            KeyError: A size follows from no input.
        """
        known = {symbol: int(size) for symbol, size in _symbols(example_inputs, inputs)}
        return {name: _zeros(recorded, known) for name, recorded in self.taps.items()}


@dataclass(slots=True)
class Probed:
    """The results of one run of a region, or of its probe.

    Attributes:
        inputs: The inputs it was called with, as they were before.
        results: All that the probe returned.
        cotangents: The gradients sent in, by place among the results.
        gradients: The gradients of the inputs, by position, as far as they were taken.
        taps: The gradients of the taps, by node.
    """

    inputs: Sequence[Any]
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
        results=[bare(value) for value in results],
        cotangents=sent,
        gradients={place: gradients.get(place) for place in leaves if sent},
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
    versions: dict[str, tuple[str, int]] = {}
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
    for writer, owner in rewritten.items():
        versions[writer.name] = owner.name, len(results)
        results.append(_copied(graph, behind.get(owner, owner), writer))
    graph.output_node().args = (tuple(results),)
    probe.recompile()
    return Exposed(probe, count, values, versions, taps, sum(map(_bytes, [*exposed, *rewritten.values()])))


def _planned(gm: fx.GraphModule, *, gradients: bool) -> tuple[list[fx.Node], list[fx.Node], dict[fx.Node, fx.Node]]:
    """The nodes to hand out, those to tap, and for each that writes to a tensor which is used later: what made that."""
    exposed: list[fx.Node] = []
    tapped: list[fx.Node] = []
    rewritten: dict[fx.Node, fx.Node] = {}
    inputs = [recorded_value(node) for node in gm.graph.find_nodes(op="placeholder")]
    symbols = {symbol for symbol, _ in _symbols(inputs, inputs)}
    written = set(map(_written, gm.graph.nodes))
    last = {_memory(source): place for place, node in enumerate(gm.graph.nodes) for source in node.all_input_nodes}
    owners: dict[int, fx.Node] = {}
    for place, node in enumerate(gm.graph.nodes):
        value = recorded_value(node)
        memory = _written(node)
        if memory in owners and last[memory] > place:
            rewritten[node] = owners[memory]
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


def _memory(node: fx.Node) -> int | None:
    value = recorded_value(node)
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def _written(node: fx.Node) -> int | None:
    """The memory that a node writes to, as far as its name tells."""
    target = written_by(node)
    return None if target is None else _memory(target)


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


def _symbols(recorded: Sequence[Any], real: Sequence[Any]) -> Iterator[tuple[sympy.Basic, Any]]:
    """The symbols that stand for inputs' sizes, with the sizes of the real inputs."""
    for value, own in zip(recorded, real, strict=True):
        pairs: Iterable[tuple[Any, Any]] = [(value, own)]
        if isinstance(value, torch.Tensor):
            pairs = zip((*value.shape, *value.stride()), (*own.shape, *own.stride()), strict=True)
        for size, number in pairs:
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                yield size.node.expr, number


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


def out_of_place(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a region's graph, with calls that make new tensors for writes in place; nodes keep their names.

    All writes to one tensor are replaced, or none: those to inputs, through views, under ``no_grad``, those that
    views made before would see, and functions of which only one spelling is known stay.
    """
    copied = copy_graph(gm)
    places = {node: place for place, node in enumerate(copied.graph.nodes)}
    for group in _by_memory(copied.graph.nodes):
        writers = [node for node in group if has_effects(node)]
        if any(_spelled(node) is None for node in writers) or not _only_seen_through(group, writers, places):
            continue
        former = [group[0]]
        for writer in writers:
            writer.target, writer.args, writer.kwargs = _spelled(writer) or (writer.target, writer.args, writer.kwargs)
            for node in former:
                node.replace_all_uses_with(writer, delete_user_cb=_behind(places, writer))
            writer.meta["example_value"] = _anew(recorded_value(writer))
            former.append(writer)
    copied.recompile()
    return copied


def _by_memory(nodes: Any) -> Iterator[list[fx.Node]]:
    """The nodes whose tensors share memory, in order, where a call made it and no write to it is hidden of autograd."""
    groups: dict[int, list[fx.Node]] = {}
    closed: set[int] = set()
    recording = True
    for node in nodes:
        name = mode_name(node)
        if name.startswith("_set_grad_enabled"):
            recording = bool(node.args[0])
        elif "inference" in name:
            return  # where that ends is not looked for
        key = _memory(node)
        if key is None:
            continue
        groups.setdefault(key, []).append(node)
        if not recording and has_effects(node):
            closed.add(key)
    for key, group in groups.items():
        if key not in closed and group[0].op in ("call_function", "call_method"):
            yield group


def _only_seen_through(group: Sequence[fx.Node], writers: Sequence[fx.Node], places: Mapping[fx.Node, int]) -> bool:
    """Whether the writes are to the whole tensor, and nothing that a view of it was made for before reads it after."""
    whole = {group[0], *writers}
    if group[0] in writers or any(writer.args[0] not in whole for writer in writers):
        return False
    return not any(
        places[view] < places[writer] <= max((places[user] for user in view.users), default=0)
        for view in group
        if view not in whole
        for writer in writers
    )


def _behind(places: Mapping[fx.Node, int], writer: fx.Node) -> Callable[[fx.Node], bool]:
    return lambda user: places[user] > places[writer]


def _spelled(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Target, arguments and keywords of the call that makes a new tensor; None if that may be another one."""
    if not node.args or not isinstance(node.args[0], fx.Node) or "out" in node.kwargs:
        return None
    own = recorded_value(node.args[0])
    others = [recorded_value(source) for source in node.all_input_nodes if source is not node.args[0]]
    if not isinstance(own, FakeTensor) or not own.is_floating_point() or not all(_keeps(own, one) for one in others):
        return None
    kwargs = dict(node.kwargs)
    if node.op == "call_method":
        name = str(node.target).removesuffix("_")
        return (name, node.args, kwargs) if name in _SAME else None
    if isinstance(node.target, str):
        return None
    if node.target in _OPERATORS:
        return _OPERATORS[node.target], node.args, kwargs
    name = str(getattr(node.target, "__name__", ""))
    if name.removesuffix("_") not in _SAME:
        return None
    if name.endswith("_"):
        homes = (torch, F, torch.Tensor)
        found = [getattr(home, name[:-1]) for home in homes if getattr(home, name, None) is node.target]
        return (found[0], node.args, kwargs) if found else None
    if "inplace" in kwargs:
        return node.target, node.args, {**kwargs, "inplace": False}
    place = list(inspect.signature(node.target).parameters).index("inplace")
    return node.target, (*node.args[:place], False, *node.args[place + 1 :]), kwargs


def _keeps(own: torch.Tensor, other: Any) -> bool:
    """Whether the result has the dtype of the first operand, as one that is written to has."""
    if not isinstance(other, torch.Tensor) or other.dtype == own.dtype:
        return True
    return not other.is_floating_point() or (other.dim() == 0 and own.dim() > 0)


def _anew(value: torch.Tensor) -> torch.Tensor:
    """A tensor like this in memory of its own."""
    with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        made = torch.empty_like(value)
    return made.requires_grad_(value.requires_grad)


def without_repeats(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[fx.Node]] | None:
    """Copy a region's graph without calls that repeat an earlier one: the same function, of tensors that are alike.

    Decompositions take no values, so that they are the same for all of them.

    Returns:
        The graph. It returns all tensors that nothing in it reads. The calls that are left out, but read: their values
        are further inputs, behind the region's own. None if nothing is repeated.
    """
    repeated = _repeated(gm.graph.nodes)
    if not repeated:
        return None
    pending = [
        node
        for node in gm.graph.nodes
        if node.op in CALLS
        and node not in repeated
        and (isinstance(recorded_value(node), torch.Tensor) or sets_mode(node) or has_effects(node))
    ]
    kept = set(pending)
    while pending:
        more = {*pending.pop().all_input_nodes} - kept - repeated
        kept |= more
        pending += more
    read = [node for node in gm.graph.nodes if node in repeated and not kept.isdisjoint(node.users)]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in [*gm.graph.find_nodes(op="placeholder"), *read, *(one for one in gm.graph.nodes if one in kept)]:
        if node in repeated:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = {"example_value": recorded_value(node)}
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    last = [copy for node, copy in copies.items() if node in kept and node.op in CALLS and not copy.users]
    graph.output(tuple(copy for copy in last if isinstance(recorded_value(copy), torch.Tensor)))
    return fx.GraphModule(gm, graph), read


def _repeated(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    written = set(map(_written, nodes))
    modes: dict[Any, str] = {}
    seen: set[tuple[str, ...]] = set()
    repeated: set[fx.Node] = set()
    for node in nodes:
        if name := mode_name(node):
            modes.pop(node.args[0], None) if name.startswith("_exit_") else modes.update({node: f"{name}{node.args}"})
            continue
        value = recorded_value(node)
        if node.op not in ("call_function", "call_method") or has_effects(node) or not isinstance(value, torch.Tensor):
            continue
        key = (_described(node), *modes.values())
        if key not in seen:
            seen.add(key)
        elif value.layout is torch.strided and _memory(node) not in written:
            repeated.add(node)
    return repeated


def _described(node: fx.Node) -> str:
    """What is known of a call when it is traced."""
    places = {source: place for place, source in enumerate(node.all_input_nodes)}
    values = fx.map_arg((node.args, node.kwargs), lambda source: (places[source], _kind(source)))
    return f"{node.op} {node.target!r} {values!r}"


def _kind(node: fx.Node) -> Any:
    value = recorded_value(node)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return _described(node) if node.op in CALLS else node.name  # several results, a size; a body


def values_of(gm: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The values that nodes have in eager. Nothing in the graph may write to them."""
    graph = copy_graph(gm)
    own = {node.name: node for node in graph.graph.nodes}
    graph.graph.output_node().args = (tuple(own[node.name] for node in nodes),)
    graph.recompile()
    return [value.detach().clone(memory_format=torch.preserve_format) for value in graph.forward(*inputs)]
