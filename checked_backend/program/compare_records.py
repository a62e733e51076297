"""Compare two recordings of a program: where does the second first leave the noise of the first?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checked_backend.findings import Coverage, EvidenceKey, Finding, Kind, RegionInfo, Skip
from checked_backend.program.arithmetic import Arithmetic
from checked_backend.program.compare_tensors import FACTOR, are_alike, compared, noise_of, spread_of
from checked_backend.program.records import PLAIN, Place, TensorRecord, noise_folders, read_run
from checked_backend.report import Report
from checked_backend.report.advice import TENSORS_OF_BOTH_RUNS
from checked_backend.subjects import Subject, SubjectKind

__all__ = ["compare_recordings"]

_SHOWN = 20

_DRAWN = "the program has drawn random numbers, and each device draws others; turn dropout off to compare these values"
_INTEGERS = "integers differ where float32 is multiplied in a lower precision, in which another one may be the greatest"
_OUTSIDE = (
    "it differs by what float32 products in TF32 or bfloat16 make, which the settings allow code outside of the "
    'regions; for a verdict set torch.backends.fp32_precision = "ieee" in both programs'
)
_COARSE = (
    "one device computes more coarsely than the noise runs of the first recording (float32 products in TF32 or "
    "bfloat16, or autocast's dtype): noise is taken {:.3g} times theirs, see the detection limits"
)


@dataclass(slots=True)
class _Run:
    """All tensors of one run, and what is known of its processes."""

    tensors: dict[Place, TensorRecord]
    headers: dict[str, Mapping[str, Any]]

    def gpu(self, process: str) -> str:
        """The GPU of a process; "" if it has none."""
        return str(dict(self.headers[process].get("environment") or {}).get("gpu", ""))

    @classmethod
    def read(cls, folder: Path) -> _Run:
        processes = read_run(folder)
        tensors = {place: record for one in processes.values() for place, record in one.tensors.items()}
        return cls(tensors, {name: one.header for name, one in processes.items()})


@dataclass(frozen=True, slots=True)
class _Difference:
    place: Place
    finding: Finding
    other_device: bool


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
    comparison = _Comparison(mine, theirs, noisy)
    comparison.run()
    shared = [place for place in mine.tensors if place in theirs.tensors and not _unread(place, mine, theirs)]
    skips = [*_skips(mine, theirs, noisy), *comparison.skips.values()]
    findings = tuple(_told(comparison.found, mine))
    coverage = Coverage(
        regions=tuple(_regions(mine, theirs)),
        checked={TENSORS_OF_BOTH_RUNS: len(shared), "processes": len({place[0] for place in shared})},
        skipped=tuple(skips),
        notes=(*_notes(mine, theirs, first, second), *comparison.told()),
        detection_limit=comparison.limits,
    )
    header = next(iter(theirs.headers.values()))
    known = {str(key): str(value) for key, value in dict(header.get("environment") or {}).items()}
    return Report(findings, coverage, title=f"{second} against {first}", environment=known)


@dataclass(slots=True)
class _Comparison:
    """All tensors of two runs, one after another.

    Attributes:
        mine: The first run.
        theirs: The second.
        noisy: The noise runs of the first.
        found: The tensors of the second run that are beyond the noise of the first.
        limits: The smallest error that would have been found, by tensor.
        skips: What was not held against the noise because the devices compute otherwise: the first place of each kind.
        notes: What the devices do otherwise.
    """

    mine: _Run
    theirs: _Run
    noisy: Sequence[_Run]
    found: list[_Difference] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    skips: dict[str, Skip] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Compare them, in the order of the first run."""
        met: dict[str, Arithmetic] = {}
        for place, record in self.mine.tensors.items():
            other = self.theirs.tensors.get(place)
            if other is None or _unread(place, self.mine, self.theirs):
                continue  # told with the coverage
            process = place[0]
            if process not in met:
                met[process] = Arithmetic(other_device=self.mine.gpu(process) != self.theirs.gpu(process))
            self._compare(place, record, other, met[process])

    def told(self) -> Iterator[str]:
        """The notes, the first ones of many."""
        return (where + note for note, where in itertools.islice(self.notes.items(), _SHOWN))

    def _compare(self, place: Place, record: TensorRecord, other: TensorRecord, met: Arithmetic) -> None:
        met.meet(record, other)
        spread = spread_of([found for run in self.noisy if (found := run.tensors.get(place)) is not None])
        noise = noise_of(record, spread, met.factor(record))
        finding = compared(record, other, noise)
        if finding is not None and finding.kind is not Kind.STRUCTURE:
            if why := self._of_the_device(record, other, spread, met):
                self.skips.setdefault(
                    why, Skip(record.subject, f"from call {record.call} on: {why}", True, record.region)
                )
                finding = None
            noise = noise_of(record, spread, met.factor(record))
        if finding is not None:
            self.found.append(_Difference(place, finding, met.other_device))
        elif record.dtype != other.dtype:
            self.notes[
                f"{record.subject} of {record.region} is {record.dtype} on {record.device}, {other.dtype} on "
                f"{other.device}: autocast chooses by the device. The values are compared"
            ] = ""
        if (factor := met.factor(record)) > 1:
            self.notes.setdefault(_COARSE.format(factor), f"from call {record.call} of {record.region} on: ")
        if record.rms > 0 and noise is not None:
            name = f"{record.subject} of {record.region}"
            self.limits[name] = max(self.limits.get(name, 0.0), FACTOR * noise / record.rms)

    def _of_the_device(self, record: TensorRecord, other: TensorRecord, spread: float | None, met: Arithmetic) -> str:
        """Why a tensor beyond its noise may be what another device computes; "" if that explains nothing."""
        if met.drew:
            return _DRAWN
        if met.coarse and not record.roundoff:
            return _INTEGERS
        if not record.subject.startswith(("input[", "grad_output[")):
            return ""
        outside = met.with_products_outside(record, other)
        products = max(record.products_outside, other.products_outside)
        if compared(record, other, noise_of(record, spread, outside.factor(record), products)) is not None:
            return ""
        met.first, met.second = outside.first, outside.second
        return _OUTSIDE


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
            + ("; or random numbers, of which each device draws others" if one.other_device else "")
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
    if (one.dtype, one.shape) == (other.dtype, other.shape) and not are_alike(one, other):
        return "two versions of this package recorded it in different ways; record both with one of them"
    return ""


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
