"""Handwritten candidates against plain PyTorch: right ones pass, wrong ones fail at the smallest size that shows it."""

from __future__ import annotations

import os
import re
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from checked_backend import Verdict
from checked_backend.checking.handwritten import SIZES
from checked_backend.errors import OptionError
from checked_backend.findings import Kind, Severity
from tests.support.kernels import RIGHT, WRONG, Kernel, ReturnsItsBuffer, doubled, online_softmax, softmax

SOME_SIZES = (0, 1, 15, 16, 17, 127, 513)
WIDE, *LOW = torch.float32, torch.bfloat16, torch.float16


def _checked(kernel: Kernel, dtype: torch.dtype) -> cb.Report:
    return cb.check(
        kernel.reference, lambda size: kernel.make(size, dtype), candidate=kernel.candidate, sizes=SOME_SIZES
    )


def _cases(kernels: tuple[Kernel, ...]) -> list[Any]:
    return [
        pytest.param(kernel, dtype, id=f"{kernel.name}, {dtype}", marks=() if dtype is WIDE else pytest.mark.more)
        for kernel in kernels
        for dtype in kernel.dtypes
    ]


@pytest.mark.parametrize(("kernel", "dtype"), _cases(RIGHT))
def test_a_right_kernel_that_is_written_differently_passes(kernel: Kernel, dtype: torch.dtype) -> None:
    report = _checked(kernel, dtype)
    assert report.verdict is Verdict.PASS, str(report)
    assert report.headline.startswith("PASS: the candidate agrees with eager")
    assert not any(skip.subject.startswith("size") for skip in report.coverage.skipped)


@pytest.mark.parametrize(("kernel", "dtype"), _cases(WRONG))
def test_a_wrong_kernel_fails_with_its_kind_at_the_smallest_size(kernel: Kernel, dtype: torch.dtype) -> None:
    report = _checked(kernel, dtype)
    assert report.verdict is Verdict.FAIL, str(report)
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
    assert report.verdict is Verdict.PASS
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
    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.factor

    given = (torch.randn(4, 6),)
    assert cb.check(Scaled(1.0), given, candidate=Scaled(1.0)).verdict is Verdict.PASS
    report = cb.check(Scaled(1.0), given, candidate=Scaled(1.01))
    assert {finding.subject for finding in report.findings} == {"output[0]", "grad[weight]"}
    with pytest.raises(OptionError, match=r"parameter 'weight'.*none of this name"):
        cb.check(nn.ReLU(), given, candidate=Scaled(1.0))


def test_a_function_and_its_candidate_share_what_both_have_captured() -> None:
    weight = torch.randn(5, requires_grad=True)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    def right(y: torch.Tensor) -> torch.Tensor:
        return weight * y

    def wrong(y: torch.Tensor) -> torch.Tensor:
        return weight.detach() * y

    given = (torch.randn(3, 5, requires_grad=True),)
    assert cb.check(reference, given, candidate=right).verdict is Verdict.PASS
    assert "grad[weight]" in {one.subject for one in cb.check(reference, given, candidate=wrong).findings}
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
    with pytest.raises(OptionError, match=message):
        cb.check(doubled, (torch.ones(2),), **more)


def test_sizes_are_natural_numbers_and_what_makes_arguments_returns_a_tuple() -> None:
    with pytest.raises(OptionError, match="natural numbers"):
        cb.check(doubled, lambda size: (torch.ones(size),), candidate=doubled, sizes=(-1,))
    with pytest.raises(OptionError, match=r"args\(4\) returned Tensor"):
        cb.check(doubled, lambda size: torch.ones(size), candidate=doubled, sizes=(4,))


def test_a_size_that_cannot_be_made_is_in_the_coverage() -> None:
    def make(size: int) -> tuple[torch.Tensor]:
        if size == 0:
            raise ValueError("no size 0 here")
        return (torch.randn(size),)

    report = cb.check(doubled, make, candidate=doubled, sizes=(0, 4))
    assert report.verdict is Verdict.PASS
    assert ("size 0", "args(0) raises ValueError: no size 0 here") in [
        (skip.subject, skip.reason) for skip in report.coverage.skipped
    ]


def test_it_begins_with_the_first_size_that_the_reference_takes() -> None:
    def sums(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 16).sum(-1)

    def make(size: int) -> tuple[torch.Tensor]:
        if size < 16:
            raise ValueError("16 at least")
        return (torch.randn(size),)

    for made in (lambda size: (torch.randn(size),), make):
        report = cb.check(sums, made, candidate=lambda x: sums(x) * (2 if len(x) >= 64 else 1))
        assert report.verdict is Verdict.FAIL
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
    def writes(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).clone()

    for candidate in (lambda x: (2 * x).double(), lambda x: x, writes):
        report = cb.check(doubled, (torch.randn(3),), candidate=candidate)
        assert report.verdict is Verdict.FAIL
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
    assert report.verdict is Verdict.PASS
    assert report.headline.startswith("PASS: the candidate agrees with eager; it refuses arguments in another layout (")
    [warning] = report.findings
    assert (warning.detail, warning.severity, warning.actual) == (
        "crash.running",
        Severity.WARNING,
        "ValueError: takes contiguous tensors only",
    )
    offset = cb.check(doubled, (x,), candidate=partial(contiguous, wrong=3))
    assert {finding.detail for finding in offset.findings if finding.fails} == {"logic"}
    assert "with x at an offset" in str(offset)
    assert cb.check(doubled, (x.t(),), candidate=contiguous).verdict is Verdict.FAIL  # the layout that it is given


def test_a_kernel_may_remember_a_tensor_by_its_version() -> None:
    """As torch does: what a write to a tensor counts is part of the key."""
    known: dict[Any, torch.Tensor] = {}

    def remembers(x: torch.Tensor) -> torch.Tensor:
        key = (x.data_ptr(), x._version, x.shape, x.stride())
        if key not in known:
            known[key] = doubled(x)
        return known[key].clone()

    report = cb.check(doubled, (torch.randn(8, 16),), candidate=remembers)
    assert report.verdict is Verdict.PASS, str(report)
