"""Looking for operators takes long: not longer than other ranks have patience, and in a session not for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checked_backend._torch import collectives
from checked_backend.findings import Finding, Kind
from checked_backend.options import CheckOptions
from checked_backend.regions import local_region as module
from checked_backend.regions import reporter
from checked_backend.regions.build import build_region
from checked_backend.regions.failure import Failure
from checked_backend.regions.local_region import LocalRegion
from checked_backend.report.session import Session, collect
from tests.support import faults
from tests.support.raising import raising

FOUND = [
    Finding(Kind.LOGIC, subject, "wrong", "logic")
    for subject in ("sent[all_reduce_1]", "output[0]", "sent[backward all_reduce_0]")
]


def region() -> LocalRegion:
    graph = torch.fx.Graph()
    graph.output(tuple(graph.placeholder(name) for name in ("x", "y", "z")))
    gm = torch.fx.GraphModule({}, graph)
    return LocalRegion(gm, (), ("all_reduce_0", "all_reduce_1"), gm)


@pytest.mark.parametrize("patience", [60.0, None])
def test_an_investigation_ends_long_before_other_ranks_give_up(
    patience: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may wait in DDP's backward pass."""
    monkeypatch.setattr(module, "patience_of_ranks", lambda: patience)
    seen: list[Failure] = []

    def investigator(failure: Failure, findings: Any) -> Any:
        seen.append(failure)
        return findings

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        options = CheckOptions(compiler=faults.wrong_value(), on_divergence="record")
        return build_region(gm, inputs, options, None, silent=True, investigator=investigator)

    torch.compile(torch.sin, backend=backend)(torch.randn(4))
    assert [failure.patience for failure in seen] == [None if patience is None else pytest.approx(20.0)]


def test_findings_get_their_own_names_back(monkeypatch: pytest.MonkeyPatch) -> None:
    subjects: list[str] = []

    def investigator(_failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        subjects.extend(finding.subject for finding in findings)
        return [replace(finding, op=f"op{place}") for place, finding in enumerate(findings)]

    call: Any = None
    monkeypatch.setattr(LocalRegion, "call", lambda _self, _call: call)
    failure = Failure(region().graph, (), call, None, CheckOptions(), None)
    found = region().investigate(failure, FOUND, investigator)
    gradients = ["grad[received_all_reduce_0]", "grad[received_all_reduce_1]"]
    assert subjects == ["output[2]", "output[0]", *gradients]
    assert [(one.subject, one.op) for one in found] == [
        (FOUND[0].subject, "op0"),
        (FOUND[1].subject, "op1"),
        (FOUND[2].subject, "op2"),
    ]


def test_a_graph_that_cannot_be_read_is_no_problem_of_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checked_backend.regions.local_region.cut_collectives", raising(KeyError("odd")))
    assert LocalRegion.of(region().graph, ()) == "cutting its graph raised KeyError: 'odd'"


def test_the_patience_of_ranks_is_their_groups_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collectives.patience_of_ranks() is None
    monkeypatch.setattr(collectives, "distributed_is_on", lambda: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert collectives.patience_of_ranks() == 77.0
    finally:
        dist.destroy_process_group()


# in a session each place is looked into once, and not for ever


def failing_regions(functions: Sequence[Callable[..., Any]], on_divergence: Any = "record") -> tuple[int, Session]:
    """Run functions of which each is a region that is wrong; how often it was asked where that comes from."""
    asked: list[Failure] = []

    def investigator(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        asked.append(failure)
        return findings

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        options = CheckOptions(compiler=faults.one_element(0), on_divergence=on_divergence)
        return build_region(gm, example_inputs, options, None, silent=True, investigator=investigator)

    with collect() as session:
        for place, function in enumerate(functions):  # another dtype: the same function is compiled anew
            x = torch.randn(4, dtype=(torch.float32, torch.float64)[place % 2])
            torch.compile(function, backend=backend)(x)
    torch._dynamo.reset()
    return len(asked), session


def first(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def second(x: torch.Tensor) -> torch.Tensor:
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
