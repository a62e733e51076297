"""Clean networks and training steps: deep, in half precision, with statistics of tiny batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import case, normal, seeded


@case("noise", train=True)
def deep_mlp_bf16() -> tuple[Any, ...]:
    """Twenty layers in bfloat16."""

    def net() -> nn.Module:
        return nn.Sequential(*(m for _ in range(20) for m in (nn.Linear(32, 32), nn.SiLU()))).bfloat16()

    return seeded(net), normal(16, 32, dtype=torch.bfloat16)


@case("noise", train=True)
def batch_norm_of_two() -> tuple[Any, ...]:
    """Batch norm in training with a batch of two: every value becomes 1 or -1, its gradient nearly zero."""
    return seeded(lambda: nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3))), normal(
        2, 10
    ).requires_grad_()


@case("noise", train=True)
def batch_norm_of_constant() -> tuple[Any, ...]:
    """Batch norm of channels that are nearly constant."""

    def fn(x: Tensor) -> Tensor:
        return F.batch_norm(x * 1e-4 + 3, None, None, training=True, eps=1e-5)

    return fn, normal(8, 4, 6, 6).requires_grad_()


@case("noise", train=True)
def group_norm_bf16() -> tuple[Any, ...]:
    """Convolution, group norm and swish in bfloat16."""
    net = seeded(lambda: nn.Sequential(nn.Conv2d(4, 16, 3), nn.GroupNorm(4, 16), nn.SiLU()).bfloat16())
    return net, normal(2, 4, 12, 12, dtype=torch.bfloat16).requires_grad_()


@case("noise", train=True)
def bias_before_batch_norm() -> tuple[Any, ...]:
    """The bias has a true gradient of zero, a sum of 4,608 terms that are equal but for the norm's mean."""
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1))
    ), normal(2, 4, 48, 48)


@case("noise", train=True)
def softmax_less_its_maximum_bf16() -> tuple[Any, ...]:
    """Nothing of a row that is subtracted changes its softmax: the gradient of the maximum is rounding alone."""

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        scores = x @ weight
        return torch.softmax(scores - scores.max(-1, keepdim=True).values, -1)

    low = torch.bfloat16
    return fn, normal(96, 24, dtype=low).requires_grad_(), normal(24, 40, seed=1, dtype=low).requires_grad_()


@case("noise", train=True)
def instance_norm_then_conv() -> tuple[Any, ...]:
    """The bias before an instance norm has a true gradient of zero."""
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    ), normal(2, 3, 10, 10)
