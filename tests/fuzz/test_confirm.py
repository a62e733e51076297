"""A failure is confirmed, made small, and gets a script that ends as the bug makes it end."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from checked_backend.fuzz import worker as confirming
from checked_backend.fuzz.corpus import Record
from checked_backend.fuzz.program import FuzzProgram, encode_program
from checked_backend.fuzz.results import Group, ProgramResult
from checked_backend.fuzz.text import DIFFERS
from checked_backend.fuzz.worker import FuzzOptions, confirm, shows
from checked_backend.process.job import AnswerFolder
from checked_backend.runs.case import Status
from tests.support.fuzz_tools import program_of

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "detail", "expected"),
    [
        ("raise SystemExit(1)", "logic", True),
        ("raise SystemExit(0)", "logic", False),
        ("raise SystemExit(2)", "logic", False),
        (KILLED, "crash.signal", True),
        (KILLED, "logic", False),
        ("raise SystemExit(1)", "crash.signal", False),
        ("raise SystemExit(7)", "crash.exit", True),
        ("raise SystemExit(1)", "crash.exit", False),
        ("import time; time.sleep(60)", "crash.hang", True),
        ("import time; time.sleep(60)", "logic", False),
        ("1 +", "logic", False),
    ],
)
def test_a_script_shows_the_bug_that_it_is_of(tmp_path: Path, script: str, detail: str, expected: bool) -> None:
    path = tmp_path / "repro.py"
    path.write_text(script)
    assert shows(path, 3.0, detail) is expected


@pytest.mark.process
def test_a_script_that_checks_must_say_so(tmp_path: Path) -> None:
    path = tmp_path / "repro.py"
    path.write_text("print('FAIL: x'); raise SystemExit(1)")
    assert shows(path, 20.0, "logic", "FAIL: ")
    path.write_text("raise SystemExit(1)")
    assert not shows(path, 20.0, "logic", "FAIL: ")
    path.write_text("import nowhere_to_be_found")
    assert not shows(path, 20.0, "logic", DIFFERS)


DEADLY = """
import os, signal, time


def _has_exp(gm):
    return any("exp" in str(node.target) for node in gm.graph.nodes)


def dies(gm, _):
    if _has_exp(gm):
        os.kill(os.getpid(), signal.SIGSEGV)
    return gm.forward


def hangs(gm, _):
    if _has_exp(gm):
        time.sleep(600)
    return gm.forward


def five_percent(gm, _):
    return lambda *args: [r * 1.05 for r in gm(*args)] if _has_exp(gm) else gm(*args)
"""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a process that confirms changes its own


def _confirmed(folder: Path, name: str) -> Group:
    path = folder / "mine.py"
    path.write_text(DEADLY)
    question = {
        "program": encode_program(program_of("torch.neg", "torch.exp", "torch.sin", "torch.cos", "torch.tanh")),
        "asked": asdict(FuzzOptions(f"{path}:{name}", timeout=60.0, reduce_seconds=40.0)),
        "isolate": name != "five_percent",
        "localize": False,
    }
    confirm(question, AnswerFolder(folder))
    group = Record.from_json((folder / "result.json").read_text()).group
    assert group is not None
    return group


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("dies", "crash.signal"),
        pytest.param("hangs", "crash.hang", marks=[pytest.mark.slow, pytest.mark.ci_sample]),  # it waits
        ("five_percent", "logic"),
    ],
)
def test_a_failure_is_made_small_and_gets_a_script_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, detail: str
) -> None:
    monkeypatch.setattr(confirming, "_HUNG_SECONDS", 4.0)
    monkeypatch.setattr(confirming, "_ISOLATED_SECONDS", 8.0)
    group = _confirmed(tmp_path, name)
    assert group.program.ops == ("torch.exp",)
    assert group.result.detail == detail
    assert (group.op, group.stage, group.script_shows) == ("exp", "compiled", True)
    assert group.is_death == (detail != "logic")


def test_what_is_slow_but_ends_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller program that only takes longer than one waits while reducing is not taken for the bug."""
    monkeypatch.setattr(confirming, "death_of", lambda *asked: "crash.hang" if asked[-1] < 5 else "")
    monkeypatch.setattr(confirming, "_HUNG_SECONDS", 4.0)
    hung = ProgramResult(Status.FAIL, "did not end", kind="crash", detail="crash.hang")
    monkeypatch.setattr(confirming, "check_program", lambda *_args, **_more: hung)
    monkeypatch.setattr(confirming, "_script", lambda *_: ("", False))
    assert len(_confirmed(tmp_path, "hangs").program.ops) == 5


@pytest.mark.parametrize(("stage", "cheaper"), [("aot", "aot_eager"), ("eager", "eager"), ("compiled", "")])
@pytest.mark.parametrize("shown_there", [True, False])
def test_what_fails_before_the_compiler_is_made_small_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, cheaper: str, shown_there: bool
) -> None:
    asked = []

    def checked(program: FuzzProgram, compiler: Any, _options: Any = None, **_more: Any) -> ProgramResult:
        asked.append(compiler if isinstance(compiler, str) else "mine")
        if "torch.exp" not in program.ops or (asked[-1] != "mine" and not shown_there):
            return ProgramResult(Status.PASS)
        return ProgramResult(Status.FAIL, kind="alias", detail="alias.identity", stage=stage)

    monkeypatch.setattr(confirming, "check_program", checked)
    monkeypatch.setattr(confirming, "_script", lambda *_: ("", False))
    group = _confirmed(tmp_path, "five_percent")
    assert group.program.ops == ("torch.exp",)
    assert (group.detail, group.stage) == ("alias.identity", stage)
    assert set(asked) - {"mine"} == ({cheaper} - {""})
    if cheaper and shown_there:
        assert asked.count("mine") <= 3  # before, after, and with the stage
    else:
        assert asked.count("mine") > 3
