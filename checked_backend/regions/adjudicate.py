"""Noise or bug: look at every tensor once, and hear the cases of those that are not settled by that.

A tensor is settled if it is equal bit for bit, or within a scale that an earlier call of the region established. One of
a region that computes in half precision is not settled by equal bits before its float64 twin has been compared:
rounding to half precision hides errors of a thousandth, with some inputs altogether. The twin is compiled once for
each region, at its first checked call, and asked again whenever the caller wants the tensors judged anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checked_backend.numerics.measure import measure
from checked_backend.numerics.noise import RememberedScale
from checked_backend.numerics.screen import Glance, screen
from checked_backend.record import Skip
from checked_backend.regions.case import Case, is_floating
from checked_backend.regions.control_runs import short
from checked_backend.regions.controls import Controls
from checked_backend.regions.hearing import Hearing
from checked_backend.regions.rulings import Pair, Rulings

__all__ = ["Pair", "Rulings", "adjudicate"]

CHEAP_SLACK = 4.0
"""How much a remembered scale may be exceeded before a tensor is adjudicated again."""


def adjudicate(
    pairs: Sequence[Pair],
    controls: Callable[[], Controls],
    known: dict[str, RememberedScale],
    *,
    thorough: bool = False,
    low_precision: bool = False,
    anew: bool = False,
) -> Rulings:
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
    rulings = Rulings(anew=anew)
    cases: list[Case] = []
    for pair in pairs:
        ask_twin = low_precision and (anew or pair.name not in known) and is_floating(pair.reference)
        try:
            scale = None if anew else known.get(pair.name)
            case = _examined(pair, scale, rulings.powers, ask_twin=ask_twin)
        except Exception as error:  # a tensor that cannot be measured is never a pass
            rulings.skips.append(Skip(pair.subject, f"could not be measured: {short(error)}", matters=True))
            continue
        rulings.compared += 1
        if case is not None:
            cases.append(case)
    if cases:
        # whether a tensor is still nothing but rounding is for float64 to say
        asked = {name for name, scale in known.items() if scale.settles and scale.sizes is None and not anew}
        Hearing(cases, controls(), rulings, frozenset(asked), thorough=thorough, low_precision=low_precision).run()
    return rulings


def _examined(pair: Pair, scale: RememberedScale | None, powers: dict[str, float], *, ask_twin: bool) -> Case | None:
    """Look at a tensor once; returns its case if that does not settle it."""
    glance = screen(reference=pair.reference, candidate=pair.candidate)
    if glance is not None and not ask_twin and (glance.max_abs_diff == 0 or _settled(pair, glance, scale, powers)):
        return None
    metrics = measure(reference=pair.reference, candidate=pair.candidate)
    if ask_twin:
        return Case.of(pair, metrics)
    if glance is None and is_floating(pair.reference) and metrics.nonfinite_mismatched == 0:
        # a mask's infinities, complex numbers: the same question of other numbers
        glance = Glance(metrics.max_abs_diff, metrics.rmse, metrics.reference_rms)
        if _settled(pair, glance, scale, powers):
            return None
    return None if metrics.bitwise_equal else Case.of(pair, metrics)


def _settled(pair: Pair, glance: Glance, scale: RememberedScale | None, powers: dict[str, float]) -> bool:
    if scale is None or not scale.covers(glance, slack=CHEAP_SLACK):
        return False
    powers[pair.name] = scale.power(glance, slack=CHEAP_SLACK)
    return True
