"""Clean programs whose float32 or half-precision arithmetic magnifies roundings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import case, normal


@case("noise")
def sine_map() -> tuple[Any, ...]:
    """Chaos: every step doubles the error, until nothing of the result is right in either."""

    def fn(x: Tensor) -> Tensor:
        for _ in range(60):
            x = 0.98 * torch.sin(3.14159 * x)
        return x

    return fn, torch.linspace(0.1, 0.9, 64)


@case("noise")
def sine_map_half_way() -> tuple[Any, ...]:
    """The same when half of the digits are left."""

    def fn(x: Tensor) -> Tensor:
        for _ in range(12):
            x = 0.95 * torch.sin(3.14159 * x)
        return x

    return fn, torch.linspace(0.1, 0.9, 64)


@case("noise")
def coupled_maps_bf16() -> tuple[Any, ...]:
    """Chaos in 32 dimensions and bfloat16."""

    def fn(x: Tensor, m: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.sin(3 * (x @ m)) * 1.1
        return x

    return fn, normal(8, 32, dtype=torch.bfloat16), normal(32, 32, seed=1, dtype=torch.bfloat16, scale=0.2)


@case("noise")
def tanh_recurrence_bf16() -> tuple[Any, ...]:
    """A recurrence in bfloat16: eager rounds in every step, the fused kernel does not."""

    def fn(h: Tensor, w: Tensor) -> Tensor:
        for _ in range(5):
            h = torch.tanh(h * w + 0.3 * h.roll(1, 1))
        return h

    return fn, normal(16, 64, dtype=torch.bfloat16), normal(64, seed=1, dtype=torch.bfloat16, scale=1.5)


@case("noise")
def deviations_from_mean() -> tuple[Any, ...]:
    """x - x.mean() of values near 1000: four digits are left."""
    return (lambda x: x - x.mean(1, keepdim=True)), normal(16, 1000, scale=1e-2) + 1000


@case("noise")
def variance_of_nearly_constant() -> tuple[Any, ...]:
    """The standard deviation of values that differ in the last digits."""
    return (lambda x: (x * 1.1).std(1) / x.mean(1)), normal(16, 512, scale=1e-4) + 30


@case("noise")
def sum_of_cancelling_terms() -> tuple[Any, ...]:
    """The true sum is zero."""

    def fn(x: Tensor) -> Tensor:
        y = torch.cat([x * 1.7, -1.7 * x.flip(0)]).exp().log()
        return y.sum()

    return fn, normal(5000)


@case("noise")
def softmax_minus_itself() -> tuple[Any, ...]:
    """Two ways to write the same softmax, subtracted."""

    def fn(x: Tensor) -> Tensor:
        return F.softmax(x, 1) - (x - torch.logsumexp(x, 1, keepdim=True)).exp()

    return fn, normal(32, 200, scale=3)


@case("noise")
def normalised_near_zero() -> tuple[Any, ...]:
    """Vectors that are nothing but rounding error, normalised to length 1."""

    def fn(x: Tensor) -> Tensor:
        small = (x / 3 + x / 7) - x * (10 / 21)
        return F.normalize(small, dim=1, eps=1e-30)

    return fn, normal(16, 64)


@case("noise")
def log_of_one_plus_tiny() -> tuple[Any, ...]:
    """log(1 + x) written out."""
    return (lambda x: torch.log(1 + x.exp() * 1e-6) / 1e-6), normal(1000)


@case("noise")
def difference_quotient() -> tuple[Any, ...]:
    """A numerical derivative."""
    return (lambda x: (torch.sin(x + 1e-3) - torch.sin(x - 1e-3)) / 2e-3), normal(1000)


@case("noise")
def quadratic_formula() -> tuple[Any, ...]:
    """The small root by the formula from school."""

    def fn(b: Tensor) -> Tensor:
        return (-b + torch.sqrt(b * b - 4 * 0.001)) / 2

    return fn, normal(1000).abs() * 5 + 1


@case("noise")
def long_cumsum() -> tuple[Any, ...]:
    """A running sum of 1e6 elements, which drifts."""
    return (lambda x: (x * 1.001).cumsum(0)), normal(1_000_000)


@case("noise")
def long_cumsum_of_positive() -> tuple[Any, ...]:
    """A running sum of positive numbers: eager sums in float64 or not, the kernel in blocks."""
    return (lambda x: torch.cumsum(x.abs() + 0.1, 0)), normal(1_000_000)


@case("noise")
def cumprod_near_one() -> tuple[Any, ...]:
    """A running product."""
    return (lambda x: (1 + 0.01 * x).cumprod(1)), normal(8, 4000)


@case("noise")
def logcumsumexp_long() -> tuple[Any, ...]:
    """A running log-sum-exp."""
    return (lambda x: torch.logcumsumexp(x * 3, 1)), normal(8, 2000)


@case("noise")
def sum_in_half() -> tuple[Any, ...]:
    """A sum of 1e5 halfs."""
    return (lambda x: (x * x + x).sum(0)), normal(20000, 5, dtype=torch.float16)


@case("noise")
def softmax_in_half() -> tuple[Any, ...]:
    """softmax, written out, in float16."""

    def fn(x: Tensor) -> Tensor:
        e = (x - x.amax(1, keepdim=True)).exp()
        return e / e.sum(1, keepdim=True)

    return fn, normal(64, 300, dtype=torch.float16, scale=4)


@case("noise")
def bf16_polynomial() -> tuple[Any, ...]:
    """A polynomial near its root, in bfloat16."""

    def fn(x: Tensor) -> Tensor:
        return ((((x - 5) * x + 10) * x - 10) * x + 5) * x - 1

    return fn, (1 + normal(4096, scale=0.2)).bfloat16()


@case("noise")
def fp16_overflow_to_nan() -> tuple[Any, ...]:
    """Eager overflows to inf and then has inf - inf; the fused kernel is right."""
    return (lambda x: (x * x - x * x * 0.5) / x), (normal(512).abs() * 400 + 10).half()


@case("noise")
def fp16_underflow_divided() -> tuple[Any, ...]:
    """Eager underflows to 0 and has 0/0 = NaN; the fused kernel is right."""
    return (lambda x: (x * 1e-4) * 1e-4 / (x * 1e-4 * 1e-4)), normal(512).abs().half() + 0.1


@case("noise")
def bf16_variance_written_out() -> tuple[Any, ...]:
    """mean(x*x) - mean(x)**2 in bfloat16 is negative here and there; its root is NaN."""

    def fn(x: Tensor) -> Tensor:
        return ((x * x).mean(1) - x.mean(1) ** 2).clamp_min(0).sqrt()

    return fn, (normal(64, 128) * 0.1 + 3).bfloat16()


@case("noise")
def geometric_mean() -> tuple[Any, ...]:
    """exp of the mean of logs."""
    return (lambda x: x.abs().clamp_min(1e-6).log().mean(1).exp()), normal(64, 3000)


@case("noise")
def transcendental_chain() -> tuple[Any, ...]:
    """Vectorised functions differ from the scalar ones in the last place."""

    def fn(x: Tensor) -> Tensor:
        return torch.tanh(F.gelu(x) * 3).exp().log1p() * torch.erf(x) + torch.atan(x).sinh()

    return fn, normal(4096)


@case("noise")
def gamma_functions() -> tuple[Any, ...]:
    """lgamma and digamma near their zeros."""
    return (lambda x: torch.lgamma(x) * torch.digamma(x)), torch.linspace(0.9, 2.1, 500)


@case("noise")
def bessel_near_zeros() -> tuple[Any, ...]:
    """Bessel functions, near their zeros too."""

    def fn(x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x) / (torch.special.i0e(x) + torch.special.bessel_j1(x).abs())

    return fn, torch.linspace(0.1, 20, 800)


@case("noise")
def erfinv_tails() -> tuple[Any, ...]:
    """The inverse error function near 1, where one rounding of the argument is large."""
    return (lambda x: torch.erfinv(torch.tanh(x))), torch.linspace(-6, 6, 500)


@case("noise")
def logsumexp_tail() -> tuple[Any, ...]:
    """What the smaller terms add to the greatest."""
    return (lambda x: torch.logsumexp(x, 1) - x.amax(1)), torch.cat([torch.full((64, 1), 14.0), normal(64, 50)], 1)


@case("noise")
def mixed_precision_sum() -> tuple[Any, ...]:
    """float64, float32 and bfloat16 in one expression."""

    def fn(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return ((x * y.float()).sum(1) * z).exp() - (y * z.bfloat16()[:, None]).sum(1)

    return fn, normal(32, 100, scale=0.1), normal(32, 100, seed=1, dtype=torch.bfloat16), normal(32, seed=2).double()


@case("noise")
def complex_polar() -> tuple[Any, ...]:
    """Complex arithmetic: angle, magnitude, product."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = torch.complex(x, y)
        w = torch.polar(z.abs(), z.angle() * 2)
        return torch.view_as_real(w * z / (z * z + 0.1))

    return fn, normal(500), normal(500, seed=1)


