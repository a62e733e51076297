"""Coverage in words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from checked_backend.findings import Coverage, RegionInfo
from checked_backend.report.clean import clean, first_line, listed, plural

_LONGEST = 120
_PLURAL = re.compile(r"(?<=ss)es\b|s\b")
_HIDDEN = " (an error could hide there)"


def counts(coverage: Coverage) -> list[str]:
    """``3 outputs``, for each kind of comparison that ran. Tensors are told by what they are, where that is counted."""
    kinds = [said for said, count in coverage.checked.items() if count > 0]
    if "outputs" in kinds:
        kinds = [said for said in kinds if said != "tensors"]
    return [_counted(coverage.checked[said], clean(said)) for said in kinds]


def _counted(count: int, plural_noun: str) -> str:
    return f"{count} {_PLURAL.sub('', plural_noun, count=1) if count == 1 else plural_noun}"


def missed(coverage: Coverage) -> int:
    """How many parts were skipped in which an error could hide."""
    return sum(skip.matters for skip in coverage.skipped)


def first_missed(coverage: Coverage) -> str:
    """The first part that was skipped in which an error could hide, and why, in short; empty if there is none."""
    told = next((f"{skip.subject}: {skip.reason}" for skip in coverage.skipped if skip.matters), "")
    return first_line(told if len(told) <= _LONGEST else f"{told[: _LONGEST - 3]}...")


def but_for_ignored(coverage: Coverage) -> str:
    """``, but for 1 finding that is ignored``; empty if none is."""
    count = len(coverage.ignored)
    return f", but for {plural(count, 'finding')} that {'is' if count == 1 else 'are'} ignored" if count else ""


def coverage_line(coverage: Coverage) -> str:
    """The coverage in one line; empty if nothing was checked."""
    parts = []
    if coverage.regions:
        calls = sum(region.calls for region in coverage.regions)
        checked = sum(region.checked_calls for region in coverage.regions)
        backwards = sum(region.checked_backwards for region in coverage.regions)
        more = f" and {plural(backwards, 'backward')}" if backwards else ""
        parts.append(f"{plural(len(coverage.regions), 'region')}, {checked} of {plural(calls, 'call')}{more}")
    if any(coverage.checked.values()):
        parts.append(listed(counts(coverage)))
    if coverage.detection_limit:
        subject, limit, but = bluntest(coverage.detection_limit.items())
        where = f"everywhere{but} (the bluntest is {clean(subject)})"
        parts.append(f"an error of {limit:.2g} would have been caught {where}")
    unimportant = sum(not skip.matters for skip in coverage.skipped)
    parts += [f"{unimportant} skipped without harm"] if unimportant else []
    parts += [f"{plural(len(coverage.ignored), 'finding')} ignored as you asked"] if coverage.ignored else []
    return "; ".join(parts)


def bluntest(detection_limits: Iterable[tuple[str, float]]) -> tuple[str, float, str]:
    """The subject on which the check was bluntest, and the smallest relative error that it would have caught there.

    A tensor that is no larger than its noise says nothing about the others: in a clean program it is zero in exact
    arithmetic. Such tensors are counted, unless all are.
    """
    limits = sorted(detection_limits, key=lambda item: -item[1])
    rounding = sum(limit >= 1 for _, limit in limits) % len(limits)
    subject, limit = limits[rounding]
    return subject, limit, f" but in {plural(rounding, 'tensor')} no larger than the noise" if rounding else ""


def region_line(region: RegionInfo) -> str:
    """A region, and how much of it was checked."""
    lines = f"; {', '.join(region.sources[:3])}" if region.sources else ""
    backwards = f", {plural(region.checked_backwards, 'backward')}" if region.checked_backwards else ""
    checked = f"{region.checked_calls} of {plural(region.calls, 'call')}{backwards} checked"
    if 0 < region.last_checked_call < region.calls:
        checked += f", the last at call {region.last_checked_call}"
    return clean(f"{region.name}: {plural(region.nodes, 'node')}, {checked}{lines}")


def limits(coverage: Coverage) -> list[str]:
    """The subjects on which the check was bluntest: there an error could be largest and still unseen."""
    worst = sorted(coverage.detection_limit.items(), key=lambda item: -item[1])[:3]
    lines = []
    for subject, limit in worst:
        own = coverage.own_precision_limit.get(subject, 0.0)
        hidden = f"; one that float64 does not show (a kernel's own, or Dynamo's) is hidden up to {own:.2g}"
        told = f"{clean(subject)}: a relative error above {limit:.2g} would have been caught"
        lines.append(told + (hidden if own > limit else ""))
    return lines


def skips(coverage: Coverage, *, all_of_them: bool = True) -> list[str]:
    """Each thing that was skipped once, those that matter first."""
    regions: dict[tuple[bool, str, str], list[str]] = {}
    for skip in sorted(coverage.skipped, key=lambda skip: not skip.matters):
        if skip.matters or all_of_them:
            regions.setdefault((skip.matters, skip.subject, skip.reason), []).append(skip.region)
    lines = []
    for (matters, subject, reason), names in regions.items():
        named = sorted({name for name in names if name and name not in subject})
        where = f" in {named[0]}" if len(named) == 1 else f" in {len(named)} regions" if named else ""
        lines.append(clean(f"{subject}{where}: {reason}{_HIDDEN if matters else ''}"))
    return lines
