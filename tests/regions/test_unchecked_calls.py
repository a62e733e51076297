"""Calls that are not checked: counted in full, by those who look, at a small cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import checked_backend as cb
from checked_backend.regions.unchecked_calls import unobserved
from checked_backend.report.session import Session
from checked_backend.tensors.streams import is_capturing

Program = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def program() -> Program:
    """A region of which one call in a thousand is checked."""

    return torch.compile(lambda x: x * 2, backend=cb.numcheck, options={"compiler": "aot_eager", "every": 1000})


def calls(session: Session) -> list[tuple[int, int]]:
    return [(region.calls, region.checked_calls) for region in session.report.coverage.regions]


def test_each_session_counts_the_calls_of_its_own_time(program: Program) -> None:
    x = torch.ones(3)
    with cb.collect() as whole:
        for _ in range(5):
            program(x)
        with cb.collect() as part:
            for _ in range(4):
                program(x)
            assert calls(part) == [(4, 0)]
        for _ in range(3):
            program(x)
        assert calls(whole) == [(12, 1)]
    program(x)
    assert calls(whole) == [(12, 1)]
    assert calls(part) == [(4, 0)]


def test_what_is_unobserved_is_not_counted(program: Program) -> None:
    x = torch.ones(3)
    with cb.collect() as session:
        for _ in range(3):
            program(x)
        with unobserved():
            for _ in range(3):
                program(x)
        assert calls(session) == [(3, 1)]


def test_a_call_that_a_cuda_graph_captures_is_not_checked_and_the_coverage_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capturing, reasons = [True], "a CUDA graph captured them"
    monkeypatch.setattr("checked_backend.regions.unchecked_calls.is_capturing", lambda: capturing[0])
    program = torch.compile(lambda x: x * 2, backend=cb.numcheck, options={"compiler": "aot_eager"})
    x = torch.ones(3)
    with cb.collect() as session:
        assert torch.equal(program(x), x * 2)
        assert calls(session) == [(1, 0)]
        assert session.report.verdict is cb.Verdict.INCONCLUSIVE  # nothing was compared
        (skip,) = [skip for skip in session.report.coverage.skipped if skip.reason.startswith(reasons)]
        assert (skip.subject, skip.matters) == ("calls", True)
        capturing[:] = [False]
        program(x)
        capturing[:] = [True]
        program(x)
        assert calls(session) == [(3, 1)]
        assert session.report.verdict is cb.Verdict.PASS
        (skip,) = [skip for skip in session.report.coverage.skipped if skip.reason.startswith(reasons)]
        assert not skip.matters


@pytest.mark.parametrize("used", [False, True])
def test_a_process_that_has_not_used_cuda_captures_nothing(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_capturing() is used


def test_the_call_that_is_due_is_checked_after_those_that_were_passed_by(program: Program) -> None:
    x = torch.ones(3)
    with cb.collect() as session:
        for _ in range(1001):
            program(x)
        [region] = session.report.coverage.regions
    assert (region.calls, region.checked_calls, region.last_checked_call) == (1001, 2, 1001)


def test_a_region_none_of_whose_calls_is_checked_in_a_session_is_no_pass(program: Program) -> None:
    other = torch.compile(lambda x: x / 2, backend=cb.numcheck, options={"compiler": "aot_eager", "every": 2})
    x = torch.ones(3)
    program(x)
    with cb.collect() as session:
        other(x)
        assert session.report.verdict is cb.Verdict.PASS
        program(x)
        other(x)
    assert calls(session) == [(2, 1), (1, 0)]
    [skip] = session.report.coverage.skipped
    assert (skip.subject, skip.matters) == ("all calls", True)
    assert skip.region == session.report.coverage.regions[1].name
    assert "option every" in skip.reason
    assert session.report.verdict is cb.Verdict.INCONCLUSIVE


def test_a_region_that_a_reset_replaced_was_not_checked_because_the_next_one_is() -> None:
    """Both have one name: it is the same code."""

    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    options = {"compiler": "aot_eager", "every": 2}
    x = torch.ones(3)
    first = torch.compile(halve, backend=cb.numcheck, options=options)
    first(x)
    with cb.collect() as session:
        first(x)
        torch.compiler.reset()
        torch.compile(halve, backend=cb.numcheck, options=options)(x)
    assert calls(session) == [(2, 1)]
    assert [(skip.subject, skip.matters) for skip in session.report.coverage.skipped] == [("all calls", True)]
    assert session.report.verdict is cb.Verdict.INCONCLUSIVE
