"""Later calls of a region are held against the noise of earlier ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checked_backend.regions.runner import RegionRunner
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered


@pytest.mark.parametrize(("late", "rechecked"), [(1.0, False), (3.0, True)])
def test_a_later_recheck_runs_controls_for_what_differs_by_more_than_before(
    late: float, rechecked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the third call a difference may be four times as large, at the fourth no larger."""
    asked: list[int] = []
    number, run_once = 0, RegionRunner.run

    def counted(*given: Any) -> Any:
        asked.append(number)
        return run_once(*given)

    def off(result: torch.Tensor) -> torch.Tensor:
        return (result * (1 + (late if number > 2 else 1) * 2.0**-21)).to(result.dtype)

    monkeypatch.setattr(RegionRunner, "run", counted)
    model = checked(lambda x: torch.sin(x @ x) * 1.1, faults.spoiled_output(off))

    def run() -> None:
        nonlocal number
        for _ in range(4):
            number += 1
            model(torch.randn(16, 16))

    assert agreed(gathered(run))
    assert {*asked} == ({1, 2, 4} if rechecked else {1, 2})


def test_a_fault_that_begins_at_a_later_recheck_is_found() -> None:
    number = 0

    def off(result: torch.Tensor) -> torch.Tensor:
        return result * (1.001 if number == 4 else 1)

    model = checked(lambda x: torch.sin(x @ x) * 1.1, faults.spoiled_output(off))

    def run() -> None:
        nonlocal number
        for _ in range(4):
            number += 1
            model(torch.randn(16, 16))

    assert found(gathered(run)) == {("logic", "output[0]")}
