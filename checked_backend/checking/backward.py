"""The backward pass of a check: its roots, the gradients that enter there, and the leaves that get gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from checked_backend._torch.modes import disable_current_modes
from checked_backend._torch.tensors import is_wrapper_type, rewrapped
from checked_backend.checking.cotangents import Incoming, draw, laid_out
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Skip
from checked_backend.regions.execution import COMPRESSED, compressed_indices, gradient_edge


@dataclass(frozen=True, slots=True)
class Objective:
    """How the gradients that enter a backward pass are made.

    Attributes:
        step: The number of the step. Each step has its own gradients.
        bounded: Make them those of a loss that has a least value, so that an optimizer converges: for a scalar a
            multiple of the scalar itself, for any other output half its mean squared distance from a fixed random
            target. Otherwise each output gets a random gradient.
        incoming: Their kind.
        dtypes: The dtype of an output's gradient by the output's name, if it is not the output's own. So a program in
            float64 gets the same numbers as at its own precision.
    """

    step: int = 0
    bounded: bool = False
    incoming: Incoming = Incoming.CONTIGUOUS
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    given: Mapping[str, torch.Tensor] | None = None


def roots_of(outputs: Mapping[str, Any], *, refusing: bool = True) -> dict[str, torch.Tensor]:
    """The outputs at which a backward pass begins: those that require grad (and have a history, as not all views do).

    Args:
        refusing: If no output requires grad, take all that could. Eager then refuses to differentiate, and so must the
            compiled program.
    """
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    floating = {name: value for name, value in tensors.items() if value.is_floating_point() or value.is_complex()}
    found = {name: root for name, root in floating.items() if root.requires_grad and gradient_edge(root)}
    return found or (floating if refusing else {})


def run_backward(
    roots: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor], objective: Objective
) -> torch.Tensor | float:
    """Differentiate outputs, each of which gets a gradient of its own, with respect to leaves, into their ``grad``.

    Returns:
        The loss that these gradients belong to; 0 if it is not `Objective.bounded`.

    Raises:
        CheckedBackendError: The gradients that enter could not be made. Autograd's exceptions are the program's own.
    """
    roots = objective.incoming.at(roots)
    if (given := objective.given) is not None:
        if lost := sorted(given.keys() - roots.keys()):
            raise CheckedBackendError(f"a gradient enters at {lost[0]}, which has no history in eager")
        roots = {name: root for name, root in roots.items() if name in given}
        own = [given[name].detach().to(root.dtype, copy=True) for name, root in roots.items()]
        torch.autograd.backward(list(roots.values()), own, inputs=list(leaves))
        return 0.0
    try:
        with torch.no_grad(), disable_current_modes():  # no part of the program: no mode may perturb it
            entering = [_entering(root.detach(), name, objective) for name, root in roots.items()]
            loss = sum(loss for _, loss in entering)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckedBackendError(
            f"no gradient could be made for an output: {why}. Check without gradients: gradients=False."
        ) from error
    torch.autograd.backward(list(roots.values()), [gradient for gradient, _ in entering], inputs=list(leaves))
    return loss


def _entering(root: torch.Tensor, name: str, objective: Objective) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The gradient that enters at an output, and the loss whose gradient it is.

    Its random numbers are the same in every run, and in every precision.
    """
    step = 0 if objective.bounded else objective.step  # the target of a bounded loss stays the same in all steps
    generator = torch.Generator().manual_seed((step << 32) + zlib.crc32(name.encode()))
    dtype = objective.dtypes.get(name, root.dtype)

    def like(tensor: torch.Tensor) -> torch.Tensor:
        shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
        numbers = draw(shape, dtype, generator, objective.incoming)
        whole = torch.view_as_complex(numbers) if tensor.is_complex() else numbers
        return whole.to(dtype=tensor.dtype, device=tensor.device)

    if root.layout is torch.sparse_coo:
        stored = root.coalesce()
        return torch.sparse_coo_tensor(stored.indices(), like(stored.values()), root.shape), 0.0
    if root.layout in COMPRESSED:
        values = like(root.values())
        return torch.sparse_compressed_tensor(*compressed_indices(root), values, root.shape, layout=root.layout), 0.0
    if is_wrapper_type(type(root)):
        return rewrapped(root, lambda inner: like(inner) if inner.is_floating_point() else inner), 0.0
    if type(root) is not torch.Tensor or root.layout is not torch.strided or root.is_nested:
        return torch.ones_like(root) * like(torch.empty((), dtype=root.dtype)).item(), 0.0
    values = like(root)
    if not objective.bounded:
        return laid_out(values, objective.incoming), 0.0
    if root.dim() == 0 and not root.is_complex():
        slope = values.abs()
        return slope, root * slope
    distance = root - values / 2
    scale = 1 / max(root.numel(), 1)
    return distance * scale, distance.abs().square().sum().double() * (scale / 2)


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
