"""Monte Carlo arithmetic on eager: how far each tensor moves, and which elements that does not explain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from checked_backend.verdict import thresholds
from checked_backend.verdict.control_runner import ControlRunner
from checked_backend.verdict.evidence import Evidence, extended
from checked_backend.verdict.outliers import outside_noise

__all__ = ["compare_with_noise", "perturb"]


def perturb(
    cases: Sequence[Evidence], runs: ControlRunner, seeds: Iterable[int], magnitude: float, *, held: bool = False
) -> None:
    """Run eager with every rounding made random, and widen the envelopes by what that changes.

    Args:
        cases: Whose envelopes are widened.
        runs: Makes the runs.
        seeds: One for each run.
        magnitude: Size of the roundings, in unit roundoffs.
        held: Let no rounding flip a choice (an index, a comparison).
    """
    for seed in seeds:
        values = runs.run("Monte Carlo arithmetic", partial(runs.controls.monte_carlo, seed, magnitude, held=held))
        if values is None:
            return
        for case in cases:
            sample = case.sample(values)
            if sample is None:
                continue
            if magnitude < thresholds.STRONG_MAGNITUDE:
                case.envelope = extended(case.envelope, case.pair.reference, sample)
            else:
                case.strong = extended(case.strong, case.pair.reference, sample)


def compare_with_noise(cases: Iterable[Evidence]) -> None:
    """Find the elements that what is known by now does not explain."""
    for case in cases:
        if case.envelope is not None and not case.same_bits:
            case.outside = outside_noise(
                reference=case.pair.reference,
                candidate=case.pair.candidate,
                envelope=case.envelope,
                high_precision=case.high_precision,
                strong=case.strong,
            )
