"""A run in its folder: what is kept, what a stranger's files can do, merging, and many cases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from checked_backend import SuiteError, Verdict
from checked_backend.runs.case import Attempt, Case, encode
from checked_backend.runs.folder import RunFolder
from checked_backend.runs.results import Plan, Results, WantedCase
from checked_backend.runs.summary import summarize
from checked_backend.runs.text import render_text
from tests.support.sweep_tools import VERSIONS, failing, keep, outcome

ROOT = Path(__file__).parents[2]


def kept_in(path: Path) -> dict[str, list[str]]:
    with Results(path) as results:
        return {
            wanted.case.model: [attempt.result.status.value for attempt in results.attempts(wanted)]
            for wanted in results.wanted.values()
        }


def test_what_is_written_is_read(tmp_path: Path) -> None:
    hang = outcome("hang", message="slow", seconds=2.0)
    path = keep(tmp_path / "new" / "a", {"a": failing(), "../b\n": hang})
    assert RunFolder.is_one(path, "sweep")
    assert sorted(file.name.partition("-")[0] for file in path.iterdir()) == ["a", "b", "sweep.json"]
    with Results(path) as results:
        found = [attempt.result for wanted in results.wanted.values() for attempt in results.attempts(wanted)]
    assert found == [failing(), hang]


def test_other_versions_need_another_folder(tmp_path: Path) -> None:
    with Results(keep(tmp_path / "a", {"a": outcome()}, "2.12.0"), write=True) as results:
        results.begin({**VERSIONS, "torch": "2.12.0"})
        with pytest.raises(SuiteError) as caught:
            results.begin({**VERSIONS, "triton": "3.5"})
    assert "other versions (torch 2.12.0 -> 2.13.0, triton none -> 3.5); give another --out" in str(caught.value)


def test_two_sweeps_do_not_write_to_one_folder(tmp_path: Path) -> None:
    path = tmp_path / "a"
    told = "another sweep writes to it; wait for it, or give another --out"
    with Results(path, write=True), pytest.raises(SuiteError, match=told):
        Results(path, write=True)
    with Results(path, write=True):
        pass


@pytest.mark.process
def test_what_is_complete_survives_kill_and_what_is_not_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    code = f"""
    import os, signal
    from pathlib import Path
    from tests.support.sweep_tools import keep, outcome
    path = Path({str(path)!r})
    keep(path, {{"a": outcome()}})
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    keep(path, {{"b": outcome("fail")}})
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT).returncode == -9
    assert any(file.suffix == ".tmp" for file in path.iterdir())
    assert kept_in(path) == {"a": ["pass"]}
    keep(path, {"b": outcome("fail")})
    assert kept_in(path) == {"a": ["pass"], "b": ["fail"]}


def test_a_folder_in_which_nothing_was_begun_can_be_used(tmp_path: Path) -> None:
    (tmp_path / ".12.tmp").touch()  # it was killed at once
    assert kept_in(keep(tmp_path, {"a": outcome()})) == {"a": ["pass"]}


def test_merging_twice_changes_nothing_and_keeps_both_attempts(tmp_path: Path) -> None:
    parts = [
        keep(tmp_path / name, {"shared": outcome(status, host=name), name: outcome(host=name)})
        for name, status in (("a", "pass"), ("b", "fail"))
    ]
    for expected in ([2, 2], [0, 0]):
        with Results(tmp_path / "all", write=True) as whole:
            new = []
            for part in parts:
                with Results(part) as other:
                    new.append(whole.merge(other))
        assert new == expected
    assert kept_in(tmp_path / "all") == {"shared": ["pass", "fail"], "a": ["pass"], "b": ["pass"]}


def test_copying_files_merges_too(tmp_path: Path) -> None:
    first, second = keep(tmp_path / "a", {"a": outcome()}), keep(tmp_path / "b", {"b": outcome("fail")})
    shutil.copytree(second, first, dirs_exist_ok=True)
    assert kept_in(first) == {"b": ["fail"], "a": ["pass"]}


def test_merging_other_versions_is_refused(tmp_path: Path) -> None:
    first, second = keep(tmp_path / "a", {"a": outcome()}), keep(tmp_path / "b", {"b": outcome()}, "2.12.0")
    with Results(first, write=True) as whole, Results(second) as other, pytest.raises(SuiteError, match="versions"):
        whole.merge(other)


