"""Find out whether the probe is the program that the user runs. Errors of the probe alone do not count.

Handing out inner tensors changes how a compiler fuses and schedules. If the probe's results are further from those of
the compiled region than rounding takes them, and the compiled region's are near eager's, the error is the probe's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from checked_backend.modes.choice_tape import ChoiceTape, RecordChoices, ReplayChoices
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from checked_backend.numerics.bits import unit_roundoff
from checked_backend.regions.execution import Call
from checked_backend.regions.operator_check.findings import Place, places_reached
from checked_backend.regions.operator_check.probe import Probed, run_region
from checked_backend.regions.operator_check.tensor_checks import Wrong
from checked_backend.verdict.elements import difference, root_mean_square

FAR = 4.0
"""A probe this many times as far from the region as the region is from eager is another program than the region."""

SAMPLES = 2
"""Runs in eager with other roundings: two that are near each other by chance are not taken for exact."""


def other_places(probed: Probed, region: Callable[..., Any], eager: Callable[..., Any], call: Call) -> set[Place]:
    """The results and gradients in which a probe is another program than the region as it was compiled.

    Args:
        probed: A run of the probe, with no results but the region's own.
    """

    def ran(program: Callable[..., Any], *modes: AbstractContextManager[Any]) -> dict[Place, Any]:
        return _by_place(run_region(program, call, lambda _results: probed.cotangents, modes=modes))

    tape, choices = RandomTape(), ChoiceTape()
    own, right = ran(region), ran(eager, RecordRandom(tape), RecordChoices(choices))
    rounded = [
        ran(eager, ReplayRandom(tape), MonteCarloMode(1 + seed, 1.0), ReplayChoices(choices)) for seed in range(SAMPLES)
    ]
    return {
        place
        for place, found in _by_place(probed).items()
        if _is_far(found, own.get(place), right.get(place), [sample.get(place) for sample in rounded])
    }


def _by_place(probed: Probed) -> dict[Place, Any]:
    results: dict[Place, Any] = {(False, place): value for place, value in enumerate(probed.results)}
    return results | {(True, place): value for place, value in probed.gradients.items()}


def errors_of_probe(gm: fx.GraphModule, wrong: Sequence[Wrong], elsewhere: set[Place]) -> list[Wrong]:
    """The errors that may be the probe's alone, because they reach a place where the probe is another program.

    An error that reaches no such place is also the region's, whatever else is wrong with the probe: each operator was
    checked on its own inputs.
    """
    reached_by = [(one, set(places_reached(gm, one))) for one in wrong]
    explained = set().union(*(places for one, places in reached_by if one.gradient))
    # these gradients may be wrong because a value is; a loss hardly shows that value's error
    gradients = {place for place in elsewhere - explained if place[0]}
    return [one for one, places in reached_by if not elsewhere.isdisjoint(places) or (gradients and not one.gradient)]


def _is_far(found: Any, region: Any, right: Any, rounded: Sequence[Any]) -> bool:
    """Whether the probe's tensor is further from the region's than rounding or the region's own error explains."""
    tensors = (found, region, right, *rounded)
    if not all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in tensors):
        return False
    if any(value.shape != found.shape for value in tensors) or not found.numel():
        return False
    near = [unit_roundoff(right.dtype) * root_mean_square(right)]
    near += [root_mean_square(difference(right, value)) for value in (region, *rounded)]
    return root_mean_square(difference(region, found)) > FAR * max(near)
