"""Report files."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checked_backend.findings import Coverage, Finding, Kind
from checked_backend.report import Report, write
from checked_backend.report.file_names import free_path, process_rank, this_moment
from checked_backend.report.write import (
    KeptReport,
    files_of_one_report,
    keep_alone,
    read_reports,
    write_report,
    write_whole,
)
from tests.support.raising import raising


def titled(title: str) -> Report:
    return Report((), Coverage(checked={"outputs": 1}), title)


def test_written_and_read(tmp_path: Path) -> None:
    path = write_report(titled("My Model: forward"), tmp_path / "made" / "here")
    assert re.fullmatch(rf"my-model-forward-\d{{8}}T\d{{6}}Z-{os.getpid()}-0\.json", path.name)
    for place in (path, path.parent):
        found = read_reports(place)
        assert not found.broken
        assert [(report.title, report.path) for report in found.reports] == [("My Model: forward", path)]


full = raising(OSError(28, "No space left on device"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    st.text() | st.sampled_from(["../../x", "/etc/passwd", "..", "", "C:\\x", "a" * 500, "-rf", ".hidden", "\0", "ü"])
)
def test_name_stays_in_the_folder(tmp_path: Path, title: str) -> None:
    path = write_report(titled(title), tmp_path)
    assert path.parent == tmp_path
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*-\d{8}T\d{6}Z-\d+-\d+\.json", path.name)
    assert len(path.name) < 120
    assert path.is_file()


def test_concurrent_writers_get_their_own_files(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda number: write_report(titled(f"same {number % 2}"), tmp_path), range(60)))
    assert len(set(paths)) == 60
    found = read_reports(tmp_path)
    assert (len(found.reports), found.broken) == (60, ())
    assert not [entry for entry in tmp_path.iterdir() if entry.suffix != ".json"]


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(titled("x"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="file"):
        write_report(titled("x"), blocked / "folder")


def test_names_that_are_taken_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def now(zone: timezone) -> datetime:
            return datetime(2026, 1, 2, 3, 4, 5, tzinfo=zone)

    monkeypatch.setattr(write, "datetime", Clock)
    stem = f"x-20260102T030405Z-{os.getpid()}"
    (tmp_path / f".{stem}-0.json.tmp").write_text("left by a process that was killed")
    (tmp_path / f"{stem}-1.json").write_text("somebody's")
    assert write_report(titled("x"), tmp_path).name == f"{stem}-2.json"
    assert (tmp_path / f"{stem}-1.json").read_text() == "somebody's"
    assert not (tmp_path / f".{stem}-1.json.tmp").exists()


def test_broken_files_are_listed(tmp_path: Path) -> None:
    good = write_report(titled("good"), tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "other.txt").write_text("not looked at")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.json")  # must not block
    found = read_reports(tmp_path)
    assert [report.path for report in found.reports] == [good]
    broken = {path.name: reason for path, reason in found.broken}
    assert {"bad.json", "binary.json", "folder.json"} <= set(broken)
    assert broken["folder.json"] == "not a report: not a regular file"
    assert broken["binary.json"].startswith("not a report: not UTF-8 text: ")


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_reports(tmp_path / "nowhere")


def test_write_whole_keeps_the_old_file_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "page.html"
    write_whole("old \ud800", target)
    assert target.read_text() == "old \\ud800"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_whole("new", target)
    assert target.read_text() == "old \\ud800"
    assert list(tmp_path.iterdir()) == [target]
    write_whole("new", target)
    assert target.read_text() == "new"
    write_whole("gone", Path(os.devnull))


# a report that is on disk from the first finding on


def about(op: str | None) -> Report:
    return Report((Finding(Kind.LOGIC, "output[0]", "wrong", op=op),), Coverage(checked={"outputs": 1}), title="region")


def on_disk(folder: Path) -> list[str | None]:
    found = read_reports(folder)
    assert not found.broken
    return [finding.op for report in found.reports for finding in report.findings]


def test_it_is_completed_in_its_own_file(tmp_path: Path) -> None:
    file = KeptReport(tmp_path)
    first = file.save(about(None))
    assert on_disk(tmp_path) == [None]
    file.progress(about("aten.relu"))
    assert on_disk(tmp_path) == ["aten.relu"]
    assert file.save(about("aten.gelu")).path == first.path
    assert on_disk(tmp_path) == ["aten.gelu"]
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize("rank", [None, "0"])
@pytest.mark.parametrize("written", [True, False])
def test_the_reports_of_regions_go_when_the_report_of_the_program_is_there(
    written: bool, rank: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    before = KeptReport(tmp_path).save(about("aten.before"))
    with files_of_one_report() as files:
        KeptReport(tmp_path).save(about("aten.relu"))
        whole = about("aten.gelu")
        keep_alone(KeptReport(tmp_path).save(whole) if written else whole, files)
    left = {"aten.before", "aten.gelu"} if written else {"aten.before", "aten.relu"}
    assert set(on_disk(tmp_path)) == (left if rank is None or not written else left | {"aten.relu"})
    assert before.path.exists()
    KeptReport(tmp_path).save(about("aten.after"))
    assert len(files) == 1 + written


def test_a_folder_that_cannot_be_written_is_said_in_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    report = KeptReport(blocked / "reports").save(about(None))
    assert report.path is None
    assert "could not be written to" in str(report)
    assert "report_dir" in str(report)
    assert "could not be written to" in caplog.text


def test_a_disk_that_fills_up_later_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeptReport(tmp_path)
    file.save(about(None))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        file.progress(about("aten.relu"))
        report = file.save(about("aten.relu"))
    assert report.path is not None
    assert "No space left" in str(report)
    assert on_disk(tmp_path) == [None]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interruption_lets_the_file_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    original, interrupted = write.write_report, []

    def interrupting(report: Report, folder: Path, over: Path | None) -> Path:
        if not interrupted:
            interrupted.append(True)
            raise stop
        return original(report, folder, over)

    monkeypatch.setattr(write, "write_report", interrupting)
    with pytest.raises(stop):
        KeptReport(tmp_path).save(about(None))
    assert on_disk(tmp_path) == [None]


MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def test_the_process_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert this_moment(MOMENT) == f"20260102T030405Z-{os.getpid()}"


def test_two_ranks_in_the_same_second_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        names.add(this_moment(MOMENT))
    assert names == {f"20260102T030405Z-rank{rank}-{os.getpid()}" for rank in (0, 1)}


def test_the_process_group_knows_better_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    assert process_rank() == 3


@pytest.mark.parametrize("rank", ["", "-1", "one", "../1", "1" * 50])
def test_what_is_no_rank_is_none(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    assert process_rank() is None


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        path = free_path(tmp_path, "repro_relu", ".py")
        path.touch()
        names.append(path.name)
    assert names == ["repro_relu.py", "repro_relu_1.py", "repro_relu_2.py"]
