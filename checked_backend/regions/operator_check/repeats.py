"""Leave out of a region what it repeats: layers that are alike come down to the first of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend.graphs.effects import has_effects, mode_name, sets_mode, written_by
from checked_backend.graphs.nodes import recorded_value
from checked_backend.regions.compile import copy_graph
from checked_backend.regions.inputs import storage_key
from checked_backend.regions.operator_check.probe import CALLS


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
    written = {storage_key(value) for value in map(_written, nodes) if isinstance(value, torch.Tensor)}
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
        elif value.layout is torch.strided and storage_key(value) not in written:
            repeated.add(node)
    return repeated


def _written(node: fx.Node) -> Any:
    target = written_by(node)
    return None if target is None else recorded_value(target)


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
