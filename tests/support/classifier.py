"""A small classifier whose one output feeds the other, and its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Compile = Callable[..., Any]


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.hidden(x).tanh())
        return F.cross_entropy(logits, target), logits


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 6), torch.randint(0, 3, (5,))
