"""Clean programs in which a rounding decides: comparisons, roundings to integers, choices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import case, normal


@case("noise")
def argmax_of_near_ties() -> tuple[Any, ...]:
    """The greatest of values that differ by roundings."""
    return (
        (lambda x, y: ((x @ y) / 3).argmax(1)),
        torch.ones(64, 40) + normal(64, 40, scale=1e-4),
        1 + normal(40, 300, seed=1, scale=1e-6),
    )


@case("noise")
def argmax_of_bf16_scores() -> tuple[Any, ...]:
    """The greatest of 1000 scores in bfloat16, which eager rounds in between."""
    return (
        (lambda x, y: (F.gelu(x) * y + x.sin() * 0.1).argmax(1)),
        normal(256, 1000, dtype=torch.bfloat16),
        normal(1000, seed=1, dtype=torch.bfloat16),
    )


@case("noise")
def topk_of_bf16_router() -> tuple[Any, ...]:
    """A mixture-of-experts router: indices and weights of the two best experts."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        values, experts = torch.topk(F.softmax(F.silu(x) @ w, -1), 2)
        return values / values.sum(-1, keepdim=True), experts

    return fn, normal(256, 64, dtype=torch.bfloat16), normal(64, 16, seed=1, dtype=torch.bfloat16, scale=0.05)


@case("noise")
def sort_of_bf16_products() -> tuple[Any, ...]:
    """An order of values that are nearly the same."""
    return (
        (lambda x, y: torch.sort(x * y + x.cos(), dim=1, stable=True)[1]),
        normal(16, 200, dtype=torch.bfloat16),
        normal(16, 200, seed=1, dtype=torch.bfloat16),
    )


@case("noise")
def comparison_near_threshold() -> tuple[Any, ...]:
    """Eager rounds to bfloat16 before it compares."""
    return (
        (lambda x, y: x * y + 0.1 > x.sin()),
        normal(8192, dtype=torch.bfloat16),
        normal(8192, seed=1, dtype=torch.bfloat16),
    )


@case("noise")
def step_function_bf16() -> tuple[Any, ...]:
    """A jump between two values at a threshold in bfloat16."""
    return (lambda x: torch.where(x.exp() * 0.37 > 1, x * 10, -x)), normal(8192, dtype=torch.bfloat16)


@case("noise")
def rounding_to_grid() -> tuple[Any, ...]:
    """Round to multiples of 0.1 what lies at half of one."""
    return (lambda x: torch.round((x * 1.05 / 1.05) * 10 + 0.5) / 10), torch.arange(-2000.0, 2000.0) / 10


@case("noise")
def floor_of_exact_quotient() -> tuple[Any, ...]:
    """floor of a quotient that is an integer but for a rounding."""
    return (lambda x: torch.floor(torch.log(x) / 0.6931471805599453)), 2.0 ** torch.arange(-60.0, 60.0)


