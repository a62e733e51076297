"""Metrics of the difference of two tensors, and of the noise that rounding alone makes."""

from __future__ import annotations

from dataclasses import dataclass

from checked_backend.findings.values import Count, Index, Number, Real


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of the difference of two tensors. `NoiseScale` and the verdict give them a meaning.

    Differences are over elements that are finite on both sides. Elements that are NaN on both sides, or the same
    infinity on both sides, are equal.

    Attributes:
        total: Number of elements.
        mismatched: Number of elements that are not equal (NaN equals NaN, ``-0.0`` equals ``0.0``).
        max_abs_diff: Greatest absolute difference.
        max_rel_diff: Greatest ``|candidate - reference| / |reference|``; infinite where the reference is 0 and the
            candidate is not.
        max_ulp: Greatest distance in representable numbers of the dtype (real floating point only).
        rmse: Root of the mean squared difference.
        reference_rms: Root mean square of the reference's finite elements.
        reference_max: Greatest magnitude of the reference's finite elements.
        nonfinite_mismatched: Number of elements whose class (finite, NaN, +inf, -inf) differs.
        nan_reference: Number of NaNs in the reference.
        nan_candidate: Number of NaNs in the candidate.
        inf_reference: Number of infinities in the reference.
        inf_candidate: Number of infinities in the candidate.
        index: Where the greatest difference is (an element whose class differs comes before all others); None if
            all elements are equal.
        reference_value: The reference's value at ``index``.
        candidate_value: The candidate's value at ``index``.
        dtype: The reference's dtype: ``float32``; empty if it is not known.
    """

    total: Count
    mismatched: Count
    max_abs_diff: Real
    max_rel_diff: Real
    max_ulp: Count | None
    rmse: Real
    reference_rms: Real
    reference_max: Real
    nonfinite_mismatched: Count
    nan_reference: Count
    nan_candidate: Count
    inf_reference: Count
    inf_candidate: Count
    index: Index | None
    reference_value: Number | None
    candidate_value: Number | None
    dtype: str = ""

    @property
    def bitwise_equal(self) -> bool:
        """Whether all elements are equal."""
        return self.mismatched == 0


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The rounding noise that a tensor must have at its precision, and where that number came from.

    Attributes:
        rms: Root mean square of the noise, in units of the tensor.
        max: Greatest noise of one element, in units of the tensor.
        source: The control runs that it comes from, in words.
        detection_limit: The smallest relative error (of the tensor's root mean square) that would have been caught.
    """

    rms: Real
    max: Real
    source: str
    detection_limit: Real | None = None
