"""One tensor on its way through an adjudication: what is known about it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from checked_backend.numerics.judge import ENVELOPE_FACTOR, TWIN_TOLERANCE, Outside
from checked_backend.numerics.noise import Envelope, RememberedScale
from checked_backend.record import Metrics, NoiseScale
from checked_backend.regions.controls import Values
from checked_backend.regions.rulings import Pair

__all__ = ["Case", "extended", "is_floating"]


@dataclass(slots=True)
class Case:
    """One tensor of both executions, with the evidence gathered.

    Attributes:
        pair: Both tensors.
        metrics: How they differ.
        envelope: Noise from Monte Carlo runs.
        strong: The same from runs with larger roundings.
        outside: Elements that noise does not explain. Nothing is explained before there is an envelope.
        high_precision: Eager's float64 result.
        twin: The float64 twin's.
        logic_differs: Whether the float64 twin computes something else; None if that could not be found out.
        float64_repeats: Whether eager repeats itself in float64, with other junk in uninitialised memory.
        float64_spread: How far eager's runs in float64 differ, root mean square; None if there were none.
        evidence: What a finding will say.
        closed: Whether it is decided.
    """

    pair: Pair
    metrics: Metrics
    envelope: Envelope | None = None
    strong: Envelope | None = None
    outside: Outside = field(default_factory=lambda: Outside(1, 0, float("inf")))
    high_precision: torch.Tensor | None = None
    twin: torch.Tensor | None = None
    logic_differs: bool | None = None
    float64_repeats: bool = False
    float64_spread: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    closed: bool = False

    @classmethod
    def of(cls, pair: Pair, metrics: Metrics) -> Case:
        """A new case. A tensor that differs nowhere has nothing that noise must explain."""
        case = cls(pair, metrics)
        if metrics.bitwise_equal:
            case.outside = Outside(0, 0, 0.0)
        return case

    @property
    def same_bits(self) -> bool:
        """Whether no element differs; then only the float64 twin can show that the logic does."""
        return self.metrics.bitwise_equal

    def sample(self, values: Values) -> torch.Tensor | None:
        """This tensor in a control run; None where the run has none (a perturbed comparison can change a shape)."""
        found = values.get(self.pair.name)
        return None if found is None or found.shape != self.pair.reference.shape else found

    def noise_source(self) -> str:
        """Which controls the noise scale comes from, in words."""
        parts = []
        if self.envelope is not None:
            stronger = f" and {self.strong.runs} with larger roundings" if self.strong is not None else ""
            parts.append(f"Monte Carlo arithmetic on eager, {self.envelope.runs} runs{stronger}")
        if self.high_precision is not None:
            parts.append("float64 reference")
        if self.logic_differs is not None:
            parts.append("float64 twin")
        return ", ".join(parts) or "none: no control could run"

    def noise(self) -> NoiseScale | None:
        """The noise scale, for a finding."""
        if self.envelope is None:
            return None
        scale = self.metrics.reference_rms
        power = ENVELOPE_FACTOR * self.envelope.rms / scale if scale else None
        return NoiseScale(self.envelope.rms, self.envelope.max, self.noise_source(), power)

    def remembered(self) -> RememberedScale:
        """The noise scale, for later calls."""
        scale = self.metrics.reference_rms or 1.0
        rms = max(self.envelope.rms if self.envelope else 0.0, self.metrics.rmse)
        greatest = max(self.envelope.max if self.envelope else 0.0, self.metrics.max_abs_diff)
        power = ENVELOPE_FACTOR * rms / scale
        if self.logic_differs is False:
            power = TWIN_TOLERANCE
        elif self.envelope is None and is_floating(self.pair.reference):
            power = torch.finfo(self.pair.reference.dtype).eps
        return RememberedScale(rms / scale, greatest / scale, self.noise_source(), power)


def extended(envelope: Envelope | None, reference: torch.Tensor, sample: torch.Tensor) -> Envelope:
    """An envelope with one more control run in it."""
    if envelope is None:
        return Envelope.of(reference, sample)
    envelope.add(reference, sample)
    return envelope


def is_floating(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are rounded."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