@case("noise")
def rms_of_tiny() -> tuple[Any, ...]:
    """Root mean square of values near 1e-20: their squares underflow."""
    return (lambda x: x / ((x * x).mean(1, keepdim=True).sqrt() + 1e-22)), normal(16, 64, scale=3e-20)


@case("noise")
def einsum_bf16() -> tuple[Any, ...]:
    """A contraction in bfloat16 and what is left when its mean is taken off."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = torch.einsum("bik,bjk->bij", x, y)
        return z - z.mean((1, 2), keepdim=True) * torch.sigmoid(z)

    return fn, normal(4, 16, 200, dtype=torch.bfloat16), normal(4, 16, 200, seed=1, dtype=torch.bfloat16)


@case("noise")
def fft_round_trip() -> tuple[Any, ...]:
    """What a Fourier transform and back loses."""

    def fn(x: Tensor) -> Tensor:
        return (torch.fft.irfft(torch.fft.rfft(x * 1.3), n=256) - 1.3 * x) * 1e6 + x.sin()

    return fn, normal(8, 256)


@case("noise")
def angle_between_near_parallel() -> tuple[Any, ...]:
    """acos near 1."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = x + 1e-3 * y
        cosine = (x * z).sum(1) / (x.norm(dim=1) * z.norm(dim=1))
        return torch.acos(cosine.clamp(-1, 1))

    return fn, normal(200, 100), normal(200, 100, seed=1)


