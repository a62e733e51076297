"""Monte Carlo arithmetic on eager: how far does each tensor move, and which elements does that not explain?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from checked_backend.verdict import thresholds
from checked_backend.verdict.context import Context
from checked_backend.verdict.control_runner import ControlRunner
from checked_backend.verdict.control_runs import Control
from checked_backend.verdict.evidence import Evidence, extended
from checked_backend.verdict.outliers import outside_noise

__all__ = ["compare_with_noise", "explain_by_own_noise", "perturb"]


def explain_by_own_noise(context: Context) -> None:
    """Find the differences that are within the noise that the program must have at its own precision.

    Eager's choices (indices, comparisons) are held at first, so that a choice that flips does not make other elements
    look noisy.
    """
    if all(case.same_bits for case in context.open()):
        return
    seeds = range(thresholds.FIRST_RUNS)
    perturb(context.open(), context.runs, seeds, 1.0, replay_choices=True)
    compare_with_noise(context.open())
    if context.controls.flips():  # a candidate that is not near eager may have chosen otherwise
        jumping = [case for case in context.open() if case.outside]
        perturb(jumping, context.runs, seeds, 1.0)
        compare_with_noise(jumping)


def perturb(
    cases: Sequence[Evidence],
    runs: ControlRunner,
    seeds: Iterable[int],
    magnitude: float,
    *,
    replay_choices: bool = False,
) -> None:
    """Run eager with every rounding made random, and widen the envelopes by the changes.

    Args:
        cases: The tensors whose envelopes are widened.
        runs: Makes the runs.
        magnitude: Size of the roundings, in unit roundoffs.
        replay_choices: Let no rounding flip a choice (an index, a comparison).
    """
    for seed in seeds:
        values = runs.run(
            Control.MONTE_CARLO, partial(runs.controls.monte_carlo, seed, magnitude, replay_choices=replay_choices)
        )
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
    """Find the elements that the evidence so far does not explain."""
    for case in cases:
        if case.envelope is not None and not case.same_bits:
            case.outside = outside_noise(
                reference=case.pair.reference,
                candidate=case.pair.candidate,
                envelope=case.envelope,
                high_precision=case.high_precision,
                strong=case.strong,
            )
