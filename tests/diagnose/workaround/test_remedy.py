"""Workarounds are tried on the region before they are announced."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from checked_backend.diagnose.workaround import search
from checked_backend.diagnose.workaround.search import WorkaroundSearch
from checked_backend.diagnose.workaround.settings import EAGER, Setting, pass_settings
from checked_backend.graphs.source_line import source_line
from checked_backend.process.worker import cannot_differentiate_in_worker, cannot_fork
from checked_backend.regions.failure import Failure
from checked_backend.regions.graph_case import GraphCase
from tests.support import faults, locate_tools
from tests.support.raising import raising
from tests.support.region_tools import checked, gathered

Failed = tuple[Failure, Sequence[cb.Finding]]
WRONG = faults.wrong_operator("aten.relu.default", how="aot")


def function(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x)
    return y.sin()


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> Failed:
    return locate_tools.failed(monkeypatch, function, WRONG, torch.randn(8))


def search_in(failure: Failure, findings: Sequence[cb.Finding], evidence: dict[str, str]) -> WorkaroundSearch:
    return WorkaroundSearch(failure, findings, lambda *_: (), time.monotonic() + 60, lambda _: None, evidence)


def searched(
    failed: Failed, monkeypatch: pytest.MonkeyPatch, **compilers: Callable[..., Any]
) -> tuple[Setting | None, dict[str, str]]:
    """Offer these compilers, as settings that help the small program."""

    def find(_case: GraphCase, _step: Any, *, confirm: Callable[[Setting], bool], **_more: Any) -> Setting | None:
        return next((Setting(name) for name in compilers if confirm(Setting(name))), None)

    monkeypatch.setattr(search, "find_workaround", find)
    monkeypatch.setattr(
        Setting, "on", lambda setting, options: options.model_copy(update={"compiler": compilers[setting.name]})
    )
    failure, findings = failed
    evidence: dict[str, str] = {}
    found = search_in(failure, findings, evidence).setting(GraphCase(failure.graph, (), failure.options), search.cheap)
    return found, evidence


@pytest.mark.process
def test_what_helps_the_small_program_but_not_the_region_is_told_and_the_next_is_tried(
    failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, evidence = searched(failed, monkeypatch, first=WRONG, second=faults.clean())
    assert found.name == "second"
    assert evidence["settings"].startswith("first (output[0] is wrong: ")
    assert evidence["settings"].endswith(") helps the small program, but not the region")


@pytest.mark.process
def test_a_setting_under_which_the_region_fails_or_dies_is_no_workaround(
    failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, evidence = searched(failed, monkeypatch, raises=faults.crash_when_compiling())
    assert found is None
    assert "raises (it fails: " in evidence["settings"]
    why = cannot_fork() or cannot_differentiate_in_worker()
    if why:
        pytest.skip(f"the region is tried in this process: {why}")
    dying = {"raises": faults.crash_when_compiling(), "dies": lambda *_given: os._exit(7)}
    found, evidence = searched(failed, monkeypatch, **dying)
    assert found is None
    assert "dies (the process that tried it died: exited with status 7)" in evidence["settings"]
    assert evidence["settings"].endswith("help the small program, but not the region")


@pytest.mark.process
def test_the_last_resort_is_tried_and_where_it_cannot_be_that_is_said(failed: Failed) -> None:
    failure, findings = failed
    [relu] = failure.graph.graph.find_nodes(op="call_function", target=torch.relu)
    for source, said in (
        (source_line(relu), None),
        ("elsewhere.py:1 in forward: x", "none found: no call of the region is from that line"),
        (None, "none found: the user's line that calls aten.relu.default is not known"),
    ):
        evidence: dict[str, str] = {}
        tried = search_in(failure, findings, evidence)
        found = tried.line("aten.relu.default", source)
        assert evidence.get("workaround") == said
        assert not tried.in_vain
        if said is not None:
            assert found is None  # what was not seen to help is not announced
        else:
            assert "torch.compiler.disable(torch.relu)" in found


def looked_up(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    y = torch.index_select(x, 0, at)
    return y.sin()


@pytest.mark.process
def test_what_should_raise_is_left_to_eager_where_it_raises(tmp_path: Path) -> None:
    lenient = faults.runs(lambda forward, x, at: forward(x, at.clamp(max=len(x) - 1)))
    compiled = checked(looked_up, lenient, localize=True, report_dir=tmp_path)
    [finding] = gathered(lambda: compiled(torch.randn(5, 6), torch.tensor([9, 1, 7]))).findings
    assert (finding.detail, finding.op) == ("exception.missing", "aten.index_select.default")
    assert "torch.compiler.disable(torch.index_select)" in (finding.workaround or "")


@pytest.mark.process
def test_a_line_that_does_not_help_outside_either_was_tried_in_vain(
    failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure, findings = failed
    monkeypatch.setattr(search, "without_line", lambda *_: WRONG)
    [relu] = failure.graph.graph.find_nodes(op="call_function", target=torch.relu)
    evidence: dict[str, str] = {}
    tried = search_in(failure, findings, evidence)
    assert tried.first(None, "aten.relu.default", source_line(relu)) is None
    assert tried.in_vain
    assert evidence["workaround"].startswith("none found: with that line outside of the compiler too, output[0] is")

    def find(_case: GraphCase, step: Any, **_more: Any) -> Setting | None:
        return Setting("in eager") if step is search.in_eager else None

    monkeypatch.setattr(search, "find_workaround", find)
    case = GraphCase(failure.graph, (), failure.options)
    assert tried.first(case, "aten.relu.default", source_line(relu)) is not None
    assert evidence["workaround"].startswith("with that line outside of the compiler too, output[0] is")


@pytest.mark.process
def test_the_order_in_which_workarounds_are_tried(failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def note(name: str, answer: Any = None) -> Any:
        return lambda *_: tried.append(name) or answer

    failure, findings = failed
    looked = search_in(failure, findings, {})
    monkeypatch.setattr(WorkaroundSearch, "setting", lambda _self, _case, step: tried.append(step.__name__))
    monkeypatch.setattr(WorkaroundSearch, "unfused_line", note("unfused line"))
    monkeypatch.setattr(WorkaroundSearch, "line", note("line in eager"))
    case = GraphCase(failure.graph, (), failure.options)
    assert looked.first(case, "aten.relu.default", None) is None
    assert tried == ["cheap", "unfused line", "pass_or_operator", "line in eager", "costly", "in_eager"]
    tried.clear()
    monkeypatch.setattr(WorkaroundSearch, "unfused_line", note("unfused line", "code"))
    assert looked.first(case, "aten.relu.default", None) == "code"
    assert tried == ["cheap", "unfused line"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("stage", "small", "region", "helps"),
    [
        ("compiled", True, True, True),
        ("compiled", True, False, False),
        ("compiled", False, True, False),
        ("decomposed", True, True, False),
    ],
)
def test_a_line_is_kept_out_of_fusion_where_that_helps_the_small_program_and_the_region(
    failed: Failed, monkeypatch: pytest.MonkeyPatch, stage: str, small: bool, region: bool, helps: bool
) -> None:
    failure, findings = failed
    failure = replace(failure, options=failure.options.model_copy(update={"compiler": "inductor"}))
    monkeypatch.setattr(search, "heeds_annotations", lambda: True)
    compiler = faults.clean() if region else WRONG
    monkeypatch.setattr(search, "unfused", lambda _compiler, source=None: compiler if source else faults.clean())
    [relu] = failure.graph.graph.find_nodes(op="call_function", target=torch.relu)
    looked = search_in(failure, findings, {})
    looked.stage, looked.oracle = stage, lambda *_: () if small else findings
    found = looked.unfused_line(GraphCase(failure.graph, (), failure.options), source_line(relu))
    assert (found is not None) is helps
    if found is not None:
        assert found.endswith("with annotate({'fallback_to_eager': True}):\n    y = torch.relu(x)")


@pytest.mark.process
def test_what_cannot_be_tried_is_not_announced(failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "without_line", lambda *_: raising(RuntimeError("the line cannot be taken out")))
    failure, findings = failed
    [relu] = failure.graph.graph.find_nodes(op="call_function", target=torch.relu)
    evidence: dict[str, str] = {}
    assert search_in(failure, findings, evidence).line("aten.relu.default", source_line(relu)) is None
    assert "could not be tried" in evidence["workaround"]


@pytest.mark.process
def test_what_is_wrong_must_be_right_and_what_only_has_another_layout_may_stay(
    failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure, findings = failed
    layout = replace(findings[0], kind=cb.Kind.STRUCTURE, detail="structure.stride")
    assert layout.is_layout
    monkeypatch.setattr(search, "rerun_failure", lambda *_, **__: (layout,))
    found, _ = searched(failed, monkeypatch, other_strides=faults.clean())
    assert found is not None
    found, evidence = searched((failure, [layout]), monkeypatch, other_strides=faults.clean())
    assert found is None
    assert "output[0] is wrong" in evidence["settings"]


def two_calls(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).sin()


def in_a_body(x: torch.Tensor) -> torch.Tensor:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    return checkpoint(body, x, use_reentrant=False).sin()


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "line"), [(in_a_body, "return checkpoint(body"), (two_calls, "torch.relu(x).sin()")]
)
def test_a_line_of_which_no_single_call_can_be_named_is_kept_out_as_a_whole(
    program: Callable[[torch.Tensor], torch.Tensor], line: str, tmp_path: Path
) -> None:
    """What is announced is what was tried."""
    compiled = checked(program, WRONG, localize=True, report_dir=tmp_path)
    finding = gathered(lambda: compiled(torch.randn(8, requires_grad=True))).findings[0]
    assert finding.op == "aten.relu.default"
    assert line in finding.workaround
    assert "@torch.compiler.disable\ndef in_eager(" in finding.workaround
    exec(finding.workaround, {})
    assert "workaround" not in finding.evidence


GELU = torch.ops.aten.gelu.default
LEFT_TO_EAGER = Setting(f"eager's kernel for {GELU}", fallback=GELU)
NO_PASS = pass_settings({"wrong_pass": []})[0]
REGION = "the region is right with eager's kernel for aten.gelu.default"
SMALL = "the small program is right with options={"


@pytest.mark.process
@pytest.mark.parametrize(
    ("helpful", "stage", "right_with", "said"),
    [
        (
            NO_PASS,
            "compiled",
            "",
            "graph pass wrong_pass: the region is right with options={'disabled_passes': 'wrong_",
        ),
        (LEFT_TO_EAGER, "compiled", "cpp.simdlen", f"vectorization of aten.gelu.default: {SMALL}'cpp.simdlen': 1}}"),
        (LEFT_TO_EAGER, "compiled", "max_fusion_size", f"fusion of aten.gelu.default: {SMALL}'max_fusion_size': 1, "),
        (LEFT_TO_EAGER, "decomposed", "cpp.simdlen", f"decomposition of aten.gelu.default: {REGION}"),
        (LEFT_TO_EAGER, "partitioned", "", f"what is made of aten.gelu.default: {REGION}"),
        (replace(LEFT_TO_EAGER, fallback=torch.ops.aten.mm.default), "compiled", "", "lowering of aten.mm.default: "),
        (None, "compiled", "cpp.simdlen", f"vectorization of aten.tanh.default: {SMALL}"),
        (None, "compiled", "", ""),
        (EAGER[0], "compiled", "cpp.simdlen", ""),
    ],
)
def test_what_breaks_the_program_is_the_least_part_without_which_it_is_right(
    failed: Failed, helpful: Setting | None, stage: str, right_with: str, said: str
) -> None:
    failure, findings = failed

    def oracle(case: GraphCase, _timeout: float) -> Sequence[cb.Finding]:
        return () if right_with in case.options.compiler_options else findings

    looked = search_in(failure, findings, {})
    looked.oracle, looked.stage, looked.helpful = oracle, stage, helpful
    options = failure.options.model_copy(update={"compiler": "inductor"})
    told = looked.broken_by(GraphCase(failure.graph, (torch.ones(2),), options), "aten.tanh.default")
    assert told.startswith(said)
    assert bool(told) == bool(said)
