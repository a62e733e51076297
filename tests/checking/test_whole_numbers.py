"""Calls of a candidate on whole numbers: they show what the noise of a dtype hides, and accuse no right kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.checking.whole_numbers import ExactMode
from tests.support.check_tools import agreed, only, skips

LOW = torch.bfloat16


@pytest.mark.parametrize(
    ("reference", "x"),
    [
        (lambda x: x.sum(-1), torch.ones(4, 50_000, dtype=LOW)),
        (lambda x: x.abs().sum(-1), torch.ones(3, 60, dtype=LOW)),
    ],
    ids=["long", "as large as the dtype tells apart"],
)
def test_an_element_that_a_sum_at_16_bits_drops_is_found(reference: Callable[..., Any], x: torch.Tensor) -> None:
    x = x * torch.rand(x.shape).to(LOW)
    finding = only(cb.check(reference, (x,), candidate=lambda x: reference(x[..., :-1])))
    assert (finding.kind, finding.subject) == (cb.Kind.LOGIC, "output[0]")
    assert "on whole numbers, of which nothing has to be rounded" in finding.message
    agreed(cb.check(reference, (x,), candidate=lambda x: reference(x.float()).to(LOW)), calls_on_whole_numbers=1)


class Scaled(torch.autograd.Function):
    """A gradient that forgets the last row, in a long sum at 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x)[:-1].sum(0)


def test_gradients_are_whole_too() -> None:
    x, w = torch.randn(20_000, 3, dtype=LOW, requires_grad=True), torch.randn(3, dtype=LOW, requires_grad=True)
    assert only(cb.check(lambda x, w: x * w, (x, w), candidate=Scaled.apply)).subject == "grad[w]"
    agreed(cb.check(lambda x, w: x * w, (x, w), candidate=lambda x, w: w * x), calls_on_whole_numbers=1)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.softmax(-1), "the reference rounds (aten._softmax.default)"),
        (lambda x: x.sum(-1) / 3, "the reference rounds (aten.div.Tensor)"),
        (lambda x: x * 0.1, "the reference rounds (aten.mul.Tensor)"),
        (torch.nn.Linear(8, 4), "the reference rounds (aten.addmm.default)"),
    ],
    ids=["softmax", "division", "fraction", "parameters"],
)
def test_a_reference_that_rounds_has_no_such_call(function: Callable[..., Any], why: str) -> None:
    report = agreed(cb.check(function, (torch.randn(3, 8),), candidate=function))
    assert f"on whole numbers, of which nothing has to be rounded: {why}" in skips(report)
    assert "calls on whole numbers" not in report.coverage.checked


def hadamard(size: int) -> torch.Tensor:
    made = torch.ones(1, 1)
    while len(made) < size:
        made = torch.kron(made, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return made


def by_fourier(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1] + w.shape[-1] - 1
    product = torch.fft.rfft(x, n=size)[:, None] * torch.fft.rfft(w.flip(-1), n=size)[None]
    return torch.fft.irfft(product.sum(2), n=size)[..., w.shape[-1] - 1 : x.shape[-1]].contiguous()


@pytest.mark.parametrize(
    ("reference", "candidate", "args"),
    [
        (torch.nn.functional.conv1d, by_fourier, (torch.rand(2, 3, 64).double(), torch.rand(4, 3, 7).double())),
        (lambda x: x @ hadamard(32), lambda x: (x @ (hadamard(32) / 32**0.5)) * 32**0.5, (torch.rand(4, 32),)),
        (lambda q, k: q @ k, lambda q, k: (q * 0.3) @ (k / 0.3), (torch.rand(8, 33), torch.rand(33, 8))),
    ],
    ids=["by Fourier transforms", "scaled Hadamard matrix", "scaled factors"],
)
def test_a_formula_that_rounds_is_no_fault(reference: Any, candidate: Any, args: Any) -> None:
    report = cb.check(reference, [arg.clone().requires_grad_() for arg in args], candidate=candidate)
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert report.coverage.checked["calls on whole numbers"] == 1


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (lambda x, y: (x - y).abs().sum(-1), lambda x, y: torch.where(x > y, x - y, y - x).sum(-1)),
        (lambda x, y: (1 - x * y).clamp(min=0).sum(-1), lambda x, y: torch.relu(1 - x * y).sum(-1)),
        (lambda x, y: (x + y).sort(-1)[1], lambda x, y: 32 - (x + y).flip(-1).sort(dim=-1, stable=True)[1]),
    ],
    ids=["abs", "clamp", "sort"],
)
def test_another_choice_among_equal_numbers_is_no_fault(reference: Any, candidate: Any) -> None:
    report = cb.check(reference, (torch.randn(8, 33, requires_grad=True), torch.randn(8, 33)), candidate=candidate)
    assert report.verdict is cb.Verdict.PASS, str(report)


@pytest.mark.parametrize(
    "candidate",
    [lambda x: x / (1 / 3), lambda x: (x + x) + x, lambda x: x * 4 - x],
    ids=["rounds", "adds", "subtracts"],
)
def test_another_formula_is_no_fault(candidate: Callable[..., Any]) -> None:
    agreed(cb.check(lambda x: x * 3, (torch.randn(5, 7),), candidate=candidate), calls_on_whole_numbers=1)


def test_integers_alone_have_no_such_call() -> None:
    report = agreed(cb.check(lambda x: x + 1, (torch.arange(4),), candidate=lambda x: x + 1))
    assert "calls on whole numbers" not in report.coverage.checked


@pytest.mark.parametrize(
    ("function", "rounds", "is_full"),
    [
        (lambda x: x.sum(), "", False),
        (lambda x: x.repeat(2).sum(), "aten.sum.default", True),
        (lambda x: x.add(1).masked_fill(x > 0, 2.0).clamp(max=3), "", False),
        (lambda x: torch.cat((x, -x)).sum(), "aten.sum.default", True),
        (lambda x: x.exp(), "aten.exp.default", False),
        (lambda x: x.mul(0.5), "aten.mul.Tensor", True),
        (lambda x: x.topk(2), "aten.topk.default, which chooses among equal numbers", False),
    ],
)
def test_what_is_exact_in_any_order(function: Callable[..., Any], rounds: str, is_full: bool) -> None:
    """A sum of 40 ones is, in bfloat16; one of 80 numbers of magnitude 1 is not, though these add up to 0."""
    with ExactMode() as mode:
        function(torch.ones(40, dtype=LOW))
    assert (mode.rounds, mode.is_full) == (rounds, is_full)


def test_a_count_that_is_wrong_on_whole_numbers_is_found() -> None:
    """Few numbers of a random tensor are zero, so that only this call shows it."""
    report = cb.check(lambda x: (x != 0).sum(-1), (torch.randn(3, 9).abs() + 1,), candidate=lambda x: (x > 0).sum(-1))
    assert report.verdict is cb.Verdict.FAIL
