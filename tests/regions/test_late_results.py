"""Results that are not complete when they are returned are found, however soon they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.regions.execution import Subjects
from checked_backend.regions.late_results import AtReturn
from tests.support.call_faults import returns_too_early
from tests.support.region_tools import agreed, audit, found

NAMES = Subjects(("x",))


def wave(compile_it: Any) -> None:
    compile_it(lambda x: (x * 2).sin())(torch.rand(7) + 0.1)


def test_a_result_that_changes_after_the_return() -> None:
    first, second = torch.zeros(5), torch.rand(4, 3).t()
    early = AtReturn.of((first, second, None, 3), ())
    assert early.late((first, second, None, 3), NAMES, ()) == []
    second[1, 2] += 1
    (finding,) = early.late((first, second, None, 3), NAMES, ("a.py:1", "a.py:2"))
    assert (finding.detail, finding.subject, finding.source) == ("mutation.late", "output[1]", "a.py:2")
    assert "was not waited for" in finding.message


@pytest.mark.parametrize("size", [3, 40000])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.bfloat16, torch.float64, torch.complex64])
def test_any_dtype_and_size(dtype: torch.dtype, size: int) -> None:
    result = torch.ones(size).to(dtype)
    views = (result, result.conj(), result[::2])
    early = AtReturn.of(views, ())
    assert early.late(views, NAMES, ()) == []
    result[2] = 0
    assert [finding.subject for finding in early.late(views, NAMES, ())] == ["output[0]", "output[1]", "output[2]"]


def test_a_result_alone_need_not_be_in_a_tuple() -> None:
    assert list(AtReturn.of(torch.rand(3), ()).held) == [0]


def test_memory_of_inputs_may_be_written_to_by_others() -> None:
    x = torch.rand(8)
    early = AtReturn.of((x[2:4], x.clone()), (x,))
    assert list(early.held) == [1]


@pytest.mark.parametrize("seconds", [1e-3, 2e-2, 0.2])
def test_it_is_found_however_soon_it_is_complete(seconds: float) -> None:
    """If the comparison comes first, the value is wrong; else the result has changed since."""
    assert found(audit(wave, returns_too_early(seconds))) & {("mutation.late", "output[0]"), ("logic", "output[0]")}


def test_results_that_were_waited_for() -> None:
    agreed(audit(wave, returns_too_early(0.0, waits=True)))


def test_a_mistake_in_looking_ends_no_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_given: Any) -> Any:
        raise RuntimeError("no such dtype")

    monkeypatch.setattr(AtReturn, "of", fails)
    report = audit(wave, "eager")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "no such dtype" in str(report)
    assert "no such dtype" in caplog.text
