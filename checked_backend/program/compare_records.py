"""Compare two recordings of a program: where does the second first leave the noise of the first?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checked_backend.findings import Coverage, EvidenceKey, Finding, Kind, NoiseScale, RegionInfo, Skip
from checked_backend.program.records import PLAIN, Place, TensorRecord, noise_folders, read_run
from checked_backend.report import Report
from checked_backend.subjects import Subject, SubjectKind

__all__ = ["FACTOR", "compare_recordings"]

FACTOR = 8.0
"""So many times the noise is beyond it. The noise is known from a few runs, and from a sample of each tensor.

Of 84 honest pairs of recordings, 1 is accused with 2, and none with 4 (``tests/calibration/recordings.py``).
"""

ROUNDINGS = 16.0
"""A difference of so many units of roundoff, of the tensor's root mean square, is noise whatever the noise runs say.

They do not move what code between the regions makes. Other vector instructions move ``randn`` by 4.6 roundings.
"""

_OF_ONE = 4.0
"""A projection is held to so much more. Where one element has most of the noise, all projections of a run are its, and
those of two noise runs may by chance be near each other. Elements in wrong places are beyond this by orders."""

_ROUNDINGS_IN_HALF = 4.0
"""The same in 16 bits, where functions compute in 32 and round once."""

_LARGE = 1e-2
"""A relative difference from which on values are called wrong, and not imprecise."""

_HALF = 1e-4
"""Units of roundoff above this are of 16 bits and less."""

_SHOWN = 20


@dataclass(slots=True)
class _Run:
    """All tensors of one run, and what is known of its processes."""

    tensors: dict[Place, TensorRecord]
    headers: dict[str, Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> _Run:
        processes = read_run(folder)
        tensors = {place: record for one in processes.values() for place, record in one.tensors.items()}
        return cls(tensors, {name: one.header for name, one in processes.items()})


@dataclass(frozen=True, slots=True)
class _Difference:
    place: Place
    finding: Finding


def compare_recordings(first: Path, second: Path) -> Report:
    """Compare two recordings.

    Args:
        first: The folder of the recording whose noise counts.
        second: The folder of the other one.

    Returns:
        A report whose first finding says where the second run first leaves the noise of the first.

    Raises:
        CheckedBackendError: A folder has no recording.
    """
    mine, theirs = _Run.read(first / PLAIN), _Run.read(second / PLAIN)
    noisy = [_Run.read(folder) for folder in noise_folders(first)]
    differences, limits = _differences(mine, theirs, noisy)
    shared = [place for place in mine.tensors if place in theirs.tensors and not _unread(place, mine, theirs)]
    skips = list(_skips(mine, theirs, noisy))
    findings = tuple(_told(differences, mine))
    coverage = Coverage(
        regions=tuple(_regions(mine, theirs)),
        checked={"tensors": len(shared), "processes": len({place[0] for place in shared})},
        skipped=tuple(skips),
        notes=tuple(_notes(mine, theirs, first, second)),
        detection_limit=limits,
    )
    header = next(iter(theirs.headers.values()))
    known = {str(key): str(value) for key, value in dict(header.get("environment") or {}).items()}
    return Report(findings, coverage, title=f"{second} against {first}", environment=known)


def _differences(mine: _Run, theirs: _Run, noisy: Sequence[_Run]) -> tuple[list[_Difference], dict[str, float]]:
    found: list[_Difference] = []
    limits: dict[str, float] = {}
    for place, record in mine.tensors.items():
        other = theirs.tensors.get(place)
        if other is None:
            continue  # told with the coverage
        noise = _noise(place, record, noisy)
        if record.rms > 0 and noise is not None:
            name = f"{record.subject} of {record.region}"
            limits[name] = max(limits.get(name, 0.0), FACTOR * noise / record.rms)
        finding = None if _unread(place, mine, theirs) else _compared(record, other, noise)
        if finding is not None:
            found.append(_Difference(place, finding))
    return found, limits


def _noise(place: Place, record: TensorRecord, noisy: Sequence[_Run]) -> float | None:
    """The noise of a tensor, root mean square: the greatest distance of two noise runs, at least a few roundings."""
    known = [found for run in noisy if (found := run.tensors.get(place)) is not None]
    pairs = [pair for pair in itertools.combinations(known, 2) if _are_alike(*pair)]
    if not pairs:
        return None
    spread = max(
        max(_distance(one.sample, other.sample), _distance(one.projections, other.projections)) for one, other in pairs
    )
    roundings = _ROUNDINGS_IN_HALF if record.roundoff > _HALF else ROUNDINGS
    return max(spread, roundings * record.roundoff * record.rms / FACTOR)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Root mean square of the difference; infinite where one is finite and the other is not."""
    total = 0.0
    for a, b in zip(one, other, strict=True):
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.inf
        total += (a - b) ** 2
    return math.sqrt(total / max(1, len(one)))


