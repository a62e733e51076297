"""Families: losses, reductions, scans and discontinuous functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .family import Family, Plan, family


@family(lambda m: (m.normal(32, 20, scale=3.0), m.integers(20, 32)))
def nll_loss(c: Plan, logits: Tensor, target: Tensor) -> Tensor:
    logp = F.log_softmax(
        c.up(logits, "missing upcast: of the logits"), c.pick("wrong reduction dimension: over the batch", -1, 0)
    )
    if c.bug("off by one: targets"):
        target = (target + 1) % 20
    logp = c.one(logp)
    ignored = c.pick("mask: label 0 ignored", -100, 0)
    smooth = -logp.mean(-1).mean() * c.pick("scale: smoothing of 0.09 for 0.1", 0.1, 0.09)
    return c.down(smooth + 0.9 * F.nll_loss(logp, target, ignore_index=ignored))


@family(lambda m: (m.normal(16, 12), m.normal(16, 12)))
def kl_loss(c: Plan, a: Tensor, b: Tensor) -> Tensor:
    p, q = F.log_softmax(a, -1), F.log_softmax(b, -1)
    if c.bug("swapped operand: target for prediction"):
        p, q = q, p
    terms = F.kl_div(p, c.one(q.exp()), reduction="none").sum(c.pick("wrong reduction dimension: over the batch", 1, 0))
    return terms.mean() * c.pick("scale: 1.001 for 1", 1.0, 1.001)


@family(lambda m: (m.normal(24, 64), m.normal(24, 64, scale=1e-3)))
def cosine(c: Plan, a: Tensor, b: Tensor) -> Tensor:
    eps = c.pick("eps: 1e-2 for 1e-8", c.pick("eps: 1e-6 for 1e-8", 1e-8, 1e-6), 1e-2)
    if c.bug("wrong reduction dimension: over the batch"):
        return F.cosine_similarity(a, b, 0, eps).sum() + 0 * a[:, 0]
    return F.cosine_similarity(a, c.one(b), -1, eps)


@family(lambda m: (m.normal(16, 100, shift=3.0),))
def standardise(c: Plan, x: Tensor) -> Tensor:
    ddof = c.pick("off by one: n for n - 1", 1, 0)
    mean = x[:1].mean(1, keepdim=True) if c.bug("stale statistic: of the first row") else x.mean(1, keepdim=True)
    deviation = x.std(1, keepdim=True, correction=ddof)
    return c.one((x - mean) / (deviation + c.pick("eps: 1e-4 for 1e-6", 1e-6, 1e-4)))


@family(lambda m: (m.normal(8, 64), m.normal(8, 8)))
def scan(c: Plan, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    total = x.cumsum(-1)
    if c.bug("off by one: exclusive for inclusive"):
        total = total - x
    decay = c.pick("scale: decay of 0.901 for 0.9", 0.9, 0.901)
    for step in range(8):
        state = decay * state + x[:, step * 8 : step * 8 + 8]
    if c.bug("wrong reduction dimension: scan over rows"):
        total = x.cumsum(0)
    return c.one(total / 8), state


@family(lambda m: (m.normal(96, 16, shift=1.0), m.normal(16)))
def accumulate(c: Plan, x: Tensor, w: Tensor) -> Tensor:
    name = "missing upcast: the sum is kept in half precision"
    total = c.up(w, name) * 0
    for step in range(96):
        total = total + c.up(x[step] * w, name)
    return c.one(c.down(total)) * c.pick("scale: 1.01 for 1", 1.0, 1.01)


@family(lambda m: (m.normal(16, 64, shift=300.0),), low=False)
def double_statistics(c: Plan, x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x if c.bug("missing upcast: statistics in float32") else x.double()
    mean = wide.mean(1)
    square = wide.square().mean(1) - mean.square()
    ddof = c.pick("off by one: n - 1 for n", 1.0, 64 / 63)
    return (wide - mean[:, None]).to(x.dtype), (square * ddof).to(x.dtype)


@family(lambda m: (m.normal(4, 64), m.normal(64)), low=False)
def fft_magnitude(c: Plan, x: Tensor, window: Tensor) -> Tensor:
    if c.bug("off by one: window"):
        window = window.roll(1)
    spectrum = torch.fft.rfft(x * window, norm=c.pick("scale: orthonormal", "backward", "ortho"))
    power = spectrum.real.square() + spectrum.imag.square() * c.pick("scale: 1.001 for 1", 1.0, 1.001)
    return c.one(torch.log(power + c.pick("eps: 1e-5 for 1e-6", 1e-6, 1e-5)))


@family(lambda m: (m.normal(16, 48, scale=4.0),))
def logsumexp(c: Plan, x: Tensor) -> Tensor:
    hot = x * c.pick("scale: temperature of 1.999 for 2", 0.5, 1 / 1.999)
    wide = c.up(hot, "missing upcast: of the sum")
    total = torch.logsumexp(wide, c.pick("wrong reduction dimension: over the batch", 1, 0))
    if c.bug("off by one: the last term"):
        total = torch.logsumexp(wide[:, :-1], 1)
    return c.down(wide[:, :16] - total[:16, None])


@family(lambda m: (m.normal(24, 32), m.normal(24, 32)))
def contrastive(c: Plan, a: Tensor, b: Tensor) -> Tensor:
    a, b = F.normalize(a, dim=-1), F.normalize(b, dim=c.pick("wrong reduction dimension: norm over the batch", -1, 0))
    logits = a @ b.t() / c.pick("scale: temperature of 0.0701 for 0.07", 0.07, 0.0701)
    if c.bug("mask: the diagonal left out"):
        logits = logits - 2 * torch.eye(24, dtype=c.dtype)
    labels = torch.arange(24)
    other = logits if c.bug("swapped operand: rows twice") else logits.t()
    return (F.cross_entropy(c.one(logits), labels) + F.cross_entropy(other, labels)) / 2


@family(lambda m: (m.normal(32, 8), m.positive(32, 8, low=0.0, high=1.0, grad=False)))
def focal_loss(c: Plan, x: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    ce = F.binary_cross_entropy_with_logits(x, target, reduction="none")
    pt = p * target + (1 - p) * (1 - target)
    if c.bug("swapped operand: p for 1 - p"):
        pt = 1 - pt
    alpha = c.pick("scale: alpha of 0.251 for 0.25", 0.25, 0.251)
    return c.one((1 - pt) ** c.pick("scale: gamma of 2.01 for 2", 2.0, 2.01) * ce * alpha).mean()


@family(lambda m: (m.normal(32, 16), m.normal(32, 16), m.normal(16, 16, scale=0.25)))
def tiny_gradients(c: Plan, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    error = F.smooth_l1_loss(x @ w, y, beta=c.pick("scale: beta of 1.1 for 1", 1.0, 1.1), reduction="none")
    scale = c.pick("scale: 1.01e-6 for 1e-6", 1e-6, 1.01e-6)
    if c.bug("wrong reduction dimension: one row short"):
        return error[:-1].mean() * scale
    return (c.one(error, "one element: a loss is 1 % too large")).mean() * scale


@family(lambda m: (m.normal(32, 16), m.normal(16, 16, scale=0.25)))
def near_constant(c: Plan, x: Tensor, w: Tensor) -> Tensor:
    small = torch.tanh(x @ w) * c.pick("scale: 1.001e-3 for 1e-3", 1e-3, 1.001e-3)
    if c.bug("swapped operand: subtracted"):
        small = -small
    return small + c.pick("scale: 100.01 for 100", 100.0, 100.01)


@family(lambda m: (m.normal(16, 40), m.normal(40, 40, scale=0.3)))
def ties(c: Plan, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    scores = torch.round((x @ w) * 4) / 4
    best = scores.argmax(1) if not c.bug("mask: the first ten left out") else scores[:, 10:].argmax(1) + 10
    values, places = torch.topk(scores, 5, largest=c.pick("swapped operand: least for greatest", True, False))
    ordered = torch.sort(scores, 1, descending=True).values
    if c.bug("off by one: ranks"):
        ordered = ordered.roll(1, 1)
    return best, values, places, c.one(ordered)


@family(lambda m: (m.normal(16, 50), m.normal(50, 12, scale=0.2)), trains=False, low=False)
def quantile(c: Plan, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    levels = torch.quantile(y, c.pick("scale: level of 0.91 for 0.9", 0.9, 0.91), dim=1)
    bounds = torch.linspace(-2, 2, 9) + c.pick("off by one: bounds moved", 0.0, -0.05)
    bins = torch.bucketize(torch.round(y * 4) / 4, bounds, right=c.pick("off by one: right bound in", False, True))
    return levels, bins, torch.floor(y * 3) if not c.bug("wrong rounding: round for floor") else torch.round(y * 3)


@family(lambda m: (m.normal(32, 24), m.normal(24, 24, scale=0.3)))
def fake_quantise(c: Plan, x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    step = y.detach().abs().amax(c.pick("wrong reduction dimension: over columns", 1, 0), keepdim=True)
    step = (step if step.shape[0] == 32 else step.amax(1, keepdim=True)) / c.pick("off by one: 128 for 127", 127, 128)
    whole = torch.trunc(y / step) if c.bug("wrong rounding: trunc for round") else torch.round(y / step)
    quantised = whole.clamp(-127, c.pick("mask: clamped at 100", 127, 100)) * step
    return y + (quantised - y).detach()


FAMILIES: tuple[Family, ...] = (
    nll_loss,
    kl_loss,
    cosine,
    standardise,
    scan,
    accumulate,
    double_statistics,
    fft_magnitude,
    logsumexp,
    contrastive,
    focal_loss,
    tiny_gradients,
    near_constant,
    ties,
    quantile,
    fake_quantise,
)
