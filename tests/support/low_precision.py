"""A model to train in half precision, and faults that are there in half precision alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import checked_backend as cb
from tests.support.region_tools import audit

LOW = (torch.bfloat16, torch.float16)
Change = Callable[[torch.Tensor], torch.Tensor]


def at_16_bits(change: Change) -> Change:
    """A fault that is there in half precision alone."""
    return lambda tensor: change(tensor) if tensor.dtype in LOW else tensor


def times(factor: float) -> Change:
    """A fault that scales at 16 bits."""
    return at_16_bits(lambda tensor: tensor * factor)


class Block(nn.Module):
    """A transformer's block, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(heads[0] @ heads[1].transpose(-1, -2) * 8**-0.5, -1)
        x = x + (weights @ heads[2]).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), target)


def trained(compiler: Any, dtype: torch.dtype, *, amp: bool = False) -> cb.Report:
    """Train a block for one step."""

    def program(compiled: Callable[..., Any]) -> None:
        run = compiled(Block() if amp else Block().to(dtype))
        x = torch.randn(4, 24, 32, dtype=torch.float32 if amp else dtype)
        with torch.autocast("cpu", dtype=dtype, enabled=amp):
            loss = run(x, torch.randint(0, 10, (96,)))
        loss.backward()

    return audit(program, compiler)
