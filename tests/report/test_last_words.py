"""A rank that ends by an exception tells which other rank has ended its program, and with what."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

import checked_backend as cb
from checked_backend.findings import Finding, Kind
from checked_backend.report import Report, last_words, peers
from checked_backend.report.kept import KeptReport
from checked_backend.report.last_words import LastWords
from checked_backend.report.ledger import Ledger
from checked_backend.report.peers import Peers

LOST = RuntimeError("Connection closed by peer")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LastWords:
    """Those of rank 1, which a broken connection ends."""
    store, own = HashStore(), Peers()
    monkeypatch.setattr(peers, "default_store", lambda: store)
    for module in (peers, last_words):
        monkeypatch.setattr(module, "distributed_is_on", lambda: True)
    monkeypatch.setattr(last_words, "peers_of_run", lambda: own)
    monkeypatch.setattr(last_words.atexit, "register", lambda _function: None)
    monkeypatch.setattr(sys, "last_value", LOST, raising=False)
    of_rank(1, monkeypatch)
    made = LastWords()
    made.prepare(tmp_path)
    return made


def of_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (peers, last_words):
        monkeypatch.setattr(module, "process_rank", lambda: rank)
    monkeypatch.setenv("RANK", str(rank))


def report(kind: Kind = Kind.LOGIC) -> Report:
    ledger = Ledger()
    ledger.add_findings([Finding(kind=kind, subject="output[7]", message="wrong")])
    return ledger.report("region")


@pytest.mark.parametrize("ends", [True, False])
def test_a_report_that_another_rank_has_ended_with_is_printed(
    words: LastWords, ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_rank(0, monkeypatch)
    Peers().announce(report(), ends=ends)
    of_rank(1, monkeypatch)
    words.say()
    printed = capsys.readouterr().err
    assert ("rank 0 on" in printed) == ("output[7]" in printed) == ends


def test_where_the_store_went_with_its_rank_the_file_is_read(
    words: LastWords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_rank(0, monkeypatch)
    KeptReport(tmp_path).save(report())
    of_rank(1, monkeypatch)
    words.say()
    assert "rank 0 has ended its program" in capsys.readouterr().err


@pytest.mark.parametrize("written", ["by this rank", "in an earlier run", "without a failure"])
def test_other_files_are_not_taken_for_the_reason(
    words: LastWords, tmp_path: Path, written: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_rank(1 if written == "by this rank" else 0, monkeypatch)
    path = KeptReport(tmp_path).save(report(Kind.UNSUPPORTED if written == "without a failure" else Kind.LOGIC)).path
    assert path is not None
    if written == "in an earlier run":
        os.utime(path, (time.time() - 3600,) * 2)
    of_rank(1, monkeypatch)
    words.say()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("ended", [None, KeyboardInterrupt(), cb.DivergenceError(report())])
def test_a_rank_that_ends_otherwise_says_nothing(
    words: LastWords,
    ended: BaseException | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "last_value", ended)
    of_rank(0, monkeypatch)
    Peers().announce(report(), ends=True)
    of_rank(1, monkeypatch)
    words.say()
    assert not capsys.readouterr().err
