"""What ranks tell one another through a store, here within one process, and what one says that ends after another."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

import checked_backend as cb
from checked_backend.findings import Finding, Kind
from checked_backend.report import Report, peers
from checked_backend.report.ledger import Ledger
from checked_backend.report.peers import ExitMessage, Peers
from checked_backend.report.write import KeptReport


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    shared = HashStore()
    monkeypatch.setattr(peers, "default_store", lambda: shared)
    monkeypatch.setattr(peers, "distributed_is_on", lambda: True)
    return shared


def report(kind: Kind = Kind.LOGIC, subject: str = "output[7]") -> Report:
    ledger = Ledger()
    ledger.add_findings([Finding(kind, subject, "wrong")])
    return ledger.report("region")


def announced_by(rank: int, subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "process_rank", lambda: rank)
    Peers().announce(report(subject=subject), ends=False)


def test_every_announcement_of_others_is_read_once(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    announced_by(1, "output[0]", monkeypatch)
    announced_by(0, "output[1]", monkeypatch)
    own = Peers()
    assert [(news.rank, news.report.findings[0].subject) for news in own.news()] == [(1, "output[0]")]
    assert own.news() == []
    announced_by(2, "output[2]", monkeypatch)
    monkeypatch.setattr(peers, "process_rank", lambda: 0)
    assert [news.rank for news in own.news()] == [2]


def test_a_rank_that_dies_while_it_announces_hides_no_other(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    number = store.add("checked_backend/count", 1)  # and then it is killed
    announced_by(2, "output[2]", monkeypatch)
    monkeypatch.setattr(peers, "process_rank", lambda: 0)
    own = Peers()
    assert [news.rank for news in own.news()] == [2]
    announced_by(1, "output[1]", monkeypatch)
    store.set(f"checked_backend/{number}", store.get("checked_backend/3"))  # it was only slow
    monkeypatch.setattr(peers, "process_rank", lambda: 0)
    assert [news.rank for news in own.news()] == [1, 1]


@pytest.fixture
def message(store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExitMessage:
    """Those of rank 1, which a broken connection ends."""
    monkeypatch.setattr(peers, "PEERS", Peers())
    monkeypatch.setattr(peers.atexit, "register", lambda _function: None)
    monkeypatch.setattr(sys, "last_value", RuntimeError("Connection closed by peer"), raising=False)
    of_rank(1, monkeypatch)
    made = ExitMessage()
    made.prepare(tmp_path)
    return made


def of_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "process_rank", lambda: rank)
    monkeypatch.setenv("RANK", str(rank))


@pytest.mark.parametrize("ends", [True, False])
def test_a_report_that_another_rank_has_ended_with_is_printed(
    message: ExitMessage, ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_rank(0, monkeypatch)
    Peers().announce(report(), ends=ends)
    of_rank(1, monkeypatch)
    message.say()
    printed = capsys.readouterr().err
    assert ("rank 0 on" in printed) == ("output[7]" in printed) == ends


def test_where_the_store_went_with_its_rank_the_file_is_read(
    message: ExitMessage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_rank(0, monkeypatch)
    KeptReport(tmp_path).save(report())
    of_rank(1, monkeypatch)
    message.say()
    assert "rank 0 has ended its program" in capsys.readouterr().err


@pytest.mark.parametrize("written", ["by this rank", "in an earlier run", "without a failure"])
def test_other_files_are_not_taken_for_the_reason(
    message: ExitMessage,
    tmp_path: Path,
    written: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    of_rank(1 if written == "by this rank" else 0, monkeypatch)
    path = KeptReport(tmp_path).save(report(Kind.UNSUPPORTED if written == "without a failure" else Kind.LOGIC)).path
    assert path is not None
    if written == "in an earlier run":
        os.utime(path, (time.time() - 3600,) * 2)
    of_rank(1, monkeypatch)
    message.say()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("ended", [None, KeyboardInterrupt(), cb.DivergenceError(report())])
def test_a_rank_that_ends_otherwise_says_nothing(
    message: ExitMessage,
    ended: BaseException | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "last_value", ended)
    of_rank(0, monkeypatch)
    Peers().announce(report(), ends=True)
    of_rank(1, monkeypatch)
    message.say()
    assert not capsys.readouterr().err
