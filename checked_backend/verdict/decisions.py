"""The pairs of tensors that a check is about, and its decisions about them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from checked_backend.findings import Finding, Kind, Skip
from checked_backend.verdict.envelope import NoiseBaseline


@dataclass(frozen=True, slots=True)
class TensorPair:
    """One tensor of both executions.

    Attributes:
        name: Its key among a control run's values.
        kind: The kind of finding that a wrong value makes. None: the evidence decides.
        detail: The finer kind that belongs to `kind`.
    """

    subject: str
    name: str
    reference: torch.Tensor
    candidate: torch.Tensor
    kind: Kind | None = None
    detail: str = ""
    source: str = ""


@dataclass(slots=True)
class Decisions:
    """The decisions of one check.

    Attributes:
        findings: Differences that are not noise.
        skips: Controls that could not run, and tensors that could not be decided about.
        scales: Noise scales learned, by name.
        limits: The smallest relative error that would have been caught, by name.
        own_precision_limits: The relative error that noise hides at the tensor's own precision, where float64 would
            not show it either, by name.
        ratios: The difference divided by the noise, by name, if the noise is known; 0 for equal bits.
        recheck: Whether the scales of earlier calls settled nothing, or only what is within them as they are.
        short_of_memory: Whether a control could not run for want of memory, which there may be the next time.
    """

    findings: list[Finding] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    scales: dict[str, NoiseBaseline] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    own_precision_limits: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    recheck: bool = False
    short_of_memory: bool = False
