"""One tensor in two recordings: is the second beyond the noise of the first?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from checked_backend.findings import Finding, Kind, NoiseScale
from checked_backend.program.arithmetic import may_have_dtypes
from checked_backend.program.records import TensorRecord

__all__ = ["FACTOR", "ROUNDINGS", "are_alike", "compared", "noise_of", "spread_of"]

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


def compared(record: TensorRecord, other: TensorRecord, noise: float | None) -> Finding | None:
    """A finding if a tensor of the second run is beyond the noise of the first.

    Autocast chooses dtypes by the device: of two devices, values of two dtypes are compared.
    """
    if (record.dtype, record.shape) != (other.dtype, other.shape) and not may_have_dtypes(record, other):
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
