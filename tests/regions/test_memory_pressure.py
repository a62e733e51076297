"""Memory that runs out in a check is told in the coverage: it is no finding, and the user's program goes on."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import checked_backend as cb
from checked_backend.regions import backward, observers
from checked_backend.regions.memory_pressure import GrowingDistance
from tests.support import faults
from tests.support.raising import raising
from tests.support.region_tools import agreed, backwards, checked, found, gathered

Plan = Callable[[int], bool]

ERRORS: dict[str, Callable[[], Exception]] = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "cpu": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
    "python": MemoryError,
}


def never(_number: int) -> bool:
    return False


def always(_number: int) -> bool:
    return True


@dataclass
class Plans:
    """When the operator's forward and backward run out of memory; the runs are counted from 1."""

    forward: Plan = never
    backward: Plan = never
    error: Callable[[], Exception] = MemoryError
    runs: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})

    def ran(self, what: str) -> None:
        self.runs[what] += 1
        if getattr(self, what)(self.runs[what]):
            raise self.error()


PLANS = Plans()


@torch.library.custom_op("checked_backend_tests::greedy", mutates_args=())
def greedy(x: Tensor) -> Tensor:
    PLANS.ran("forward")
    return x.clone()


def _greedy_backward(_ctx: Any, grad: Tensor) -> Tensor:
    PLANS.ran("backward")
    return grad.clone()


greedy.register_fake(torch.empty_like)
greedy.register_autograd(_greedy_backward)


@contextmanager
def planned(**given: Any) -> Iterator[Plans]:
    before = PLANS.__dict__.copy()
    PLANS.__dict__.update(Plans(**given).__dict__)
    try:
        yield PLANS
    finally:
        PLANS.__dict__.update(before)


def net(x: Tensor) -> Tensor:
    return torch.tanh(greedy(x)) * 2


def sparing(factor: float = 2.0, spoil: Callable[[Tensor], Tensor] = lambda out: out) -> Any:
    """A compiler whose program computes `net` without the operator, and so never runs out of memory."""
    return faults.instead(lambda *args: spoil(torch.tanh(args[-1]) * factor))


def trained(compiler: Any, times: int = 1, folder: Path | None = None, **options: Any) -> cb.Report:
    """Train with the default policy, which raises; what the user gets must be right."""
    torch._dynamo.reset()
    given = {"on_divergence": "raise", **options, **({} if folder is None else {"report_dir": folder})}
    compiled = checked(net, compiler, **given)

    def run() -> None:
        for number in range(times):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number), requires_grad=True)
            out = compiled(x)
            assert torch.equal(out, torch.tanh(x) * 2)
            out.sum().backward()
            torch.testing.assert_close(x.grad, 2 * (1 - torch.tanh(x) ** 2))

    return gathered(run)


def told(report: cb.Report, where: str) -> list[cb.Skip]:
    return [skip for skip in report.coverage.skipped if "memory" in skip.reason and where in str(skip)]


def undecided(report: cb.Report, where: str) -> bool:
    """Whether nothing is found, and the report says where memory ran out."""
    return not report.findings and report.verdict is cb.Verdict.INCONCLUSIVE and bool(told(report, where))


# eager


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("what", "reference", "error"),
    [
        *(("forward", "keep", error) for error in ERRORS),
        ("backward", "keep", "device"),
        ("forward", "recompute", "cpu"),
        ("backward", "recompute", "python"),
    ],
)
def test_eager_that_never_gets_memory_is_no_finding(what: str, reference: str, error: str) -> None:
    with planned(**{what: always, "error": ERRORS[error]}):
        report = trained(sparing(), times=3, reference=reference)
    assert not report.findings
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert any(skip.matters and "unsupported: memory" in skip.reason for skip in told(report, f"eager's {what} pass"))


def test_a_call_that_could_not_be_compared_is_not_the_last_that_was_checked() -> None:
    with planned(forward=lambda number: number > 1, error=MemoryError):
        compiled = checked(net, sparing())
        report = gathered(lambda: [compiled(torch.ones(3)) for _ in range(4)])
    [region] = report.coverage.regions
    assert (region.calls, region.checked_calls, region.last_checked_call) == (4, 1, 1)


def test_a_region_of_the_same_name_does_not_make_up_for_one_that_was_never_compared() -> None:
    def program() -> None:
        with planned(forward=always, error=MemoryError):
            checked(net, sparing())(torch.ones(3))
        torch._dynamo.reset()
        checked(net, sparing())(torch.ones(3))

    report = gathered(program)
    [region] = report.coverage.regions
    assert (region.calls, region.checked_calls) == (2, 1)
    assert report.verdict is cb.Verdict.INCONCLUSIVE


