"""A person who waits for a long check is told what it is doing, and that of a quick one is quiet."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import checked_backend as cb
from checked_backend.regions import waiting as module
from checked_backend.regions.waiting import CONTROL_RUNS, Waiting
from checked_backend.report import progress
from checked_backend.verdict.runner import Control
from tests.support import faults


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def waiting(clock: Clock, *, tells: bool = True, terminal: bool = False) -> tuple[Waiting, io.StringIO]:
    stream = Terminal() if terminal else io.StringIO()
    return Waiting("Net [0/0]", tells=tells, stream=stream, clock=clock), stream


def run(one: Waiting, clock: Clock, control: Control, seconds: float) -> None:
    with one.control_run(control):
        clock.now += seconds


def test_control_runs_are_told_once_the_check_has_taken_a_while() -> None:
    clock = Clock()
    one, stream = waiting(clock)
    run(one, clock, Control.REPEAT, 21.0)
    assert not stream.getvalue()
    run(one, clock, Control.FLOAT64, 0.1)
    assert stream.getvalue() == "numcheck:   21 s: checking Net [0/0]: running eager in float64\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_is_told_later_than_a_person_who_waits(terminal: bool) -> None:
    clock = Clock()
    one, stream = waiting(clock, terminal=terminal)
    run(one, clock, Control.REPEAT, 4.0)
    run(one, clock, Control.FLOAT64, 0.1)
    assert ("running eager in float64" in stream.getvalue()) is terminal


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_tells_it_for_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    clock = Clock()
    one, stream = waiting(clock, terminal=True)
    run(one, clock, Control.REPEAT, 30.0)
    run(one, clock, Control.FLOAT64, 0.1)
    assert bool(stream.getvalue()) is (rank == 0)


def test_quick_checks_are_quiet_however_many_there_are() -> None:
    clock = Clock()
    one, stream = waiting(clock)
    for _ in range(10):
        run(one, clock, Control.REPEAT, 2.0)
        clock.now += 60
    assert not stream.getvalue()


@pytest.mark.parametrize(
    ("compiling", "nodes", "inductor", "told"),
    [(10.0, 3, False, True), (0.1, 300, True, True), (0.1, 300, False, False), (0.1, 3, True, False)],
)
def test_compiling_is_told_before_it_begins_where_it_takes_long(
    compiling: float, nodes: int, inductor: bool, told: bool
) -> None:
    clock = Clock()
    one, stream = waiting(clock)
    one.expect(compiling, nodes, inductor=inductor)
    seen: list[str] = []

    def compile_for(inputs: Sequence[Any]) -> Any:
        seen.append(stream.getvalue())
        return inputs

    assert one.compiling("in float64", compile_for)([1]) == [1]
    assert seen == ["numcheck:    0 s: checking Net [0/0]: compiling it in float64\n" if told else ""]


def test_where_it_was_turned_off_nothing_is_told() -> None:
    clock = Clock()
    one, stream = waiting(clock, tells=False)
    one.expect(100.0, 300, inductor=True)
    run(one, clock, Control.REPEAT, 100.0)
    run(one, clock, Control.REPEAT, 100.0)
    one.compiling("in float64", lambda inputs: lambda: inputs)([])
    assert not stream.getvalue()


def test_every_control_run_has_words() -> None:
    assert {*CONTROL_RUNS} == {*Control} - {Control.SHAPES}  # these are Monte Carlo runs


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("face", ["numcheck", "check"])
def test_a_wrong_program_says_what_is_done_about_it_until_told_not_to(
    face: str, tells: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(module, "PATIENCE_OF_A_LOG", 0.0)
    monkeypatch.setattr(progress, "_OFTEN", 0.0)
    monkeypatch.setenv("CHECKED_BACKEND_PROGRESS", str(int(tells)))
    monkeypatch.setenv("CHECKED_BACKEND_REPORT_DIR", str(tmp_path))

    def f(x: Tensor) -> Tensor:
        return x.sin() * 2

    wrong, x = faults.one_element(0), torch.randn(5)
    if face == "check":
        cb.check(f, (x,), compiler=wrong, gradients=False)
    else:
        options = {"compiler": wrong, "localize": False, "on_divergence": "record"}
        torch.compile(f, backend="numcheck", options=options)(x)
    told = [line.partition(" s: ")[2] for line in capfd.readouterr().err.splitlines() if line.startswith("numcheck: ")]
    assert bool(told) is tells
    if tells:
        assert all(line.startswith("checking f [0/0]: ") for line in told)
        assert "checking f [0/0]: running eager in float64" in told
        assert "checking f [0/0]: compiling it in float64" in told
