"""What ranks tell one another through a store, here within one process."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from checked_backend.findings import Finding, Kind
from checked_backend.report import Report, peers
from checked_backend.report.ledger import Ledger
from checked_backend.report.peers import Peers


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    shared = HashStore()
    monkeypatch.setattr(peers, "default_store", lambda: shared)
    monkeypatch.setattr(peers, "distributed_is_on", lambda: True)
    return shared


def report(subject: str) -> Report:
    ledger = Ledger()
    ledger.add_findings([Finding(kind=Kind.LOGIC, subject=subject, message="wrong")])
    return ledger.report("region")


def announced_by(rank: int, subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "process_rank", lambda: rank)
    Peers().announce(report(subject), ends=False)


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
