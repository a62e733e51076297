"""Reports of several ranks as one: what any of them knows is told, and nothing is better than the worst of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from checked_backend.findings import Coverage, EvidenceKey, Finding, Kind, RegionInfo, Severity, Skip, Verdict
from checked_backend.report import Report
from checked_backend.report.merged import merged_report

WRONG = Finding(Kind.LOGIC, "grad[w]", "wrong", region="Net.forward [0/0]", detail="logic.values")
CLEAN = Report(
    (),
    Coverage(
        regions=(RegionInfo("Net.forward [0/0]", calls=10, checked_calls=4, nodes=3, last_checked_call=8),),
        checked={"outputs": 4},
        detection_limit={"grad[w]": 1e-9},
        own_precision_limit={"grad[w]": 0.02},
    ),
    "Net.forward [0/0]",
    {"torch": "2.13.0", "cpu": "one"},
)
FAIL = replace(CLEAN, findings=(WRONG,))
VAGUE = replace(CLEAN, coverage=replace(CLEAN.coverage, skipped=(Skip("output[1]", "why", matters=True),)))
NOTHING = Report((), Coverage(), "Net.forward [1/0]")


def on_rank(report: Report, rank: int, number: int = 0) -> Report:
    findings = tuple(
        replace(one, ranks=(f"{rank} on host",), evidence={EvidenceKey.RANK: f"{rank} on host"})
        for one in report.findings
    )
    path = Path(f"/reports/net-20260102T030405Z-rank{rank}-{rank + 100}-{number}.json")
    return replace(report, findings=findings, path=path)


@pytest.mark.parametrize("reports", list(product([CLEAN, FAIL, VAGUE, NOTHING], repeat=2)))
def test_the_verdict_is_the_worst_of_all(reports: tuple[Report, ...]) -> None:
    assert merged_report(reports).verdict is Verdict.worst([report.verdict for report in reports])


def test_a_finding_of_several_ranks_is_told_once_with_its_ranks() -> None:
    merged = merged_report([on_rank(FAIL, 10), on_rank(CLEAN, 1), on_rank(FAIL, 2), on_rank(FAIL, 2, 1)])
    assert [found.ranks for found in merged.findings] == [("2 on host", "10 on host")]
    assert [found.evidence[EvidenceKey.RANK] for found in merged.findings] == ["2 on host, 10 on host"]


def test_the_rank_that_knows_the_operator_stands_for_the_others() -> None:
    knows = replace(FAIL, findings=(replace(WRONG, op="aten.relu.default"),))
    merged = merged_report([on_rank(FAIL, 0), on_rank(knows, 1)])
    assert [found.op for found in merged.findings] == ["aten.relu.default"]
    assert merged.findings[0].evidence[EvidenceKey.RANK] == "0 on host, 1 on host"


def test_other_subjects_regions_details_and_severities_are_findings_of_their_own() -> None:
    others = [
        replace(WRONG, subject="grad[v]"),
        replace(WRONG, region="Net.forward [1/0]"),
        replace(WRONG, detail="logic.ranks"),
        replace(WRONG, severity=Severity.WARNING),
    ]
    merged = merged_report([replace(FAIL, findings=(WRONG,)), replace(FAIL, findings=tuple(others))])
    assert merged.findings == (WRONG, *others)


def test_calls_of_ranks_are_summed_and_those_that_one_rank_told_before_are_not_counted_twice() -> None:
    region = replace(CLEAN.coverage.regions[0], calls=20, checked_calls=5, last_checked_call=16)
    later = replace(CLEAN, coverage=replace(CLEAN.coverage, regions=(region,), checked={"outputs": 5}))
    coverage = merged_report([on_rank(CLEAN, 0), on_rank(later, 0, 1), on_rank(CLEAN, 1)]).coverage
    assert coverage.checked == {"outputs": 9}
    assert coverage.regions == (replace(region, calls=30, checked_calls=9),)


def test_limits_are_the_worst_and_other_machines_are_told() -> None:
    worse = replace(CLEAN.coverage, detection_limit={"grad[w]": 1e-3}, own_precision_limit={"output[0]": 0.5})
    other = replace(CLEAN, coverage=worse, environment={"torch": "2.13.0", "cpu": "another"})
    merged = merged_report([CLEAN, other])
    assert merged.coverage.detection_limit == {"grad[w]": 1e-3}
    assert merged.coverage.own_precision_limit == {"grad[w]": 0.02, "output[0]": 0.5}
    assert merged.environment == {"torch": "2.13.0", "cpu": "one; another"}
    assert merged.title == "Net.forward [0/0]"
    assert Report.from_json(merged.to_json()) == merged


def test_a_limit_that_is_no_number_is_the_worst() -> None:
    nan = replace(CLEAN, coverage=replace(CLEAN.coverage, detection_limit={"grad[w]": float("nan")}))
    for reports in ([nan, CLEAN], [CLEAN, nan]):
        limit = merged_report(reports).coverage.detection_limit["grad[w]"]
        assert limit != limit
