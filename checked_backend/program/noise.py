"""The noise of a tensor in two recordings, and whether the second is beyond that of the first.

A noise run rounds as the dtypes say. A GPU may multiply numbers in float32 as TF32, some CPUs as bfloat16, if the
settings let them; autocast chooses other dtypes on another device; and each device draws random numbers of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from checked_backend.findings import Finding, Kind, NoiseScale
from checked_backend.program.records import TensorRecord

__all__ = ["FACTOR", "ROUNDINGS", "Arithmetic", "are_alike", "compare_tensor", "noise_of", "spread_of"]

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

    def with_products_outside(self, one: TensorRecord, other: TensorRecord) -> Arithmetic:
        """The same, if code between the regions multiplied as coarsely as the settings let it."""
        first, second = max(self.first, one.products_outside), max(self.second, other.products_outside)
        return replace(self, first=first, second=second)

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
