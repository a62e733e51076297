"""Reports of several ranks, or of several processes of one program, as one report."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import add

from checked_backend.findings import Coverage, EvidenceKey, Finding, RegionInfo, Skip
from checked_backend.report.report import Report

_PROCESS = re.compile(r"Z-((?:rank\d+-)?\d+)-\d+\.json$")
"""The rank and the process in the name of a report's file."""


def merged_report(reports: Sequence[Report]) -> Report:
    """Make one report of several.

    A finding that several ranks have is told once, as the first of them has it, with all their names. What was skipped
    anywhere is skipped, limits are the worst of all, and a fact about the machines that is not everywhere the same is
    told with each of its values. The verdict follows from all of that, so it is the worst of all. Several reports may
    come from one rank.
    """
    coverages = [report.coverage for report in reports]
    groups = list(_cumulated(reports))
    titles = list(dict.fromkeys(report.title for report in reports if report.title))
    return Report(
        _once(finding for report in reports for finding in report.findings),
        Coverage(
            regions=_regions(groups),
            checked=_counts(groups),
            skipped=_skips(reports),
            ignored=_once(finding for coverage in coverages for finding in coverage.ignored),
            notes=tuple(dict.fromkeys(note for coverage in coverages for note in coverage.notes)),
            detection_limit=_worst(coverage.detection_limit for coverage in coverages),
            own_precision_limit=_worst(coverage.own_precision_limit for coverage in coverages),
        ),
        title=titles[0] if len(titles) == 1 else f"{len(reports)} reports",
        environment=_facts(reports),
    )


def _once(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings, each once. One whose operator was found stands for those of other ranks that know less."""
    groups: dict[object, list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.identity, finding.severity), []).append(finding)
    return tuple(_of_all(group) for group in groups.values())


def _of_all(group: Sequence[Finding]) -> Finding:
    told = max(group, key=lambda finding: (finding.op is not None, finding.repro is not None))
    ranks = sorted({rank for finding in group for rank in finding.ranks}, key=_in_order)
    if len(ranks) < 2:
        return told
    return replace(told, ranks=tuple(ranks), evidence={**told.evidence, EvidenceKey.RANK: ", ".join(ranks)})


def _in_order(rank: str) -> tuple[int, str]:
    number = rank.partition(" ")[0]
    return (int(number) if number.isdecimal() else 0, rank)


def _cumulated(reports: Sequence[Report]) -> Iterator[list[Coverage]]:
    """Coverages, those that one process wrote of one thing together: each of these counts from the beginning."""
    groups: dict[object, list[Coverage]] = {}
    for place, report in enumerate(reports):
        process = None if report.path is None else _PROCESS.search(report.path.name)
        writer = place if process is None else (report.path.parent if report.path else None, process[1], report.title)
        groups.setdefault(writer, []).append(report.coverage)
    yield from groups.values()


def _counts(groups: Iterable[Sequence[Coverage]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for group in groups:
        for name in dict.fromkeys(name for coverage in group for name in coverage.checked):
            total[name] = total.get(name, 0) + max(coverage.checked.get(name, 0) for coverage in group)
    return total


def _regions(groups: Iterable[Sequence[Coverage]]) -> tuple[RegionInfo, ...]:
    """The regions by name. The calls of several processes are summed up."""
    known: dict[str, RegionInfo] = {}
    for group in groups:
        own: dict[str, RegionInfo] = {}
        for info in (info for coverage in group for info in coverage.regions):
            own[info.name] = _joined(own[info.name], info, max) if info.name in own else info
        for name, info in own.items():
            known[name] = _joined(known[name], info, add) if name in known else info
    return tuple(known.values())


def _joined(one: RegionInfo, other: RegionInfo, calls: Callable[[int, int], int]) -> RegionInfo:
    return RegionInfo(
        one.name,
        sources=tuple(dict.fromkeys((*one.sources, *other.sources))),
        nodes=max(one.nodes, other.nodes),
        calls=calls(one.calls, other.calls),
        checked_calls=calls(one.checked_calls, other.checked_calls),
        drawn_calls=calls(one.drawn_calls, other.drawn_calls),
        checked_backwards=calls(one.checked_backwards, other.checked_backwards),
        last_checked_call=max(one.last_checked_call, other.last_checked_call),
    )


def _skips(reports: Iterable[Report]) -> tuple[Skip, ...]:
    """Everything that was skipped anywhere. It matters if it did anywhere, as does a report that checked nothing."""
    known: dict[tuple[str, str, str], Skip] = {}
    for report in reports:
        checked = any(count > 0 for count in report.coverage.checked.values())
        nothing = [] if checked else [Skip(report.title or "a report", "nothing was checked", matters=True)]
        for skip in (*report.coverage.skipped, *nothing):
            key = skip.subject, skip.reason, skip.region
            known[key] = skip if skip.matters else known.get(key, skip)
    return tuple(known.values())


def _worst(limits: Iterable[Mapping[str, float]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for one in limits:
        for name, limit in one.items():
            worst[name] = max(worst.get(name, limit), limit, key=lambda one: (math.isnan(one), one))
    return worst


def _facts(reports: Sequence[Report]) -> dict[str, str]:
    values: dict[str, dict[str, None]] = {}
    for name, value in (fact for report in reports for fact in report.environment.items()):
        values.setdefault(name, {})[value] = None
    return {name: "; ".join(known) for name, known in values.items()}
