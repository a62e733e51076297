"""Ledgers gather findings and coverage over calls. Several threads share them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from checked_backend.findings import Coverage, EvidenceKey, Finding, RegionInfo, Skip
from checked_backend.report import Report
from checked_backend.report.environment import environment

MOST_UNDER_WAY = 64
"""Of so many things that have begun each may still end; of more the oldest will not."""

_PASSED_BY = (
    "never checked: none of the calls here was one of those that are checked (option every), or memory was short; "
    "watch more calls, or have more of them checked"
)


class Ledger:
    """Findings, skips and counts. Several threads may add to a ledger.

    ``on_news`` is called when a finding that fails is new, and when more is known of it.
    """

    def __init__(self, on_news: Callable[[], None] | None = None) -> None:
        self._on_news = on_news
        self._lock = threading.Lock()
        self._findings: dict[tuple[str, str, str], Finding] = {}
        self._repeats: Counter[tuple[str, str, str]] = Counter()
        self._ignored: dict[tuple[str, str, str], Finding] = {}
        self._skips: dict[Skip, None] = {}
        self._begun: dict[object, Skip] = {}
        self._never_over: dict[Skip, tuple[Skip, int]] = {}
        self._until_compared: dict[tuple[Skip, object], bool] = {}
        self._compared: Counter[tuple[object, bool]] = Counter()
        self._came_by: dict[object, Skip] = {}
        self._notes: dict[str, None] = {}
        self._checked: Counter[str] = Counter()
        self._limits: dict[str, float] = {}
        self._own_precision_limits: dict[str, float] = {}
        self._regions: dict[str, RegionInfo] = {}
        self._last_before: dict[str, int] = {}
        self._passing: dict[str, dict[PassedCalls, int]] = {}
        self._gradients_wanted: dict[object, Skip] = {}
        self._compiled_by: dict[str, None] = {}

    def add_findings(self, findings: Sequence[Finding], ignored: Sequence[Finding] = ()) -> tuple[Finding, ...]:
        """Add findings, and return the new ones; those known from an earlier call are only counted."""
        new = []
        with self._lock:
            for finding in findings:
                key = finding.identity
                self._repeats[key] += 1
                if key not in self._findings:
                    self._findings[key] = finding
                    new.append(finding)
            for finding in ignored:
                self._ignored.setdefault(finding.identity, finding)
        self._tell(new)
        return tuple(new)

    def _tell(self, findings: Iterable[Finding]) -> None:
        if self._on_news is not None and any(finding.fails for finding in findings):
            self._on_news()

    def complete(self, findings: Sequence[Finding], before: Sequence[Finding] | None = None) -> None:
        """Replace known findings by what has become of them since: an operator, a repro, another detail.

        ``before`` are the same ones as they were added, in order, if more than where they come from changed.
        """
        known = findings if before is None or len(before) != len(findings) else before
        with self._lock:
            for old, finding in zip(known, findings, strict=True):
                if old.identity in self._findings:
                    self._findings[old.identity] = finding
        self._tell(findings)

    def skip(self, skip: Skip) -> None:
        """Note something that was not checked."""
        with self._lock:
            self._skips.setdefault(skip)

    def begun(self, about: object, skip: Skip) -> None:
        """Note something that is not checked if it is never over."""
        with self._lock:
            self._begun[about] = skip
            if len(self._begun) > MOST_UNDER_WAY:  # the oldest never ends: a run may be long
                self._fold(self._begun.pop(next(iter(self._begun))), self._never_over)

    @staticmethod
    def _fold(skip: Skip, known: dict[Skip, tuple[Skip, int]]) -> None:
        alike = replace(skip, subject="")
        first, count = known.get(alike, (skip, 0))
        known[alike] = first, count + 1

    def _not_over(self) -> Iterator[Skip]:
        """What has begun and is not over, those of one region and reason together."""
        folded = dict(self._never_over)
        for skip in self._begun.values():
            self._fold(skip, folded)
        for first, count in folded.values():
            yield first if count == 1 else replace(first, subject=f"{first.subject}, and {count - 1} more")

    def over(self, about: object) -> None:
        """Note that something is over."""
        with self._lock:
            self._begun.pop(about, None)

    def skip_until_compared(self, skip: Skip, region: object, *, backward: bool) -> None:
        """Note a call that was not checked, which matters as long as no other call of its region was."""
        with self._lock:
            self._until_compared.setdefault((skip, region), backward)

    def _uncompared(self) -> Iterator[Skip]:
        told = (
            replace(skip, matters=self._compared[region, backward] <= 0)
            for (skip, region), backward in self._until_compared.items()
        )
        yield from dict.fromkeys(told)

    def note(self, note: str) -> None:
        """Note a remark that changes no verdict."""
        with self._lock:
            self._notes.setdefault(note)

    def count(self, checked: Mapping[str, int]) -> None:
        """Note comparisons that ran."""
        with self._lock:
            self._checked.update(checked)

    def limits(self, limits: Mapping[str, float], own_precision: Mapping[str, float]) -> None:
        """Note detection limits, and what is hidden at the tensors' own precision; the weakest of all calls is kept."""
        with self._lock:
            for noted, new in (self._limits, limits), (self._own_precision_limits, own_precision):
                for subject, limit in new.items():
                    noted[subject] = max(limit, noted.get(subject, 0.0))

    def region(self, info: RegionInfo, region: object = None) -> None:
        """Add a region's call counts to what is known of its name."""
        with self._lock:
            self._compared[region, False] += info.checked_calls
            self._compared[region, True] += info.checked_backwards
            known = self._known(info.name)
            if known is not None and info.checked_calls < 0:  # the latest was not checked after all
                info = replace(info, last_checked_call=self._last_before.get(info.name, 0) - known.calls)
            elif info.checked_calls > 0:
                self._last_before[info.name] = 0 if known is None else known.last_checked_call
            if known is None:
                self._regions[info.name] = info
            else:
                self._regions[info.name] = replace(
                    known,
                    calls=known.calls + info.calls,
                    checked_calls=known.checked_calls + info.checked_calls,
                    drawn_calls=known.drawn_calls + info.drawn_calls,
                    checked_backwards=known.checked_backwards + info.checked_backwards,
                    last_checked_call=known.calls + info.last_checked_call
                    if info.checked_calls
                    else known.last_checked_call,
                )

    def passing(self, calls: PassedCalls) -> None:
        """Read a counter of calls that are not checked, from now until `passed`."""
        with self._lock:
            self._regions.setdefault(calls.info.name, calls.info)
            self._passing.setdefault(calls.info.name, {})[calls] = calls.count
            skip = Skip("all calls", calls.reason, matters=True, region=calls.info.name)
            self._came_by.setdefault(calls.region, skip)

    def passed(self, calls: PassedCalls) -> None:
        """Read it for the last time."""
        with self._lock:
            self._known(calls.info.name)
            self._passing.get(calls.info.name, {}).pop(calls, None)

    def _known(self, name: str) -> RegionInfo | None:
        """The facts about a region, with the calls that were not checked; None if it is not known."""
        known, passed = self._regions.get(name), 0
        for calls, before in self._passing.get(name, {}).items():
            self._passing[name][calls] = calls.count
            passed += self._passing[name][calls] - before
        if known is not None and passed:
            known = self._regions[name] = replace(known, calls=known.calls + passed)
        return known

    def gradients_wanted(self, region: object, skip: Skip) -> None:
        """Note that a region's gradients are to be checked: it is told if none ever is."""
        with self._lock:
            self._gradients_wanted.setdefault(region, skip)

    def _passed_by(self) -> Iterator[Skip]:
        """Regions none of whose calls, or gradients, was checked. A reason that is known already is not told again."""
        told = {skip.region for skip in (*self._skips, *self._uncompared()) if skip.matters}
        told |= {finding.region for finding in self._findings.values()}
        for skip in dict.fromkeys(skip for region, skip in self._came_by.items() if self._compared[region, False] <= 0):
            if skip.region not in told:
                yield skip
        wanted = self._gradients_wanted.items()
        yield from dict.fromkeys(skip for region, skip in wanted if self._compared[region, True] <= 0)

    def add_coverage(self, coverage: Coverage) -> None:
        """Add what another ledger has gathered of one call."""
        self.count(coverage.checked)
        self.limits(coverage.detection_limit, coverage.own_precision_limit)
        for skip in coverage.skipped:
            self.skip(skip)
        for note in coverage.notes:
            self.note(note)
        for info in coverage.regions:
            self.region(info)

    def findings(self, only: Sequence[Finding] | None = None) -> tuple[Finding, ...]:
        """The findings so far, or these only; those seen more than once with how often."""
        with self._lock:
            findings = tuple(self._findings.values()) if only is None else tuple(only)
            return tuple(
                replace(finding, evidence={**finding.evidence, EvidenceKey.SEEN_IN_CALLS: times})
                if (times := self._repeats[finding.identity]) > 1
                else finding
                for finding in findings
            )

    def coverage(self) -> Coverage:
        """The coverage so far."""
        with self._lock:
            return Coverage(
                regions=tuple(known for name in list(self._regions) if (known := self._known(name)) is not None),
                checked=dict(self._checked),
                skipped=(*self._skips, *self._not_over(), *self._uncompared(), *self._passed_by()),
                ignored=tuple(self._ignored.values()),
                notes=tuple(self._notes),
                detection_limit=dict(self._limits),
                own_precision_limit=dict(self._own_precision_limits),
            )

    def compiled_by(self, candidate: str) -> None:
        """Note a candidate that was checked."""
        with self._lock:
            self._compiled_by.setdefault(candidate)

    def report(self, title: str, *, only: Sequence[Finding] | None = None) -> Report:
        """A report of everything so far. It asks the C++ compiler for its version: not for use at every call."""
        candidates = {"compiled by": ", ".join(self._compiled_by)} if self._compiled_by else {}
        facts = {**candidates, **environment()}
        return Report(self.findings(only), self.coverage(), title=title, environment=facts)


class PassedCalls:
    """A counter of calls of a region that are not checked. Most calls are none, so that they only add to a number."""

    def __init__(
        self, info: RegionInfo, ledgers: Sequence[Ledger], region: object = None, reason: str = _PASSED_BY
    ) -> None:
        self.info = info
        self.region = region
        self.reason = reason
        self.count = 0
        self._ledgers = tuple(ledgers)
        for ledger in self._ledgers:
            ledger.passing(self)

    def end(self) -> None:
        """Let the ledgers read it for the last time."""
        for ledger in self._ledgers:
            ledger.passed(self)


def split_ignored(
    findings: Iterable[Finding], ignore: Sequence[str], layout: str = "warn"
) -> tuple[list[Finding], list[Finding]]:
    """Part findings into those to report and those the user asked to ignore: by kind, detail, subject or layout."""
    reported: list[Finding] = []
    ignored: list[Finding] = []
    for finding in findings:
        hidden = bool(finding.ignored) or any(
            word in (str(finding.kind), finding.detail, finding.subject) for word in ignore
        )
        hidden |= layout == "ignore" and finding.is_layout
        (ignored if hidden else reported).append(finding)
    return reported, ignored
