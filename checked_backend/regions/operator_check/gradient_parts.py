"""The parts of a gradient: a tensor that is read several times gets the sum of what its readers send.

Where great parts cancel, a rounding of the sum on the way is greater than what is left of it. The order of the sum is
the compiler's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import fx
from torch.autograd.graph import Node

from checked_backend._torch.modes import DisableTorchDispatch
from checked_backend.regions.execution import gradient_edge
from checked_backend.regions.gradient_gate import Edge

__all__ = ["CANCELS", "largest_parts"]

CANCELS = 8.0
"""A sum cancels where its greatest part is more than so many times what is left: three bits are lost."""


@contextmanager
def largest_parts(made: torch.Tensor, leaves: Mapping[fx.Node, torch.Tensor]) -> Iterator[dict[fx.Node, torch.Tensor]]:
    """Watch the backward pass that is run from a tensor within the block.

    Args:
        made: A tensor that requires grad.
        leaves: The tensors for which gradients are asked.

    Returns:
        The magnitude of the greatest part that each leaf gets, by element, once the pass has run.
    """
    edges: dict[Edge, fx.Node] = {}
    for leaf, tensor in leaves.items():
        if (edge := gradient_edge(tensor)) is not None:
            edges[edge.node, edge.output_nr] = leaf
    largest: dict[fx.Node, torch.Tensor] = {}

    def sent(targets: Sequence[tuple[int, fx.Node]], gradients: Sequence[torch.Tensor | None], _: object) -> None:
        for number, leaf in targets:
            part = gradients[number]
            if part is not None and part.shape == leaves[leaf].shape:
                with DisableTorchDispatch(), torch.no_grad():
                    size = part.abs()
                    largest[leaf] = torch.maximum(largest[leaf], size) if leaf in largest else size

    handles = []
    queue: list[Node] = [] if made.grad_fn is None else [made.grad_fn]
    known = set(queue)
    while queue:
        node = queue.pop()
        targets = [(number, edges[edge]) for number, edge in enumerate(node.next_functions) if edge in edges]
        if targets:
            handles.append(node.register_hook(partial(sent, targets)))
        for target, number in node.next_functions:
            if target is not None and target not in known and (target, number) not in edges:
                known.add(target)
                queue.append(target)
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()
