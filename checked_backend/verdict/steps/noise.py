"""How far does noise move each tensor, and which elements does that not explain? Monte Carlo arithmetic on eager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from checked_backend.numerics.bits import is_floating
from checked_backend.verdict import thresholds
from checked_backend.verdict.closing import close_as_noise, is_as_near_as_eager
from checked_backend.verdict.evidence import Context, Evidence
from checked_backend.verdict.runner import Runs, monte_carlo


def explain_by_own_noise(context: Context) -> None:
    """Find the differences that are within the noise that the program must have at its own precision.

    Eager's choices (indices, comparisons) are held at first, so that a choice that flips does not make other elements
    look noisy.
    """
    if all(case.same_bits for case in context.open()):
        return
    seeds = range(thresholds.FIRST_RUNS)
    # further runs only widen the noise, but from the first ones the scales for later calls are taken
    one_will_do = all(case.pair.name in context.needs_no_twin for case in context.open())
    for few in (seeds[:1], seeds[1:]) if one_will_do else (seeds,):
        perturb(context.open(), context.runs, few, keeps_choices=True)
        compare_with_noise(context.open())
        if not any(case.outside for case in context.open()):
            return
    if False in context.runs.runner.facts.flips:  # a candidate that is not near eager may have chosen otherwise
        jumping = [case for case in context.open() if case.outside]
        perturb(jumping, context.runs, seeds)
        compare_with_noise(jumping)


def close_what_is_explained(context: Context) -> None:
    """Decide that a tensor is noise if noise explains every element and no float64 twin was found wrong."""
    for case in context.open():
        if not case.outside and not case.logic_differs:
            close_as_noise(context, case)


def close_what_is_as_good_as_eager(context: Context) -> None:
    """Decide about tensors whose float64 twin is right, or could not be asked.

    A tensor no further from float64 than eager is no worse than eager. The tensors left over get a closer look: more
    runs, then stronger runs, which show jumps and cancellation.
    """
    if all(case.logic_differs for case in context.open()):
        return
    _close_what_is_as_near(context)
    for number, magnitude in enumerate((1.0, thresholds.CORRELATED_MAGNITUDE, thresholds.STRONG_MAGNITUDE), start=1):
        if all(case.logic_differs for case in context.open()):
            return
        perturb(context.open(), context.runs, range(100 * number, 100 * number + thresholds.MORE_RUNS), magnitude)
        compare_with_noise(context.open())
        close_what_is_explained(context)
    _close_what_is_as_near(context)


def _close_what_is_as_near(context: Context) -> None:
    for case in context.open():
        # These distances cannot see elements so small that they have lost their digits. Integers are exact: eager's
        # wrong ones do not explain the candidate's.
        if case.logic_differs or case.outside.digits or not is_floating(case.pair.reference):
            continue
        if case.outside.unconfirmed:  # float64 cannot tell which side is wrong there
            continue
        if is_as_near_as_eager(case):
            close_as_noise(context, case)


def perturb(
    cases: Sequence[Evidence],
    runs: Runs,
    seeds: Iterable[int],
    magnitude: float = 1.0,
    *,
    keeps_choices: bool = False,
    float64: bool = False,
) -> None:
    """Run eager with every rounding made random, and widen the envelopes by the changes.

    Args:
        cases: The tensors whose envelopes are widened; without any, nothing is run.
        magnitude: Size of the roundings, in unit roundoffs. Strong ones have an envelope of their own.
        keeps_choices: Let no rounding flip a choice (an index, a comparison).
        float64: Run in float64, for the tensors with a float64 reference.
    """
    for seed in seeds if cases else ():
        values = runs.run(monte_carlo(seed, magnitude, keeps_choices=keeps_choices, float64=float64))
        if values is None:
            return
        for case in cases:
            case.widen(values, large=magnitude >= thresholds.STRONG_MAGNITUDE, float64=float64)
        del values  # before the next run makes its own


def compare_with_noise(cases: Iterable[Evidence]) -> None:
    """Find the elements that the evidence so far does not explain."""
    for case in cases:
        if case.envelope is not None and not case.same_bits:
            case.outside = case.outliers(case.pair.candidate)
