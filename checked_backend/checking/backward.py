"""The backward pass of a check: where it begins, with which gradients, and whose gradients it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch import disable_current_modes, is_wrapper_type, rewrapped
from checked_backend.errors import CheckedBackendError
from checked_backend.regions.execution import COMPRESSED, compressed_indices, gradient_edge

__all__ = ["Objective", "roots_of", "run_backward"]


@dataclass(frozen=True, slots=True)
class Objective:
    """How the gradients that enter a backward pass are made.

    Attributes:
        step: Each step has its own.
        bounded: Make them those of a loss that has a least value, so that an optimizer converges: for a scalar the
            scalar itself, for any other output half its mean squared distance from a fixed random target. Otherwise
            each output gets a random gradient.
    """

    step: int = 0
    bounded: bool = False


def roots_of(outputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The outputs at which a backward pass begins: those that require grad (and have a history, as not all views do).

    If none does, all that could: eager then refuses to differentiate, and so must the compiled program.
    """
    tensors = [value for value in outputs.values() if isinstance(value, torch.Tensor)]
    floating = [value for value in tensors if value.is_floating_point() or value.is_complex()]
    return [value for value in floating if value.requires_grad and gradient_edge(value)] or floating


def run_backward(
    roots: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], objective: Objective
) -> torch.Tensor | float:
    """Differentiate outputs with respect to leaves, into their ``grad``.

    Args:
        roots: Outputs, each of which gets a gradient of its own.
        leaves: Whose gradients are wanted.
        objective: How the gradients that enter are made.

    Returns:
        The loss that these gradients belong to; 0 if it is not `Objective.bounded`.

    Raises:
        CheckedBackendError: The gradients that enter could not be made. What autograd raises is the program's own.
    """
    try:
        with torch.no_grad(), disable_current_modes():  # no part of the program: not to be perturbed, nor replayed
            entering = [_entering(root.detach(), index, objective) for index, root in enumerate(roots)]
            loss = sum(loss for _, loss in entering)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckedBackendError(
            f"no gradient could be made for an output: {why}. Check without gradients: gradients=False."
        ) from error
    torch.autograd.backward(list(roots), [gradient for gradient, _ in entering], inputs=list(leaves))
    return loss


def _entering(root: torch.Tensor, index: int, objective: Objective) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The gradient that enters at an output, and the loss whose gradient it is."""
    seed = index + 1 + 1000 * objective.step if not objective.bounded else index + 1
    if root.layout is torch.sparse_coo:
        stored = root.coalesce()
        return torch.sparse_coo_tensor(stored.indices(), _random(stored.values(), seed), root.shape), 0.0
    if root.layout in COMPRESSED:
        values = _random(root.values(), seed)
        return torch.sparse_compressed_tensor(*compressed_indices(root), values, root.shape, layout=root.layout), 0.0
    if is_wrapper_type(type(root)):
        return rewrapped(root, lambda inner: _random(inner, seed) if inner.is_floating_point() else inner), 0.0
    if type(root) is not torch.Tensor or root.layout is not torch.strided or root.is_nested:
        return torch.ones_like(root), 0.0
    exact = _random(root, seed)
    if not objective.bounded:
        return exact, 0.0
    if root.dim() == 0 and not root.is_complex():
        return torch.ones_like(root), root
    distance = root - exact / 2
    scale = 1 / max(root.numel(), 1)
    return distance * scale, distance.abs().square().sum().double() * (scale / 2)


def _random(root: torch.Tensor, seed: int) -> torch.Tensor:
    """Random numbers in the shape of an output: the same in every run, exact in every floating dtype."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*root.shape, 2) if root.is_complex() else tuple(root.shape)
    eighths = torch.randint(-16, 17, shape, generator=generator).to(torch.float64) / 8
    exact = torch.view_as_complex(eighths) if root.is_complex() else eighths
    return exact.to(dtype=root.dtype, device=root.device)
