"""Later calls of a region are held against the noise of earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from checked_backend.regions.operator_check.check import OperatorCheck, OperatorDecisions
from checked_backend.regions.runner import RegionRunner
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered


def four_calls(factor: Callable[[int], float], numbers: list[int]) -> cb.Report:
    """Four calls of a region, each of which is wrong by a factor. Their numbers are noted as they begin."""
    off = faults.spoiled_output(lambda result: (result * factor(numbers[-1])).to(result.dtype))
    model = checked(lambda x: torch.sin(x @ x) * 1.1, off)

    def run() -> None:
        for number in range(1, 5):
            numbers.append(number)
            model(torch.randn(16, 16))

    return gathered(run)


@pytest.mark.parametrize(("late", "rechecked"), [(1, {1}), (3, {1, 4})])
def test_a_later_recheck_runs_controls_for_what_differs_by_more_than_before(
    late: int, rechecked: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the third call a difference may be four times as large, at the fourth no larger."""
    numbers: list[int] = []
    asked: set[int] = set()
    run_once = RegionRunner.run

    def counted(*given: Any) -> Any:
        asked.add(numbers[-1])
        return run_once(*given)

    monkeypatch.setattr(RegionRunner, "run", counted)
    assert agreed(four_calls(lambda number: 1 + (late if number > 2 else 1) * 2.0**-21, numbers))
    assert asked == rechecked


@pytest.mark.parametrize("begins", [2, 3, 4])
def test_a_fault_that_begins_at_a_later_call_is_found(begins: int) -> None:
    assert found(four_calls(lambda number: 1.001 if number >= begins else 1, [])) == {("logic", "output[0]")}


@pytest.mark.parametrize(("lost", "detail"), [(True, "logic"), (False, "logic.this_dtype")])
def test_a_recheck_asks_the_twin_where_no_operator_is_checked(
    lost: bool, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In call 2 the region is off by no more than another draw of its noise, in float64 too."""
    numbers: list[int] = []
    if lost:
        monkeypatch.setattr(OperatorCheck, "run", lambda *_: OperatorDecisions(reason="no memory"))

    def off(result: torch.Tensor) -> torch.Tensor:
        return result * (1.025 if numbers[-1] == 2 else 1.001 if result.dtype is torch.float32 else 1.0)

    model = checked(lambda x: torch.sin((x @ x).bfloat16()).float() * 1.1, faults.spoiled_output(off))

    def run() -> None:
        for number in (1, 2):
            numbers.append(number)
            model(torch.randn(16, 16))

    assert [finding.detail for finding in gathered(run).findings] == [detail]


@pytest.mark.parametrize(("added", "verdict"), [(0.0, cb.Verdict.PASS), (0.01, cb.Verdict.FAIL)])
def test_rounding_that_is_large_once_hides_no_later_error(added: float, verdict: cb.Verdict) -> None:
    """The gradient of a bias before a normalisation: a million times as large in call 1, and wrong in call 5."""
    numbers: list[int] = []
    late = faults.spoiled_gradient("0.bias", lambda gradient: gradient * 1.1 + added * (numbers[-1] == 5))
    norm = nn.BatchNorm1d(32, track_running_stats=False)
    model = checked(nn.Sequential(nn.Linear(16, 32), norm, nn.GELU(), nn.Linear(32, 4)), late)

    def run() -> None:
        for number in range(1, 6):
            numbers.append(number)
            (model(torch.randn(64, 16)) * (1e3 if number == 1 else 1.0)).square().sum().backward()

    report = gathered(run)
    assert report.verdict is verdict, str(report)


def test_what_hides_in_numbers_that_processors_flush_is_told() -> None:
    compiled = checked(lambda x: x * 1e-40, faults.spoiled_output(torch.zeros_like, how="aot"))
    report = gathered(lambda: compiled(torch.randn(64)))
    assert report.verdict is cb.Verdict.PASS
    assert report.coverage.detection_limit["output[0]"] > 10
