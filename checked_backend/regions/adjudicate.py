"""Noise or bug: look at every tensor once, and hear the cases of those that are not settled by that.

A tensor is settled if it is equal bit for bit, or within a scale that an earlier call of the region established. One of
a region that computes in half precision is not settled by equal bits before its float64 twin has been compared:
rounding to half precision hides errors of a thousandth, with some inputs altogether. The twin is compiled once for
each region, at its first checked call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checked_backend.numerics.measure import measure
from checked_backend.numerics.noise import RememberedScale
from checked_backend.numerics.screen import Glance, screen
from checked_backend.record import Skip
from checked_backend.regions.case import Case, is_floating
from checked_backend.regions.controls import Controls
from checked_backend.regions.hearing import Hearing, short
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
) -> Rulings:
    """Judge the values of a check.

    Args:
        pairs: Tensors of equal shape and dtype.
        controls: Makes the control runs; called only if one is needed.
        known: Scales from earlier calls.
        thorough: Run the float64 twin for every difference, not only for suspicious ones and low precision.
        low_precision: The region computes in half precision somewhere: run the float64 twin once for each of its
            floating tensors, also for those that are equal bit for bit.
    """
    rulings = Rulings()
    cases: list[Case] = []
    for pair in pairs:
        ask_twin = low_precision and pair.name not in known and is_floating(pair.reference)
        try:
            case = _examined(pair, known.get(pair.name), ask_twin)
        except Exception as error:  # a tensor that cannot be measured is never a pass
            rulings.skips.append(Skip(pair.subject, f"could not be measured: {short(error)}", matters=True))
            continue
        rulings.compared += 1
        if case is not None:
            cases.append(case)
    if cases:
        Hearing(cases, controls(), rulings, known, thorough=thorough, low_precision=low_precision).run()
    return rulings


def _examined(pair: Pair, scale: RememberedScale | None, ask_twin: bool) -> Case | None:
    """Look at a tensor once; returns its case if that does not settle it."""
    glance = screen(reference=pair.reference, candidate=pair.candidate)
    if glance is not None and not ask_twin and _settled(glance, scale):
        return None
    metrics = measure(reference=pair.reference, candidate=pair.candidate)
    return Case.of(pair, metrics) if ask_twin or not metrics.bitwise_equal else None


def _settled(glance: Glance, scale: RememberedScale | None) -> bool:
    return glance.max_abs_diff == 0 or (scale is not None and scale.covers(glance, slack=CHEAP_SLACK))
