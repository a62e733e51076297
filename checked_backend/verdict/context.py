"""The state that the steps of one check share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from checked_backend.verdict.control_runner import ControlRunner
from checked_backend.verdict.control_runs import ControlRuns, Values
from checked_backend.verdict.decisions import Decisions
from checked_backend.verdict.evidence import Evidence
from checked_backend.verdict.repetition import Repetition
from checked_backend.verdict.steps.fused_rounding import FusedRounding
from checked_backend.verdict.steps.other_draws import OtherDraws

__all__ = ["Context"]


@dataclass(slots=True)
class Context:
    """The tensors of one check that one look did not settle, and everything the steps ask and decide about them.

    Attributes:
        cases: The tensors, with the evidence gathered so far.
        runs: Makes the control runs.
        decisions: Receives the decisions.
        known: Names of tensors whose float64 twin was compared in an earlier call, and whose noise hides little.
        thorough: Run the float64 twin for every difference.
        low_precision: Whether the region computes in half precision somewhere.
        draws: Tells whether random numbers explain a difference.
        fused: Tells whether kernels that round less often explain a difference.
        repetition: The results of running eager again.
        recompiled: The results of the candidate compiled once more; empty until they were asked for.
    """

    cases: Sequence[Evidence]
    runs: ControlRunner
    decisions: Decisions
    known: frozenset[str]
    thorough: bool
    low_precision: bool
    draws: OtherDraws = field(init=False)
    fused: FusedRounding = field(init=False)
    repetition: Repetition = field(default_factory=lambda: Repetition(None))
    recompiled: list[Values | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Prepare the questions that are asked once for all tensors."""
        self.draws = OtherDraws(self.runs)
        self.fused = FusedRounding(self.controls, self.runs, self.decisions.notes)

    @property
    def controls(self) -> ControlRuns:
        """The control runs that the steps may ask for."""
        return self.runs.controls

    @property
    def repeated(self) -> Values | None:
        """Eager's values when it ran again; None if it could not be run."""
        return self.repetition.values

    def open(self) -> list[Evidence]:
        """The tensors that are not decided yet."""
        return [case for case in self.cases if not case.closed]
