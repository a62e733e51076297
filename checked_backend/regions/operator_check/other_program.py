"""Find out whether the probe is the program that the user runs. Errors of the probe alone do not count.

Handing out inner tensors changes how a compiler fuses and schedules. If the probe's results are further from those of
the compiled region than rounding takes them, and the compiled region's are near eager's, the error is the probe's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import fx

from checked_backend.modes.choice_tape import ChoiceTape, RecordChoices, ReplayChoices
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from checked_backend.numerics.bits import unit_roundoff
from checked_backend.regions.inputs import Inputs
from checked_backend.regions.operator_check.findings import reached
from checked_backend.regions.operator_check.tensor_checks import Wrong
from checked_backend.regions.torch_state import RngState
from checked_backend.verdict.elements import difference, root_mean_square

__all__ = ["Elsewhere", "Place", "errors_of_probe"]

FAR = 4.0
"""A probe this many times as far from the region as the region is from eager is another program than the region."""

SAMPLES = 2
"""Runs in eager with other roundings: two that are near each other by chance are not taken for exact."""

Place = tuple[bool, int]
"""Whether it is a gradient, and its place among the results or the inputs."""

Region = Callable[..., Sequence[Any]]


class Elsewhere:
    """The results and gradients of a probe that are far from those of the region as it was compiled.

    Args:
        probed: The probe's results and gradients.
        cotangents: The gradients that were sent in, by place among the results.
        rng: The random state before the call.
    """

    def __init__(
        self, probed: Mapping[Place, Any], cotangents: Mapping[int, torch.Tensor], inputs: Inputs, rng: RngState
    ) -> None:
        self._probed = probed
        self._cotangents = cotangents
        self._inputs = inputs
        self._rng = rng

    def places(self, region: Region, eager: Region) -> set[Place]:
        """The results and gradients that show that the probe is another program.

        Args:
            region: The region as it was compiled.
        """
        own = self._ran(region, ())
        tape, choices = RandomTape(), ChoiceTape()
        right = self._ran(eager, (RecordRandom(tape), RecordChoices(choices)))
        rounded = [
            self._ran(eager, (ReplayRandom(tape), MonteCarloMode(1 + seed, 1.0), ReplayChoices(choices)))
            for seed in range(SAMPLES)
        ]
        return {
            place
            for place, found in self._probed.items()
            if _is_far(found, own.get(place), right.get(place), [sample.get(place) for sample in rounded])
        }

    def _ran(self, region: Region, modes: Sequence[AbstractContextManager[Any]]) -> dict[Place, Any]:
        """A region's results, and its gradients for the cotangents that the probe was given."""
        arguments, leaves = self._inputs.fresh()
        gradients: Sequence[Any] = ()
        self._rng.restore()
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            results = list(region(*arguments))
            if self._cotangents and leaves:
                gradients = torch.autograd.grad(
                    [results[place] for place in self._cotangents],
                    list(leaves.values()),
                    list(self._cotangents.values()),
                    allow_unused=True,
                )
        bare = (value.detach() if isinstance(value, torch.Tensor) else value for value in results)
        found: dict[Place, Any] = {(False, place): value for place, value in enumerate(bare)}
        return found | {(True, place): value for place, value in zip(leaves, gradients, strict=False)}


def errors_of_probe(gm: fx.GraphModule, wrong: Sequence[Wrong], elsewhere: set[Place]) -> list[Wrong]:
    """The errors that may be the probe's alone, because they reach a place where the probe is another program.

    An error that reaches no such place is also the region's, whatever else is wrong with the probe: each operator was
    checked on its own inputs.
    """
    reached_by = [(one, set(_reached(gm, one))) for one in wrong]
    explained = set().union(*(places for one, places in reached_by if one.gradient))
    # these gradients may be wrong because a value is; a loss hardly shows that value's error
    gradients = {place for place in elsewhere - explained if place[0]}
    return [one for one, places in reached_by if not elsewhere.isdisjoint(places) or (gradients and not one.gradient)]


def _reached(gm: fx.GraphModule, wrong: Wrong) -> Iterator[Place]:
    if wrong.gradient:
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            if node is wrong.node or wrong.node in reached(node):
                yield True, place
        return
    if wrong.output is not None:
        yield False, wrong.output
        return
    [output] = gm.graph.find_nodes(op="output")
    returned = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    behind = {wrong.node, *reached(wrong.node)}
    for place, node in enumerate(returned):
        if node in behind:
            yield False, place


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
