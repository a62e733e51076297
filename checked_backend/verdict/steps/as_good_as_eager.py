"""A tensor no further from float64 than eager is no worse than eager. The tensors left over get a closer look."""

from __future__ import annotations

from checked_backend.numerics.bits import is_floating
from checked_backend.verdict import thresholds
from checked_backend.verdict.closing import close_as_noise, is_as_near_as_eager
from checked_backend.verdict.context import Context
from checked_backend.verdict.steps.monte_carlo import compare_with_noise, perturb

__all__ = ["close_what_is_as_good_as_eager"]


def close_what_is_as_good_as_eager(context: Context) -> None:
    """Decide about tensors whose float64 twin is right, or could not be asked."""
    if any(not case.logic_differs for case in context.open()):
        _close_what_is_as_near(context)
        _look_closer(context)


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


def _look_closer(context: Context) -> None:
    """Look closer at the tensors left over: more runs, then stronger runs, which show jumps and cancellation."""
    for number, magnitude in enumerate((1.0, thresholds.CORRELATED_MAGNITUDE, thresholds.STRONG_MAGNITUDE), start=1):
        if not any(not case.logic_differs for case in context.open()):
            return
        perturb(context.open(), context.runs, range(100 * number, 100 * number + thresholds.MORE_RUNS), magnitude)
        compare_with_noise(context.open())
        for case in context.open():
            if not case.outside and not case.logic_differs:
                close_as_noise(context, case)
    _close_what_is_as_near(context)
