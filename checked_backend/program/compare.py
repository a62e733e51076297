"""Compare two recordings of a program: where does the second first leave the noise of the first?

A noise run rounds as the dtypes say. A GPU may multiply numbers in float32 as TF32, some CPUs as bfloat16, if the
settings let them; autocast chooses other dtypes on another device; and each device draws random numbers of its own.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checked_backend.findings import Coverage, EvidenceKey, Finding, Kind, NoiseScale, RegionInfo, Skip
from checked_backend.program.records import PLAIN, Place, Recording, TensorRecord, read_run
from checked_backend.report import Report
from checked_backend.report.advice import TENSORS_OF_BOTH_RUNS

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

_OF_FLOAT32 = 2.0**-24


@dataclass(slots=True)
class Arithmetic:
    """How coarsely one process of two runs has computed so far, tensor by tensor in the order of the first run.

    Attributes:
        other_device: Whether the two ran on hardware that draws random numbers of its own.
        first: The coarsest roundoff with which the first has multiplied numbers in float32; 0 for that of the dtype.
        second: The same of the second.
        ratio: By how much a dtype of the second is coarser than the first's, where autocast chose another one.
        drew: Whether a region has drawn random numbers, which may be others in the second.
    """

    other_device: bool = False
    first: float = 0.0
    second: float = 0.0
    ratio: float = 1.0
    drew: bool = False

    def meet(self, one: TensorRecord, other: TensorRecord) -> None:
        """Take note of a tensor of both runs, before it is compared."""
        self.first = max(self.first, one.products)
        self.second = max(self.second, other.products)
        self.other_device = self.other_device or _are_other_devices(one, other)
        if _may_have_dtypes(one, other):
            self.ratio = max(self.ratio, other.roundoff / one.roundoff)
        self.drew = self.drew or (self.other_device and (one.drew or other.drew))

    def factor(self, record: TensorRecord) -> float:
        """By how much a tensor's noise may be greater than the noise runs have it.

        A noise run moves the factors of a product by a roundoff of float32 at least, and noise grows in proportion. If
        the first run is coarse itself, this moves a few factors by a whole coarse roundoff: the root is left. In a
        tensor of 16 bits, the roundings of its own dtype are the greater part.
        """
        fine = max(_OF_FLOAT32, record.roundoff)
        first = max(fine, self.first)
        return max(self.ratio, math.sqrt(first / fine) * max(1.0, self.second / first))


def spread_of(known: Sequence[TensorRecord]) -> float | None:
    """The greatest distance of two noise runs, root mean square; None without two that are alike."""
    return max(
        (
            max(_distance(one.sample, other.sample), _distance(one.projections, other.projections))
            for one, other in itertools.combinations(known, 2)
            if are_alike(one, other)
        ),
        default=None,
    )


def noise_of(record: TensorRecord, spread: float | None, factor: float, products: float = 0.0) -> float | None:
    """The noise of a tensor, root mean square: that of the noise runs, at least a few roundings.

    Args:
        spread: The distance of two noise runs; None if there are no two.
        factor: By how much its arithmetic may be coarser than that of the noise runs.
        products: The roundoff of products by which it may be moved that no noise run moves.
    """
    if spread is None:
        return None
    half = record.roundoff > _HALF
    least = max((_ROUNDINGS_IN_HALF if half else ROUNDINGS) * record.roundoff, ROUNDINGS * products)
    if factor > 1:  # coarse noise shows in a weight whose last step is so small that the noise runs' is rounded away
        spread = max(spread, record.roundoff * record.rms) * factor
    return max(spread, least * record.rms / FACTOR)


def compare_tensor(record: TensorRecord, other: TensorRecord, noise: float | None) -> Finding | None:
    """A finding if a tensor of the second run is beyond the noise of the first.

    Autocast chooses dtypes by the device: of two devices, values of two dtypes are compared.
    """
    if (record.dtype, record.shape) != (other.dtype, other.shape) and not _may_have_dtypes(record, other):
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


def are_alike(one: TensorRecord, other: TensorRecord) -> bool:
    """Whether two records describe a tensor in the same way."""
    return (len(one.sample), len(one.projections)) == (len(other.sample), len(other.projections))


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


def _may_have_dtypes(one: TensorRecord, other: TensorRecord) -> bool:
    """Whether two dtypes may be autocast's choice: each kind of device has its own."""
    floats = one.roundoff > 0 and other.roundoff > 0
    return floats and one.shape == other.shape and _are_other_devices(one, other)


