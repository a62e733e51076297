"""Small programs that the tests of the dispatch modes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from checked_backend.tensors.float64_copies import to_float64


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(F.gelu(self.norm(self.first(x))), 0.3)
        return F.cross_entropy(self.last(hidden), target)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(F.relu(self.norm(self.conv(x))).mean((2, 3))), target)


class Encoder(nn.Module):
    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 4)
        self.autocast = autocast

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return F.cross_entropy(self.head(self.layer(x)).flatten(0, 1), target)


@dataclass
class Case:
    """A model with its inputs; ``run`` gives the loss, the gradients and the buffers afterwards."""

    model: nn.Module
    args: tuple[torch.Tensor, ...]

    def state(self) -> dict[str, Any]:
        return {
            "params": {name: value.detach().requires_grad_() for name, value in self.model.named_parameters()},
            "buffers": {name: value.clone() for name, value in self.model.named_buffers()},
            "args": self.args,
        }

    def run(self, state: dict[str, Any] | None = None) -> list[torch.Tensor]:
        state = state or self.state()
        params = state["params"]
        loss = functional_call(self.model, (params, state["buffers"]), state["args"])
        return [loss.detach(), *torch.autograd.grad(loss, list(params.values())), *state["buffers"].values()]


def _case(make: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().to(dtype)
        rows = shape[0] * (shape[1] if len(shape) == 3 else 1)
        return Case(model, (torch.randn(shape).to(dtype), torch.arange(rows) % 4))


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: _case(Mlp, 16, 64),
    "conv": lambda: _case(Convolutional, 8, 3, 12, 12),
    "encoder-autocast": lambda: _case(lambda: Encoder(True), 2, 8, 32),
    "encoder-bfloat16": lambda: _case(lambda: Encoder(False), 2, 8, 32, dtype=torch.bfloat16),
}


def promote_tensors(tree: Any) -> Any:
    """Nested containers with every tensor in float64. Tensors that are one object stay one object."""
    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_unflatten(to_float64(leaves), spec)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance in the Euclidean norm."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
