"""A call of a region that failed its check, with everything that is needed to run it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from checked_backend.findings import EvidenceKey, Finding
from checked_backend.options import CheckOptions
from checked_backend.regions.execution import Call, Cotangents
from checked_backend.regions.operator_check.in_place import KernelCheck

Keep = Callable[[Sequence[Finding]], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call.

    Attributes:
        graph: The region's Dynamo graph, as Dynamo made it.
        example_inputs: The values that Dynamo compiled it for; fake, with symbols, if sizes are dynamic.
        call: The call, without exchanges with other ranks.
        cotangents: The gradients that arrived at its results, if its backward pass failed.
        mode: What the user passed as ``torch.compile(mode=...)``.
        patience: Seconds after which other ranks would wait no longer for this one; None if none waits.
        kernels: Sees the kernels of the compiled region as they run; None if the compiler is not Inductor.
        keep: Puts the findings, with everything known about them so far, on disk. It may be called in any process.
    """

    graph: fx.GraphModule
    example_inputs: tuple[Any, ...]
    call: Call
    cotangents: Cotangents | None
    options: CheckOptions
    mode: str | None
    keep: Keep = lambda _findings: None
    kernels: KernelCheck | None = None
    patience: float | None = None


Investigator = Callable[[Failure, Sequence[Finding]], Sequence[Finding]]
"""Gets a failed call and its findings. Gives back the findings with everything that it found out about them."""


def not_localized(findings: Sequence[Finding], why: str) -> list[Finding]:
    """The findings, with the reason why nobody looked for their operator."""
    return [replace(one, searched=True, evidence={**one.evidence, EvidenceKey.LOCALIZED: why}) for one in findings]
