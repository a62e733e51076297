"""What a ledger says of findings that become more than they were."""

from __future__ import annotations

from dataclasses import replace

from checked_backend import Finding, Kind
from checked_backend.findings import RegionInfo
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


def test_calls_that_are_passed_by_are_counted_with_the_others() -> None:
    ledger, region = Ledger(), RegionInfo("f", nodes=3)
    ledger.passed_by(region)
    ledger.region(replace(region, calls=1, checked_calls=1, last_checked_call=1))
    ledger.passed_by(region)
    [known] = ledger.coverage().regions
    assert known == replace(region, calls=3, checked_calls=1, last_checked_call=2)
    ledger.passed_by(region)
    assert ledger.coverage().regions[0].calls == 4
