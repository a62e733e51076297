"""One checked call of a region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checked_backend.ranks.exchanges import Exchanges
from checked_backend.regions.budget import Due, Meter
from checked_backend.regions.execution import AutogradGraph, Subjects
from checked_backend.regions.inputs import Inputs
from checked_backend.regions.other_threads import FinalRngStates
from checked_backend.regions.torch_state import RngState, TorchState

__all__ = ["Call"]


@dataclass(eq=False)
class Call:
    """One checked call, kept until its backward passes are over.

    Attributes:
        inputs: Its inputs.
        ambient: Modes at the call.
        rng: Random state before it.
        subjects: Names.
        graph: The reference's autograd graph; None before it ran, after its activations were freed, and with
            ``reference="recompute"``.
        final_rng_states: The random states that both sides left behind; None before they ran.
        due: How it is checked.
        exchanges: Its exchanges with other ranks; None for a region that exchanges nothing.
        ratios: The differences of its results, or later of its gradients, divided by their noise, by name;
            None before that is known.
        number: The number of the call in its region, from 1.
        meter: Measures the part of the check that runs, results or gradients; None where nothing is paid for.
    """

    inputs: Inputs
    ambient: TorchState
    rng: RngState
    subjects: Subjects
    graph: AutogradGraph | None = None
    final_rng_states: FinalRngStates | None = None
    due: Due = field(default_factory=Due)
    exchanges: Exchanges | None = None
    ratios: Mapping[str, float] | None = None
    number: int = 0
    meter: Meter | None = None
