"""Does rounding explain a difference: a fused half-precision kernel omits roundings that eager makes?"""

from __future__ import annotations

import torch

from checked_backend.verdict import thresholds
from checked_backend.verdict.control_runner import ControlRunner
from checked_backend.verdict.control_runs import Control, ControlRuns, Values
from checked_backend.verdict.elements import difference, root_mean_square
from checked_backend.verdict.evidence import Evidence
from checked_backend.verdict.outliers import outside_noise

__all__ = ["FusedRounding", "agrees", "is_there"]


class FusedRounding:
    """Runs a candidate that rounds wherever eager does, once for all tensors of a check.

    Args:
        controls: Offers the run.
        runs: Makes it, and records a failure.
        notes: Receives a note for each tensor that it explains.
    """

    def __init__(self, controls: ControlRuns, runs: ControlRunner, notes: list[str]) -> None:
        self._controls = controls
        self._runs = runs
        self._notes = notes
        self._asked = False
        self._values: Values | None = None

    def explains(self, case: Evidence) -> bool:
        """Whether the candidate agrees with eager once it rounds where eager does; if so, a note is added."""
        if not agrees(case, self._ask()):
            return False
        self._notes.append(
            f"fusion-rounding: {case.pair.subject} differs from eager by {case.metrics.max_abs_diff:.3g} at "
            "most, because fused kernels keep intermediate results in float32; with emulate_precision_casts, "
            "which makes them round wherever eager does, it agrees"
        )
        return True

    def loses(self, case: Evidence) -> bool:
        """Whether the candidate loses the rest that casts leave in eager, for another reason than omitted roundings.

        A tensor that is zero but for rounding is as near to float64 if it is all zero. But a program may ask for just
        that rest: the part of a value that a cast to half precision and back removes (error feedback, compensated
        sums). Such a tensor has the wider dtype.
        """
        if case.pair.reference.dtype.itemsize <= 2 or not case.vanishes or is_there(case, case.pair.candidate):
            return False
        if int(torch.count_nonzero(case.pair.reference)) < thresholds.LEFT_BY_CHANCE:
            return False
        values = self._ask()
        other = None if values is None else case.sample(values)
        return other is None or not is_there(case, other) or not self.explains(case)

    def _ask(self) -> Values | None:
        if not self._asked:
            self._values = self._runs.run(Control.UNFUSED, self._controls.unfused)
            self._asked = True
        return self._values


def is_there(case: Evidence, values: torch.Tensor) -> bool:
    """Whether the values are of about eager's size, and not next to nothing. Zero is near to any small tensor."""
    return root_mean_square(values) * 2.0**thresholds.NEIGHBOUR_BITS >= case.metrics.reference_rms


def agrees(case: Evidence, values: Values | None) -> bool:
    """Whether another run of the candidate, under other conditions, gives other values, and right ones."""
    if values is None or case.envelope is None or case.logic_differs:
        return False  # the float64 twin ran on the recorded random numbers too
    other = case.sample(values)
    if other is None or other.dtype != case.pair.reference.dtype:
        return False
    if not bool((difference(other, case.pair.candidate) != 0).any()):
        return False  # the other conditions changed nothing
    return not outside_noise(reference=case.pair.reference, candidate=other, envelope=case.envelope)