GOOD = asdict(Attempt(Case("s", "m"), "s", "2026", outcome()))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "Invalid JSON"),
        (b"\x00\xff", "Invalid JSON"),
        (b"[" * 100000, "Invalid JSON"),
        (json.dumps({**GOOD, "result": {}}).encode(), "result.status: Field required"),
        (
            json.dumps({**GOOD, "case": {"suite": 1, "model": "m"}}).encode(),
            "case.suite: Input should be a valid string",
        ),
        (json.dumps({**GOOD, "finished": None}).encode(), "finished: Input should be a valid string"),
    ],
)
def test_a_damaged_file_is_told_and_kept_and_its_case_runs_again(tmp_path: Path, content: bytes, why: str) -> None:
    path = keep(tmp_path / "a", {"a": outcome(), "b": outcome()})
    (file,) = path.glob("a-*.json")
    file.write_bytes(content)
    with Results(path) as results:
        summary = summarize(results)
    assert summary.damaged[0].startswith(f"{file}: {why}")
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert f"no results (1), left as they are\n  {file}: {why}" in render_text(summary)
    keep(path, {"a": outcome()})
    assert file.with_name(f"{file.name}.damaged").read_bytes() == content
    assert kept_in(path) == {"a": ["pass"], "b": ["pass"]}


def test_files_that_are_too_large_or_lead_elsewhere_are_no_results(tmp_path: Path) -> None:
    path = keep(tmp_path / "a", {"a": outcome(), "b": outcome(), "c": outcome()})
    large, link, pipe = (next(path.glob(f"{name}-*.json")) for name in "abc")
    with large.open("ab") as stream:
        stream.truncate(65 * 2**20)
    link.rename(tmp_path / "outside")
    link.symlink_to(tmp_path / "outside")
    pipe.unlink()
    os.mkfifo(pipe)
    with Results(path) as results:
        told = "\n".join(results.damaged)
    assert f"{large}: larger than 64 MiB" in told
    assert told.count("not a regular file") == 2


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    with RunFolder(tmp_path / "a", "sweep", write=True) as folder:
        (folder.path / f".{os.getpid()}.tmp").symlink_to(victim)
        (folder.path / "sweep.json").symlink_to(victim)
        folder.write_plan("{}")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("nonsense", "Invalid JSON"),
        ("{}", "versions: Field required"),
        ('{"versions": [], "started": ""}', "versions: Input should be an object"),
        ('{"versions": {}, "started": "", "cases": [{"case": {"suite": "s"}}]}', "cases.0.case.model: Field required"),
    ],
)
def test_a_damaged_plan_is_told(tmp_path: Path, plan: str, why: str) -> None:
    path = keep(tmp_path / "a", {"a": outcome()})
    (path / "sweep.json").write_text(plan)
    for write in (False, True, True):  # nor does it stay locked
        with pytest.raises(SuiteError) as caught:
            Results(path, write=write)
        assert str(caught.value).startswith(f"{path / 'sweep.json'}: {why}")


def test_other_folders_and_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    for path in (text, tmp_path):
        for write in (False, True):
            with pytest.raises(SuiteError, match=r"not the folder of a sweep: there is no sweep\.json in it"):
                Results(path, write=write)
    assert text.read_text() == "hello"
    with pytest.raises(SuiteError, match="not the folder of a sweep"):
        Results(tmp_path / "none")


def test_what_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SuiteError, match="cannot be written to: No space left on device"):
        keep(tmp_path / "a", {"a": outcome()})


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_hundred_thousand_cases_are_listed_and_shown_in_seconds(tmp_path: Path) -> None:
    wanted = [WantedCase(Case("s", f"model{number}"), "s") for number in range(100_000)]
    (tmp_path / "sweep.json").write_text(encode(Plan(VERSIONS, "2026", wanted)))
    text = encode(Attempt(wanted[0].case, "s", "2026", failing()))
    for number in range(len(wanted)):
        (tmp_path / f"model{number}-{number:016x}.{0:012x}.json").write_text(text.replace("model0", f"model{number}"))
    began = time.process_time()  # others may run here, too
    with Results(tmp_path) as results:
        assert not any(not results.done(one) for one in wanted)
        summary = summarize(results)
    assert "100000 fail" in render_text(summary)
    assert time.process_time() - began < 60
    assert replace(summary, cases=()).verdict is Verdict.INCONCLUSIVE
