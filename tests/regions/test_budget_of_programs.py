"""Option ``budget``: what is checked of a program, and what its coverage says. Time passes as the tests say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from checked_backend.regions import backward, schedule
from checked_backend.regions.compare_call import CallComparison
from checked_backend.regions.schedule import Budget, is_recheck
from tests.support import faults
from tests.support.raising import raising
from tests.support.region_tools import agreed, backwards, calls, checked, gathered


class Clock:
    """A clock that each look moves on a little."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(schedule, "clock", clock)
    monkeypatch.setattr(schedule, "budget_of", cache(Budget))
    return clock


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def training(compiled: Callable[..., Any], clock: Clock, calls: int, seconds: float = 10.0) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            compiled(torch.randn(6, 5)).square().sum().backward()
            clock.now += seconds

    return run


def test_a_check_waits_until_it_is_earned(clock: Clock) -> None:
    compiled = checked(net(), "aot_eager", budget=0.1)
    assert gathered(training(compiled, clock, 12, seconds=0.01)).coverage.regions[0].checked_calls == 0
    report = gathered(training(compiled, clock, 20))
    [region] = report.coverage.regions
    assert region.calls == 20
    assert 10 < region.checked_calls <= 20
    assert 0 < region.drawn_calls <= region.checked_calls - 4  # checks 1, 2, 4, 8 are rechecks, and come at once
    assert region.checked_backwards == region.checked_calls
    assert agreed(report)


def test_what_is_never_checked_is_no_pass(clock: Clock) -> None:
    report = gathered(training(checked(net(), "aot_eager", budget=0.0001), clock, 10))
    [skip] = report.coverage.skipped
    assert skip.matters
    assert (skip.subject, skip.region) == ("all calls", report.coverage.regions[0].name)
    assert "option budget" in skip.reason
    assert "larger budget" in str(report).replace("\n    ", " ")
    assert report.verdict is cb.Verdict.INCONCLUSIVE


def test_the_coverage_says_when_a_region_was_checked_last(clock: Clock) -> None:
    compiled = checked(net(), "aot_eager", budget=0.1)
    with cb.collect() as session:
        training(compiled, clock, 30)()
        training(compiled, clock, 60, seconds=0.0)()
    [region] = session.report.coverage.regions
    assert region.calls == 90
    assert region.checked_calls <= region.last_checked_call < 90
    assert f"the last at call {region.last_checked_call}" in session.report.to_text(verbose=True).replace("\n    ", " ")
    assert cb.Report.from_json(session.report.to_json()) == session.report


def test_every_region_gets_its_turn(clock: Clock) -> None:
    compiled = [checked(module, "aot_eager", budget=0.3) for module in (net(), nn.Linear(5, 3), nn.Bilinear(5, 5, 3))]
    report = gathered(training(lambda x: compiled[0](x) + compiled[1](x) + compiled[2](x, x), clock, 40))
    assert len(report.coverage.regions) == 3
    assert min(region.checked_calls for region in report.coverage.regions) > 1, report.coverage.regions
    assert agreed(report)


def test_a_region_that_is_never_checked_is_told_though_others_are(clock: Clock) -> None:
    often, seldom = (checked(module, "aot_eager", budget=0.1) for module in (net(), nn.Softmax(1)))

    def program() -> None:
        training(often, clock, 30)()
        seldom(torch.randn(6, 5))

    report = gathered(program)
    assert calls(report) > 1
    assert [skip.subject for skip in report.coverage.skipped] == ["all calls"]
    assert report.verdict is cb.Verdict.INCONCLUSIVE


def test_a_compiler_that_fails_is_told_at_the_first_call(clock: Clock) -> None:
    report = gathered(training(checked(net(), raising(RuntimeError("no such kernel")), budget=0.001), clock, 3))
    assert [finding.kind for finding in report.findings] == [cb.Kind.CRASH]


def test_check_checks_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_BUDGET", "0.0001")
    assert agreed(cb.check(net(), (torch.randn(6, 5),), compiler="aot_eager"))


