"""Where the gradients of a region's inputs arrive, and one autograd node that they can be led through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from checked_backend._torch.dynamo import dynamo_disable
from checked_backend.regions.execution import gradient_edge

__all__ = ["GATE", "Edge", "gradient_gate", "input_edges"]

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
    """The identity on any number of tensors, as one autograd node."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    @dynamo_disable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


GATE = f"{_Gate.__name__}Backward"
"""The name of the autograd node that `gradient_gate` makes."""


def gradient_gate(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """Lead the gradients of some arguments through one autograd node.

    Args:
        args: A region's inputs.
        positions: The positions of those arguments.

    Returns:
        The arguments, with aliases at those positions.
    """
    gated = list(args)
    aliases = _Gate.apply(*(args[position] for position in positions))  # type: ignore[no-untyped-call]
    for position, alias in zip(positions, aliases, strict=True):
        gated[position] = alias
    return gated
