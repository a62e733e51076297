"""The candidate again: on eager's random numbers, rounding wherever eager does, and compiled once more.

Other random numbers that explain a difference are the candidate's own, another thread's, or draws that rounding flips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from checked_backend.errors import OtherDrawsError
from checked_backend.findings import EvidenceKey, Kind
from checked_backend.numerics.bits import same_bits
from checked_backend.verdict import thresholds
from checked_backend.verdict.classify import Classification
from checked_backend.verdict.closing import agrees, close_as, close_as_noise, close_undecided, rounds_less_often
from checked_backend.verdict.elements import difference
from checked_backend.verdict.evidence import Context, Evidence
from checked_backend.verdict.runner import BARE, Build, Control, Recipe

AGAIN = tuple(Recipe(Control.CANDIDATE_AGAIN, Build.COMPILED, number=number) for number in range(thresholds.FEW_RUNS))
ON_EAGERS_DRAWS = Recipe(Control.CANDIDATE_REPLAYED, Build.COMPILED, replays_draws=True)
RECOMPILED = Recipe(Control.RECOMPILED, Build.RECOMPILED, replays_draws=True)

_OTHER_RANDOM_NUMBERS = Classification(
    Kind.RNG,
    "rng.stream",
    "the compiled program draws other random numbers than eager from the same random state; on eager's random numbers "
    "it agrees",
)


def try_candidate_again(context: Context) -> None:
    """Decide about tensors that another run of the candidate explains; for the others note whether they repeat."""
    if not context.open():
        return
    _explain_by_random_numbers(context)
    _explain_by_fused_rounding(context)
    differing = [case for case in context.open() if not case.same_bits]
    for case in differing:
        again = _again(context, case)
        if again:
            times = sum(_still_differs(case, sample) for sample in again)
            case.evidence[EvidenceKey.DIFFERENCE_REPEATS] = f"in {times} of {len(again)} more runs of the candidate"
            case.not_reproduced = not times and _is_not_reproduced(context, case)
    # The twin was compiled apart from the user's program. Is it right only because of that?
    for case in differing:
        if case.logic_differs is False and not case.not_reproduced and case.pair.kind is None:
            sample = case.sample(context.runs.run(RECOMPILED))
            case.right_recompiled = None if sample is None else not _still_differs(case, sample)


def _explain_by_random_numbers(context: Context) -> None:
    if not context.runs.runner.facts.draws:
        return
    others_drew = cache(lambda: context.runs.ask(Control.OTHER_THREADS, context.runs.runner.others_drew))
    for case in context.open():
        if not case.logic_differs:
            _explain_by_draws(context, case, others_drew)


def _explain_by_fused_rounding(context: Context) -> None:
    """Close tensors that fused kernels explain: in half precision these round less often than eager."""
    for case in context.open():
        if not case.low_precision or case.logic_differs is not False or case.outside.nonfinite:
            continue
        if not _is_not_reproduced(context, case) and rounds_less_often(context, case):
            close_as_noise(context, case)


def _still_differs(case: Evidence, sample: torch.Tensor) -> bool:
    if sample.dtype != case.pair.reference.dtype or case.envelope is None:
        return bool((difference(case.pair.reference, sample) != 0).any())
    differs = case.logic_differs and (difference(case.pair.reference, sample) != 0).any()
    return bool(case.outliers(sample)) or bool(differs)


def _again(context: Context, case: Evidence) -> Sequence[torch.Tensor]:
    """The tensor in further runs of the candidate, from the random state before the call."""
    return [sample for recipe in AGAIN if (sample := case.sample(context.runs.run(recipe))) is not None]


def _is_not_reproduced(context: Context, case: Evidence) -> bool:
    """Whether the compiled program gave this value in the checked call, and never gives it again.

    Its further runs must be equal bit for bit, or right. A program that changes from run to run is another question.
    """
    again = _again(context, case)
    if not again or any(one.dtype != case.pair.candidate.dtype for one in again):
        return False
    if any(same_bits(case.pair.candidate, one) for one in again):
        return False
    alike = len(again) == thresholds.FEW_RUNS and all(same_bits(again[0], one) for one in again[1:])
    made = [values for recipe in AGAIN if (values := context.runs.run(recipe)) is not None]
    return alike or all(agrees(case, values) for values in made)


def _explain_by_draws(context: Context, case: Evidence, others_drew: Callable[[], str | None]) -> None:
    """Close a case if random numbers explain it. Where another thread may have drawn, it takes note of the answer.

    Args:
        others_drew: Gives evidence that another thread drew some.
    """
    replayed = context.runs.run(ON_EAGERS_DRAWS)
    by_values = context.runs.runner.facts.draws_by_values
    flips = bool(by_values) and not case.same_bits
    error, _, why = context.runs.missing.get(Control.CANDIDATE_REPLAYED, "").partition(": ")
    if error == OtherDrawsError.__name__ and not by_values and not case.same_bits:
        message = f"the compiled program draws otherwise than eager, so that its values cannot be compared: {why}"
        close_as(context, case, Classification(Kind.RNG, "rng.stream", message))
        return
    if not agrees(case, replayed) and not (flips and replayed is None):
        return
    if _is_not_reproduced(context, case):
        _explain_by_others(context, case, others_drew())
        return
    # a thread that draws all the time disturbs each run of either side otherwise
    repeats = all(same_bits(case.pair.candidate, one) for one in _again(context, case))
    eager = case.sample(context.runs.run(BARE))
    if not repeats or (eager is not None and not same_bits(case.pair.reference, eager)):
        _explain_by_others(context, case, others_drew())
    if case.closed:
        return
    if flips:
        reason = f"it depends on what {by_values[0]} draws by computed values, and rounding changes that"
        close_undecided(context, case, reason)
    elif case.low_precision or not any(agrees(case, context.runs.run(recipe)) for recipe in AGAIN):
        # what is right now and then goes on; in half precision it might be taken for fused rounding
        close_as(context, case, _OTHER_RANDOM_NUMBERS)


def _explain_by_others(context: Context, case: Evidence, evidence: str | None) -> None:
    if evidence is None:
        case.evidence[EvidenceKey.OTHER_THREADS] = "nothing shows that one drew random numbers"
    else:
        close_undecided(context, case, f"another thread drew random numbers: {evidence}")
