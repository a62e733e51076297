"""Looking for operators takes long: in a session each place is looked into once, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from checked_backend.findings import Finding
from checked_backend.options import CheckOptions
from checked_backend.regions import reporter
from checked_backend.regions.build import build_region
from checked_backend.regions.failure import Failure
from checked_backend.report.session import Session, collect
from tests.support import faults


def failing_regions(functions: Sequence[Callable[..., Any]], on_divergence: Any = "record") -> tuple[int, Session]:
    """Run functions of which each is a region that is wrong; how often it was asked where that comes from."""
    asked: list[Failure] = []

    def investigator(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        asked.append(failure)
        return findings

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        options = CheckOptions(compiler=faults.one_element(0), on_divergence=on_divergence)
        return build_region(gm, example_inputs, options, None, silent=True, investigator=investigator)

    with collect() as session:
        for place, function in enumerate(functions):  # another dtype: the same function is compiled anew
            x = torch.randn(4, dtype=(torch.float32, torch.float64)[place % 2])
            torch.compile(function, backend=backend)(x)
    torch._dynamo.reset()
    return len(asked), session


def first(x: Tensor) -> Tensor:
    return torch.sin(x)


def second(x: Tensor) -> Tensor:
    return torch.cos(x)


def test_the_same_lines_are_looked_into_once() -> None:
    asked, session = failing_regions([first, first, second])
    assert asked == 2
    told = [finding.evidence.get("localized") for finding in session.report.findings]
    assert any("findings of the same lines were" in str(words) for words in told)


def test_after_long_enough_no_more_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "LONG_ENOUGH", -1.0)
    asked, session = failing_regions([first, second])
    assert asked == 0
    assert all("localize" in str(finding.evidence["localized"]) for finding in session.report.findings)


def test_each_session_has_its_own_patience() -> None:
    assert failing_regions([first])[0] == 1
    assert failing_regions([first])[0] == 1
