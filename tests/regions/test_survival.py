"""Whatever ends the process while the operator is looked for: what was found is on disk."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend import backends
from checked_backend.regions.failure import Failure
from checked_backend.report.write import read_reports
from tests.support import faults
from tests.support.raising import raising
from tests.support.started_programs import started

PROGRAM = """
import os, signal, sys
import torch
import checked_backend
from tests.support import faults
def handler(number, frame):
    print("the user's own handler ran in", os.getpid(), flush=True)
    sys.exit(7)
if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, handler)
def net(x):
    return torch.tanh(torch.relu(x) + 1) * x
print(os.getpid(), flush=True)
wrong = faults.wrong_operator("aten.relu.default", how="aot")
options = {"compiler": wrong, "report_dir": sys.argv[1]}
with torch.no_grad():
    torch.compile(net, backend="numcheck", options=options)(torch.randn(5, 6))
"""

LIMIT = 200.0


def known(folder: Path) -> dict[str, Any] | None:
    for file in folder.glob("*.json"):
        [finding] = json.loads(file.read_text("utf-8"))["findings"]
        return dict(finding)
    return None


def killed(folder: Path, number: signal.Signals, *, handler: bool, once_known: str) -> tuple[int, str]:
    """Run the program and kill it when the report on disk has a field; its exit status, and what it printed."""
    with started((sys.executable, "-c", PROGRAM, folder, "handler" if handler else ""), folder) as child:
        until = time.monotonic() + LIMIT
        while child.poll() is None and time.monotonic() < until:
            if (known(folder) or {}).get(once_known):
                child.send_signal(number)
                break
            time.sleep(0.005)
        printed, _ = child.communicate(timeout=LIMIT)
        return child.returncode, printed


@pytest.mark.process
def test_sigkill_right_after_the_first_finding(tmp_path: Path) -> None:
    status, _ = killed(tmp_path, signal.SIGKILL, handler=False, once_known="subject")
    assert status == -signal.SIGKILL
    found = read_reports(tmp_path)
    assert not found.broken
    [report] = found.reports
    assert report.verdict is cb.Verdict.FAIL
    [finding] = report.findings
    assert finding.subject == "output[0]"
    assert finding.metrics is not None
    assert str(finding.evidence["localized"]).startswith("not yet")


@pytest.mark.process
def test_sigterm_with_a_handler_of_the_users_once_the_operator_is_known(tmp_path: Path) -> None:
    status, printed = killed(tmp_path, signal.SIGTERM, handler=True, once_known="op")
    assert status == 7
    process = printed.split()[0]
    assert printed.count("handler ran in") == 1  # the worker is none of the user's program
    assert f"handler ran in {process}" in printed
    [report] = read_reports(tmp_path).reports
    [finding] = report.findings
    assert finding.op == "aten.relu.default"


# in this process


def compiled(folder: Path, **options: Any) -> Any:
    def net(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2

    return torch.compile(net, backend="numcheck", options={"compiler": faults.one_element(0), **options})


def reports_in(folder: Path) -> list[cb.Report]:
    found = read_reports(folder)
    assert not found.broken
    return list(found.reports)


def test_the_report_is_on_disk_and_in_the_session_before_localizing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[cb.Report], int]] = []

    def investigator(_failure: Failure, findings: Sequence[cb.Finding]) -> Sequence[cb.Finding]:
        seen.append((reports_in(tmp_path), len(session.report.findings)))
        return findings

    monkeypatch.setattr(backends, "investigate", investigator)
    with cb.collect() as session:
        compiled(tmp_path, report_dir=tmp_path, on_divergence="record")(torch.randn(4))
    [([before], in_session)] = seen
    assert before.verdict is cb.Verdict.FAIL
    assert in_session == 1
    [after] = reports_in(tmp_path)
    assert after.path == before.path
    assert "localized" not in after.findings[0].evidence


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_interrupts_localizing_loses_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    monkeypatch.setattr(backends, "investigate", raising(stop))
    raised = cb.DivergenceError if stop is MemoryError else stop
    with cb.collect() as session, pytest.raises(raised):
        compiled(tmp_path, report_dir=tmp_path)(torch.randn(4))
    assert [report.verdict for report in (session.report, *reports_in(tmp_path))] == [cb.Verdict.FAIL] * 2


def test_a_second_finding_while_the_first_is_localized_has_its_own_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def investigator(_failure: Failure, findings: Sequence[cb.Finding]) -> Sequence[cb.Finding]:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(60)
        return findings

    monkeypatch.setattr(backends, "investigate", investigator)
    first, second = (compiled(tmp_path, report_dir=tmp_path, on_divergence="record") for _ in range(2))
    thread = threading.Thread(target=first, args=(torch.randn(4),))
    thread.start()
    try:
        assert begun.wait(60)
        second(torch.randn(5))
        assert len(reports_in(tmp_path)) == 2
    finally:
        go_on.set()
        thread.join()
    assert len(reports_in(tmp_path)) == 2