@case("noise")
def fake_quantise_int8() -> tuple[Any, ...]:
    """Dynamic int8 quantisation of an activation, and back."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.silu(x) * 1.3
        scale = y.abs().amax(1, keepdim=True) / 127
        q = torch.clamp(torch.round(y / scale), -128, 127).to(torch.int8)
        return q, q.float() * scale

    return fn, normal(64, 2048)


@case("noise")
def quantise_int8_of_bf16() -> tuple[Any, ...]:
    """The same on bfloat16, where eager rounds before it rounds."""

    def fn(x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True) / 127
        return torch.clamp(torch.round(F.gelu(x) / scale), -128, 127).to(torch.int8)

    return fn, normal(64, 512, dtype=torch.bfloat16)


@case("noise")
def quantise_float8() -> tuple[Any, ...]:
    """float8 and back."""

    def fn(x: Tensor) -> Tensor:
        scale = 448.0 / (x.tanh() * 3).abs().amax()
        return (x.tanh() * 3 * scale).to(torch.float8_e4m3fn).float() / scale

    return fn, normal(64, 512)


@case("noise")
def quantise_float8_of_bf16() -> tuple[Any, ...]:
    """float8 of a bfloat16 product: eager rounds twice."""
    return (
        (lambda x, y: (x * y * 1.7).to(torch.float8_e5m2).to(torch.bfloat16)),
        normal(64, 256, dtype=torch.bfloat16),
        normal(256, seed=1, dtype=torch.bfloat16),
    )


@case("noise")
def histogram_of_bf16() -> tuple[Any, ...]:
    """Bins of values that lie at their bounds."""
    return (lambda x: torch.bucketize((x.sin() * 3).float(), torch.linspace(-3, 3, 49))), normal(
        4096, dtype=torch.bfloat16
    )


@case("noise")
def nearest_code() -> tuple[Any, ...]:
    """Vector quantisation: the nearest code's number and vector."""

    def fn(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        distance = (x * x).sum(1, keepdim=True) - 2 * x @ codes.t() + (codes * codes).sum(1)
        number = distance.argmin(1)
        return number, codes[number]

    return fn, normal(512, 16, dtype=torch.bfloat16), normal(64, 16, seed=1, dtype=torch.bfloat16)


@case("noise", train=True)
def relu_at_zero_grad() -> tuple[Any, ...]:
    """A relu whose argument is a rounding error: its gradient is 0 or 1."""
    return (lambda x: F.relu((x / 3 + x / 7) - x * (10 / 21)) * 3 + x), normal(2000).requires_grad_()


@case("noise", train=True)
def max_of_near_ties_grad() -> tuple[Any, ...]:
    """The gradient of a maximum goes to whichever is greatest."""
    return (
        (lambda x, w: (1 + 1e-6 * x @ w).max(1).values),
        normal(64, 50).requires_grad_(),
        normal(50, 200, seed=1).requires_grad_(),
    )


@case("noise", train=True)
def max_pool_of_bf16_grad() -> tuple[Any, ...]:
    """The same for max pooling."""
    return (lambda x: F.max_pool2d(F.gelu(x) * 1.1, 2)), normal(2, 4, 16, 16).bfloat16().requires_grad_()


@case("noise", train=True)
def straight_through_grad() -> tuple[Any, ...]:
    """A straight-through estimator: round forward, identity backward."""

    def fn(x: Tensor) -> Tensor:
        y = x * 7.3
        return (y + (torch.round(y) - y).detach()).sin()

    return fn, normal(2000).requires_grad_()


@case("noise")
def newton_sqrt_until_close() -> tuple[Any, ...]:
    """Newton's iteration with a mask of what has converged, and how many steps it took."""

    def fn(a: Tensor) -> tuple[Tensor, Tensor]:
        x = a * 0.5 + 0.5
        steps = torch.zeros_like(a, dtype=torch.int64)
        for _ in range(4):
            going = (x * x - a).abs() > 1e-6 * a
            x = torch.where(going, 0.5 * (x + a / x), x)
            steps = steps + going
        return x, steps

    return fn, normal(500).abs() * 50 + 0.01


@case("noise")
def mandelbrot_steps() -> tuple[Any, ...]:
    """Steps until a point escapes: near the border they are chaotic."""

    def fn(re: Tensor, im: Tensor) -> Tensor:
        zr, zi = torch.zeros_like(re), torch.zeros_like(im)
        count = torch.zeros_like(re, dtype=torch.int32)
        for _ in range(4):
            zr, zi = zr * zr - zi * zi + re, 2 * zr * zi + im
            inside = zr * zr + zi * zi < 4
            count = count + inside.int()
            zr, zi = torch.where(inside, zr, 2.0), torch.where(inside, zi, 2.0)
        return count

    grid = torch.linspace(-1.5, 0.5, 60)
    return fn, grid[None].expand(60, 60) * 1.0, (grid + 0.5)[:, None].expand(60, 60) * 1.0


@case("noise")
def nucleus_sampling_mask() -> tuple[Any, ...]:
    """Top-p filtering: which tokens are kept depends on a running sum against 0.9."""

    def fn(x: Tensor) -> Tensor:
        p, order = torch.sort(F.softmax(x * 0.7, -1), descending=True, dim=-1, stable=True)
        drop = p.cumsum(-1) - p > 0.9
        return x.masked_fill(drop.gather(-1, order.argsort(-1)), float("-inf"))

    return fn, normal(32, 500, dtype=torch.bfloat16)


@case("noise")
def modulo_of_sums() -> tuple[Any, ...]:
    """A remainder jumps where the dividend is a multiple."""
    return (lambda x: torch.remainder(x * 3 + x * 7, 10.0)), torch.arange(-500.0, 500.0) / 7


@case("noise")
def sign_of_rounding_error() -> tuple[Any, ...]:
    """The sign of what should be zero."""
    return (lambda x: torch.sign((x / 3 + x / 7) - x * (10 / 21))), normal(3000)


@case("noise")
def counter_of_an_object() -> tuple[Any, ...]:
    """Each run begins with the count that the program's own calls have left."""
    counter = SimpleNamespace(calls=0)

    def fn(x: Tensor) -> Tensor:
        counter.calls += 1
        return x * counter.calls

    return fn, normal(4)
