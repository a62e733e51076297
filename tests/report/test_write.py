"""Report files."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checked_backend.findings import Coverage
from checked_backend.report import Report, write
from checked_backend.report.write import read_reports, write_report, write_whole

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*-\d{8}T\d{6}Z-\d+-\d+\.json")


def titled(title: str) -> Report:
    return Report((), Coverage(checked={"outputs": 1}), title)


def test_written_and_read(tmp_path: Path) -> None:
    path = write_report(titled("My Model: forward"), tmp_path / "made" / "here")
    assert re.fullmatch(rf"my-model-forward-\d{{8}}T\d{{6}}Z-{os.getpid()}-0\.json", path.name)
    for place in (path, path.parent):
        found = read_reports(place)
        assert not found.broken
        assert [(report.title, report.path) for report in found.reports] == [("My Model: forward", path)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    st.text() | st.sampled_from(["../../x", "/etc/passwd", "..", "", "C:\\x", "a" * 500, "-rf", ".hidden", "\0", "ü"])
)
def test_name_stays_in_the_folder(tmp_path: Path, title: str) -> None:
    path = write_report(titled(title), tmp_path)
    assert path.parent == tmp_path
    assert NAME.fullmatch(path.name)
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
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

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

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_whole("new", target)
    assert target.read_text() == "old \\ud800"
    assert list(tmp_path.iterdir()) == [target]
    write_whole("new", target)
    assert target.read_text() == "new"
    write_whole("gone", Path(os.devnull))
