"""Find tensors that get a gradient in a program's backward pass, but that the check has not found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from checked_backend.findings import Skip
from checked_backend.regions.execution import gradient_edge

__all__ = ["not_differentiated", "unreached_leaves"]

_LEAF = "torch::autograd::AccumulateGrad"


def unreached_leaves(roots: Mapping[str, torch.Tensor], wanted: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward pass from some roots reaches and whose gradients are not wanted."""
    known = {id(leaf) for leaf in wanted}
    todo = [edge.node for root in roots.values() if (edge := gradient_edge(root)) is not None]
    seen = set(todo)
    found = []
    while todo:
        node = todo.pop()
        if node.name() == _LEAF and id(leaf := node.variable) not in known:  # type: ignore[attr-defined]
            found.append(leaf)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        todo += new
    return found


def not_differentiated(
    unreached: Iterable[torch.Tensor], is_copy: Callable[[torch.Tensor], bool], again: Callable[[], list[torch.Tensor]]
) -> Iterator[Skip]:
    """Skips for tensors from outside the program whose gradients are not compared.

    Args:
        is_copy: Whether a tensor was copied for the run.
        again: Gives the leaves of another run. Leaves that both runs have were not made by the program in its call.
    """
    missed = list(unreached)
    if not missed:
        return
    others = {id(leaf) for leaf in again()}
    for leaf in missed:
        if is_copy(leaf) or id(leaf) in others:
            yield Skip(
                f"gradient of a tensor {tuple(leaf.shape)}",
                "the program reads a tensor that requires grad from a place that check does not know, so its gradient "
                "is compared nowhere; hand it in as an argument, or make it a parameter of the module",
                matters=True,
            )
