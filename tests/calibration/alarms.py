"""``python -m tests.calibration.alarms [word ...]``: hard but correct programs under a real compiler.

All of them are noise: long reductions, cancellation, overflow, discontinuities, ill-conditioned problems. A verdict
other than *pass* is a false alarm, unless a person finds that the compiler is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from checked_backend import check

from .run import watched

_BF16, _F16 = torch.bfloat16, torch.float16
PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {}


def _rnd(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0, grad: bool = False
) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).requires_grad_(grad)


def _program(*args: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__.strip("_")] = lambda: (function, tuple(make() for make in args))
        return function

    return keep


@_program(lambda: _rnd(1_000_000))
def _sum_of_a_million(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(), x.mean(), (x * x).sum(), x.abs().sum() - x.sum()


@_program(lambda: _rnd(1_000_000, dtype=_BF16))
def _bf16_sum_of_a_million(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(), (x * 1.5 + 0.1).mean(), x.var()


@_program(lambda: _rnd(4, 100_000, scale=5.0, grad=True))
def _softmax_of_huge_rows(x: Tensor) -> Tensor:
    return torch.softmax(x, -1) * 1e3


@_program(lambda: _rnd(4, 20_000, scale=5.0, dtype=_BF16, grad=True))
def _bf16_softmax_of_huge_rows(x: Tensor) -> Tensor:
    return torch.log_softmax(x * 1.1, -1)


@_program(lambda: _rnd(64, 64, dtype=_BF16, grad=True))
def _bf16_chain_of_50(x: Tensor) -> Tensor:
    for step in range(25):
        x = torch.sin(x * 1.3 + 0.1 * step)
        x = x + 0.5 * torch.tanh(x)
    return x


@_program(lambda: _rnd(64, 64))
def _chaotic_chain(x: Tensor) -> Tensor:
    x = torch.sigmoid(x)
    for _ in range(12):
        x = 3.9 * x * (1 - x)
    return x


@_program(lambda: _rnd(64, 32), lambda: _rnd(128, 64, seed=1), lambda: _rnd(128, 32, seed=2))
def _adam_steps(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step in range(1, 6):
        g = x.t() @ (torch.tanh(x @ w) - y) / 128
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    return w


@_program(lambda: _rnd(4096, scale=1e-5, grad=True))
def _log1p_near_zero(x: Tensor) -> tuple[Tensor, ...]:
    return torch.log1p(x), torch.log1p(x) - x, torch.exp(x) - 1  # no expm1: Inductor's is wrong on the CPU


@_program(lambda: _rnd(4096), lambda: _rnd(4096, seed=1))
def _atan2(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.atan2(x, y), torch.atan2(x * 1e-20, y * 1e-20), torch.hypot(x * 1e18, y * 1e18)


@_program(lambda: _rnd(4096).abs() + 0.5)
def _pow_with_large_exponents(x: Tensor) -> tuple[Tensor, ...]:
    return x**37.5, torch.pow(x, 60), torch.exp(40 * torch.log(x)), x**-12


@_program(lambda: _rnd(16, 16384, grad=True), lambda: _rnd(16384, 16, seed=1, grad=True))
def _matmul_of_16384(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a @ b / 128)


@_program(lambda: _rnd(16, 16384, dtype=_BF16), lambda: _rnd(16384, 16, seed=1, dtype=_BF16))
def _bf16_matmul_of_16384(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a @ b) - 1


@_program(lambda: _rnd(1, 1024, 11, 11), lambda: _rnd(2, 1024, 11, 11, seed=1))
def _conv_over_100000(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(F.conv2d(x, w, padding=1)) + 1


@_program(lambda: 1000 + _rnd(16, 4096, scale=1e-3))
def _var_of_nearly_constant(x: Tensor) -> tuple[Tensor, ...]:
    return x.var(1), x.std(1), (x - x.mean(1, keepdim=True)).square().sum(1), F.layer_norm(x, (4096,))


@_program(lambda: 10 + _rnd(8, 16, 32, 32, scale=1e-2, grad=True))
def _batch_norm_of_nearly_constant(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


@_program(lambda: _rnd(256, 64), lambda: _rnd(64, 64, seed=1))
def _floor_and_round(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    return torch.floor(y * 100), torch.round(y * 1000), torch.ceil(torch.sin(y) * 1e4), torch.trunc(y), y > 0


@_program(lambda: _rnd(256, 64, dtype=_BF16), lambda: _rnd(64, 64, seed=1, dtype=_BF16))
def _bf16_argmax_and_topk(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = torch.tanh(x @ w * 0.01) * 3
    return y.argmax(1), *torch.topk(y, 8, 1), torch.sort(y, 1).values


@_program(lambda: _rnd(256, 64), lambda: _rnd(64, 64, seed=1))
def _argsort_of_noisy_values(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = torch.round((x @ w) * 2) / 2 + torch.sin(x @ w) * 1e-7
    return y.argsort(1), y.argmax(1), y.argmin(0)


@_program(lambda: _rnd(4, 100_000, grad=True))
def _cumsum_of_100000(x: Tensor) -> tuple[Tensor, ...]:
    return x.cumsum(1), (x * 1e-3).exp().cumsum(1)


@_program(lambda: _rnd(8, 1000))
def _cumprod(x: Tensor) -> tuple[Tensor, ...]:
    return (1 + x * 0.01).cumprod(1), torch.logcumsumexp(x, 1)


@_program(lambda: _rnd(4096, dtype=_F16, scale=100.0))
def _f16_overflow(x: Tensor) -> tuple[Tensor, ...]:
    return x * x, (x * x) / x, torch.exp(x / 8), (x * 100).sum(), torch.softmax(x * 20, 0)


@_program(lambda: _rnd(64, 64, dtype=_F16, scale=8.0, grad=True))
def _f16_norm_overflow(x: Tensor) -> Tensor:
    return x / (x.square().sum(1, keepdim=True).sqrt() + 1)


@_program(lambda: torch.where(_rnd(256, 16) > 2, torch.nan, _rnd(256, 16, seed=1)))
def _nan_propagation(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(1), x.amax(1), torch.nan_to_num(x).mean(1), torch.softmax(x, 1), x.clamp(0, 1), torch.maximum(x, -x)


@_program(lambda: torch.where(_rnd(256, 16) > 1.5, torch.inf, _rnd(256, 16, seed=1)))
def _inf_propagation(x: Tensor) -> tuple[Tensor, ...]:
    return (
        x - x.amax(1, keepdim=True),
        torch.sigmoid(x),
        torch.tanh(x) * x,
        torch.logsumexp(x, 1),
        1 / x,
    )  # no x * 0: Inductor's is 0


def _hilbert(n: int) -> Tensor:
    places = torch.arange(1.0, n + 1)
    return 1 / (places[:, None] + places[None, :] - 1)


@_program(lambda: _hilbert(8))
def _inverse_of_ill_conditioned(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 1.1 + torch.sin(x) * 1e-3
    return torch.linalg.inv(y), torch.linalg.solve(y, torch.ones(8)), torch.linalg.det(y)


@_program(lambda: _rnd(12, 12))
def _eigh_of_nearly_equal(x: Tensor) -> tuple[Tensor, ...]:
    values = torch.linalg.eigvalsh(torch.eye(12) + 1e-6 * (x * 1.5 + x.t() * 1.5))
    return values, torch.linalg.svdvals(torch.sin(x) * 1.1)


@_program(lambda: _rnd(16, 16, grad=True))
def _cholesky(x: Tensor) -> tuple[Tensor, ...]:
    gram = torch.tanh(x) @ torch.tanh(x).t() + 1e-3 * torch.eye(16)
    return torch.linalg.cholesky(gram), torch.logdet(gram)


@_program(lambda: _rnd(64, 256, grad=True))
def _nearly_equal_difference(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 1.7 + 0.3
    return (y + 1000) - 1000 - y, torch.sin(y) ** 2 + torch.cos(y) ** 2 - 1, torch.sqrt(y * y + 1e-12) - y.abs()


@_program(lambda: _rnd(32, 128, grad=True))
def _logsumexp_tails(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 30
    return torch.logsumexp(y, 1) - y.amax(1), torch.softmax(y, 1), F.softplus(y), F.logsigmoid(y)


@_program(lambda: _rnd(32, 10, grad=True), lambda: torch.arange(32) % 10)
def _tiny_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(x * 3), target) * 1e-9


@_program(lambda: _rnd(16, 32, scale=1e-22, grad=True))
def _denormals(x: Tensor) -> tuple[Tensor, ...]:
    return x * x, (x * x).sum(1), x * 1e-18, torch.exp(-100 - x * 1e22)


@_program(lambda: _rnd(4096, scale=1e4, grad=True))
def _trigonometry_of_large(x: Tensor) -> tuple[Tensor, ...]:
    return torch.sin(x), torch.cos(x * 3.3), torch.tan(x), torch.fmod(x, 0.1), torch.remainder(x * 1.1, 0.3)


@_program(lambda: _rnd(4096).clamp(-0.9999999, 0.9999999))
def _inverse_functions_at_the_edge(x: Tensor) -> tuple[Tensor, ...]:
    return torch.acos(x), torch.atanh(x), torch.erfinv(x), torch.asin(x), torch.acosh(1 + x.abs() * 1e-6)


@_program(lambda: _rnd(1024).abs() * 10 + 0.1)
def _special_functions(x: Tensor) -> tuple[Tensor, ...]:
    return torch.lgamma(x), torch.digamma(x), torch.erfc(x), torch.special.i0e(x), torch.erf(x) - 1


@_program(
    lambda: _rnd(8, 4, 128, 32, dtype=_BF16, grad=True), lambda: _rnd(8, 4, 128, 32, seed=1, dtype=_BF16, grad=True)
)
def _bf16_attention(q: Tensor, k: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k * 3, k + q, is_causal=True)


@_program(
    lambda: _rnd(64, 128, dtype=_BF16, grad=True), lambda: _rnd(128, 128, seed=1, dtype=_BF16, scale=0.09, grad=True)
)
def _bf16_deep_residual(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(8):
        x = x + F.gelu(F.layer_norm(x, (128,)) @ w)
    return F.layer_norm(x, (128,))


@_program(lambda: _rnd(32, 16, dtype=_F16, grad=True), lambda: _rnd(16, 16, seed=1, dtype=_F16, scale=0.3, grad=True))
def _f16_gradient_underflow(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x @ w * 3).square().mean() * 1e-3


@_program(lambda: _rnd(512, 64), lambda: torch.randint(0, 7, (512,), generator=torch.Generator().manual_seed(3)))
def _scatter_sums(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    total = torch.zeros(7, 64).index_add(0, index, x * 1.1)
    return (
        total,
        total / torch.bincount(index, minlength=7)[:, None],
        torch.zeros(7, 64).index_reduce(0, index, x, "amax"),
    )


@_program(lambda: _rnd(16, 300, grad=True))
def _quantiles_and_histogram(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.sin(x * 3)
    return torch.quantile(y, 0.3, dim=1), y.median(1).values, torch.bucketize(y, torch.linspace(-1, 1, 33))


@_program(lambda: _rnd(8, 512, grad=True))
def _fft_round_trip(x: Tensor) -> tuple[Tensor, ...]:
    spectrum = torch.fft.rfft(x * 1.3 + 0.2)
    return torch.fft.irfft(spectrum * torch.exp(-spectrum.abs() / 10), n=512), spectrum.abs(), torch.angle(spectrum)


@_program(lambda: _rnd(40, 8, 16, scale=0.5, grad=True), lambda: _rnd(16, 16, seed=1, scale=0.4, grad=True))
def _long_recurrence(xs: Tensor, w: Tensor) -> Tensor:
    h = torch.zeros(8, 16)
    for x in xs:
        h = torch.tanh(h @ w * 1.5 + x)
    return h


@_program(lambda: _rnd(64, 64, grad=True))
def _relu_and_where_at_zero(x: Tensor) -> tuple[Tensor, ...]:
    y = x - x.mean(1, keepdim=True)
    y = y - y.mean(1, keepdim=True)
    z = y.mean(1)  # zero up to rounding
    return torch.relu(z), torch.where(z > 0, y[:, 0], y[:, 1]), torch.sign(z), z.abs()


@_program(lambda: _rnd(64, 64), lambda: _rnd(64, 64, seed=1))
def _integer_casts(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    return (
        (y * 50).to(torch.int32),
        (y * 4).to(torch.uint8),
        (y * 1e3).long() % 7,
        y.bool(),
        (y * 10).round().to(torch.int8),
    )


@_program(lambda: _rnd(64, 32, grad=True), lambda: _rnd(64, 32, seed=1))
def _distances_of_near_points(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    near = x + 1e-4 * y
    return torch.cdist(x, near), F.pairwise_distance(x, near), (x - near).norm(dim=1), F.mse_loss(x, near)


def _run(name: str, compiler: str) -> tuple[bool, str]:
    torch.set_num_threads(1)
    began = time.perf_counter()
    warnings.simplefilter("ignore")
    function, args = PROGRAMS[name]()
    training = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    with watched() as seen:
        report = check(function, args, compiler=compiler, gradients=training)
    found = [(finding.detail, finding.subject, dict(finding.evidence)) for finding in report.findings]
    skips = [f"{skip.subject}: {skip.reason}" for skip in report.coverage.skipped]
    good = str(report.verdict) == "pass"
    late = ", ".join(f"{runs} runs {ratio:.2g}" for runs, ratio in seen.late)
    numbers = (
        f"noise {max(seen.noise, default=0.0):.2g}, twin {max(seen.twin, default=(0.0, 0.0))[0]:.2g} "
        f"({max((ratio for _, ratio in seen.twin), default=0.0):.2g}), "
        f"closeness {max(seen.closeness, default=0.0):.3g}, not settled [{late}]"
    )
    took = time.perf_counter() - began
    return good, f"{'ok ' if good else 'BAD'} {name:34s} {report.verdict} {took:.1f} s {numbers} {found} {skips}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs, each in a process of its own; return 1 if any did not pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.calibration.alarms", description=__doc__)
    parser.add_argument("words", nargs="*", help="run only programs with one of these in their name")
    parser.add_argument("--compiler", default="inductor")
    options = parser.parse_args(arguments)
    bad = 0
    for name in PROGRAMS:
        if options.words and not any(word in name for word in options.words):
            continue
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 3
            try:
                good, text = _run(name, options.compiler)
                print(text, flush=True)
                status = 0 if good else 1
            except Exception as error:
                print(f"BAD {name:34s} {type(error).__name__}: {error}", flush=True)
            finally:
                os._exit(status)
        bad += os.waitpid(child, 0)[1] != 0
    print(f"{bad} did not pass")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
