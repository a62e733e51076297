"""What a ledger says of findings that become more than they were."""

from __future__ import annotations

from dataclasses import replace

from checked_backend import Finding, Kind
from checked_backend.findings import RegionInfo, Severity, Skip
from checked_backend.report.ledger import MOST_UNDER_WAY, Ledger, PassedCalls

CRASH = Finding(Kind.CRASH, "candidate", "it died", detail="crash.running", region="net [0/0]")


def test_a_finding_keeps_its_place_when_its_detail_becomes_known() -> None:
    ledger = Ledger()
    other = replace(CRASH, subject="output[0]", kind=Kind.LOGIC, detail="logic")
    ledger.add_findings([CRASH, other])
    localized = replace(CRASH, detail="crash.signal", op="aten.relu.default")
    ledger.complete([localized, other], [CRASH, other])
    assert ledger.findings() == (localized, other)
    assert not ledger.add_findings([CRASH])


def test_news_are_findings_that_fail_when_they_are_new_and_when_more_is_known() -> None:
    told: list[list[str | None]] = []
    ledger = Ledger(lambda: told.append([finding.op for finding in ledger.findings()]))
    ledger.add_findings([replace(CRASH, subject="output[0]", severity=Severity.WARNING, op="layout")])
    assert not told
    ledger.add_findings([CRASH])
    ledger.add_findings([CRASH])  # in a later call
    ledger.complete([replace(CRASH, op="aten.relu.default")])
    assert told == [["layout", None], ["layout", "aten.relu.default"]]


def test_what_was_never_added_is_not_completed() -> None:
    ledger = Ledger()
    ledger.complete([CRASH])
    assert ledger.findings() == ()


def test_calls_that_are_passed_by_are_counted_with_the_others() -> None:
    ledger, region = Ledger(), RegionInfo("f", nodes=3)
    passed = PassedCalls(region, [ledger])
    passed.count += 1
    ledger.region(replace(region, calls=1, checked_calls=1, last_checked_call=1))
    passed.count += 1
    [known] = ledger.coverage().regions
    assert known == replace(region, calls=3, checked_calls=1, last_checked_call=2)
    passed.count += 1
    assert ledger.coverage().regions[0].calls == 4


def test_a_ledger_counts_the_calls_of_its_own_time_alone() -> None:
    region = RegionInfo("f", nodes=3)
    whole, part = Ledger(), Ledger()
    first = PassedCalls(region, [whole])
    first.count += 2
    first.end()
    both, other = PassedCalls(region, [whole, part]), PassedCalls(region, [whole])
    both.count += 3
    other.count += 5
    both.end()
    both.count += 7  # nobody reads it any more
    assert whole.coverage().regions[0].calls == 10
    assert part.coverage().regions[0].calls == 3


def test_what_never_ends_is_told_in_one_line_and_takes_no_more_memory_the_longer_a_run_is() -> None:
    ledger = Ledger()
    for number in range(3 * MOST_UNDER_WAY):
        ledger.begun(number, Skip(f"the gradients of call {number}", "it did not end", matters=True, region="f"))
    ledger.begun("another", Skip("the gradients of call 7", "it did not end", matters=True, region="g"))
    first, other = ledger.coverage().skipped
    assert first.subject == f"the gradients of call 0, and {3 * MOST_UNDER_WAY - 1} more"
    assert (other.subject, other.region) == ("the gradients of call 7", "g")
    assert len(ledger._begun) == MOST_UNDER_WAY
    for about in (*range(3 * MOST_UNDER_WAY), "another"):
        ledger.over(about)
    (left,) = ledger.coverage().skipped
    assert left.subject == f"the gradients of call 0, and {2 * MOST_UNDER_WAY} more"
