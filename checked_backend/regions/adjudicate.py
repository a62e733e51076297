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
from checked_backend.numerics.screen import screen
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
        anew: Run it also for those that have been judged in an earlier call.
    """
    rulings = Rulings()
    cases: list[Case] = []
    for pair in pairs:
        ask_twin = low_precision and (anew or pair.name not in known) and is_floating(pair.reference)
        try:
            case = _examined(pair, known.get(pair.name), rulings.powers, ask_twin=ask_twin)
        except Exception as error:  # a tensor that cannot be measured is never a pass
            rulings.skips.append(Skip(pair.subject, f"could not be measured: {short(error)}", matters=True))
            continue
        rulings.compared += 1
        if case is not None:
            cases.append(case)
    if cases:
        asked = frozenset() if anew else frozenset(name for name, scale in known.items() if scale.settles)
        Hearing(cases, controls(), rulings, asked, thorough=thorough, low_precision=low_precision).run()
    return rulings


def _examined(pair: Pair, scale: RememberedScale | None, powers: dict[str, float], *, ask_twin: bool) -> Case | None:
    """Look at a tensor once; returns its case if that does not settle it."""
    glance = screen(reference=pair.reference, candidate=pair.candidate)
    if glance is not None and not ask_twin:
        if glance.max_abs_diff == 0:
            return None
        if scale is not None and scale.covers(glance, slack=CHEAP_SLACK):
            powers[pair.name] = CHEAP_SLACK * scale.rms
            return None
    metrics = measure(reference=pair.reference, candidate=pair.candidate)
    return Case.of(pair, metrics) if ask_twin or not metrics.bitwise_equal else None
