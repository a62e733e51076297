"""Noise or bug: look at every tensor once, and hear the cases of those that are not settled by that.

A tensor is settled if it is equal bit for bit, or within a scale that an earlier call of the region established. One of
a region that computes in half precision is not settled by equal bits before its float64 twin has been compared:
rounding to half precision hides errors of a thousandth, with some inputs altogether. The twin is compiled once for
each region, at its first checked call, and asked again whenever the caller wants the tensors judged anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checked_backend.findings import Skip
from checked_backend.numerics.measure import measure
from checked_backend.numerics.quick_diff import QuickDiff, quick_diff
from checked_backend.verdict import thresholds
from checked_backend.verdict.control_runner import short
from checked_backend.verdict.control_runs import ControlRuns
from checked_backend.verdict.decisions import Decisions, TensorPair
from checked_backend.verdict.envelope import NoiseBaseline
from checked_backend.verdict.evidence import Evidence, is_floating
from checked_backend.verdict.steps.in_order import Steps

__all__ = ["decide"]


def decide(
    pairs: Sequence[TensorPair],
    controls: Callable[[], ControlRuns],
    known: dict[str, NoiseBaseline],
    *,
    thorough: bool = False,
    low_precision: bool = False,
    anew: bool = False,
) -> Decisions:
    """Judge the values of a check.

    Args:
        pairs: Tensors of equal shape and dtype.
        controls: Makes the control runs; called only if one is needed.
        known: Scales from earlier calls.
        thorough: Run the float64 twin for every difference, not only for suspicious ones and low precision.
        low_precision: The region computes in half precision somewhere: run the float64 twin once for each of its
            floating tensors, also for those that are equal bit for bit.
        anew: Settle nothing by the scales of earlier calls, and run the twin also for what has been judged in them.
    """
    rulings = Decisions(anew=anew)
    cases: list[Evidence] = []
    for pair in pairs:
        ask_twin = low_precision and (anew or pair.name not in known) and is_floating(pair.reference)
        try:
            scale = None if anew else known.get(pair.name)
            case = _examined(pair, scale, rulings.limits, ask_twin=ask_twin)
        except Exception as error:  # a tensor that cannot be measured is never a pass
            rulings.skips.append(Skip(pair.subject, f"could not be measured: {short(error)}", matters=True))
            continue
        rulings.compared += 1
        if case is not None:
            cases.append(case)
    if cases:
        # whether a tensor is still nothing but rounding is for float64 to say
        asked = {name for name, scale in known.items() if scale.settles and scale.sizes is None and not anew}
        Steps(cases, controls(), rulings, frozenset(asked), thorough=thorough, low_precision=low_precision).run()
    return rulings


def _examined(
    pair: TensorPair, scale: NoiseBaseline | None, limits: dict[str, float], *, ask_twin: bool
) -> Evidence | None:
    """Look at a tensor once; returns its case if that does not settle it."""
    glance = quick_diff(reference=pair.reference, candidate=pair.candidate)
    if glance is not None and not ask_twin and (glance.max_abs_diff == 0 or _settled(pair, glance, scale, limits)):
        return None
    metrics = measure(reference=pair.reference, candidate=pair.candidate)
    if ask_twin:
        return Evidence.of(pair, metrics)
    if glance is None and is_floating(pair.reference) and metrics.nonfinite_mismatched == 0:
        # a mask's infinities, complex numbers: the same question of other numbers
        glance = QuickDiff(metrics.max_abs_diff, metrics.rmse, metrics.reference_rms)
        if _settled(pair, glance, scale, limits):
            return None
    return None if metrics.bitwise_equal else Evidence.of(pair, metrics)


def _settled(pair: TensorPair, glance: QuickDiff, scale: NoiseBaseline | None, limits: dict[str, float]) -> bool:
    if scale is None or not scale.covers(glance, slack=thresholds.REMEMBERED_SLACK):
        return False
    limits[pair.name] = scale.limit(glance, slack=thresholds.REMEMBERED_SLACK)
    return True
