"""A kernel that errs on a device ends that device for the process: a crash of whose kernel it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.errors import is_device_lost
from checked_backend.regions.returned_tensors import Snapshot
from checked_backend.tensors.streams import wait_for_devices
from tests.support import faults
from tests.support.raising import raising
from tests.support.region_tools import audit, checked, found, gathered

LOST = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"
X = torch.ones(4)


def loses_it(_gm: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return raising(RuntimeError(LOST))


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(LOST), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA driver error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: invalid configuration argument"), False),  # the next call is made
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), False),
        (ValueError(LOST), False),
        (None, False),
    ],
)
def test_errors_after_which_nothing_runs_are_told_from_others(error: object, lost: bool) -> None:
    assert is_device_lost(error) is lost


def run(program: Any) -> cb.Report:
    def ran() -> None:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            program(X)

    return gathered(ran)


def test_the_compiled_program_that_loses_the_device_crashes_and_eager_does_not_go_on_in_its_place() -> None:
    report = run(checked(lambda x: x * 2, loses_it, localize=True))
    assert found(report) == {("crash.device", "candidate")}
    (finding,) = report.findings
    assert "The device is lost to this process" in finding.message
    assert "compute-sanitizer" in finding.message
    assert not finding.searched  # nothing can be compiled and run again


def test_where_eager_loses_it_the_compiled_program_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checked_backend.regions.eager.wait_for_devices", raising(RuntimeError(LOST)))
    report = run(checked(lambda x: x * 2, loses_it))
    assert not found(report)
    assert report.verdict is cb.Verdict.INCONCLUSIVE  # a call before, which was not checked, may have done it
    assert "running eager found the device lost" in str([skip.reason for skip in report.coverage.skipped])
    assert [region.checked_calls for region in report.coverage.regions] == [0]


@pytest.mark.parametrize(
    ("compiler", "where", "error"),
    [
        (loses_it, "eager", ValueError("of the user's")),  # where eager raises something else
        ("eager", "compile", RuntimeError(LOST)),  # a kernel that errs after the call has returned
    ],
)
def test_otherwise_it_is_the_compiled_programs(
    compiler: Any, where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"checked_backend.regions.{where}.wait_for_devices", raising(error))
    assert found(run(checked(lambda x: x * 2, compiler))) == {("crash.device", "candidate")}


def test_what_the_comparison_finds_lost_is_no_mistake_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshot, "overwritten", raising(RuntimeError(LOST)))
    report = audit(lambda compiled: compiled(lambda x: x * 2)(X), "eager")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "found the device lost" in str(report)
    assert "mistake of checked_backend" not in str(report)


def test_a_backward_pass_that_finds_it_lost_does_not_pass() -> None:
    program = checked(lambda x: x.sin(), faults.compiled_by_aot(backward=lambda _gm: raising(RuntimeError(LOST))))

    def ran() -> None:
        loss = program(X.clone().requires_grad_()).sum()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            loss.backward()

    report = gathered(ran)
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    reasons = [skip.reason for skip in report.coverage.skipped if skip.matters]
    assert any(reason.startswith("the compiled backward pass found the device lost") for reason in reasons), reasons


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


def test_each_gpus_stream_is_waited_for_once_and_a_processor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(str(self.device))

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    wait_for_devices([X, 3, None, torch.ones(2, device="meta")])
    assert waited == []
    wait_for_devices([X.as_subclass(OnGpu), X, X.as_subclass(OnGpu)])
    assert waited == ["cuda:1"]
