"""Where gradients arrive at a region's results and inputs, and one autograd node that they can be led through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import Node

from checked_backend.regions.execution import Result, grad_fn, gradient_edge, results_of

Edge = tuple[Node, int]
"""A place in an autograd graph: a node, and the number of its output."""


def input_edges(args: Sequence[Any], positions: frozenset[int]) -> dict[Edge, int]:
    """The places in the user's autograd graph where the inputs' gradients arrive. Take them before the region runs."""
    edges: dict[Edge, int] = {}
    for position in sorted(positions):
        edge = gradient_edge(args[position])
        if edge is not None:
            edges[edge.node, edge.output_nr] = position
    return edges


class _Gate(torch.autograd.Function):
    """The identity on any number of tensors, as one autograd node.

    For a gradient that is None it sends zeros, which a hook can replace, as it cannot replace None.
    """

    @staticmethod
    def forward(_ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


GATE = f"{_Gate.__name__}Backward"
"""The name of the autograd node that `gradient_gate` makes."""


def gradient_gate(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """Lead the gradients of some arguments through one autograd node.

    Returns:
        The arguments, with aliases at those positions, and wherever else the same tensors are given.
    """
    given = [args[position] for position in positions]
    aliases = dict(zip(map(id, given), _Gate.apply(*given), strict=True))  # type: ignore[no-untyped-call]
    return [aliases.get(id(arg), arg) for arg in args]


@dataclass(slots=True)
class Site:
    """The facts that a hook on one node needs.

    Attributes:
        results: Results that hang on the node, each with the number of the node's output.
        to_inputs: Gradients that go to inputs of the region: (number among the node's gradients, position).
        to_results: Gradients that go to other results: (number among the node's gradients, that result).
        to_gate: Gradients that go to inputs through a `gradient_gate`: (number among the node's gradients, position).
        known: The node's outputs that are results, or that other nodes of the region read.
        is_gate: Whether it is a `gradient_gate`.
        reaches: Positions of the inputs that its gradients lead to, through other nodes too.
    """

    results: list[tuple[int, Result]] = field(default_factory=list)
    to_inputs: list[tuple[int, int]] = field(default_factory=list)
    to_results: list[tuple[int, Result]] = field(default_factory=list)
    to_gate: list[tuple[int, int]] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    is_gate: bool = False
    reaches: frozenset[int] = frozenset()


def find_sites(
    outputs: Sequence[Any], mutated: Mapping[int, Any], edges: Mapping[Edge, int], since: int
) -> tuple[dict[Node, Site], list[Node], int]:
    """Walk the region's autograd graph from its results to its inputs.

    Returns:
        The nodes that need hooks, all nodes of the region, and the number of edges that leave it elsewhere.
    """
    results: dict[Edge, Result] = {}
    copied = {edge for value in mutated.values() if (edge := copied_edge(value, since)) is not None}
    for result, value in results_of(outputs, mutated).items():
        edge = copied_edge(value, since)
        if edge not in copied:
            edge = _edge(value)
        elif result[0] == "output":
            continue  # a view of a mutated input: its gradient is in that one's
        if edge is not None and edge not in edges:  # else it is an input passed through
            # two results on one edge are one tensor, whose gradient arrives once
            results.setdefault(edge, result)
    sites: dict[Node, Site] = {}
    for (node, output), result in results.items():
        sites.setdefault(node, Site()).results.append((output, result))
    outside_edges = 0
    users = cache(partial(_behind, edges))
    queue = list(sites)
    seen = set(queue)
    while queue:
        node = queue.pop()
        for number, (target, target_number) in enumerate(node.next_functions):
            if target is None:
                continue
            edge_out = (target, target_number)
            if edge_out in edges:
                sites.setdefault(node, Site()).to_inputs.append((number, edges[edge_out]))
                continue
            if edge_out in results:
                sites.setdefault(node, Site()).to_results.append((number, results[edge_out]))
            if target in seen:
                continue
            # each thread counts for itself: a node that seems old may be one that the candidate made in another thread
            is_users = target._sequence_nr() < since and target in users()
            if is_users or target.name() == "torch::autograd::AccumulateGrad":
                outside_edges += 1
                continue
            seen.add(target)
            queue.append(target)
    for node in seen:
        for target, output in node.next_functions:
            if target in sites:
                sites[target].known.add(output)
    reached = _reached(seen, edges)
    for node, site in sites.items():
        site.is_gate = node.name() == GATE
        site.reaches = frozenset(position for position in edges.values() if reached[node] >> position & 1)
        site.known.update(output for output, _ in site.results)
        for number, (target, target_number) in enumerate(node.next_functions):
            if target in sites and target.name() == GATE:
                behind = dict(sites[target].to_inputs)
                site.to_gate += [(number, behind[target_number])] if target_number in behind else []
    return sites, list(seen), outside_edges


def _edge(value: Any) -> Edge | None:
    edge = gradient_edge(value) if _has_history(value) else None
    return None if edge is None else (edge.node, edge.output_nr)


def copied_edge(value: Any, since: int) -> Edge | None:
    """The place where the gradient of what AOT autograd copied to a view arrives, also if it does not pass the view.

    The view's base knows the copy too. Both lead to it.
    """
    node = grad_fn(value) if _has_history(value) and value._is_view() else None
    while node is not None and node._sequence_nr() >= since:
        (source, number), *others = node.next_functions or [(None, 0)]
        if node.name().endswith("CopySlices"):
            source, number = others[0] if len(others) == 1 else (None, 0)
            return None if source is None or source.name() != "CompiledFunctionBackward" else (source, number)
        node = None if others else source
    return None


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and grad_fn(value) is not None


def _reached(nodes: Set[Node], edges: Mapping[Edge, int]) -> dict[Node, int]:
    """The inputs that the gradients of each node of the region lead to: a bit for each position."""
    reached: dict[Node, int] = {}
    queue = list(nodes)
    while queue:
        ahead = [(target, number) for target, number in queue[-1].next_functions if target is not None]
        unknown = [target for target, _ in ahead if target in nodes and target not in reached]
        if unknown:
            queue += unknown
            continue
        node = queue.pop()
        reached[node] = 0
        for edge in ahead:
            reached[node] |= 1 << edges[edge] if edge in edges else reached.get(edge[0], 0)
    return reached


def _behind(edges: Mapping[Edge, int]) -> set[Node]:
    """The nodes of the user's autograd graph: those that the gradients of the inputs go to."""
    queue = [node for node, _ in edges]
    seen = set(queue)
    while queue:
        for target, _ in queue.pop().next_functions:
            if target is not None and target not in seen:
                seen.add(target)
                queue.append(target)
    return seen
