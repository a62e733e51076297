"""A call of a region that failed its check, with everything that is needed to run it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from checked_backend.findings import Finding
from checked_backend.options import CheckOptions
from checked_backend.regions.execution import Cotangents, Subjects
from checked_backend.regions.inputs import Inputs
from checked_backend.regions.operator_check.in_place import KernelCheck
from checked_backend.regions.torch_state import RngState, TorchState

__all__ = ["Failure", "Investigator", "Keep"]


Keep = Callable[[Sequence[Finding]], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call.

    Attributes:
        graph: The region's Dynamo graph, as Dynamo made it.
        example_inputs: The values that Dynamo compiled it for; fake, with symbols, if sizes are dynamic.
        inputs: The inputs of the call.
        ambient: Modes at the call.
        rng: Random state before it.
        subjects: Names of its inputs and outputs.
        cotangents: The gradients that arrived at its results, if its backward pass failed.
        options: The user's options.
        mode: What the user passed as ``torch.compile(mode=...)``.
        patience: Seconds after which other ranks would wait no longer for this one; None if none waits.
        kernels: Sees the kernels of the compiled region as they run; None if the compiler is not Inductor.
        keep: Puts the findings, with everything known about them so far, on disk. It may be called in any process.
    """

    graph: fx.GraphModule
    example_inputs: tuple[Any, ...]
    inputs: Inputs
    ambient: TorchState
    rng: RngState
    subjects: Subjects
    cotangents: Cotangents | None
    options: CheckOptions
    mode: str | None
    keep: Keep = lambda _findings: None
    kernels: KernelCheck | None = None
    patience: float | None = None


Investigator = Callable[[Failure, Sequence[Finding]], Sequence[Finding]]
"""Gets a failed call and its findings. Gives back the findings with everything that it found out about them."""
