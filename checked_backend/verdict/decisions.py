"""What a check is about, and what it decided."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from checked_backend.findings import Finding, Kind, Skip
from checked_backend.verdict.envelope import NoiseBaseline

__all__ = ["Decisions", "TensorPair"]


@dataclass(frozen=True, slots=True)
class TensorPair:
    """One tensor of both executions.

    Attributes:
        subject: What people call it.
        name: Its key among a control run's values.
        reference: Eager's.
        candidate: The compiled program's.
        kind: The kind of finding that a wrong value makes (None: as the evidence says).
        detail: The finer kind for that.
        source: The user's line that made it.
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
    """What a check decided.

    Attributes:
        findings: Differences that are not noise.
        skips: Controls that could not run, tensors that could not be judged.
        notes: Remarks.
        scales: Noise scales learned, by name.
        limits: The smallest relative error that would have been caught, by name.
        own_precision_limits: What noise hides of errors that float64 does not show, by name.
        ratios: How large the difference is in times of the noise, by name, where a noise is known: 0 for equal bits.
        compared: Number of tensors compared.
        recheck: Whether what earlier calls taught was left aside.
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
