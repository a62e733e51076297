"""What the tests of noise or bug share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support import faults


def mlp(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def train(model: nn.Module, dtype: torch.dtype, *, steps: int = 3, device_cast: bool = False) -> None:
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=device_cast):
            out = model(torch.randn(6, 8, dtype=dtype))
        out.square().sum().backward()


def rounding_otherwise(tensor: Any) -> Any:
    return tensor * (1 + 2.0**-22) if tensor.dtype is torch.float32 else tensor


@faults.runs
def in_float32(forward: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    """A compiler that keeps what is between inputs and results in float32."""
    wide = [arg.float() if arg.dtype is torch.bfloat16 else arg for arg in args]
    results = forward(*wide)
    return [result.to(args[0].dtype) if result.is_floating_point() else result for result in results]
