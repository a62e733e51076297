"""A compiler that dies on some graphs is a rejected candidate there, and not the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from checked_backend.diagnose.localize import probe
from checked_backend.diagnose.localize.locate import Location
from checked_backend.diagnose.localize.subgraph import calls_of
from checked_backend.diagnose.oracle import verdict_oracle
from checked_backend.findings import Finding, Kind
from checked_backend.graphs.nodes import outputs_of
from checked_backend.process.worker import cannot_fork
from checked_backend.regions.graph_case import GraphCase
from tests.support import faults
from tests.support.locate_tools import located
from tests.support.reduce_tools import case_of

pytestmark = pytest.mark.skipif(cannot_fork() is not None, reason="no process can be forked")


def function(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x)
    y = torch.relu(y) * 2
    return torch.cos(y).softmax(-1)


def found_with(compiler: Any) -> Location:
    """The location, each case tried in a process of its own."""

    def oracle(case: GraphCase) -> Sequence[Finding]:
        return [finding for finding in verdict_oracle(case, 60) or () if finding.kind.fails]

    return located(lambda compiled: compiled(torch.randn(4, 5)), function, compiler, tries=oracle)


@pytest.mark.process
def test_where_the_probe_dies_bisection_finds_it() -> None:
    location = found_with(faults.dies_on(lambda gm: len(outputs_of(gm.graph)) > 2, "aten.relu.default"))
    assert location.op == "aten.relu.default"
    assert "its process died: killed by SIGUSR1" in location.notes[0]
    assert location.cut.finding.kind is Kind.LOGIC


@pytest.mark.process
def test_where_the_probe_hangs_bisection_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*_args: Any, **_kwargs: Any) -> None:
        torch.multiprocessing.Event().wait()

    monkeypatch.setattr(probe, "probe", waits)
    monkeypatch.setattr(probe, "PROBE_LIMIT", 0.5)
    location = found_with(faults.wrong_operator("aten.relu.default", how="aot"))
    assert location.op == "aten.relu.default"
    assert "its process died: still running after 0.5 s" in location.notes[0]


@pytest.mark.process
def test_a_part_that_the_compiler_dies_of_is_not_taken_for_the_wrong_one() -> None:
    """It dies of whatever is small, which is no sign of what is looked for."""
    location = found_with(faults.dies_on(lambda gm: len(calls_of(gm)) < 2, "aten.relu.default"))
    assert (location.op, location.cut.finding.kind) == ("aten.relu.default", Kind.LOGIC)
    assert len(calls_of(location.cut.case.graph)) == 2


def dies(_gm: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    os.kill(os.getpid(), signal.SIGUSR1)
    raise AssertionError


@pytest.mark.process
def test_a_death_is_a_finding_only_where_eager_runs() -> None:
    [found] = verdict_oracle(case_of(lambda x: (torch.relu(x),), torch.ones(2), compiler=dies), 60) or ()
    assert (found.detail, found.actual) == ("crash.signal", "killed by SIGUSR1")
    refused = case_of(lambda x, y: (torch.mm(x, y),), torch.ones(2, 3), torch.ones(2, 3), compiler=dies)
    assert verdict_oracle(refused, 60) is None
