"""Option ``budget``: what is checked of a program, and what its coverage says. Time passes as the tests say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from checked_backend.regions.schedule import Accounts, accounts_used
from tests.support import faults
from tests.support.region_tools import agreed, calls, checked, found, gathered


class Clock:
    """A clock that each look moves on by a hundredth of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with accounts_used(Accounts(clock)):
        yield clock


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()) * 2


def training(compiled: Callable[..., Any], clock: Clock, calls: int, seconds: float = 10.0) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            compiled(torch.randn(6, 5)).square().sum().backward()
            clock.now += seconds

    return run


def test_a_check_waits_until_it_is_earned(clock: Clock) -> None:
    compiled = checked(Net(), "aot_eager", budget=0.1)
    report = gathered(training(compiled, clock, 12, seconds=0.01))
    assert report.coverage.regions[0].checked_calls == 0
    report = gathered(training(compiled, clock, 20))
    [region] = report.coverage.regions
    assert region.calls == 20
    assert 10 < region.checked_calls <= 20
    assert 5 < region.checked_backwards < region.checked_calls
    assert agreed(report)


def test_what_is_never_checked_is_no_pass(clock: Clock) -> None:
    compiled = checked(Net(), "aot_eager", budget=0.001)
    report = gathered(training(compiled, clock, 10))
    [skip] = report.coverage.skipped
    assert skip.matters
    assert skip.subject == "all calls"
    assert skip.region == report.coverage.regions[0].name
    assert "option budget" in skip.reason
    assert "larger budget" in str(report).replace("\n    ", " ")
    assert report.verdict is cb.Verdict.INCONCLUSIVE


def test_gradients_that_are_never_checked_are_no_pass(clock: Clock) -> None:
    compiled = checked(Net(), "aot_eager", budget=0.1)
    with cb.collect() as session:
        while not any(region.checked_calls for region in session.report.coverage.regions):
            training(compiled, clock, 1)()
        first = session.report
        training(compiled, clock, 20)()
    assert [(skip.subject, skip.matters) for skip in first.coverage.skipped] == [("gradients", True)]
    assert first.verdict is cb.Verdict.INCONCLUSIVE
    assert agreed(session.report)


def test_the_coverage_says_when_a_region_was_checked_last(clock: Clock) -> None:
    compiled = checked(Net(), "aot_eager", budget=0.1)
    with cb.collect() as session:
        training(compiled, clock, 30)()
        training(compiled, clock, 3, seconds=0.0)()
    [region] = session.report.coverage.regions
    assert region.calls == 33
    assert region.checked_calls <= region.last_checked_call < 33
    told = session.report.to_text(verbose=True).replace("\n    ", " ")
    assert f"the last at call {region.last_checked_call}" in told
    assert cb.Report.from_json(session.report.to_json()) == session.report


@pytest.mark.parametrize("what", ["output[0]", "grad[first.weight]"])
def test_a_bug_is_found_in_a_call_that_is_checked(clock: Clock, what: str) -> None:
    wrong = faults.one_element(0, "aot") if what == "output[0]" else faults.scaled_gradient("first.weight", "aot")
    report = gathered(training(checked(Net(), wrong, budget=0.1), clock, 30))
    assert {subject for _, subject in found(report)} == {what}


def test_every_region_gets_its_turn(clock: Clock) -> None:
    compiled = [checked(module, "aot_eager", budget=0.3) for module in (Net(), nn.Linear(5, 3), nn.Bilinear(5, 5, 3))]
    report = gathered(training(lambda x: compiled[0](x) + compiled[1](x) + compiled[2](x, x), clock, 40))
    assert len(report.coverage.regions) == 3
    assert min(region.checked_calls for region in report.coverage.regions) > 1, [
        (region.name, region.checked_calls, region.calls) for region in report.coverage.regions
    ]
    assert agreed(report)


def test_a_region_that_is_never_checked_is_told_though_others_are(clock: Clock) -> None:
    often, seldom = (checked(module, "aot_eager", budget=0.1) for module in (Net(), nn.Softmax(1)))

    def program() -> None:
        training(often, clock, 30)()
        seldom(torch.randn(6, 5))

    report = gathered(program)
    assert calls(report) > 1
    assert [skip.subject for skip in report.coverage.skipped] == ["all calls"]
    assert report.verdict is cb.Verdict.INCONCLUSIVE


def test_a_compiler_that_fails_is_told_at_the_first_call(clock: Clock) -> None:
    def broken(_gm: Any, _inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("no such kernel")

    report = gathered(training(checked(Net(), broken, budget=0.001), clock, 3))
    assert [finding.kind for finding in report.findings] == [cb.Kind.CRASH]


def test_check_checks_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_BUDGET", "0.0001")
    assert agreed(cb.check(Net(), (torch.randn(6, 5),), compiler="aot_eager"))


def test_an_operator_is_found_under_a_budget(clock: Clock) -> None:
    """Looking for it compiles regions of its own, each call of which is checked."""
    compiled = checked(Net(), faults.scaled_gradient("first.weight", "python"), budget=0.3)
    report = gathered(training(compiled, clock, 20))
    assert found(report)


def test_a_report_of_before_has_no_last_checked_call() -> None:
    text = gathered(lambda: checked(Net(), "aot_eager")(torch.randn(6, 5))).to_json()
    kept = text.replace(',\n        "last_checked_call": 1', "")
    assert kept != text
    assert cb.Report.from_json(kept).coverage.regions[0].last_checked_call == 0
