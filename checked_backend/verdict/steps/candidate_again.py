"""The candidate again: on eager's random numbers, rounding wherever eager does, and compiled once more."""

from __future__ import annotations

import torch

from checked_backend.findings import EvidenceKey
from checked_backend.verdict.closing import close_as, close_as_noise, close_undecided
from checked_backend.verdict.context import Context
from checked_backend.verdict.control_runs import Control, Values
from checked_backend.verdict.elements import difference
from checked_backend.verdict.evidence import Evidence
from checked_backend.verdict.outliers import outside_noise

__all__ = ["try_candidate_again"]


def try_candidate_again(context: Context) -> None:
    """Decide about tensors that another run of the candidate explains; for the others note whether they repeat."""
    if not context.open():
        return
    _explain_by_random_numbers(context)
    _explain_by_fused_rounding(context)
    differing = [case for case in context.open() if not case.same_bits]
    if not differing:
        return
    runs = context.draws.alone()
    for case in differing:
        again = [sample for values in runs if (sample := case.sample(values)) is not None]
        if again:
            times = sum(_still_differs(case, sample) for sample in again)
            case.evidence[EvidenceKey.DIFFERENCE_REPEATS] = f"in {times} of {len(again)} more runs of the candidate"
            case.only_then = not times and context.draws.only_then(case)
    # The twin was compiled apart from the user's program. Is it right only because of that?
    for case in differing:
        if case.logic_differs is False and not case.only_then and case.pair.kind is None:
            recheck = _recompiled(context)
            sample = None if recheck is None else case.sample(recheck)
            case.right_recompiled = None if sample is None else not _still_differs(case, sample)


def _recompiled(context: Context) -> Values | None:
    if not context.recompiled:
        context.recompiled.append(context.runs.run(Control.RECOMPILED, context.controls.recompiled))
    return context.recompiled[0]


def _explain_by_random_numbers(context: Context) -> None:
    if not context.controls.draws():
        return
    for case in context.open():
        explained = context.draws.explain(case)
        if isinstance(explained, str):
            close_undecided(context, case, explained)
        elif explained is not None:
            close_as(context, case, explained)


def _explain_by_fused_rounding(context: Context) -> None:
    """Close tensors that fused kernels explain: in half precision these round less often than eager."""
    doubtful = [case for case in context.open() if case.logic_differs is False and not case.outside.nonfinite]
    if not doubtful or not context.low_precision:
        return
    for case in doubtful:
        if not context.draws.only_then(case) and context.fused.explains(case):
            close_as_noise(context, case)


def _still_differs(case: Evidence, sample: torch.Tensor) -> bool:
    if sample.dtype != case.pair.reference.dtype or case.envelope is None:
        return bool((difference(case.pair.reference, sample) != 0).any())
    found = outside_noise(
        reference=case.pair.reference,
        candidate=sample,
        envelope=case.envelope,
        high_precision=case.high_precision,
        strong=case.strong,
    )
    return bool(found) or bool(case.logic_differs and (difference(case.pair.reference, sample) != 0).any())
