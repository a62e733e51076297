"""Families: sums of gradients that cancel, so that rounding is all that is left of them, and sums that do not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .family import Maker, Plan, family


def _inputs(m: Maker) -> tuple[Tensor, ...]:
    return m.normal(2, 3, 36, 36, shift=0.5), m.normal(8, 3, 3, 3, scale=0.3), m.normal(8), m.positive(8), m.normal(8)


def _passed(c: Plan, y: Tensor) -> Tensor:
    """A tensor whose gradient is the same, unless there is a bug."""
    if c.bug("factor: gradient 1.02 times as large"):
        y = y * 1.02 - (y * 0.02).detach()
    if c.bug("dropped tile: of the gradient"):
        y = torch.cat([y[..., :8].detach(), y[..., 8:]], -1)
    return y


@family(_inputs)
def sums_that_cancel(c: Plan, x: Tensor, w: Tensor, bias: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The normalisation and softmax do not depend on what is added, so the gradients of that are zero."""
    y = c.up(_passed(c, F.conv2d(x, w, bias)))
    mean = y.mean((0, 2, 3), keepdim=True)
    middle = y - c.pick("skipped subtraction: in the mean's gradient", mean, mean.detach())
    normed = middle * torch.rsqrt(middle.square().mean((0, 2, 3), keepdim=True) + 1e-5)
    pooled = c.down((normed * g[:, None, None] + b[:, None, None]).square().mean((-2, -1)))
    scores = pooled[:, :, None] * pooled[:, None]
    rows = torch.log_softmax(scores - scores.amax(-1, keepdim=True), -1)
    return pooled, rows * c.pick("scale: 1.02 for 1", 1.0, 1.02)


@family(_inputs)
def sums_that_do_not(c: Plan, x: Tensor, w: Tensor, bias: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """The same convolution with nothing behind it that takes its mean away."""
    y = c.up(_passed(c, F.conv2d(x, w, bias)))
    y = F.softplus(y * g[:, None, None] + b[:, None, None])
    return c.down(c.low(y, "precision: bfloat16 before the sum").mean((-2, -1)))


FAMILIES = (sums_that_cancel, sums_that_do_not)