@pytest.mark.parametrize(("failures", "passes"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_eager_that_gets_memory_later_is_compared(what: str, failures: int, passes: int) -> None:
    """The second time; or in a later call, which makes up for one that is not compared, and one that is left out."""
    with planned(**{what: lambda number: number <= failures}):
        report = trained(sparing(), times=2 * failures)
    assert agreed(report)
    assert backwards(report) == passes
    assert told(report, f"eager's {what} pass")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_calls_are_tried_again_at_growing_distances(what: str) -> None:
    with planned(**{what: always}) as plans:
        trained(sparing(), times=16)
        assert plans.runs[what] == 2 * len((0, 2, 5, 10))


def test_growing_distances_end_and_begin_anew() -> None:
    distance = GrowingDistance()
    for expected in (1, 2, 4):
        distance.failed()
        assert [distance.due() for _ in range(expected + 1)] == [False] * expected + [True]
    distance.succeeded()
    distance.failed()
    assert [distance.due(), distance.due()] == [False, True]


def test_after_memory_ran_out_a_wrong_program_is_still_caught() -> None:
    compiled = checked(net, sparing(2.5))
    with planned(forward=lambda number: number <= 2):
        report = gathered(lambda: [compiled(torch.randn(4, 3)) for _ in range(4)])
    assert {subject for _, subject in found(report)} == {"output[0]"}


def test_what_both_raise_is_the_programs_own() -> None:
    compiled = checked(net, "eager", on_divergence="raise")

    def run() -> None:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            compiled(torch.ones(3))

    with planned(forward=always, error=ERRORS["device"]):
        report = gathered(run)
    assert not report.findings
    assert not told(report, "")


def test_check_is_no_finding_either() -> None:
    with planned(forward=lambda number: number == 1, error=ERRORS["cpu"]):
        report = cb.check(net, (torch.ones(3),), compiler=sparing())
    assert undecided(report, "eager ran out of it"), str(report)


# control runs


def noisy(out: Tensor) -> Tensor:
    return out * (1 + torch.finfo(out.dtype).eps) if out.dtype is torch.float32 else out


@pytest.mark.parametrize("error", ERRORS)
def test_control_runs_without_memory_leave_a_difference_undecided(error: str) -> None:
    with planned(forward=lambda number: number > 1, error=ERRORS[error]), torch.no_grad():
        report = gathered(lambda: checked(net, sparing(spoil=noisy))(torch.randn(4, 3)))
    assert undecided(report, "control: "), str(report)
    assert any(skip.matters for skip in told(report, "output[0]"))


def twin_without_memory(factor: float, spoil: Callable[[Tensor], Tensor] = noisy) -> Any:
    """Its float64 twin runs out of memory, each time."""
    no_memory = raising(MemoryError)
    return sparing(factor, lambda out: no_memory() if out.dtype is torch.float64 else spoil(out))


def test_a_twin_without_memory_is_told_and_noise_stays_noise() -> None:
    with torch.no_grad():
        report = gathered(lambda: checked(net, twin_without_memory(2.0), reference="keep")(torch.randn(4, 3)))
        half = gathered(lambda: checked(net, twin_without_memory(2.0, lambda out: out))(torch.randn(4, 3).bfloat16()))
    assert agreed(report)
    assert not half.findings
    assert told(half, "control: float64 twin")


def test_a_twin_without_memory_hides_no_gross_error() -> None:
    with torch.no_grad():
        report = gathered(lambda: checked(net, twin_without_memory(3.0))(torch.randn(4, 3)))
    assert {subject for _, subject in found(report)} == {"output[0]"}
    assert told(report, "control: float64 twin")


def test_float64_is_left_out_for_some_calls_after_it_ran_out() -> None:
    tries: list[int] = []

    def spoilt(out: Tensor) -> Tensor:
        if out.dtype is torch.float64:
            tries.append(1)
            raise MemoryError
        return out

    compiled = checked(net, sparing(spoil=spoilt))
    with torch.no_grad():
        report = gathered(lambda: [compiled(torch.randn(4, 3).bfloat16()) for _ in range(8)])
    assert not report.findings
    assert 0 < len(tries) <= 2 * 3
    assert any("left out" in skip.reason for skip in told(report, "control: "))


# the candidate


def running_out(times: int) -> Callable[[Tensor], Tensor]:
    """Runs out of memory some times."""
    ran, no_memory = itertools.count(), raising(torch.OutOfMemoryError("no memory"))
    return lambda out: no_memory() if next(ran) < times else out


def test_a_candidate_that_runs_once_the_check_lets_go_is_no_crash() -> None:
    report = agreed(trained(sparing(spoil=running_out(1)), times=4))
    assert told(report, "the compiled program, beside what the check held")


def test_a_candidate_that_runs_out_of_memory_by_itself_is_a_crash() -> None:
    report = gathered(lambda: checked(net, sparing(spoil=running_out(99)))(torch.randn(4, 3)))
    assert ("crash.memory", "candidate") in found(report)


def test_inputs_that_were_changed_before_memory_ran_out_are_changed_once() -> None:
    x = torch.zeros(3)
    report = gathered(lambda: checked(lambda t: t.add_(1) * 2, faults.every_output(running_out(1)))(x))
    assert torch.equal(x, torch.ones(3))
    assert not report.findings


# what the check itself copies


def test_copies_that_find_no_memory_leave_the_call_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers.Inputs, "capture", raising(MemoryError))
    x = torch.zeros(3)
    report = gathered(lambda: checked(lambda t: t.add_(1) * 2, "eager")(x))
    assert torch.equal(x, torch.ones(3))
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert told(report, "copying what the check needs")


@pytest.mark.parametrize("forward", [never, always])
def test_what_a_check_holds_is_freed_without_a_collector(forward: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[weakref.ref[observers.CallRecord]] = []
    begin = observers.CallRecorder.begin

    def noted(*given: Any) -> observers.CallRecord:
        record = begin(*given)
        records.append(weakref.ref(record))
        return record

    monkeypatch.setattr(observers.CallRecorder, "begin", noted)
    compiled = checked(net, sparing())
    gc.collect()
    gc.disable()
    try:
        with planned(forward=forward):
            gathered(lambda: compiled(torch.randn(4, 3)))
        assert [record() is None for record in records] == [True]
    finally:
        gc.enable()


def test_arriving_gradients_that_cannot_be_copied_leave_the_pass_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_kept", raising(ERRORS["cpu"]()))
    assert undecided(trained("aot_eager"), "copying the gradients that arrive")
