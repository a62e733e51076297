"""Compare two recordings of a program: where does the second first leave the noise of the first?"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checked_backend.findings import Coverage, EvidenceKey, Finding, Kind, RegionInfo, Skip
from checked_backend.program.noise import FACTOR, Arithmetic, are_alike, compare_tensor, noise_of, spread_of
from checked_backend.program.records import PLAIN, Place, Recording, TensorRecord, noise_folders, read_run
from checked_backend.report import Report
from checked_backend.report.advice import TENSORS_OF_BOTH_RUNS

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
    mine, theirs = read_run(first / PLAIN), read_run(second / PLAIN)
    comparison = _Comparison(mine, theirs, [read_run(folder) for folder in noise_folders(first)])
    comparison.run()
    one, other = (next(iter(run.environments.values())) for run in (mine, theirs))
    here, there = (", ".join(sorted({record.device for record in run.tensors.values()})) for run in (mine, theirs))
    facts = [(name, one.get(name, "none"), other.get(name, "none")) for name in sorted({*one, *other})]
    facts.append(("device", here or "unknown", there or "unknown"))
    coverage = Coverage(
        regions=tuple(_regions(mine, theirs)),
        checked={
            TENSORS_OF_BOTH_RUNS: len(comparison.compared),
            "processes": len({place[0] for place in comparison.compared}),
        },
        skipped=(*comparison.missing(), *comparison.unread, *comparison.skips.values()),
        notes=(
            *(f"{name}: {known} in {first}, {now} in {second}" for name, known, now in facts if known != now),
            *itertools.islice((where + note for note, where in comparison.notes.items()), _SHOWN),
        ),
        detection_limit=comparison.limits,
    )
    environment = {str(name): str(value) for name, value in other.items()}
    return Report(tuple(comparison.findings()), coverage, title=f"{second} against {first}", environment=environment)


@dataclass(slots=True)
class _Comparison:
    """All tensors of two runs, one after another.

    Attributes:
        noisy: The noise runs of the first.
        compared: Where both runs have a tensor with the same description.
        differences: The tensors of the second run that are beyond the noise of the first.
        limits: The smallest error that would have been found, by tensor.
        unread: The tensors of both runs whose values nobody knows.
        skips: What was not held against the noise because the devices compute otherwise: the first place of each kind.
        notes: What the devices do otherwise, and where they do it first.
    """

    mine: Recording
    theirs: Recording
    noisy: Sequence[Recording]
    compared: list[Place] = field(default_factory=list)
    differences: list[_Difference] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    unread: list[Skip] = field(default_factory=list)
    skips: dict[str, Skip] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Compare them, in the order of the first run."""
        met = {
            process: Arithmetic(other_device=known.get("gpu", "") != self.theirs.environments[process].get("gpu", ""))
            for process, known in self.mine.environments.items()
            if process in self.theirs.environments
        }
        for place, record in self.mine.tensors.items():
            other = self.theirs.tensors.get(place)
            if other is None:
                continue  # `missing` has it
            if why := _unread(record, other):
                self.unread.append(Skip(record.subject, why, matters=True, region=record.region))
            else:
                self.compared.append(place)
                self._compare(place, record, other, met[place[0]])

    def missing(self) -> Iterator[Skip]:
        """What one of the runs lacks."""
        if len(self.noisy) < 2:
            why = "the first recording has no two noise runs; record it with --noise-runs 2"
            yield Skip("noise", why, matters=True)
        for run, other, which in ((self.mine, self.theirs, "first"), (self.theirs, self.mine, "second")):
            alone = Counter(place[1] for place in run.tensors if place not in other.tensors)
            for region, count in alone.items():
                yield Skip(f"{count} tensors", f"only the {which} recording has them", matters=True, region=region)

    def findings(self) -> Iterator[Finding]:
        """The first difference with its meaning, then the first of each other region; what follows is not listed."""
        seen: set[tuple[str, str]] = set()
        for number, one in enumerate(self.differences):
            process, region, call, _ = one.place
            if number and ((process, region) in seen or len(seen) >= _SHOWN):
                continue
            seen.add((process, region))
            where = f"call {call} of {region}" + (f", {process}" if len(self.mine.environments) > 1 else "")
            evidence: dict[str, Any] = {EvidenceKey.COMPARED: where}
            message = f"later, in {where}: {one.finding.message}"
            if not number:
                message = f"first in {where}: {one.finding.message}. {self._meaning(one)}"
                evidence[EvidenceKey.EXPLAINS] = f"{len(self.differences)} tensors of all calls are beyond their noise"
            yield replace(one.finding, message=message, evidence=evidence)

    def _compare(self, place: Place, record: TensorRecord, other: TensorRecord, met: Arithmetic) -> None:
        met.meet(record, other)
        spread = spread_of([found for run in self.noisy if (found := run.tensors.get(place)) is not None])
        noise = noise_of(record, spread, met.factor(record))
        finding = compare_tensor(record, other, noise)
        if finding is not None and finding.kind is not Kind.STRUCTURE:
            if why := _of_the_device(record, other, spread, met):
                skip = Skip(record.subject, f"from call {record.call} on: {why}", True, record.region)
                self.skips.setdefault(why, skip)
                finding = None
            noise = noise_of(record, spread, met.factor(record))
        if finding is not None:
            self.differences.append(_Difference(place, finding, met.other_device))
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

    def _meaning(self, one: _Difference) -> str:
        *call, subject = one.place
        if subject.startswith("input["):
            return (
                "It came into the region from outside: data, an optimizer's step, code between regions, or an earlier "
                "call that is not recorded"
                + ("; or random numbers, of which each device draws others" if one.other_device else "")
            )
        if any([*d.place[:3]] == call and d.place[3].startswith("input[") for d in self.differences):
            return "Inputs of this call differ, too"
        if subject.startswith("grad"):
            return "What this call took and gave in forward agrees; so it arises in a backward pass"
        return "All that this call took agrees; so it arises in this region"


def _of_the_device(record: TensorRecord, other: TensorRecord, spread: float | None, met: Arithmetic) -> str:
    """Why a tensor beyond its noise may be what another device computes; "" if that explains nothing."""
    if met.drew:
        return _DRAWN
    if (met.first or met.second) and not record.roundoff:
        return _INTEGERS
    if not record.subject.startswith(("input[", "grad_output[")):
        return ""
    outside = met.with_products_outside(record, other)
    products = max(record.products_outside, other.products_outside)
    if compare_tensor(record, other, noise_of(record, spread, outside.factor(record), products)) is not None:
        return ""
    met.first, met.second = outside.first, outside.second
    return _OUTSIDE


def _unread(one: TensorRecord, other: TensorRecord) -> str:
    if one.unread or other.unread:
        return f"its values were not recorded: {one.unread or other.unread}"
    if (one.dtype, one.shape) == (other.dtype, other.shape) and not are_alike(one, other):
        return "two versions of this package recorded it in different ways; record both with one of them"
    return ""


def _regions(mine: Recording, theirs: Recording) -> Iterator[RegionInfo]:
    calls: dict[str, set[int]] = {}
    shared: dict[str, set[int]] = {}
    for place in mine.tensors:
        calls.setdefault(place[1], set()).add(place[2])
        if place in theirs.tensors:
            shared.setdefault(place[1], set()).add(place[2])
    for region, numbers in calls.items():
        both = shared.get(region, set())
        yield RegionInfo(region, calls=max(numbers), checked_calls=len(both), last_checked_call=max(both, default=0))
