"""The state that the steps of one check share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from checked_backend.numerics.bits import is_floating
from checked_backend.verdict import thresholds
from checked_backend.verdict.decisions import Decisions
from checked_backend.verdict.evidence import Evidence
from checked_backend.verdict.runner import Runs, Values

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


@dataclass(slots=True)
class Context:
    """The tensors of one check that one look did not settle, and everything the steps ask and decide about them.

    Attributes:
        known: Names of tensors whose float64 twin was compared in an earlier call, and whose noise hides little.
        thorough: Run the float64 twin for every difference.
        low_precision: Whether the region computes in half precision somewhere.
        repeated: Eager's values when it ran again; None if it could not be run.
        by_junk: Names of tensors that eager repeats bit for bit if it is left as it is, but not in control runs, which
            fill uninitialised memory with junk.
    """

    cases: Sequence[Evidence]
    runs: Runs
    decisions: Decisions
    known: frozenset[str]
    thorough: bool
    low_precision: bool
    repeated: Values | None = None
    by_junk: frozenset[str] = frozenset()

    def open(self) -> list[Evidence]:
        """The tensors that are not decided yet."""
        return [case for case in self.cases if not case.closed]

    def wants_twin(self, case: Evidence) -> bool:
        """Whether noise or rounding may hide an error that only the float64 twin can show."""
        if case.pair.name in self.known:
            return False
        dtype = case.pair.reference.dtype
        if case.same_bits or dtype in LOW_PRECISION or (self.thorough and is_floating(case.pair.reference)):
            return True
        # integers flip between equal values, or next to a threshold
        if case.spreads or not is_floating(case.pair.reference):
            return True
        # A float32 gradient of a region under autocast has bfloat16's noise, in which an error of some percent is lost.
        # A tensor that is zero but for rounding needs no twin: the twin could only say just that.
        if case.envelope is None or not dtype.is_floating_point or case.is_zero_in_float64:
            return False
        return case.envelope.rms > thresholds.HIDING_ROUNDOFFS * torch.finfo(dtype).eps * case.metrics.reference_rms