def slow_compiler(clock: Clock, spoil: Callable[[torch.Tensor], torch.Tensor], compiled: list[torch.dtype]) -> Any:
    """Compiles for thirty seconds, and leaves a trace of it."""

    def compile_slowly(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        clock.now += 30.0
        compiled.append(inputs[0].dtype)
        return lambda *args: tuple(spoil(out) for out in gm.forward(*args))

    return compile_slowly


def cancelled(x: torch.Tensor) -> torch.Tensor:
    """Rounding leaves a thousandth of each element unsure, in which an error could hide: only float64 knows."""
    return (x + 1e4) - 1e4


def calling(compiled: Callable[..., Any], clock: Clock, seconds: float) -> Callable[[], None]:
    def run() -> None:
        until = clock.now + seconds
        while clock.now < until:
            compiled(torch.linspace(-1, 1, 64))
            clock.now += 1.0

    return run


def test_a_twin_that_is_not_earned_is_compiled_when_it_is(clock: Clock) -> None:
    def inside_the_noise(out: torch.Tensor) -> torch.Tensor:
        return out + 1e-4 if out.dtype is torch.float32 else out

    compilations: list[torch.dtype] = []
    compiled = checked(cancelled, slow_compiler(clock, inside_the_noise, compilations), budget=0.1)
    with cb.collect() as session:
        calling(compiled, clock, 150.0)()
        early = session.report
        assert compilations == [torch.float32]
        calling(compiled, clock, 600.0)()
    assert compilations == [torch.float32, torch.float64]
    assert (early.verdict, early.coverage.regions[0].checked_calls) == (cb.Verdict.INCONCLUSIVE, 0)
    [why] = [skip.reason for skip in early.coverage.skipped if skip.matters]
    assert why == (
        "postponed: compiling its float64 twin takes about 30 s, which the run has not earned yet (option budget); no "
        "value was outside of its noise"
    )
    assert agreed(session.report)
    assert session.report.coverage.regions[0].checked_calls > 1
    assert not [skip for skip in session.report.coverage.skipped if skip.matters]


@pytest.mark.more
def test_an_error_that_the_noise_hides_is_found_when_the_twin_is_earned(clock: Clock) -> None:
    compiled = checked(cancelled, slow_compiler(clock, lambda out: out + 1e-4, []), budget=0.1)
    with cb.collect() as session:
        calling(compiled, clock, 150.0)()
        assert not session.report.findings
        while not session.report.findings and clock.now < 900.0:
            calling(compiled, clock, 20.0)()
    assert {finding.kind for finding in session.report.findings} == {cb.Kind.LOGIC}


def test_a_difference_outside_of_the_noise_waits_for_nothing(clock: Clock) -> None:
    compilations: list[torch.dtype] = []
    compiled = checked(cancelled, slow_compiler(clock, lambda out: out + 0.1, compilations), budget=0.1)
    report = gathered(calling(compiled, clock, 60.0))
    assert compilations == [torch.float32, torch.float64]
    assert {finding.kind for finding in report.findings} == {cb.Kind.LOGIC}
    assert not [skip for skip in report.coverage.skipped if "postponed" in skip.reason]


def test_a_recomputation_that_ends_early_is_no_check(clock: Clock) -> None:
    """A checkpoint ends a recomputation when it has all it needs: the region returns nothing to compare."""
    compiled = checked(net(), "aot_eager")
    x = torch.randn(6, 5, requires_grad=True)
    report = gathered(lambda: [checkpoint(compiled, x, use_reentrant=False).sum().backward() for _ in range(3)])
    [region] = report.coverage.regions
    assert (region.calls, region.checked_calls, region.last_checked_call) == (6, 3, 5)
    assert report.coverage.checked["outputs"] == 3
    assert agreed(report)


def test_a_recheck_of_which_nothing_could_be_compared_is_still_to_come(clock: Clock) -> None:
    """Without one, the next check would compare with noise that no check has established."""
    rechecked: list[bool] = []
    compiled = checked(net(), faults.clean(), budget=0.3)
    forward = CallComparison.forward

    def short_of_memory(self: CallComparison, call: Any, *rest: Any) -> Any:
        rechecked.append(is_recheck(call.check.number))
        if len(rechecked) <= 2:
            raise MemoryError
        return forward(self, call, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallComparison, "forward", short_of_memory)
        report = gathered(training(compiled, clock, 20))
    assert rechecked[:3] == [True, True, True]
    assert agreed(report)


@pytest.mark.parametrize("grad", [False, True])
def test_gradients_that_nothing_asked_for_are_told_as_such(clock: Clock, grad: bool) -> None:
    compiled = checked(net(), "aot_eager", budget=0.1)

    def evaluating() -> None:
        for _ in range(20):
            with torch.set_grad_enabled(grad):
                compiled(torch.randn(6, 5))
            clock.now += 10.0

    report = gathered(evaluating)
    assert [skip.subject for skip in report.coverage.skipped] == ["gradients"] * grad
    assert all("no backward pass came" in skip.reason for skip in report.coverage.skipped)


def test_copying_the_gradients_that_arrive_is_paid_for(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    kept = backward._kept

    def slowly(gradient: torch.Tensor) -> torch.Tensor:
        clock.now += 1.0
        return kept(gradient)

    monkeypatch.setattr(backward, "_kept", slowly)
    report = gathered(training(checked(net(), "aot_eager", budget=0.1), clock, 40))
    assert backwards(report) > 5
    assert backwards(report) < schedule.budget_of(0.1).spent < 1.2 * 0.1 * clock.now
