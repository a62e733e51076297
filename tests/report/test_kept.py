"""A report that is on disk from the first finding on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from checked_backend.findings import Coverage, Finding, Kind
from checked_backend.report import Report, kept
from checked_backend.report.kept import KeptReport, files_of_one_report, keep_alone
from checked_backend.report.write import read_reports


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
    assert before.path is not None
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
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

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
@pytest.mark.parametrize("late", [False, True])
def test_an_interruption_lets_the_file_be_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException], late: bool
) -> None:
    original, interrupted = kept.write_report, []

    def interrupting(*args: Any, **kwargs: Any) -> Path:
        if late:
            original(*args, **kwargs)
        if not interrupted:
            interrupted.append(True)
            raise stop
        return original(*args, **kwargs)

    monkeypatch.setattr(kept, "write_report", interrupting)
    with pytest.raises(stop):
        KeptReport(tmp_path).save(about(None))
    assert on_disk(tmp_path) == [None]
