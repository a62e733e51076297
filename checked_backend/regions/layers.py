"""Cut a region into its layers, so that those that are alike are compiled once.

A cut is before a matrix product or a convolution: a compiler computes all of its operands first, so that it fuses alike
in a layer and in the whole region.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend.graphs.effects import mode_name, writes, written_by
from checked_backend.graphs.nodes import recorded_value
from checked_backend.regions.inputs import storage_key
from checked_backend.regions.operator_check.probe import CALLS
from checked_backend.regions.operator_check.repeats import described

_PRODUCTS = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "conv1d", "conv2d", "conv3d", "multi_head_attention_forward"}
)
_PER_LAYER = 8
"""How many products of a layer may be alike: those with the query, the key, and the value."""
_LENGTHS = 4
"""How many lengths of a layer are tried."""
_SAVED = 0.6
"""The least share of a region's calls that are saved: what 5 layers save. Each compilation has a cost of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some successive calls of a region's graph.

    Attributes:
        graph: What computes them. Layers that are alike share it.
        inputs: The nodes that it reads, in the order of its placeholders.
        outputs: The nodes that it returns.
    """

    graph: fx.GraphModule
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]


def cut_into_layers(gm: fx.GraphModule) -> list[Piece]:
    """Cut a region's graph before each of some layers that are alike.

    Returns:
        What is before the layers, each of them, and what is after them. Empty if that would save little.
    """
    calls = [node for node in gm.graph.nodes if node.op in CALLS]
    inputs = map(recorded_value, gm.graph.find_nodes(op="placeholder"))
    if not all(isinstance(value, torch.Tensor) for value in inputs):  # symbolic sizes are numbers
        return []
    for start, length, times in _repeated(calls):
        ends = [0, *(start + length * number for number in range(times + 1)), len(calls)]
        parts = [calls[begin:end] for begin, end in pairwise(ends)]
        if _may_be_cut(parts):
            return _pieces(gm, parts)
    return []


def _repeated(calls: Sequence[fx.Node]) -> Iterator[tuple[int, int, int]]:
    """Where layers begin that are alike, the calls in each of them, and how many there are; the most calls first."""
    kinds = [described(node) for node in calls]
    starts = [place for place, node in enumerate(calls) if getattr(node.target, "__name__", "") in _PRODUCTS]
    places, lengths = defaultdict[str, list[int]](list), Counter[int]()
    for place in starts:
        lengths.update(place - earlier for earlier in places[kinds[place]][-_PER_LAYER:])
        places[kinds[place]].append(place)
    found = []
    for length, _ in lengths.most_common(_LENGTHS):
        for start in starts:
            times = 1
            while kinds[start : start + length] == kinds[start + length * times : start + length * (times + 1)]:
                times += 1
            if length * (times - 1) >= _SAVED * len(calls):
                found.append((start, length, times))
    yield from sorted(found, key=lambda one: one[1] * (one[2] - 1), reverse=True)


def _may_be_cut(parts: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether layers read alike, and nothing but what tensors hold passes from one part to another."""
    if len({str(_operands(part)) for part in parts[1:-1]}) > 1:
        return False
    passed = (recorded_value(node) for part in parts for node in _inputs(part) if node.op in CALLS)
    if not all(type(value) is FakeTensor and value.layout is torch.strided for value in passed):
        return False
    modes: set[Any] = set()
    for part in parts:
        given = {None, *(storage_key(recorded_value(node)) for node in _inputs(part))}
        for node in part:
            if writes(node):
                target = written_by(node)
                if target is None or storage_key(recorded_value(target)) in given:
                    return False
            name = mode_name(node)
            if name.startswith("_exit_"):
                modes.discard(node.args[0])
            elif name == "_set_grad_enabled" and node.args[0] is True:
                modes.discard(name)
            elif name:
                modes.add(name if name == "_set_grad_enabled" else node)
        if modes:
            return False
    return True


def _operands(part: Sequence[fx.Node]) -> list[list[int]]:
    """Which operands the calls of a part have in common, as numbers."""
    numbers = {node: number for number, node in enumerate(part)}
    return [[numbers.setdefault(source, -len(numbers)) for source in node.all_input_nodes] for node in part]


def _inputs(part: Sequence[fx.Node]) -> list[fx.Node]:
    own = set(part)
    sources = dict.fromkeys(source for node in part for source in node.all_input_nodes)
    return [source for source in sources if source not in own and source.op != "get_attr"]


def _pieces(gm: fx.GraphModule, parts: Sequence[Sequence[fx.Node]]) -> list[Piece]:
    before, *layers, after = parts
    read = {place for layer in layers for place in _read(layer)}
    first = _piece(gm, layers[0], read)
    others = [Piece(first.graph, _inputs(layer), [layer[place] for place in sorted(read)]) for layer in layers[1:]]
    ends = [[_piece(gm, part, _read(part))] if part else [] for part in (before, after)]
    return [*ends[0], first, *others, *ends[1]]


def _read(part: Sequence[fx.Node]) -> set[int]:
    """The places of the calls in a part whose results something outside of it reads."""
    return {place for place, node in enumerate(part) if not set(part).issuperset(node.users)}


def _piece(gm: fx.GraphModule, part: Sequence[fx.Node], read: Collection[int]) -> Piece:
    graph, inputs, outputs = fx.Graph(), _inputs(part), [part[place] for place in sorted(read)]
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    for node in part:
        for source in node.all_input_nodes:
            if source not in copies:
                copies[source] = graph.node_copy(source)  # of an attribute
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    made = fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return Piece(made, inputs, outputs)
