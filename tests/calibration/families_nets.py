"""Families: convolutional and recurrent nets, and one step of an optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .family import Family, Maker, Plan, family


def _norm_inputs(m: Maker) -> tuple[Tensor, ...]:
    statistics = m.normal(8, scale=0.1, grad=False), m.positive(8, grad=False)
    return m.normal(4, 3, 10, 10), m.normal(8, 3, 3, 3, scale=0.3), m.positive(8), m.normal(8), *statistics


@family(_norm_inputs)
def conv_bn_train(c: Plan, x: Tensor, w: Tensor, g: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    y = F.conv2d(x, w, padding=1)
    use_batch = c.pick("stale statistic: running instead of batch", True, False)
    momentum = c.pick("scale: momentum 0.11 for 0.1", 0.1, 0.11)
    eps = c.pick("eps: 1e-3 for 1e-5", 1e-5, 1e-3)
    shift = c.pick("dropped bias: of the norm", b, None)
    if c.bug("stale statistic: running ones not updated"):
        return F.relu(F.batch_norm(y, mean.clone(), var.clone(), g, shift, use_batch, momentum, eps))
    return F.relu(F.batch_norm(y, mean, var, g, shift, use_batch, momentum, eps))


@family(_norm_inputs)
def conv_bn_eval(c: Plan, x: Tensor, w: Tensor, g: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    kind = c.pick("mask: reflected for zero padding", "constant", "reflect")
    y = F.conv2d(F.pad(x, (1, 1, 1, 1), mode=kind), w)
    eps = c.pick("eps: 1e-3 for 1e-5", c.pick("eps: 2e-5 for 1e-5", 1e-5, 2e-5), 1e-3)
    scale = g * torch.rsqrt(var + eps)
    if c.bug("swapped operand: shift taken before the scale"):
        return F.silu((y - mean[:, None, None] + b[:, None, None]) * scale[:, None, None])
    return F.silu(c.one((y - mean[:, None, None]) * scale[:, None, None] + b[:, None, None]))


@family(lambda m: (m.normal(2, 4, 8, 8), m.normal(8, 4, 3, 3, scale=0.3), m.normal(8), m.positive(8), m.normal(8)))
def conv_groupnorm(c: Plan, x: Tensor, w: Tensor, bias: Tensor, g: Tensor, b: Tensor) -> Tensor:
    y = F.conv2d(x, w, c.pick("dropped bias: of the convolution", bias, None), padding=1)
    groups = c.pick("wrong reduction dimension: 2 groups for 4", 4, 2)
    y = F.group_norm(y, groups, g, b, c.pick("eps: 1e-6 for 1e-5", 1e-5, 1e-6))
    return c.one(F.silu(y) if not c.bug("gelu variant: gelu for silu") else F.gelu(y))


@family(lambda m: (m.normal(2, 8, 12, 12), m.normal(8, 1, 3, 3, scale=0.3), m.normal(16, 8, 1, 1, scale=0.3)))
def depthwise_conv(c: Plan, x: Tensor, deep: Tensor, point: Tensor) -> Tensor:
    kernel = deep.flip(-1) if c.bug("swapped operand: flipped kernel") else deep
    step = c.pick("off by one: dilation of 2 for 1", 1, 2)
    y = F.hardswish(F.conv2d(x, kernel, padding=step, dilation=step, groups=8))
    y = F.conv2d(y, point)
    return y * c.pick("scale: 1.003 for 1", 1.0, 1.003) if not c.bug("off by one: rolled rows") else y.roll(1, -2)


@family(lambda m: (m.normal(2, 4, 11, 11),))
def pooling(c: Plan, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = c.one(x, "one element: of the input")
    counts = c.pick("mask: padding not counted", True, False)
    average = F.avg_pool2d(x, 3, 2, 1, count_include_pad=counts)
    greatest = F.max_pool2d(x, 3, 2)
    if c.bug("off by one: windows begin one later"):
        greatest = F.max_pool2d(F.pad(x[..., 1:], (0, 1)), 3, 2)
    size = c.pick("wrong reduction dimension: pooled over rows", (1, 3), (3, 1))
    return average, greatest, F.adaptive_avg_pool2d(x, size).flatten(1)


@family(lambda m: (m.normal(2, 3, 7, 9), m.normal(4, 3, 3, 3, scale=0.3)))
def upsampling(c: Plan, x: Tensor, w: Tensor) -> Tensor:
    aligned = c.pick("off by one: corners aligned", False, True)
    kind = c.pick("wrong kernel: bicubic for bilinear", "bilinear", "bicubic")
    y = F.interpolate(x, size=(13, 17), mode=kind, align_corners=aligned)
    y = F.conv_transpose2d(F.conv2d(y, w, stride=2), w, stride=2)
    return c.one(y if not c.bug("off by one: columns") else F.pad(y, (1, -1)))


def _cell(m: Maker) -> tuple[Tensor, ...]:
    state = m.normal(8, 24), m.normal(8, 24)
    return m.normal(5, 8, 16), *state, m.normal(96, 16, scale=0.3), m.normal(96, 24, scale=0.3), m.normal(96)


@family(_cell)
def lstm(c: Plan, xs: Tensor, h: Tensor, cell: Tensor, wx: Tensor, wh: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    first = h
    for step in range(5):
        state = first if c.bug("stale statistic: the first state in every step") else h
        place = (step + c.pick("off by one: inputs", 0, 1)) % 5
        gates = F.linear(xs[place], wx, c.pick("dropped bias: of the gates", b, None)) + F.linear(state, wh)
        enter, forget, new, leave = gates.chunk(4, -1)
        if c.bug("swapped operand: gates for entering and forgetting"):
            enter, forget = forget, enter
        cell = torch.sigmoid(forget) * c.low(cell, "missing upcast: state in half precision") + torch.sigmoid(
            enter
        ) * torch.tanh(new)
        h = torch.sigmoid(leave) * torch.tanh(cell)
    return c.one(h), cell


@family(lambda m: (m.normal(5, 8, 16), m.normal(8, 24), m.normal(72, 16, scale=0.3), m.normal(72, 24, scale=0.3)))
def gru(c: Plan, xs: Tensor, h: Tensor, wx: Tensor, wh: Tensor) -> Tensor:
    for step in range(5):
        xr, xz, xn = F.linear(xs[step], wx).chunk(3, -1)
        hr, hz, hn = F.linear(h, wh).chunk(3, -1)
        reset, keep = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        if c.bug("swapped operand: reset before the product"):
            hn = F.linear(reset * h, wh[48:])
            new = torch.tanh(xn + hn)
        else:
            new = torch.tanh(xn + reset * hn)
        if c.bug("swapped operand: old for new"):
            new, h = h, new
        h = (1 - keep) * new + keep * h
    return c.one(h) * c.pick("scale: 1.002 for 1", 1.0, 1.002)


def _step(m: Maker) -> tuple[Tensor, ...]:
    moments = m.normal(32, 16, scale=1e-3), m.positive(32, 16, low=1e-7, high=1e-5)
    return m.normal(32, 16), *moments, m.normal(64, 32), m.normal(64, 16)


@family(_step, trains=False)
def adam_step(c: Plan, w: Tensor, m: Tensor, v: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad = x.t() @ (x @ w - y) * (1e-3 / 64)
    m = 0.9 * m + 0.1 * grad
    beta = c.pick("scale: beta of 0.99 for 0.999", 0.999, 0.99)
    v = beta * v + (1 - beta) * grad * grad
    steps = c.pick("off by one: step", 4, 5)
    mhat = m / (1 - 0.9**steps) if not c.bug("dropped bias: its correction") else m
    vhat = v / (1 - 0.999**steps)
    if c.bug("eps: inside of the root"):
        return w - 1e-2 * mhat / (vhat + 1e-8).sqrt(), m, v
    return w - 1e-2 * mhat / (vhat.sqrt() + c.pick("eps: 1e-7 for 1e-8", 1e-8, 1e-7)), m, v


FAMILIES: tuple[Family, ...] = (
    conv_bn_train,
    conv_bn_eval,
    conv_groupnorm,
    depthwise_conv,
    pooling,
    upsampling,
    lstm,
    gru,
    adam_step,
)
