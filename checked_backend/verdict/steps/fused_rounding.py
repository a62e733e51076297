"""What a fused kernel of half precision does not round, and eager does."""

from __future__ import annotations

import torch

from checked_backend.verdict import thresholds
from checked_backend.verdict.control_runner import ControlRunner
from checked_backend.verdict.control_runs import Control, ControlRuns, Values
from checked_backend.verdict.envelope import difference, root_mean_square
from checked_backend.verdict.evidence import Evidence
from checked_backend.verdict.outliers import outside_noise

__all__ = ["FusedRounding", "agrees", "is_there"]


class FusedRounding:
    """Asks a candidate that rounds wherever eager does, once for all tensors of a check.

    Args:
        controls: Makes the run.
        runs: Runs it.
        notes: Receives what it explains.
    """

    def __init__(self, controls: ControlRuns, runs: ControlRunner, notes: list[str]) -> None:
        self._controls = controls
        self._runs = runs
        self._notes = notes
        self._asked = False
        self._values: Values | None = None

    def explains(self, case: Evidence) -> bool:
        """Whether the candidate agrees with eager once it rounds where eager does; if so, it takes note."""
        if not agrees(case, self._ask()):
            return False
        self._notes.append(
            f"fusion-rounding: {case.pair.subject} differs from eager by {case.metrics.max_abs_diff:.3g} at "
            "most, because fused kernels keep intermediate results in float32; with emulate_precision_casts, "
            "which makes them round wherever eager does, it agrees"
        )
        return True

    def loses(self, case: Evidence) -> bool:
        """Whether the candidate has nothing where eager has what casts leave, and not only for want of such rounding.

        What is zero but for rounding is as near to float64 with nothing there at all. But a program may ask for just
        that rest: what a cast to half precision and back takes from a value (error feedback, compensated sums). That
        is a tensor of the wider dtype.
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
    """Whether there are values of eager's size, and not just nothing, which is near to everything."""
    return root_mean_square(values) * 2.0**thresholds.NEIGHBOUR_BITS >= case.metrics.reference_rms


def agrees(case: Evidence, values: Values | None) -> bool:
    """Whether another run of the candidate, on other terms, has other values and right ones."""
    if values is None or case.envelope is None or case.logic_differs:
        return False  # the float64 twin ran on the recorded random numbers too
    other = case.sample(values)
    if other is None or other.dtype != case.pair.reference.dtype:
        return False
    if not bool((difference(other, case.pair.candidate) != 0).any()):
        return False  # the terms made no difference to the candidate
    return not outside_noise(reference=case.pair.reference, candidate=other, envelope=case.envelope)
