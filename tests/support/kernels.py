"""Handwritten kernels in plain Python, right ones and wrong ones, each with its reference and what makes arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from checked_backend.findings import Kind

Make = Callable[[int, torch.dtype], Sequence[Any]]
TILE = 16
WIDTH = 40


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        kinds: The kinds of findings that are right for it; empty if the kernel is right.
        size: The smallest of the sizes tried that shows the fault.
        dtypes: Those in which it is wrong, or right.
    """

    name: str
    reference: Callable[..., Any]
    candidate: Callable[..., Any]
    make: Make
    kinds: frozenset[Kind] = frozenset()
    size: int = 1
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


def _rows(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return (torch.randn(3, size, dtype=dtype, requires_grad=True),)


def _data(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return (torch.randn(3, size, dtype=dtype),)


def _many_rows(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return (torch.randn(64, size, dtype=dtype),)


def _matrices(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return torch.randn(5, size, dtype=dtype), torch.randn(size, 7, dtype=dtype)


def _attention_inputs(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return tuple(torch.randn(2, size, 8, dtype=dtype) for _ in range(3))


def _logits(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return torch.randn(size, WIDTH, dtype=dtype, requires_grad=True), torch.randint(0, WIDTH, (size,))


def _quantised(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return torch.randint(-128, 128, (3, size), dtype=torch.int8), torch.rand(3, 1, dtype=dtype)


def _tiles(size: int) -> Sequence[slice]:
    return [slice(begin, min(begin + TILE, size)) for begin in range(0, size, TILE)]


# references


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def dequantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.to(scale.dtype) * scale


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def variance(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)).square().mean(-1)


def cumulative(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


def squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(-1)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def exponential(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


# right


def online_softmax(x: torch.Tensor) -> torch.Tensor:
    """In tiles, with a running maximum and a running sum (Milakov and Gimelshein, arXiv 1805.02867)."""
    greatest = torch.full(x.shape[:-1], -math.inf)
    total = torch.zeros(x.shape[:-1])
    for tile in _tiles(x.shape[-1]):
        part = x[..., tile].float()
        new = torch.maximum(greatest, part.amax(-1))
        total = total * (greatest - new).exp() + (part - new[..., None]).exp().sum(-1)
        greatest = new
    return ((x.float() - greatest[..., None]).exp() / total[..., None]).to(x.dtype)


def welford(x: torch.Tensor) -> torch.Tensor:
    """The variance from running means (Chan, Golub and LeVeque)."""
    count, mean, spread = 0, torch.zeros(x.shape[:-1]), torch.zeros(x.shape[:-1])
    for tile in _tiles(x.shape[-1]):
        part = x[..., tile].float()
        own, size = part.mean(-1), part.shape[-1]
        delta = own - mean
        spread = spread + (part - own[..., None]).square().sum(-1) + delta.square() * (count * size / (count + size))
        mean, count = mean + delta * (size / (count + size)), count + size
    return (spread / count if count else spread * math.nan).to(x.dtype)


def welford_layer_norm(x: torch.Tensor) -> torch.Tensor:
    if not x.shape[-1]:
        return x.clone()
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return (centred / (welford(wide)[..., None] + 1e-5).sqrt()).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, scale)
        return (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, scale = ctx.saved_tensors
        wide, arriving = x.float(), gradient.float()
        inner = (arriving * wide).mean(-1, keepdim=True)
        return (arriving * scale - wide * scale.pow(3) * inner).to(x.dtype)


def fused_rms_norm(x: torch.Tensor) -> torch.Tensor:
    return _RMSNorm.apply(x)  # type: ignore[no-untyped-call, no-any-return]


def tiled_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1])
    for tile in _tiles(a.shape[1]):
        total += a[:, tile].float() @ b[tile].float()
    return total.to(a.dtype)


def split_k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    parts = [a[:, begin::4].float() @ b[begin::4].float() for begin in range(4)]
    return torch.stack(parts).sum(0).to(a.dtype)


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """In tiles of keys (Dao et al., arXiv 2205.14135)."""
    scale = 1 / math.sqrt(q.shape[-1])
    greatest, total = torch.full((*q.shape[:-1], 1), -math.inf), torch.zeros(*q.shape[:-1], 1)
    result = torch.zeros(q.shape)
    for tile in _tiles(k.shape[1]):
        scores = q.float() @ k[:, tile].float().mT * scale
        new = torch.maximum(greatest, scores.amax(-1, keepdim=True))
        weights, kept = (scores - new).exp(), (greatest - new).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        result = result * kept + weights @ v[:, tile].float()
        greatest = new
    return (result / total).to(q.dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = logits.float()
        ctx.save_for_backward(logits, labels)
        return (wide.logsumexp(-1) - wide.gather(-1, labels[:, None])[:, 0]).sum().to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels = ctx.saved_tensors
        probabilities = logits.float().softmax(-1)
        probabilities[torch.arange(len(labels)), labels] -= 1
        return (probabilities * gradient.float()).to(logits.dtype), None


def fused_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call, no-any-return]


def fast_dequantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.mul(x.float(), scale.float()).to(scale.dtype)


def erf_gelu(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (0.5 * wide * (1 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def blocked_cumsum(x: torch.Tensor) -> torch.Tensor:
    result, carried = torch.empty_like(x), torch.zeros(x.shape[:-1])
    for tile in _tiles(x.shape[-1]):
        sums = x[..., tile].float().cumsum(-1) + carried[..., None]
        result[..., tile], carried = sums, sums[..., -1]
    return result


def pairwise_squares(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return ((wide[..., ::2] * wide[..., ::2]).sum(-1) + (wide[..., 1::2] * wide[..., 1::2]).sum(-1)).to(x.dtype)


RIGHT = (
    Kernel("online softmax", softmax, online_softmax, _rows),
    Kernel("Welford's variance", variance, welford, _data),
    Kernel("layer norm on it", layer_norm, welford_layer_norm, _rows),
    Kernel("fused RMS norm with its own gradient", rms_norm, fused_rms_norm, _rows),
    Kernel("tiled matmul", matmul, tiled_matmul, _matrices),
    Kernel("split-k matmul", matmul, split_k, _matrices),
    Kernel("flash attention", attention, flash_attention, _attention_inputs),
    Kernel("fused cross entropy with its own gradient", cross_entropy, fused_cross_entropy, _logits),
    Kernel("int8 dequantisation", dequantise, fast_dequantise, _quantised),
    Kernel("gelu by erf", gelu, erf_gelu, _rows),
    Kernel("cumulative sum in blocks", cumulative, blocked_cumsum, _data),
    Kernel("sum of squares in two halves", squares, pairwise_squares, _rows),
)


# wrong


def softmax_tail_not_masked(x: torch.Tensor) -> torch.Tensor:
    """The last tile is read to its end: what is beyond the row counts as 0, and so as exp(0)."""
    missing = -x.shape[-1] % TILE
    return torch.softmax(F.pad(x, (0, missing)), -1)[..., : x.shape[-1]]


def last_row_dropped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    whole = max(a.shape[1] // TILE * TILE, min(a.shape[1], TILE))
    return (a[:, :whole].float() @ b[:whole].float()).to(a.dtype)


def low_accumulation(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for place in range(x.shape[-1]):
        total = total + x[..., place] * x[..., place]
    return total


def uninitialised_tail(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x)
    whole = x.shape[-1] if x.shape[-1] < TILE else x.shape[-1] // TILE * TILE
    result[..., :whole] = (x * 2)[..., :whole]
    return result


def in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


class CachesByAddress:
    """Keeps its result for tensors that it has seen."""

    def __init__(self) -> None:
        self.known: dict[int, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.known.setdefault(x.data_ptr() if x.numel() else 0, x * 2).clone()


class CachesByShape:
    """Keeps what it has computed for a shape."""

    def __init__(self) -> None:
        self.known: dict[torch.Size, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.known.setdefault(x.shape, x.detach().abs().amax() if x.numel() else torch.ones(()))
        return (x / scale) * scale if scale is None else x * 2 * (scale / (x.abs().amax() if x.numel() else scale))


class _WithoutScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def gradient_without_scale(x: torch.Tensor) -> torch.Tensor:
    return _WithoutScale.apply(x)  # type: ignore[no-untyped-call, no-any-return]


def low_degree_exp(x: torch.Tensor) -> torch.Tensor:
    wide = x.float() / 4
    return (1 + wide + wide**2 / 2).pow(4).to(x.dtype)


def other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.double() * 2


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.detach() * 2


def naive_softmax(x: torch.Tensor) -> torch.Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


def _large(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return (torch.randn(3, size, dtype=dtype) + 100,)


def one_pass_variance(x: torch.Tensor) -> torch.Tensor:
    """The mean of the squares less the square of the mean: it cancels."""
    return x.square().mean(-1) - x.mean(-1).square()


_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE})
_LOW = (torch.bfloat16,)
_WIDE = (torch.float32,)

WRONG = (
    Kernel("a tail that is not masked", softmax, softmax_tail_not_masked, _rows, _VALUES),
    Kernel("the last piece of a sum dropped", matmul, last_row_dropped, _matrices, _VALUES, 17),
    Kernel("accumulation in the low precision", squares, low_accumulation, _many_rows, _VALUES, 513, _LOW),
    Kernel("a tail without values", doubled, uninitialised_tail, _data, _VALUES, 17),
    Kernel("a result that is the input", doubled, in_place, _data, frozenset({Kind.ALIAS, Kind.MUTATION})),
    Kernel("a cache by address", doubled, CachesByAddress(), _data, _VALUES, 16),
    Kernel("a cache by shape", doubled, CachesByShape(), _data, _VALUES, 16),
    Kernel("a gradient that forgets the scale", doubled, gradient_without_scale, _rows, _VALUES),
    Kernel("an exp of low degree", exponential, low_degree_exp, _data, _VALUES),
    Kernel("another dtype", doubled, other_dtype, _data, frozenset({Kind.STRUCTURE})),
    Kernel("no gradient", doubled, without_gradient, _rows, frozenset({Kind.STRUCTURE, Kind.CRASH, Kind.EXCEPTION})),
    Kernel("exp that overflows", softmax, naive_softmax, _large, frozenset({Kind.NONFINITE}), dtypes=_WIDE),
    Kernel("a variance that cancels", variance, one_pass_variance, _large, _VALUES, 15, _WIDE),
)


class ReturnsItsBuffer:
    """Has one buffer for each shape, and returns it each time."""

    def __init__(self) -> None:
        self.buffers: dict[torch.Size, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.buffers.setdefault(x.shape, torch.empty_like(x)).copy_(doubled(x))
