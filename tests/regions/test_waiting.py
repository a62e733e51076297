"""A person who waits for a long check is told what it is doing, and that of a quick one is quiet."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.regions.waiting import CONTROL_RUNS, Waiting
from checked_backend.report import progress
from checked_backend.verdict.runner import Control
from tests.support import faults
from tests.support.region_tools import checked
from tests.support.report_tools import Terminal


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(one: Waiting, clock: Clock, control: Control, seconds: float) -> None:
    with one.control_run(control):
        clock.now += seconds


@pytest.mark.parametrize(
    ("seconds", "terminal", "rank", "tells", "told"),
    [
        (21.0, False, 0, True, True),
        (2.0, False, 0, True, False),
        (4.0, False, 0, True, False),  # a log is told later than a person who waits
        (4.0, True, 0, True, True),
        (30.0, True, 1, True, False),  # one rank tells it for all
        (30.0, True, 0, False, False),
    ],
)
def test_control_runs_are_told_once_the_check_has_taken_a_while(
    seconds: float, terminal: bool, rank: int, tells: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    clock, stream = Clock(), Terminal() if terminal else io.StringIO()
    one = Waiting("Net [0/0]", tells=tells, stream=stream, clock=clock)
    for pause in (0.1,) * 30 + (60.0,) * 3:  # quick checks are quiet, however many there are
        one.begin()
        run(one, clock, Control.REPEAT, 2.0)
        clock.now += pause
    one.begin()
    run(one, clock, Control.REPEAT, seconds)
    assert not stream.getvalue()
    run(one, clock, Control.FLOAT64, 0.1)
    assert ("checking Net: running eager in float64" in stream.getvalue()) is told
    if told and not terminal:
        assert stream.getvalue() == "numcheck:   21 s: checking Net: running eager in float64\n"


@pytest.mark.parametrize(("pause", "told"), [(0.5, True), (60.0, False)])
def test_a_long_wait_goes_on_with_the_backward_pass(pause: float, told: bool) -> None:
    clock, stream = Clock(), io.StringIO()
    one = Waiting("Net", stream=stream, clock=clock)
    for _ in range(2):
        one.begin()
        run(one, clock, Control.REPEAT, 8.0)
        run(one, clock, Control.FLOAT64, 0.1)
        clock.now += pause
    assert bool(stream.getvalue()) is told


def test_every_control_run_has_words() -> None:
    assert {*CONTROL_RUNS} == {*Control} - {Control.SHAPES}  # these are Monte Carlo runs


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("face", ["numcheck", "check"])
def test_a_wrong_program_says_what_is_done_about_it_until_told_not_to(
    face: str, tells: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_OF_A_LOG", 0.0)
    monkeypatch.setattr(progress, "_OFTEN", 0.0)
    monkeypatch.setenv("CHECKED_BACKEND_PROGRESS", str(int(tells)))
    monkeypatch.setenv("CHECKED_BACKEND_REPORT_DIR", str(tmp_path))

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    wrong, x = faults.one_element(0), torch.randn(5)
    if face == "check":
        cb.check(f, (x,), compiler=wrong, gradients=False)
    else:
        checked(f, wrong)(x)
    told = [line.partition(" s: ")[2] for line in capfd.readouterr().err.splitlines() if line.startswith("numcheck: ")]
    assert bool(told) is tells
    if tells:
        assert all(re.match("checking f(: |$)", line) for line in told)
        assert ("checking f" in told) is (face == "check")  # from its beginning to its end, on one clock
        assert "checking f: running eager in float64" in told
        steps = ("compiling it", "running eager", "running the compiled program", "compiling it in float64")
        assert {f"checking f: {step}" for step in steps} <= {*told}
