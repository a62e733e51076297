"""Miscompiled backward passes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import case, normal


@case("bug", "grad", train=True)
def multilabel_margin() -> tuple[Any, ...]:
    """Labels after the terminator count as label 0 (pytorch/pytorch#185464)."""
    target = torch.tensor([[2, 0, -1, 1, 1], [4, -1, 1, 3, 0]])
    return (lambda x: F.multilabel_margin_loss(x, target)), normal(2, 5).requires_grad_()


class _Steps(nn.Module):
    """Divides by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x / self.steps


@case("bug", "grad", train=True)
def buffer_counted_twice() -> tuple[Any, ...]:
    """The backward pass computes a buffer anew that the forward pass has written to (pytorch/pytorch#197039)."""
    return _Steps(), normal(6, 8).requires_grad_()
