"""Does rounding explain a difference: a fused half-precision kernel omits roundings that eager makes?"""

from __future__ import annotations

import torch

from checked_backend.verdict import thresholds
from checked_backend.verdict.context import Context
from checked_backend.verdict.elements import difference
from checked_backend.verdict.evidence import Evidence
from checked_backend.verdict.outliers import outside_noise
from checked_backend.verdict.runner import Build, Control, Recipe, Values

UNFUSED = Recipe(Control.UNFUSED, Build.UNFUSED, replays_draws=True)


def rounds_less_often(context: Context, case: Evidence) -> bool:
    """Whether the candidate agrees with eager once it rounds where eager does; if so, a note is added."""
    if not agrees(case, context.runs.run(UNFUSED)):
        return False
    context.decisions.notes.append(
        f"fusion-rounding: {case.pair.subject} differs from eager by {case.metrics.max_abs_diff:.3g} at "
        "most, because fused kernels keep intermediate results in float32; with emulate_precision_casts, "
        "which makes them round wherever eager does, it agrees"
    )
    return True


def loses_the_rest(context: Context, case: Evidence) -> bool:
    """Whether the candidate loses the rest that casts leave in eager, for another reason than omitted roundings.

    A tensor that is zero but for rounding is as near to float64 if it is all zero. But a program may ask for just that
    rest: the part of a value that a cast to half precision and back removes (error feedback, compensated sums). Such a
    tensor has the wider dtype.
    """
    if case.pair.reference.dtype.itemsize <= 2 or not case.is_zero_in_float64 or case.is_there(case.pair.candidate):
        return False
    if int(torch.count_nonzero(case.pair.reference)) < thresholds.LEFT_BY_CHANCE:
        return False
    unfused = case.sample(context.runs.run(UNFUSED))
    return unfused is None or not case.is_there(unfused) or not rounds_less_often(context, case)


def agrees(case: Evidence, values: Values | None) -> bool:
    """Whether another run of the candidate, under other conditions, gives other values, and right ones."""
    again = case.sample(values)
    if again is None or again.dtype != case.pair.reference.dtype:
        return False
    if case.envelope is None or case.logic_differs:
        return False  # the float64 twin ran on the recorded random numbers too
    if not bool((difference(again, case.pair.candidate) != 0).any()):
        return False  # the other conditions changed nothing
    return not outside_noise(reference=case.pair.reference, candidate=again, envelope=case.envelope)
