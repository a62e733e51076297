"""The verb ``sweep``, and ``report`` with the folder of a sweep."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import pytest

from checked_backend.cli import sweeping
from checked_backend.errors import SuiteError
from checked_backend.runs.case import Status
from checked_backend.runs.results import Results
from checked_backend.runs.summary import summarize
from checked_backend.sweep import drive
from checked_backend.sweep.plan import Listed, Sweep
from tests.support.cli_tools import Run
from tests.support.started_programs import finished, started
from tests.support.sweep_tools import failing, keep, outcome

MODELS = """
import torch
from torch._dynamo import register_backend

@register_backend
def one_percent_off(gm, inputs):
    return lambda *args: [out * 1.01 if out.is_floating_point() else out for out in gm(*args)]

def linear(batch_size=4):
    return torch.nn.Linear(8, 8), (torch.randn(batch_size, 8),)
"""


@pytest.mark.process
def test_a_compiler_of_the_users_own_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    words = ["sweep", f"python:{tmp_path / 'models.py'}", "--out", tmp_path / "s", "--threads", "1"]
    code, out, _ = run(*words, "--compiler", f"{tmp_path / 'models.py'}:one_percent_off")
    assert code == 1
    assert "models.py:one_percent_off): logic: output[0]" in out
    code, _, err = run(*words, "--compiler", f"{tmp_path / 'models.py'}:nothing")
    assert code == 3
    assert "has no function 'nothing'" in err


@pytest.mark.process
def test_list_runs_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [{"name": name, "canary": name == "bird", "fixed": False} for name in ("a", "bird")]
    monkeypatch.setattr(drive, "list_suite", lambda *_: Listed("timm", "timm", models, "", {"torch": "2.13"}, 0))
    code, out, _ = run("sweep", "timm", "--list", "--mode", "training:amp", "--out", tmp_path / "s")
    assert code == 0
    assert out.splitlines() == [
        "timm  a (training amp cpu, inductor)",
        "timm  bird (training amp cpu, inductor)  skipped: a canary model; --canary runs it",
    ]
    assert not (tmp_path / "s").exists()
    code, _, err = run("sweep", "timm", "timm", "--out", tmp_path / "s")
    assert (code, err) == (3, "checked-backend: two suites are called timm; sweep them into two folders\n")
    code, _, err = run("sweep", "timm", "--device", "cuda", "--out", tmp_path / "s")
    assert (code, err) == (3, "checked-backend: --device cuda: torch finds no CUDA device here\n")


@pytest.mark.parametrize(("words", "fresh"), [([], False), (["--fresh"], True)])
def test_fresh_is_handed_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], fresh: bool
) -> None:
    seen: list[Sweep] = []

    def warm(asked: Sweep) -> contextlib.nullcontext[None]:
        seen.append(asked)
        raise SuiteError("enough")

    monkeypatch.setattr(sweeping, "warm_process", warm)
    code, _, err = run("sweep", "timm", "--jobs", "3", "--out", tmp_path / "s", *words)
    assert (code, err) == (3, "checked-backend: enough\n")
    assert [(asked.fresh, asked.jobs) for asked in seen] == [(fresh, 3)]


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["timm", "--engine", "slurm"], "--engine got 'slurm'; expected local or ray"),
        (["timm", "--shard", "5/4"], "--shard got '5/4'"),
        (["timm", "--mode", "train"], "--mode got 'train'"),
        (["timm", "--dtype", "int8"], "dtype got 'int8'"),
        (["timm", "--device", "tpu"], "--device got 'tpu'"),
        (["timm", "--skip", "ugly"], "--skip got 'ugly'; expected slow"),
        (["timm", "--rerun", "ugly"], "--rerun got 'ugly'"),
        (["timm", "--config", "none.yaml"], "none.yaml: cannot be read"),
        (["timm", "--optimizer", "Addam"], "--optimizer got 'Addam', which torch.optim does not have"),
        (["timm", "--compiler-option", "fast"], "--compiler-option got 'fast'; give KEY=VALUE"),
    ],
)
def test_misuse(run: Run, tmp_path: Path, words: list[str], why: str) -> None:
    code, _, err = run("sweep", *words, "--out", tmp_path / "s")
    assert code == 3
    assert why in err


def test_report_shows_a_sweep_and_what_changed_since_another(run: Run, tmp_path: Path) -> None:
    before = keep(tmp_path / "before", {"a": outcome(), "b": outcome("fail")}, "2.12.0")
    after = keep(tmp_path / "after", {"a": failing(), "b": outcome()}, "2.13.0")
    code, out, _ = run("report", after, "--since", before)
    assert code == 1
    assert out.startswith(f"FAIL: {after} (torch 2.13.0")
    assert f"since {before} (torch 2.12.0" in out
    assert "a (inference float32 cpu, inductor): pass -> fail" in out
    assert "fixed (1)" in out
    code, out, _ = run("report", after)
    assert (code, "since" in out) == (1, False)
    code, _, err = run("report", after, "--since", tmp_path)
    assert code == 3
    assert "not the folder of a sweep" in err
    code, _, err = run("report", tmp_path, "--since", before)
    assert code == 3
    assert "only the folder of a sweep has that" in err


def test_merge(run: Run, tmp_path: Path) -> None:
    parts = [keep(tmp_path / name, {name: outcome()}) for name in ("a", "b")]
    code, _, err = run("sweep", "--merge", "--out", tmp_path / "all", *parts)
    assert code == 0
    assert err.replace("\n", "").count(": 1 results") == 2
    code, out, _ = run("report", tmp_path / "all")
    assert code == 0
    assert "2 pass" in out


HELD = """
import os, pathlib, signal, time, torch

