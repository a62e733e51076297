"""Families: layers and blocks of transformers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .family import Family, Maker, Plan, family


@family(lambda m: (m.normal(32, 64), m.normal(128, 64, scale=0.1), m.normal(128), m.normal(64, 128, scale=0.1)))
def mlp(c: Plan, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    h = F.linear(
        c.low(x, "missing upcast: product in half precision"), w1, c.pick("dropped bias: of the first layer", b1, None)
    )
    h = F.gelu(h, approximate=c.pick("gelu variant: tanh for erf", "none", "tanh"))
    return c.one(F.linear(h * c.pick("scale: 1.001 for 1", 1.0, 1.001), w2))


@family(lambda m: (m.normal(32, 64), m.positive(64), m.normal(64)))
def layernorm_residual(c: Plan, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    eps = c.pick("eps: 1e-6 for 1e-5", c.pick("eps: 1e-3 for 1e-5", 1e-5, 1e-3), 1e-6)
    y = F.layer_norm(x, (64,), w, c.pick("dropped bias: of the norm", b, None), eps)
    return c.one(x + y if not c.bug("swapped operand: the norm instead of its input is added") else y + y)


@family(lambda m: (m.normal(32, 64), m.positive(64), m.normal(64)))
def layernorm_by_hand(c: Plan, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    wide = c.up(x, "missing upcast: statistics in half precision")
    dim = c.pick("wrong reduction dimension: over the batch", -1, 0)
    mean = wide.mean(dim, keepdim=True)
    var = (wide - mean).square().mean(dim, keepdim=True)
    if c.bug("wrong variance: divided by n - 1"):
        var = var * (64 / 63)
    return c.down((wide - mean) * torch.rsqrt(var + c.pick("eps: 1e-4 for 1e-5", 1e-5, 1e-4))) * w + b


@family(lambda m: (m.normal(32, 128), m.positive(128)))
def rmsnorm(c: Plan, x: Tensor, w: Tensor) -> Tensor:
    wide = c.up(x, "missing upcast: of the norm")
    eps = c.pick("eps: 1e-5 for 1e-6", 1e-6, 1e-5)
    square = wide.square().mean(c.pick("wrong reduction dimension: over the batch", -1, 0), keepdim=True)
    y = wide / (square.sqrt() + eps) if c.bug("eps: outside of the root") else wide * torch.rsqrt(square + eps)
    if c.bug("scale: 1 + weight for weight"):
        w = w + 1
    return c.one(c.down(y) * w)


def _heads(m: Maker) -> tuple[Tensor, ...]:
    return m.normal(2, 4, 24, 16), m.normal(2, 4, 24, 16), m.normal(2, 4, 24, 16)


@family(_heads)
def softmax_attention(c: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if c.bug("swapped operand: keys for queries"):
        q, k = k, q
    scores = q @ k.transpose(-1, -2) * c.pick("scale: 1 / d for 1 / sqrt(d)", 0.25, 1 / 16)
    dim = c.pick("wrong reduction dimension: softmax over queries", -1, -2)
    wide = c.up(scores, "missing upcast: of the softmax")
    weights = torch.exp(wide - wide.amax(dim, keepdim=True))
    return c.one(c.down(weights / weights.sum(dim, keepdim=True))) @ v


@family(_heads)
def causal_attention(c: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * c.pick("scale: 0.2499 for 0.25", 0.25, 0.2499)
    diagonal = c.pick("mask: off by one", 1, 2)
    mask = torch.ones(24, 24, dtype=torch.bool).triu(diagonal)
    if c.bug("mask: one entry open"):
        mask = mask & (torch.arange(24 * 24).reshape(24, 24) != 23)
    scores = scores.masked_fill(mask, c.pick("mask: -5 for -inf", float("-inf"), -5.0))
    return torch.softmax(scores, -1) @ v


@family(_heads)
def window_attention(c: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(24)[:, None] - torch.arange(24)[None, :]
    least = c.pick("off by one: the nearest counts as 1 away", 0, 1)
    inside = (distance >= 0) & (distance < c.pick("off by one: window of 7 for 6", 6, 7))
    slope = -(2.0 ** -torch.arange(1, 5)).to(c.dtype)
    bias = slope[:, None, None] * distance.abs().clamp_min(least).to(c.dtype)
    if c.bug("dropped bias: of the last head"):
        bias = bias * (torch.arange(4)[:, None, None] != 3)
    scores = q @ k.transpose(-1, -2) * 0.25 + bias
    return F.softmax(torch.where(inside, scores, torch.finfo(c.dtype).min), -1) @ v


def _block(m: Maker) -> tuple[Tensor, ...]:
    weights = (m.normal(96, 32, scale=0.2), m.normal(96, scale=0.1), m.normal(32, 32, scale=0.2))
    feed = (m.normal(64, 32, scale=0.2), m.normal(64, scale=0.1), m.normal(32, 64, scale=0.2))
    return m.normal(2, 16, 32), *weights, *feed, m.positive(32), m.normal(32, scale=0.1)


def _split(x: Tensor) -> Tensor:
    return x.reshape(2, 16, 2, 16).transpose(1, 2)


@family(_block)
def encoder_block(
    c: Plan, x: Tensor, qkv: Tensor, b: Tensor, out: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, g: Tensor, s: Tensor
) -> Tensor:
    q, k, v = F.linear(x, qkv, c.pick("dropped bias: of the projection", b, None)).chunk(3, -1)
    if c.bug("swapped operand: keys for values"):
        k, v = v, k
    scale = c.pick("scale: of the attention", None, 0.26)
    y = F.scaled_dot_product_attention(_split(q), _split(k), _split(v), scale=scale)
    x = F.layer_norm(x + F.linear(y.transpose(1, 2).reshape(2, 16, 32), out), (32,), g, s, 1e-5)
    h = F.gelu(F.linear(x, w1, b1), approximate=c.pick("gelu variant: tanh for erf", "none", "tanh"))
    eps = c.pick("eps: 1e-4 for 1e-5", 1e-5, 1e-4)
    return c.one(F.layer_norm(x + F.linear(h, w2), (32,), g, s, eps))


@family(_block)
def gpt_block(
    c: Plan, x: Tensor, qkv: Tensor, b: Tensor, out: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, g: Tensor, s: Tensor
) -> Tensor:
    y = F.layer_norm(x, (32,), g, s, c.pick("eps: 1e-6 for 1e-5", 1e-5, 1e-6))
    q, k, v = F.linear(y, qkv, b).chunk(3, -1)
    causal = c.pick("mask: not causal", True, False)
    y = F.scaled_dot_product_attention(_split(q), _split(k), _split(v), is_causal=causal)
    x = x + F.linear(y.transpose(1, 2).reshape(2, 16, 32), out)
    after = x if not c.bug("stale statistic: the second norm is not taken") else x / 2
    y = F.layer_norm(after, (32,), g, s) if not c.bug("dropped bias: of the second norm") else F.layer_norm(x, (32,), g)
    return x + F.linear(F.gelu(F.linear(y, w1, b1), approximate=c.pick("gelu variant: erf", "tanh", "none")), w2)


@family(lambda m: (m.integers(12, 4, 12), m.normal(12, 32), m.normal(16, 32, scale=0.1)))
def embedding_positional(c: Plan, ids: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    first = c.pick("off by one: positions begin at 1", 0, 1)
    scale = c.pick("scale: 5.65 for sqrt(32)", math.sqrt(32), 5.65)
    padding = c.pick("mask: padding gets a gradient", 3, None)
    return c.one(F.embedding(ids, table, padding_idx=padding) * scale + positions[first : first + 12])


@family(lambda m: (m.normal(2, 4, 32, 16), m.normal(2, 4, 32, 16)))
def rotary(c: Plan, q: Tensor, k: Tensor) -> Tensor:
    half = torch.arange(0, 16, 2, dtype=torch.float32) / 16
    theta = c.pick("scale: base 9990 for 10000", 10000.0, 9990.0)
    angles = torch.outer(torch.arange(32, dtype=torch.float32), theta**-half)
    if c.dtype != torch.float32 and c.bug("missing upcast: angles in half precision"):
        angles = angles.to(c.dtype)
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(c.dtype), angles.sin().to(c.dtype)

    def turn(x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        if c.bug("swapped operand: halves of the rotation"):
            return x * cos + torch.cat((two, -one), -1) * sin
        return x * cos + torch.cat((-two, one), -1) * sin

    keys = k if c.bug("dropped step: keys are not turned") else turn(k)
    if c.bug("off by one: positions of the keys"):
        keys = turn(k.roll(1, -2)).roll(-1, -2)
    return turn(q) @ keys.transpose(-1, -2)


@family(lambda m: (m.normal(32, 48), m.normal(160, 48, scale=0.15), m.normal(48, 80, scale=0.15)))
def swiglu(c: Plan, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = F.linear(x, up).chunk(2, -1)
    if c.bug("swapped operand: gate for value"):
        gate, value = value, gate
    act = F.gelu(gate) if c.bug("gelu variant: gelu for silu") else F.silu(gate)
    return F.linear(c.one(act * value), down) * c.pick("scale: 0.999 for 1", 1.0, 0.999)


@family(lambda m: (m.normal(64, 32), m.normal(8, 32), m.normal(8, 32, 32, scale=0.2)))
def moe_gating(c: Plan, x: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    logits = c.up(F.linear(x, router), "missing upcast: of the router")
    weights = torch.softmax(logits, -1)
    top, chosen = torch.topk(weights, c.pick("off by one: 1 expert for 2", 2, 1), -1)
    if not c.bug("scale: weights are not normalised"):
        top = top / top.sum(-1, keepdim=True)
    every = torch.einsum("nd,edf->nef", x, experts)
    if c.bug("swapped operand: transposed experts"):
        every = torch.einsum("nd,efd->nef", x, experts)
    picked = every.gather(1, chosen[:, :, None].expand(-1, -1, 32))
    return (picked * c.down(top)[:, :, None]).sum(1)


@family(lambda m: (m.normal(16, 24), m.normal(16, 20), m.normal(12, 24, 20, scale=0.2), m.normal(12)))
def bilinear(c: Plan, a: Tensor, b: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    y = torch.einsum("ni,oij,nj->no", a, w, b)
    if c.bug("off by one: outputs rolled"):
        y = y.roll(1, -1)
    y = y if c.bug("dropped bias: of the form") else y + bias
    gram = torch.einsum("no,mo->nm", y, y)
    return c.one(gram * c.pick("scale: 1 / 12.01 for 1 / 12", 1 / 12, 1 / 12.01))


FAMILIES: tuple[Family, ...] = (
    mlp,
    layernorm_residual,
    layernorm_by_hand,
    rmsnorm,
    softmax_attention,
    causal_attention,
    window_attention,
    encoder_block,
    gpt_block,
    embedding_positional,
    rotary,
    swiglu,
    moe_gating,
    bilinear,
)