def _are_other_devices(one: TensorRecord, other: TensorRecord) -> bool:
    return bool(one.device and other.device) and one.device != other.device


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


def compare_recordings(first: Path, second: Path) -> Report:
    """Compare the recordings of two folders. The first finding says where the second leaves the noise of the first.

    Raises:
        CheckedBackendError: A folder has no recording.
    """
    mine, theirs = read_run(first / PLAIN), read_run(second / PLAIN)
    noisy = [read_run(folder) for folder in sorted(first.glob("noise-*")) if folder.is_dir()]
    comparison = _Comparison(mine, theirs, noisy)
    for place, record in mine.tensors.items():
        if place in theirs.tensors:  # `missing` has the others
            comparison.compare(place, record, theirs.tensors[place])
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
        met: How coarsely each process computes.
        compared: Where both runs have a tensor with the same description.
        differences: What of the second run is beyond the noise of the first.
        limits: The smallest error that would have been found, by tensor.
        unread: The tensors of both runs whose values nobody knows.
        skips: What was not held against the noise because the devices compute otherwise: the first place of each kind.
        notes: What the devices do otherwise, and where they do it first.
    """

    mine: Recording
    theirs: Recording
    noisy: Sequence[Recording]
    compared: list[Place] = field(default_factory=list)
    differences: list[tuple[Place, Finding]] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    met: dict[str, Arithmetic] = field(default_factory=dict)
    unread: list[Skip] = field(default_factory=list)
    skips: dict[str, Skip] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.met = {
            process: Arithmetic(other_device=known.get("gpu", "") != self.theirs.environments[process].get("gpu", ""))
            for process, known in self.mine.environments.items()
            if process in self.theirs.environments
        }

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
        for number, (place, finding) in enumerate(self.differences):
            process, region, call, _ = place
            if number and ((process, region) in seen or len(seen) >= _SHOWN):
                continue
            seen.add((process, region))
            where = f"call {call} of {region}" + (f", {process}" if len(self.mine.environments) > 1 else "")
            evidence: dict[str, Any] = {EvidenceKey.COMPARED: where}
            message = f"later, in {where}: {finding.message}"
            if not number:
                message = f"first in {where}: {finding.message}. {self._meaning(place)}"
                evidence[EvidenceKey.EXPLAINS] = f"{len(self.differences)} tensors of all calls are beyond their noise"
            yield replace(finding, message=message, evidence=evidence)

    def compare(self, place: Place, record: TensorRecord, other: TensorRecord) -> None:
        """Compare the next tensor of the first run with the second's."""
        if why := _unread(record, other):
            self.unread.append(Skip(record.subject, why, matters=True, region=record.region))
            return
        self.compared.append(place)
        met = self.met[place[0]]
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
            self.differences.append((place, finding))
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

    def _meaning(self, place: Place) -> str:
        *call, subject = place
        if subject.startswith("input["):
            return (
                "It came into the region from outside: data, an optimizer's step, code between regions, or an earlier "
                "call that is not recorded"
                + ("; or random numbers, of which each device draws others" if self.met[place[0]].other_device else "")
            )
        if any([*other[:3]] == call and other[3].startswith("input[") for other, _ in self.differences):
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
    first, second = max(met.first, record.products_outside), max(met.second, other.products_outside)
    outside = replace(met, first=first, second=second)  # if code between the regions multiplied as coarsely as it may
    products = max(record.products_outside, other.products_outside)
    if compare_tensor(record, other, noise_of(record, spread, outside.factor(record), products)) is not None:
        return ""
    met.first, met.second = first, second
    return _OUTSIDE


def _unread(one: TensorRecord, other: TensorRecord) -> str:
    if one.unread or other.unread:
        return f"its values were not recorded: {one.unread or other.unread}"
    if (one.dtype, one.shape) == (other.dtype, other.shape) and not are_alike(one, other):
        return "two versions of this package recorded it in different ways; record both with one of them"
    return ""


def _regions(mine: Recording, theirs: Recording) -> Iterator[RegionInfo]:
    calls: defaultdict[str, dict[int, bool]] = defaultdict(dict)
    for place in mine.tensors:
        _, region, call, _ = place
        calls[region][call] = calls[region].get(call, False) or place in theirs.tensors
    for region, found in calls.items():
        both = [call for call, is_shared in found.items() if is_shared]
        yield RegionInfo(region, calls=max(found), checked_calls=len(both), last_checked_call=max(both, default=0))
