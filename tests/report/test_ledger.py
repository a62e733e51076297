"""What a ledger says of findings that become more than they were."""

from __future__ import annotations

from dataclasses import replace

from checked_backend import Finding, Kind
from checked_backend.report.ledger import Ledger

CRASH = Finding(Kind.CRASH, "candidate", "it died", detail="crash.running", region="net [0/0]")


def test_a_finding_keeps_its_place_when_its_detail_becomes_known() -> None:
    ledger = Ledger()
    other = replace(CRASH, subject="output[0]", kind=Kind.LOGIC, detail="logic")
    ledger.add_findings([CRASH, other])
    localized = replace(CRASH, detail="crash.signal", op="aten.relu.default")
    ledger.complete([localized, other], [CRASH, other])
    assert ledger.findings() == (localized, other)
    assert not ledger.add_findings([CRASH])


def test_what_was_never_added_is_not_completed() -> None:
    ledger = Ledger()
    ledger.complete([CRASH])
    assert ledger.findings() == ()