@case("noise", train=True)
def norm_of_near_zero_grad() -> tuple[Any, ...]:
    """The gradient of a norm of what is nothing but rounding error."""

    def fn(x: Tensor) -> Tensor:
        return ((x / 3 + x / 7) - x * (10 / 21)).norm(dim=1)

    return fn, normal(16, 64).requires_grad_()


@case("noise", train=True)
def cdist_of_close_points_grad() -> tuple[Any, ...]:
    """Distances between nearly equal points by way of the scalar product, and their gradient."""

    def fn(x: Tensor) -> Tensor:
        square = (x * x).sum(1)
        return (square[:, None] + square[None] - 2 * x @ x.t()).clamp_min(1e-12).sqrt()

    return fn, (1 + normal(40, 8, scale=1e-3)).requires_grad_()


@case("noise", train=True)
def tiny_gradients() -> tuple[Any, ...]:
    """Gradients of 1e-8."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return 1e-8 * F.log_softmax(torch.tanh(x @ w) * 5, 1)

    return fn, normal(32, 16).requires_grad_(), normal(16, 10, seed=1).requires_grad_()


@case("noise", train=True)
def logsigmoid_tails_grad() -> tuple[Any, ...]:
    """Saturated sigmoids: gradients from 1 down to 1e-30."""
    return (lambda x: F.logsigmoid(x) + F.softplus(x, 2.0) + torch.sigmoid(x) * x), torch.linspace(
        -70, 70, 300
    ).requires_grad_()
