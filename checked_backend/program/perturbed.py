"""A region in eager in which every rounding is random, forward and backward: one more run of the program's noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.regions.compile import eager_graph

__all__ = ["perturbed_region", "under_mode"]


class _Perturbed(torch.autograd.Function):
    """Runs a region on detached inputs, and its backward pass when gradients arrive, both under a mode."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], mode: AbstractContextManager[Any], *args: Any) -> tuple[Any, ...]:
        """Run the region with a graph of its own."""
        leaves = [
            arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args
        ]
        with torch.enable_grad(), mode:
            outputs = run(*leaves)
        ctx.leaves, ctx.outputs, ctx.mode = leaves, outputs, mode
        handed = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in outputs)
        ctx.mark_non_differentiable(
            *(
                given
                for value, given in zip(outputs, handed, strict=True)
                if isinstance(value, torch.Tensor) and not value.requires_grad
            )
        )
        return handed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Run its backward pass."""
        pairs = [
            (value, gradient)
            for value, gradient in zip(ctx.outputs, gradients, strict=True)
            if isinstance(value, torch.Tensor) and value.requires_grad and gradient is not None
        ]
        wanted = [leaf for leaf in ctx.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        with ctx.mode:
            found = iter(
                torch.autograd.grad(
                    [value for value, _ in pairs], wanted, [gradient for _, gradient in pairs], allow_unused=True
                )
                if pairs
                else [None] * len(wanted)
            )
        return (
            None,
            None,
            *(next(found) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None for leaf in ctx.leaves),
        )


def perturbed_region(gm: fx.GraphModule, seed: int) -> Callable[..., Any]:
    """A region in eager, under Monte Carlo arithmetic.

    Args:
        seed: Of the noise.
    """
    return under_mode(gm, MonteCarloMode(seed))


def under_mode(gm: fx.GraphModule, mode: AbstractContextManager[Any]) -> Callable[..., Any]:
    """A region in eager, forward and backward under a mode, which may be entered any number of times."""
    run = eager_graph(gm).forward

    def perturbed(*args: Any) -> Sequence[Any]:
        if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            outputs: Sequence[Any] = _Perturbed.apply(run, mode, *args)  # type: ignore[no-untyped-call]
            return outputs
        with mode:
            returned: Sequence[Any] = run(*args)
            return returned

    return perturbed
