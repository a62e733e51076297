"""A tensor that eager itself does not repeat is nondeterministic: there is nothing to compare with."""

from __future__ import annotations

import torch

from checked_backend.findings import EvidenceKey
from checked_backend.verdict import thresholds
from checked_backend.verdict.classify import NONDETERMINISTIC, READS_JUNK
from checked_backend.verdict.closing import close_as
from checked_backend.verdict.context import Context
from checked_backend.verdict.control_runs import Values
from checked_backend.verdict.elements import difference
from checked_backend.verdict.evidence import Evidence
from checked_backend.verdict.repetition import dwarfs, is_rounding, repeat
from checked_backend.verdict.steps.float64 import spread_in_float64

__all__ = ["close_what_changes", "close_what_is_no_rounding", "repeat_eager"]


def repeat_eager(context: Context) -> None:
    """Run eager once more, so that the other steps know what it repeats."""
    context.repetition = repeat(context.cases, context.runs)


def close_what_is_no_rounding(context: Context) -> None:
    """Decide about tensors that eager changes from run to run by more than rounding does."""
    for case in context.open():
        if not case.same_bits and not is_rounding(case):
            _close_as_changing(context, case)


def close_what_changes(context: Context) -> None:
    """Decide about tensors that eager does not repeat, where that explains the difference."""
    if context.repeated is None:
        return
    drifting: list[Evidence] = []
    for case in context.open():
        again = case.sample(context.repeated)
        if again is None:
            continue
        if not bool((difference(case.pair.reference, again) != 0).any()):
            case.evidence[EvidenceKey.EAGER_REPEATS] = "bit for bit"
            continue
        case.evidence[EvidenceKey.EAGER_SPREAD] = case.spread
        drifting.append(case)
    unknown = [case for case in drifting if case.float64_envelope is None and case.high_precision is not None]
    spread_in_float64(unknown, context.runs, range(1, 1 + thresholds.TWIN_RUNS))
    for case in drifting:
        # In float64 eager repeats itself, also with other junk in memory. So only its rounding does not repeat, unless
        # the operator has another kernel for float64, which reads no junk.
        steady = case.float64_repeats and not _is_beyond_rounding(case, context.repeated)
        if case.logic_differs and case.float64_repeats:
            continue
        if steady and dwarfs(case, context.repeated, context.runs):
            continue
        _close_as_changing(context, case)


def _is_beyond_rounding(case: Evidence, repeated: Values | None) -> bool:
    """Whether two runs of eager differ by more than the greatest element that they have, as no rounding does."""
    again = None if repeated is None else case.sample(repeated)
    if again is None or not again.numel():
        return False
    spread = difference(case.pair.reference, again)
    if not bool(spread.isfinite().all()):  # one of them has a number where the other has none
        return True
    both = [one.to(torch.uint8) if one.dtype is torch.bool else one for one in (case.pair.reference, again)]
    greatest = min(float(one.abs().nan_to_num(0.0, 0.0).max()) for one in both)
    return bool((spread > greatest).any())


def _close_as_changing(context: Context, case: Evidence) -> None:
    by_junk = case.pair.name in context.repetition.only_as_it_is
    close_as(context, case, READS_JUNK if by_junk else NONDETERMINISTIC)