def _compared(record: TensorRecord, other: TensorRecord, noise: float | None) -> Finding | None:
    """A finding if a tensor of the second run is beyond the noise of the first."""
    if (record.dtype, record.shape) != (other.dtype, other.shape):
        return Finding(
            Kind.STRUCTURE,
            record.subject,
            "another dtype or shape",
            detail="structure.other_run",
            region=record.region,
            expected=f"{record.dtype} {list(record.shape)}",
            actual=f"{other.dtype} {list(other.shape)}",
        )
    if record.bits is not None and record.bits == other.bits and record.sample == other.sample:
        return None  # the checksum is of memory: a transposed tensor has the same one
    if record.nonfinite != other.nonfinite:
        return Finding(
            Kind.NONFINITE,
            record.subject,
            f"{other.nonfinite} elements are no numbers, and {record.nonfinite} in the first run",
            detail="nonfinite.other_run",
            region=record.region,
        )
    projected = _distance(record.projections, other.projections) / _OF_ONE
    distance = max(_distance(record.sample, other.sample), abs(record.rms - other.rms), projected)
    if noise is None or distance <= FACTOR * noise:
        return None  # without noise, the coverage says so
    relative = distance / record.rms if record.rms else math.inf
    worst = max(range(len(record.sample)), key=lambda at: abs(record.sample[at] - other.sample[at]), default=0)
    times = distance / noise if noise else math.inf
    return Finding(
        Kind.LOGIC if relative > _LARGE else Kind.PRECISION,
        record.subject,
        f"{times:.3g} times its noise, {relative:.2g} of its size",
        detail="logic.other_run" if relative > _LARGE else "precision.other_run",
        region=record.region,
        expected=f"{record.sample[worst]:.9g}" if record.sample else None,
        actual=f"{other.sample[worst]:.9g}" if record.sample else None,
        noise=NoiseScale(noise, noise, "runs of the first recording with random roundings", FACTOR * noise),
    )


def _told(differences: Sequence[_Difference], mine: _Run) -> Iterator[Finding]:
    """The first difference with its meaning, then the first of each other region; what follows is not listed."""
    seen: set[tuple[str, str]] = set()
    for number, one in enumerate(differences):
        process, region, call, _ = one.place
        if number and ((process, region) in seen or len(seen) >= _SHOWN):
            continue
        seen.add((process, region))
        where = f"call {call} of {region}" + (f", {process}" if len(mine.headers) > 1 else "")
        if not number:
            message = f"first in {where}: {one.finding.message}. {_meaning(one, differences)}"
        else:
            message = f"later, in {where}: {one.finding.message}"
        evidence: dict[str, Any] = {EvidenceKey.COMPARED: where}
        if not number:
            evidence[EvidenceKey.EXPLAINS] = f"{len(differences)} tensors of all calls are beyond their noise"
        yield replace(one.finding, message=message, evidence=evidence)


def _meaning(one: _Difference, differences: Sequence[_Difference]) -> str:
    process, region, call, subject = one.place
    kind = Subject(subject).kind
    if subject.startswith("input["):
        return (
            "It came into the region from outside: data, an optimizer's step, code between regions, or an earlier "
            "call that is not recorded"
        )
    inputs = [d for d in differences if d.place[:3] == (process, region, call) and d.place[3].startswith("input[")]
    if inputs:
        return "Inputs of this call differ, too"
    if kind is SubjectKind.GRADIENT or subject.startswith("grad"):
        return "What this call took and gave in forward agrees; so it arises in a backward pass"
    return "All that this call took agrees; so it arises in this region"


def _skips(mine: _Run, theirs: _Run, noisy: Sequence[_Run]) -> Iterator[Skip]:
    if len(noisy) < 2:
        yield Skip("noise", "the first recording has no two noise runs; record it with --noise-runs 2", matters=True)
    for run, other, which in ((mine, theirs, "first"), (theirs, mine, "second")):
        alone: dict[str, int] = {}
        for process, region, call, subject in run.tensors:
            if (process, region, call, subject) not in other.tensors:
                alone[region] = alone.get(region, 0) + 1
        for region, count in alone.items():
            yield Skip(f"{count} tensors", f"only the {which} recording has them", matters=True, region=region)
    for place in mine.tensors:
        if place in theirs.tensors and (why := _unread(place, mine, theirs)):
            yield Skip(place[3], why, matters=True, region=place[1])


def _unread(place: Place, mine: _Run, theirs: _Run) -> str:
    one, other = mine.tensors[place], theirs.tensors[place]
    if one.unread or other.unread:
        return f"its values were not recorded: {one.unread or other.unread}"
    if (one.dtype, one.shape) == (other.dtype, other.shape) and not _are_alike(one, other):
        return "two versions of this package recorded it in different ways; record both with one of them"
    return ""


def _are_alike(one: TensorRecord, other: TensorRecord) -> bool:
    return (len(one.sample), len(one.projections)) == (len(other.sample), len(other.projections))


def _notes(mine: _Run, theirs: _Run, first: Path, second: Path) -> Iterator[str]:
    one, other = (dict(next(iter(run.headers.values())).get("environment") or {}) for run in (mine, theirs))
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield f"{name}: {one.get(name, 'none')} in {first}, {other.get(name, 'none')} in {second}"
    here, there = (", ".join(sorted({record.device for record in run.tensors.values()})) for run in (mine, theirs))
    if here != there:
        yield f"device: {here or 'unknown'} in {first}, {there or 'unknown'} in {second}"


def _regions(mine: _Run, theirs: _Run) -> Iterator[RegionInfo]:
    calls: dict[str, set[int]] = {}
    shared: dict[str, set[int]] = {}
    for place in mine.tensors:
        calls.setdefault(place[1], set()).add(place[2])
        if place in theirs.tensors:
            shared.setdefault(place[1], set()).add(place[2])
    for region, numbers in calls.items():
        both = shared.get(region, set())
        yield RegionInfo(region, calls=max(numbers), checked_calls=len(both), last_checked_call=max(both, default=0))
