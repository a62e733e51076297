"""Close a tensor's evidence with a decision: it is noise, it is wrong, or it cannot be decided."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from checked_backend.findings import EvidenceKey, Finding, Skip
from checked_backend.numerics.bits import is_floating
from checked_backend.verdict import thresholds
from checked_backend.verdict.classify import (
    CHANGES_IN_FLOAT64,
    UNSUPPORTED,
    Classification,
    classify,
    is_many_times_its_noise,
    singular,
)
from checked_backend.verdict.distribution import distribution
from checked_backend.verdict.elements import difference, root_mean_square, widened
from checked_backend.verdict.evidence import Context, Evidence
from checked_backend.verdict.outliers import as_good_as_eager, distances_from, outside_noise
from checked_backend.verdict.runner import FLOAT64, Build, Control, Recipe, Values

_MISSING = MappingProxyType(
    {
        Control.FLOAT64: EvidenceKey.FLOAT64_MISSING,
        Control.TWIN: EvidenceKey.TWIN_MISSING,
        Control.MONTE_CARLO: EvidenceKey.MONTE_CARLO_MISSING,
    }
)

_INDISPENSABLE = frozenset({Control.REPEAT, Control.BARE, Control.MONTE_CARLO, Control.CANDIDATE_REPLAYED})
"""If one of these is missing, any difference may be noise."""

_PRECISE = frozenset({Control.FLOAT64, Control.FLOAT64_NOISE, Control.TWIN, Control.UNFUSED})
"""If one of these is missing, any difference may be noise that is not many times the known noise."""


def close_as_noise(context: Context, case: Evidence) -> None:
    """Decide that a tensor is right, unless its noise is so large that it hides any error."""
    if _hides_everything(context, case):
        return
    if case.metrics.nonfinite_mismatched == 0:
        context.decisions.scales[case.pair.name] = case.remembered()
    # in NaN and infinity an error has no size, unless the candidate's numbers were held against float64
    finite = case.metrics.reference_rms > 0 or bool(widened(case.pair.reference).isfinite().any())
    if finite or (case.metrics.nonfinite_mismatched and case.high_precision is not None):
        context.decisions.limits[case.pair.name] = case.detection_limit()
    if case.float64_nonfinite is not None:
        count = int(case.float64_nonfinite.sum())
        context.decisions.notes.append(
            f"{case.pair.subject}: float64 has NaN or infinity in {count} of its elements where "
            "eager has numbers, and confirms nothing there: they were compared within the noise of their own precision"
        )
    if case.logic_differs is False and not case.same_bits:
        context.decisions.own_precision_limits[case.pair.name] = case.own_precision_limit()
    case.closed = True


def close_undecided(context: Context, case: Evidence, reason: str) -> None:
    """Leave a tensor undecided, and give the reason to the coverage."""
    context.decisions.skips.append(Skip(case.pair.subject, reason, matters=True))
    case.closed = True


def close_as(context: Context, case: Evidence, named: Classification) -> None:
    """Decide that a tensor is wrong, and record a finding."""
    is_as_near_as_eager(case)
    for control, key in _MISSING.items():
        if control in context.runs.missing:
            case.evidence.setdefault(key, context.runs.missing[control])
    context.decisions.findings.append(
        Finding(
            named.kind,
            case.pair.subject,
            named.message,
            named.detail or str(named.kind),
            metrics=case.metrics,
            noise=case.noise(),
            evidence=case.evidence,
            source=case.pair.source or None,
            distribution=distribution(case.pair.reference, case.pair.candidate, case.high_precision),
        )
    )
    case.closed = True


def is_as_near_as_eager(case: Evidence) -> bool:
    """Whether the candidate is as close to float64 as eager is. Both distances are added to the evidence."""
    if case.high_precision is None:
        return False
    closeness = as_good_as_eager(
        reference=case.pair.reference,
        candidate=case.pair.candidate,
        high_precision=case.high_precision,
        up_to=case.outside.largest * 2**thresholds.NEIGHBOUR_BITS if case.outside else float("inf"),
        low_precision=case.low_precision,
    )
    case.evidence[EvidenceKey.EAGER_DISTANCE] = closeness.eager
    case.evidence[EvidenceKey.CANDIDATE_DISTANCE] = closeness.candidate
    return closeness.as_good


def _hides_everything(context: Context, case: Evidence) -> bool:
    """Whether an error of 100 % would be lost, so that nothing can be decided. Such a tensor is closed."""
    if case.low_precision and loses_the_rest(context, case):
        close_undecided(context, case, "it is what rounding leaves, and of that the compiled program has nothing")
        return True
    if unconfirmed_jumps := case.explained_by_jumps_alone():
        close_undecided(context, case, singular(unconfirmed_jumps))
        return True
    if case.detection_limit() < 1 or case.is_zero_in_float64 or not case.mostly_hidden():
        return False
    if case.same_bits and case.float64_nonfinite is not None:
        return False  # there is no difference to decide about, and no limit is claimed
    if not context.wants_twin(case) or Control.TWIN in context.runs.elsewhere:
        return False  # the twin was asked in an earlier call, or another check asks it
    if case.logic_differs is False:
        if _changes_by_itself(context, case):
            return True
        double = case.pair.reference.dtype in (torch.float64, torch.complex128)  # eager is its own reference there
        confirmed = case.float64_nonfinite is None
        if confirmed and (double or is_as_near_as_eager(case)) and case.is_there(case.pair.candidate):
            return False  # nobody could do better
    lost = context.runs.missing.keys() & {Control.FLOAT64, Control.TWIN}
    why = f" (could not run: {', '.join(sorted(control.value for control in lost))})" if lost else ""
    if case.float64_nonfinite is not None:
        why = " (and float64 has NaN or infinity there where eager has numbers)"
    close_undecided(context, case, f"its noise would hide an error of 100 %, so there is no verdict on it{why}")
    return True


def _changes_by_itself(context: Context, case: Evidence) -> bool:
    """Whether the large noise comes from eager changing now and then in float64 too. Such a tensor is closed.

    The other cause of large noise is an ill-conditioned program.
    """
    sample = case.sample(context.runs.run(replace(FLOAT64, number=2)))
    if sample is None or case.high_precision is None:
        return False
    spread = root_mean_square(difference(case.high_precision, sample))
    if spread <= thresholds.VANISHING * root_mean_square(case.high_precision):
        return False
    case.evidence[EvidenceKey.EAGER_SPREAD_OF_FLOAT64] = spread
    close_as(context, case, CHANGES_IN_FLOAT64)
    return True


def close_what_is_left(context: Context) -> None:
    """Decide about tensors that neither noise nor anything else explains."""
    for case in context.open():
        if (reason := _why_undecided(context, case)) is not None:
            close_undecided(context, case, reason)
        elif case.envelope is None and case.high_precision is None:
            reason = "no control could run, so there is no verdict on it"
            context.decisions.skips.append(Skip(case.pair.subject, reason, matters=True))
            close_as(context, case, UNSUPPORTED)
        else:
            if not case.same_bits:
                case.evidence[EvidenceKey.ELEMENTS_OUTSIDE_NOISE] = case.outside.count
            close_as(context, case, classify(case))


def _why_undecided(context: Context, case: Evidence) -> str | None:
    """Why nothing shows whether a tensor is wrong that no control explains; None if it is."""
    lost = context.runs.short_of_memory & (_INDISPENSABLE | _PRECISE)
    # whatever the runs that had no memory would have shown
    is_wrong = _INDISPENSABLE.isdisjoint(lost) and (bool(case.outside.nonfinite) or is_many_times_its_noise(case))
    if lost and not is_wrong:
        names = ", ".join(sorted(control.value for control in lost))
        return f"unsupported: memory: it ran out ({names}), and without that a difference may be noise"
    if case.logic_differs or (case.envelope is None and case.high_precision is None):
        return None
    if case.envelope is None and _has_half_of_its_digits(case):
        return "its noise could not be measured, and half of its digits agree with float64: there is no verdict on it"
    if case.outside.overflowed == case.outside.count > 0:
        dtype = "half precision" if case.low_precision else str(case.pair.reference.dtype).removeprefix("torch.")
        right = "; compiled in float64 it is right" if case.logic_differs is False else ""
        return (
            f"the program leaves the range of {dtype}: eager has NaN or infinity where float64 has numbers, so "
            f"there is nothing to hold the compiled program's against{right}"
        )
    return singular(case.outside.count) if case.outside.unconfirmed == case.outside.count > 0 else None


def _has_half_of_its_digits(case: Evidence) -> bool:
    """Whether a tensor with unknown noise may be wrong by rounding alone: half of its digits agree with float64."""
    if case.high_precision is None or not is_floating(case.pair.reference):
        return False
    distance = root_mean_square(distances_from(case.high_precision, case.pair.candidate))
    digits = float(torch.finfo(case.pair.reference.dtype).eps) ** 0.5
    return not case.metrics.nonfinite_mismatched and distance <= digits * (case.metrics.reference_rms or 0.0)


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
    if int(torch.count_nonzero(case.pair.reference)) < thresholds.FEW_ELEMENTS:
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
