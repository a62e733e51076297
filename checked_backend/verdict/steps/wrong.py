"""A tensor that is still open is wrong, unless there was nothing to compare it with."""

from __future__ import annotations

from collections.abc import Collection

import torch

from checked_backend.findings import EvidenceKey, Skip
from checked_backend.numerics.bits import is_floating
from checked_backend.verdict.classify import UNSUPPORTED, classify, is_many_times_its_noise, singular
from checked_backend.verdict.closing import close_as, close_undecided
from checked_backend.verdict.context import Context
from checked_backend.verdict.control_runs import Control
from checked_backend.verdict.elements import root_mean_square
from checked_backend.verdict.evidence import Evidence
from checked_backend.verdict.outliers import distances_from

__all__ = ["close_what_is_left"]

_INDISPENSABLE = frozenset({Control.REPEAT, Control.BARE, Control.MONTE_CARLO, Control.CANDIDATE_REPLAYED})
"""If one of these is missing, any difference may be noise."""

_PRECISE = frozenset({Control.FLOAT64, Control.FLOAT64_NOISE, Control.TWIN, Control.GIVEN_CHOICES, Control.UNFUSED})
"""If one of these is missing, any difference may be noise that is not many times the known noise."""


def close_what_is_left(context: Context) -> None:
    """Decide about tensors that neither noise nor anything else explains."""
    for case in context.open():
        _close_as_wrong(context, case)


def _close_as_wrong(context: Context, case: Evidence) -> None:
    lost = context.runs.short_of_memory & (_INDISPENSABLE | _PRECISE)
    if lost and not _stands_without(case, lost):
        names = ", ".join(sorted(control.value for control in lost))
        close_undecided(
            context, case, f"unsupported: memory: it ran out ({names}), and without that a difference may be noise"
        )
        return
    if case.envelope is None and case.high_precision is None:
        reason = "no control could run, so there is no verdict on it"
        context.decisions.skips.append(Skip(case.pair.subject, reason, matters=True))
        close_as(context, case, UNSUPPORTED)
        return
    if case.envelope is None and not case.logic_differs and _has_half_of_its_digits(case):
        reason = "its noise could not be measured, and half of its digits agree with float64: there is no verdict on it"
        close_undecided(context, case, reason)
        return
    if not case.logic_differs and case.outside.overflowed == case.outside.count > 0:
        dtype = str(case.pair.reference.dtype).removeprefix("torch.")
        right = "; compiled in float64 it is right" if case.logic_differs is False else ""
        reason = (
            f"the program leaves the range of {dtype}: eager has NaN or infinity where float64 has numbers, so "
            f"there is nothing to hold the compiled program's against{right}"
        )
        close_undecided(context, case, reason)
        return
    if not case.logic_differs and case.outside.unconfirmed == case.outside.count > 0:
        close_undecided(context, case, singular(case.outside.count))
        return
    if not case.same_bits:
        case.evidence[EvidenceKey.ELEMENTS_OUTSIDE_NOISE] = case.outside.count
    close_as(context, case, classify(case))


def _stands_without(case: Evidence, lost: Collection[Control]) -> bool:
    """Whether a tensor is wrong, whatever the control runs that had no memory would have shown."""
    if not _INDISPENSABLE.isdisjoint(lost):
        return False
    return bool(case.outside.nonfinite) or is_many_times_its_noise(case)


def _has_half_of_its_digits(case: Evidence) -> bool:
    """Whether a tensor with unknown noise may be wrong by rounding alone: half of its digits agree with float64."""
    if case.high_precision is None or not is_floating(case.pair.reference):
        return False
    distance = root_mean_square(distances_from(case.high_precision, case.pair.candidate))
    digits = float(torch.finfo(case.pair.reference.dtype).eps) ** 0.5
    return not case.metrics.nonfinite_mismatched and distance <= digits * (case.metrics.reference_rms or 0.0)