folder = pathlib.Path(os.environ["SWEEP_TEST_FOLDER"])

def note(name):
    with (folder / "built").open("a") as stream:
        stream.write(name + "\\n")

def a_first():
    note("first")
    return torch.nn.Linear(2, 2), (torch.randn(1, 2),)

def b_killed():
    note("killed")
    os.kill(os.getpid(), signal.SIGKILL)

def c_held():
    note("held")
    while not (folder / "go").exists():
        time.sleep(0.05)
    return torch.nn.Linear(2, 2), (torch.randn(1, 2),)

def d_last():
    note("last")
    return torch.nn.Linear(2, 2), (torch.randn(1, 2),)
"""


@pytest.mark.slow
@pytest.mark.ci_sample
def test_kill_9_of_driver_and_worker_loses_nothing_and_runs_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    kept = tmp_path / "s"
    verb = (sys.executable, "-m", "checked_backend", "sweep", f"python:{tmp_path / 'held.py'}", "--out", kept)
    words = (*verb, "--compiler", "eager", "--threads", "1")
    environment = {"SWEEP_TEST_FOLDER": str(tmp_path)}
    built = tmp_path / "built"
    with started(words, tmp_path, environment) as driver:
        try:
            wait_until(lambda: built.exists() and "held" in built.read_text())
            (worker,) = children(driver.pid)
        finally:
            driver.kill()
    wait_until(lambda: not Path(f"/proc/{worker}").exists())
    with Results(kept) as results:
        assert summarize(results).counts == {Status.PASS: 1, Status.CRASH: 1}
    (tmp_path / "go").touch()
    code, out, _ = finished(words, tmp_path, environment)
    assert code == 1
    assert "3 pass, 1 crash" in out
    assert built.read_text().split() == ["first", "killed", "held", "held", "last"]  # only what had no result


def wait_until(true: object, seconds: float = 240.0) -> None:
    assert callable(true)
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


@pytest.mark.parametrize("words", [["--timeout", "inf"], ["--timeout", "nan"], ["--memory", "nan"], ["--memory", "-1"]])
def test_limits_are_numbers(run: Run, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    code, _, err = run("sweep", f"python:{tmp_path / 'models.py'}", "--out", tmp_path / "s", *words)
    assert code == 3
    assert f"{words[0]} got " in err or "Invalid value for" in err


@pytest.mark.process
def test_a_part_without_cases_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    words = ["sweep", f"python:{tmp_path / 'models.py'}", "--compiler", "eager", "--out", tmp_path / "s"]
    code, out, err = run(*words, "--shard", "3/3", "--threads", "1")
    assert (code, out) == (0, "")
    assert "part 3/3 has no cases: there are fewer cases than parts" in err


@pytest.mark.process
def test_names_that_forge_lines_are_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    path.write_text(MODELS + "\nMODELS = {'a\\nPASS': linear}\n")
    code, _, err = run("sweep", f"python:{path}", "--compiler", "eager", "--out", tmp_path / "s")
    assert code == 3
    assert "a model is called 'a\\nPASS'; expected a printable name that no other has" in err
