"""Handwritten candidates against plain PyTorch: right ones pass, wrong ones fail at the smallest size that shows it."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.checking.handwritten import SIZES
from checked_backend.findings import Kind, Severity
from tests.support.check_tools import differentiated

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
    make: Callable[[int, torch.dtype], Sequence[Any]]
    kinds: frozenset[Kind] = frozenset()
    size: int = 1
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


def _rows(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return (torch.randn(3, size, dtype=dtype, requires_grad=True),)


def _data(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return (torch.randn(3, size, dtype=dtype),)


def _matrices(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return torch.randn(5, size, dtype=dtype), torch.randn(size, 7, dtype=dtype)


def _logits(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return torch.randn(size, WIDTH, dtype=dtype, requires_grad=True), torch.randint(0, WIDTH, (size,))


def _tiles(size: int) -> Sequence[slice]:
    return [slice(begin, min(begin + TILE, size)) for begin in range(0, size, TILE)]


# references


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def variance(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)).square().mean(-1)


def squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(-1)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


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


def tiled_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1])
    for tile in _tiles(a.shape[1]):
        total += a[:, tile].float() @ b[tile].float()
    return total.to(a.dtype)


def split_k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([a[:, begin::4].float() @ b[begin::4].float() for begin in range(4)]).sum(0).to(a.dtype)


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
    Kernel("layer norm on it", lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), welford_layer_norm, _rows),
    Kernel("fused RMS norm with its own gradient", rms_norm, _RMSNorm.apply, _rows),
    Kernel("tiled matmul", matmul, tiled_matmul, _matrices),
    Kernel("split-k matmul", matmul, split_k, _matrices),
    Kernel(
        "flash attention",
        lambda q, k, v: torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v,
        flash_attention,
        lambda size, dtype: tuple(torch.randn(2, size, 8, dtype=dtype) for _ in range(3)),
    ),
    Kernel(
        "fused cross entropy with its own gradient",
        lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels, reduction="sum"),
        _CrossEntropy.apply,
        _logits,
    ),
    Kernel(
        "int8 dequantisation",
        lambda x, scale: x.to(scale.dtype) * scale,
        lambda x, scale: torch.mul(x.float(), scale.float()).to(scale.dtype),
        lambda size, dtype: (torch.randint(-128, 128, (3, size), dtype=torch.int8), torch.rand(3, 1, dtype=dtype)),
    ),
    Kernel("gelu by erf", lambda x: torch.nn.functional.gelu(x), erf_gelu, _rows),
    Kernel("cumulative sum in blocks", lambda x: x.cumsum(-1), blocked_cumsum, _data),
    Kernel("sum of squares in two halves", squares, pairwise_squares, _rows),
)


# wrong


def softmax_tail_not_masked(x: torch.Tensor) -> torch.Tensor:
    """The last tile is read to its end: what is beyond the row counts as 0, and so as exp(0)."""
    return torch.softmax(torch.nn.functional.pad(x, (0, -x.shape[-1] % TILE)), -1)[..., : x.shape[-1]]


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


def low_degree_exp(x: torch.Tensor) -> torch.Tensor:
    wide = x.float() / 4
    return (1 + wide + wide**2 / 2).pow(4).to(x.dtype)


def _large(size: int, dtype: torch.dtype) -> Sequence[Any]:
    return (torch.randn(3, size, dtype=dtype) + 100,)


def one_pass_variance(x: torch.Tensor) -> torch.Tensor:
    """The mean of the squares less the square of the mean: it cancels."""
    return x.square().mean(-1) - x.mean(-1).square()


_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE})
_NO_GRADIENT = frozenset({Kind.STRUCTURE, Kind.CRASH, Kind.EXCEPTION})
_WIDE = (torch.float32,)

WRONG = (
    Kernel("a tail that is not masked", softmax, softmax_tail_not_masked, _rows, _VALUES),
    Kernel("the last piece of a sum dropped", matmul, last_row_dropped, _matrices, _VALUES, 17),
    Kernel(
        "accumulation in the low precision",
        squares,
        low_accumulation,
        lambda size, dtype: (torch.randn(64, size, dtype=dtype),),
        _VALUES,
        513,
        (torch.bfloat16,),
    ),
    Kernel("a tail without values", doubled, uninitialised_tail, _data, _VALUES, 17),
    Kernel("a result that is the input", doubled, lambda x: x.mul_(2), _data, frozenset({Kind.ALIAS, Kind.MUTATION})),
    Kernel("a cache by address", doubled, CachesByAddress(), _data, _VALUES, 16),
    Kernel("a cache by shape", doubled, CachesByShape(), _data, _VALUES, 16),
    Kernel("a gradient that forgets the scale", doubled, differentiated(doubled, torch.clone), _rows, _VALUES),
    Kernel("an exp of low degree", lambda x: x.exp(), low_degree_exp, _data, _VALUES),
    Kernel("another dtype", doubled, lambda x: x.double() * 2, _data, frozenset({Kind.STRUCTURE})),
    Kernel("no gradient", doubled, lambda x: x.detach() * 2, _rows, _NO_GRADIENT),
    Kernel(
        "exp that overflows",
        softmax,
        lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
        _large,
        frozenset({Kind.NONFINITE}),
        dtypes=_WIDE,
    ),
    Kernel("a variance that cancels", variance, one_pass_variance, _large, _VALUES, 15, _WIDE),
)


class ReturnsItsBuffer:
    """Has one buffer for each shape, and returns it each time."""

    def __init__(self) -> None:
        self.buffers: dict[torch.Size, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.buffers.setdefault(x.shape, torch.empty_like(x)).copy_(doubled(x))


def _checked(kernel: Kernel, dtype: torch.dtype) -> cb.Report:
    sizes = (0, 1, 15, 16, 17, 127, 513)
    return cb.check(kernel.reference, lambda size: kernel.make(size, dtype), candidate=kernel.candidate, sizes=sizes)


def _cases(kernels: tuple[Kernel, ...]) -> list[Any]:
    return [
        pytest.param(kernel, dtype, id=f"{kernel.name}, {dtype}", marks=() if dtype in _WIDE else pytest.mark.more)
        for kernel in kernels
        for dtype in kernel.dtypes
    ]


@pytest.mark.parametrize(("kernel", "dtype"), _cases(RIGHT))
def test_a_right_kernel_that_is_written_differently_passes(kernel: Kernel, dtype: torch.dtype) -> None:
    report = _checked(kernel, dtype)
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert report.headline.startswith("PASS: the candidate agrees with eager")
    assert not any(skip.subject.startswith("size") for skip in report.coverage.skipped)


@pytest.mark.parametrize(("kernel", "dtype"), _cases(WRONG))
def test_a_wrong_kernel_fails_with_its_kind_at_the_smallest_size(kernel: Kernel, dtype: torch.dtype) -> None:
    report = _checked(kernel, dtype)
    assert report.verdict is cb.Verdict.FAIL, str(report)
    failing = [finding for finding in report.findings if finding.fails]
    assert {finding.kind for finding in failing} <= kernel.kinds
    shown = " ".join(str(report).partition("Report:")[0].split())
    assert "compiled" not in shown, "the words are about a candidate"
    keeps = "uses what it kept of an earlier one" in shown
    assert keeps or f"with size {kernel.size}" in shown, shown


def test_without_sizes_the_boundaries_of_usual_tiles_are_tried() -> None:
    made = []

    def make(size: int) -> tuple[torch.Tensor]:
        made.append(size)
        return (torch.randn(size),)

    report = cb.check(doubled, make, candidate=lambda x: x + x)
    assert report.verdict is cb.Verdict.PASS
    assert set(made) == set(SIZES) >= {0, 1, 63, 64, 65, 1025}
    assert report.coverage.checked["program runs"] > len(SIZES)


def test_the_report_tells_a_program_the_size_that_failed() -> None:
    [kernel] = [one for one in WRONG if one.name == "a tail without values"]
    report = cb.Report.from_json(_checked(kernel, torch.float32).to_json())
    [finding] = report.findings
    assert finding.kind is Kind.LOGIC
    assert finding.noise is not None
    assert finding.metrics.index is not None
    assert "with size 17" in finding.message
    assert report.environment["candidate"] == "uninitialised_tail"
    assert report.title == "uninitialised_tail against doubled"


def test_it_is_one_line_in_a_test() -> None:
    cb.check(softmax, (torch.randn(3, 20),), candidate=online_softmax).raise_for_verdict()
    with pytest.raises(cb.DivergenceError, match="is wrong"):
        cb.check(softmax, (torch.randn(3, 20),), candidate=doubled).raise_for_verdict()


def test_modules_are_held_against_each_other_with_the_same_parameters() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6))
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.factor

    given = (torch.randn(4, 6),)
    assert cb.check(Scaled(1.0), given, candidate=Scaled(1.0)).verdict is cb.Verdict.PASS
    report = cb.check(Scaled(1.0), given, candidate=Scaled(1.01))
    assert {finding.subject for finding in report.findings} == {"output[0]", "grad[weight]"}
    with pytest.raises(cb.OptionError, match=r"parameter 'weight'.*none of this name"):
        cb.check(torch.nn.ReLU(), given, candidate=Scaled(1.0))


def test_a_function_and_its_candidate_share_what_both_have_captured() -> None:
    weight = torch.randn(5, requires_grad=True)

    check = partial(cb.check, lambda x: x * weight, (torch.randn(3, 5, requires_grad=True),))
    assert check(candidate=lambda y: weight * y).verdict is cb.Verdict.PASS
    assert "grad[weight]" in {one.subject for one in check(candidate=lambda y: weight.detach() * y).findings}
    assert weight.grad is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"candidate": 3}, "candidate got int, which cannot be called"),
        ({"candidate": doubled, "dynamic": True}, "dynamic is for a compiled program"),
        ({"candidate": doubled, "compiler": "eager"}, "compiler is for a compiled program"),
        ({"candidate": doubled, "compiler_options": {"a": 1}}, "compiler_options is for a compiled program"),
        ({"candidate": doubled, "localize": True}, "localize is for a compiled program"),
        ({"candidate": doubled, "sizes": (1, 2)}, "sizes need a function in the place of args"),
        ({"sizes": (1, 2)}, "sizes are for a candidate"),
    ],
)
def test_misuse_is_told_in_a_sentence(more: dict[str, Any], message: str) -> None:
    with pytest.raises(cb.OptionError, match=message):
        cb.check(doubled, (torch.ones(2),), **more)


def test_sizes_are_natural_numbers_and_what_makes_arguments_returns_a_tuple() -> None:
    with pytest.raises(cb.OptionError, match="natural numbers"):
        cb.check(doubled, lambda size: (torch.ones(size),), candidate=doubled, sizes=(-1,))
    with pytest.raises(cb.OptionError, match=r"args\(4\) returned Tensor"):
        cb.check(doubled, lambda size: torch.ones(size), candidate=doubled, sizes=(4,))


def test_a_size_that_cannot_be_made_is_in_the_coverage() -> None:
    def make(size: int) -> tuple[torch.Tensor]:
        if size == 0:
            raise ValueError("no size 0 here")
        return (torch.randn(size),)

    report = cb.check(doubled, make, candidate=doubled, sizes=(0, 4))
    assert report.verdict is cb.Verdict.PASS
    skipped = {skip.subject: skip.reason for skip in report.coverage.skipped}
    assert skipped["size 0"] == "args(0) raises ValueError: no size 0 here"


def test_it_begins_with_the_first_size_that_the_reference_takes() -> None:
    def sums(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 16).sum(-1)

    def make(size: int) -> tuple[torch.Tensor]:
        if size < 16:
            raise ValueError("16 at least")
        return (torch.randn(size),)

    for made in (lambda size: (torch.randn(size),), make):
        report = cb.check(sums, made, candidate=lambda x: sums(x) * (2 if len(x) >= 64 else 1))
        assert report.verdict is cb.Verdict.FAIL
        assert "with size 64" in report.findings[0].message


def test_a_candidate_of_another_signature_or_that_raises_is_a_crash() -> None:
    for candidate in (lambda: None, lambda x: x.view(-1, 7)):
        [finding] = cb.check(doubled, (torch.randn(3, 5),), candidate=candidate).findings
        assert finding.kind is Kind.CRASH
        assert "only" in finding.message


def test_a_candidate_that_calls_exit_fails_and_does_not_end_the_process() -> None:
    [finding] = cb.check(doubled, (torch.randn(3),), candidate=lambda _: sys.exit(0)).findings
    assert finding.kind is Kind.CRASH
    assert "it calls sys.exit(0)" in finding.actual


def test_advice_on_a_candidate_blames_no_compiler() -> None:
    for candidate in (lambda x: (2 * x).double(), lambda x: x, lambda x: x.mul_(2).clone()):
        report = cb.check(doubled, (torch.randn(3),), candidate=candidate)
        assert report.verdict is cb.Verdict.FAIL
        advice = str(report).partition("What to do next")[2].partition("Notes")[0]
        assert advice
        assert "compiler" not in advice


@pytest.mark.process
def test_a_candidate_that_kills_or_hangs_its_process_is_a_crash() -> None:
    def dies(x: torch.Tensor) -> torch.Tensor:
        os._exit(11)

    def hangs(x: torch.Tensor) -> torch.Tensor:
        time.sleep(600)
        return x

    isolated = partial(cb.check, doubled, (torch.randn(3),), isolate=True)
    [dead] = isolated(candidate=dies).findings
    assert dead.kind is Kind.CRASH
    assert dead.stage is None, "nothing was compiled, so there is no level"
    [hung] = isolated(candidate=hangs, timeout=15.0).findings
    assert "did not end in time" in hung.message
    assert re.match(r"\S*test_handwritten.py:\d+ in hangs, called at ", str(hung.evidence["where"]))


def test_a_container_in_place_of_what_is_in_it_is_found() -> None:
    for reference, candidate in ((doubled, lambda x: [2 * x]), (lambda x: (2 * x,), doubled)):
        report = cb.check(reference, (torch.randn(8, 16),), candidate=candidate)
        assert {(finding.detail, finding.subject) for finding in report.findings} == {("structure.container", "output")}


def test_a_result_that_a_later_call_overwrites_is_found() -> None:
    """The buffer is right whenever it is looked at, and no call sees what the next does to it."""
    report = cb.check(doubled, (torch.randn(8, 16),), candidate=ReturnsItsBuffer())
    assert [(one.kind, one.detail) for one in report.findings] == [(Kind.ALIAS, "alias.overwritten")]
    assert "call 1 of the candidate returned it" in str(report).replace("\n               ", " ")
    assert cb.check(doubled, (torch.randn(8, 16),), candidate=lambda x: 2 * x).verdict is cb.Verdict.PASS


def test_a_buffer_that_the_reference_returns_too_is_no_fault() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.seen.add_(x.sum(0))

    assert cb.check(Counts(), (torch.randn(8, 4),), candidate=Counts()).verdict is cb.Verdict.PASS


def test_a_kernel_may_refuse_another_layout_if_it_says_so() -> None:
    """The kernel is still called in the layouts that it does not refuse."""

    def contiguous(x: torch.Tensor, wrong: int = 2) -> torch.Tensor:
        if not x.is_contiguous():
            raise ValueError("takes contiguous tensors only")
        return x * (wrong if x.storage_offset() else 2)

    x = torch.randn(8, 16)
    report = cb.check(doubled, (x,), candidate=contiguous)
    assert report.verdict is cb.Verdict.PASS
    assert report.headline.startswith("PASS: the candidate agrees with eager; it refuses arguments in another layout (")
    [warning] = report.findings
    assert (warning.detail, warning.severity) == ("crash.running", Severity.WARNING)
    assert warning.actual == "ValueError: takes contiguous tensors only"
    offset = cb.check(doubled, (x,), candidate=partial(contiguous, wrong=3))
    assert {finding.detail for finding in offset.findings if finding.fails} == {"logic"}
    assert "with x at an offset" in str(offset)
    assert cb.check(doubled, (x.t(),), candidate=contiguous).verdict is cb.Verdict.FAIL  # the layout that it is given


def test_a_kernel_may_remember_a_tensor_by_its_version() -> None:
    """As torch does: what a write to a tensor counts is part of the key."""
    known: dict[Any, torch.Tensor] = {}

    def remembers(x: torch.Tensor) -> torch.Tensor:
        key = (x.data_ptr(), x._version, x.shape, x.stride())
        if key not in known:
            known[key] = doubled(x)
        return known[key].clone()

    assert cb.check(doubled, (torch.randn(8, 16),), candidate=remembers).verdict is cb.Verdict.PASS
