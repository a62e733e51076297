"""The verbs ``fuzz`` and ``selftest``, and ``report`` with the folder of a fuzz."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from checked_backend.fuzz.corpus import Corpus, Entry
from checked_backend.fuzz.planted import CONTROL, FAULTS
from checked_backend.fuzz.results import ProgramResult
from checked_backend.fuzz.selftest import Tried
from checked_backend.runs.case import Status
from tests.support.cli_tools import Run
from tests.support.fuzz_tools import PASS, STRIDES, failing, filled, group_of
from tests.support.started_programs import finished
from tests.support.torchfuzz_checkout import write_checkout

COMPILER = """
print("a compiler that talks")

def refuses(gm, example_inputs):
    raise NotImplementedError("no lowering for anything")
"""


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_compiler_of_the_users_own_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(COMPILER)
    monkeypatch.chdir(tmp_path)
    words = ["fuzz", "--compiler", "mine.py:refuses", "--programs", "1", "--longest", "2", "--static", "--inference"]
    code, out, err = run(*words, "--ops", "add", "--no-localize", "--repros", "repros", "--json")
    assert code == 1, err
    assert json.loads(out)["verdict"] == "fail"
    code, out, err = finished((sys.executable, next(iter((tmp_path / "repros").glob("repro_*.py")))), Path("/"))
    assert code == 1
    assert "no lowering for anything" in out + err


@pytest.mark.slow
def test_programs_of_torchfuzz_are_checked_grouped_and_kept(run: Run, tmp_path: Path) -> None:
    checkout = write_checkout(
        tmp_path / "pytorch", "torch.exp(var)", "torch.ops.aten.neg(var)", "torch.add(var, arg_1)"
    )
    db = tmp_path / "f"
    words = ["fuzz", "--generator", f"torchfuzz:{checkout}", "--compiler", "planted:refuses", "--out", db, "--static"]
    code, out, err = run(*words, "--programs", "4", "--time", "10m", "--ops", "add")
    assert code == 1, err
    assert out.startswith("FAIL: planted:refuses")
    assert "= torch.add(" in out
    assert "of the generator's programs were left out: " in err
    assert "neg, which no program may call" in err
    code, _, err = run("fuzz", "--compiler", "planted:refuses", "--out", db, "--programs", "1")
    assert code == 3
    assert "was begun with generator 'torchfuzz:" in err


def _with_results(path: Path) -> Path:
    with Corpus(path, write=True) as corpus:
        corpus.settle({"compiler": "inductor", "torch": "2.13.0"})
        _, second = filled(corpus, ("torch.exp", PASS), ("torch.neg", failing()))
        corpus.put(group_of("torch.neg"), second)
        corpus.put(group_of("torch.abs", **STRIDES))
    return path


def test_report_refuses_what_a_fuzz_has_not(run: Run, tmp_path: Path) -> None:
    db = _with_results(tmp_path / "f")
    code, _, err = run("report", db, "--run", "1")
    assert code == 3
    assert "--run" in err
    code, _, err = run("report", db, "--certificate")
    assert code == 3
    assert "a fuzz has no certificate" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--compiler", "nothing_of_that_name"), "nothing_of_that_name"),
        (("--compiler", "nothing.py:mine"), "nothing.py: no such file"),
        (("--seed", str(10**20)), f"--seed got {10**20}; expected a whole number from -2**63 to 2**63 - 1"),
        (("--against", "missing"), "not the folder of a fuzz"),
        (("--generator", "torchfuzz:nowhere"), "no torchfuzz in it"),
        (("--ops", "nothing_of_that_name"), "--ops names no operation that is known"),
        (("--generator", "other"), "expected own, or torchfuzz:DIR"),
        (("--generator", "torchfuzz:nowhere", "--dtype", "float32"), "torchfuzz chooses its own dtypes"),
    ],
)
def test_misuse_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("fuzz", *words)
    assert code == 3
    assert message in err
    assert not list(tmp_path.iterdir())


def test_a_run_gets_what_the_user_asks_for(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    module = import_module("checked_backend.fuzz.drive")

    def run_fuzz(what: Any, corpus: Corpus, _progress: Any) -> None:
        asked.append(what)
        corpus.add([Entry(3, number, "", ProgramResult(Status.SKIPPED, "streams")) for number in range(3)])

    monkeypatch.setattr(module, "run_fuzz", run_fuzz)
    checkout = write_checkout(tmp_path / "pytorch", "var")
    words = ["--generator", f"torchfuzz:{checkout}", "--out", tmp_path / "f", "--seed", "3", "--ops", "add"]
    code, _, err = run("fuzz", *words, "--html", tmp_path / "f.html")
    assert code == 2
    assert "3 of the generator's programs were left out: streams (3)" in err
    assert (asked[0].seed, asked[0].choices.ops) == (3, ("add",))
    assert Path(asked[0].generator).name == "torchfuzz"
    assert "INCONCLUSIVE" in (tmp_path / "f.html").read_text()


def test_what_another_folder_has_is_known(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_fuzz(_asked: Any, corpus: Corpus, _progress: Any) -> None:
        (program,) = filled(corpus, ("torch.neg", failing()))
        corpus.put(group_of("torch.neg"), program)

    monkeypatch.setattr(import_module("checked_backend.fuzz.drive"), "run_fuzz", run_fuzz)
    code, out, _ = run("fuzz", "--out", tmp_path / "new")
    assert (code, "1 fail\n" in out) == (1, True), out
    code, out, _ = run("fuzz", "--out", tmp_path / "f", "--against", _with_results(tmp_path / "known"))
    assert (code, "1 fail (1 expected)\n" in out) == (0, True), out


def test_selftest_tells_what_was_caught(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [Tried("logic", "an operator is wrong", True, 3, 0, "logic: output[0]"), Tried("none", "", False, 25, 1)]
    monkeypatch.setattr(import_module("checked_backend.fuzz.selftest"), "run_selftest", lambda _place: results)
    code, out, _ = run("selftest")
    assert code == 0
    assert out.splitlines()[0] == "PASS: 1 of 1 planted faults were caught"
    assert "25 programs, 1 left out: torch alone gets them wrong in the same way: nothing was reported" in out
    results.append(Tried("alias", "a view is a copy", False, 200))
    code, out, _ = run("selftest")
    assert code == 1
    assert "MISSED alias" in out
    results[1] = Tried("none", "", True, 4, 0, "logic: output[0]")
    code, out, _ = run("selftest", "--json")
    assert code == 1
    assert json.loads(out)["faults"][1]["right"] is False


@pytest.mark.process
def test_a_short_selftest_from_the_command_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("checked_backend.fuzz.selftest")
    monkeypatch.setattr(module, "FAULTS", {name: FAULTS[name] for name in (CONTROL, "logic", "dies")})
    monkeypatch.setattr(module, "_CONTROL_PROGRAMS", 1)
    code, out, _ = run("selftest")
    assert code == 0, out
    assert out.startswith("PASS: 2 of 2 planted faults were caught"), out
