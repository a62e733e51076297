"""Find out whether Dynamo's graph only rounds differently from the program. If so, both agree in float64.

Dynamo may compute in another way than Python. For example, torch's optimizers compute with Python's numbers in eager,
and with float32 tensors when they are compiled.
"""

from __future__ import annotations

from functools import cached_property

import torch

from checked_backend.checking.compare_runs import in_step
from checked_backend.checking.program import Program
from checked_backend.checking.program_controls import ProgramControls
from checked_backend.verdict import thresholds
from checked_backend.verdict.control_runs import Values

__all__ = ["Rounding"]


class Rounding:
    """Runs a program, and the graphs that Dynamo makes of it, in float64, when it is first asked."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def explains(self, index: int, subject: str) -> bool | None:
        """Whether a tensor that differs is the same in float64.

        Args:
            index: The number of the call.
            subject: The tensor that differs after the call.

        Returns:
            Whether it is; None if the program does not run in float64.
        """
        try:
            reference, traced = self._runs
        except Exception:  # any such error is about float64, not about the program
            return None
        place = in_step(index, subject)
        names = [name for name in reference.keys() & traced.keys() if name.startswith(place)]
        return all(_same(reference[name], traced[name]) for name in names) if names else None

    @cached_property
    def _runs(self) -> tuple[Values, Values]:
        controls = ProgramControls(self._program)
        return controls.high_precision(None), controls.traced_in_float64()


def _same(reference: torch.Tensor, traced: torch.Tensor) -> bool:
    if reference.shape != traced.shape or reference.dtype != traced.dtype:
        return False
    if not (reference.is_floating_point() or reference.is_complex()):
        return torch.equal(reference, traced)
    if not bool(reference.isfinite().all()):
        return False  # two that are NaN or infinite in float64 agree whatever else they compute
    size = float(reference.abs().mean()) if reference.numel() else 0.0
    return torch.allclose(
        reference, traced, rtol=thresholds.TWIN_TOLERANCE, atol=thresholds.TWIN_TOLERANCE * size, equal_nan=True
    )
