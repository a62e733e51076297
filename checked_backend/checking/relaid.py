"""Repeat the program's own call with incoming gradients of other layouts or values, or at some outputs alone.

A loss is often a sum or a mean, whose gradient is one number expanded over a whole tensor. Other gradients arrive as
slices or transposed. The gradients of a mean are small, those of a scaled loss are large, and some of these overflow.
A compiled backward pass may be wrong only for such gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from checked_backend.checking.backward import roots_of
from checked_backend.checking.cotangents import layouts_of
from checked_backend.checking.program import ProgramCall
from checked_backend.checking.stopwatch import Stopwatch
from checked_backend.findings import Coverage, Finding, Kind, Skip
from checked_backend.report.ledger import Ledger

__all__ = ["Allowance", "ContiguousGradients", "note_relaid", "of_relaid", "relaid_calls"]

LEAST_SECONDS = 5.0
"""Seconds that calls with other incoming gradients may take in any case, together."""

SHARE = 0.5
"""The share of the check's time so far that these calls may take, if that is more."""

_ROUNDED = frozenset({Kind.LOGIC, Kind.PRECISION})

_OF_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE})

ROUNDOFFS = 32.0
"""Differences up to this many roundoffs of the same gradient in the user's own call are rounding."""


def relaid_calls(call: ProgramCall, outputs: Mapping[str, Any]) -> Iterator[ProgramCall]:
    """The same call, once for each magnitude and layout that gradients of some of its outputs can have."""
    for layout in layouts_of(list(roots_of(outputs).values())):
        label = f"with incoming gradients {layout.value}"
        yield ProgramCall(call.args, call.kwargs, label, cotangents=layout, dtypes=call.dtypes)


class Allowance:
    """The time that these calls may take, so that a check does not become much slower.

    Args:
        before: The seconds that the check has taken.
    """

    def __init__(self, before: float) -> None:
        self._watch = Stopwatch()
        self._allowed = max(LEAST_SECONDS, SHARE * before)

    def left_out(self, call: ProgramCall) -> Skip | None:
        """The skip for a call for which there is no time; None if there is time."""
        if self._watch.seconds() <= self._allowed:
            return None
        return Skip(call.label, f"left out: those before it took more than the {self._allowed:.0f} s that they may")


class ContiguousGradients:
    """The gradients of the user's own call, which show how large the rounding in the repeated call may be.

    If one number is expanded over a whole tensor, gradients through a normalisation or a softmax vanish. Only their
    rounding is left, and no run repeats that.

    Args:
        gradients: Eager's gradients, by subject.
    """

    def __init__(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        self._rounding: dict[str, float] = {}
        for subject, gradient in gradients.items():
            if isinstance(gradient, torch.Tensor) and gradient.layout is torch.strided and gradient.numel():
                size = gradient.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()
                self._rounding[subject] = ROUNDOFFS * torch.finfo(gradient.dtype).eps * float(size)

    def left(self, findings: Sequence[Finding], call: ProgramCall, ledger: Ledger) -> list[Finding]:
        """The findings of a call with other incoming gradients that are errors. The ledger gets reasons for the others.

        Args:
            ledger: Receives the reasons.
        """
        left = []
        for finding in findings:
            greatest = math.inf if finding.metrics is None else finding.metrics.max_abs_diff
            rounding = self._rounding.get(finding.subject, -1.0) if call.cotangents.is_laid_out else -1.0
            if not finding.kind.fails:
                ledger.skip(Skip(f"{finding.subject} {call.label}", f"{finding.kind}: {finding.message}"))
            elif finding.kind in _ROUNDED and greatest <= rounding:
                ledger.skip(Skip(f"{finding.subject} {call.label}", "it is zero but for rounding"))
            elif not call.cotangents.is_finite and finding.kind in _OF_VALUES and not _is_lost(finding):
                ledger.skip(Skip(f"{finding.subject} {call.label}", "it is NaN or infinite in other elements"))
            else:
                left.append(finding)
        return left


def _is_lost(finding: Finding) -> bool:
    """Whether nothing in a compiled result shows that gradients were infinite or NaN, as eager's result does.

    Which elements show it is no error: formulas that are equal for numbers make NaN in different elements.
    """
    metrics = finding.metrics
    if metrics is None:
        return False
    seen = (metrics.nan_reference + metrics.inf_reference, metrics.nan_candidate + metrics.inf_candidate)
    return seen[0] > 0 and seen[1] == 0


def of_relaid(call: ProgramCall, coverage: Coverage) -> Coverage:
    """The part of a repeated call's coverage that is added to that of the user's own calls.

    Tensors that stay undecided here were decided about there, with contiguous gradients. The detection limit is that of
    the user's own calls. So are the numbers of calls, tensors and gradients, because they describe the user's program.
    """
    skipped = [replace(skip, subject=f"{skip.subject} {call.label}", matters=False) for skip in coverage.skipped]
    return Coverage(skipped=tuple(skipped), ignored=coverage.ignored, notes=coverage.notes)


def note_relaid(ledger: Ledger, coverages: Iterable[tuple[ProgramCall, Coverage]]) -> None:
    """Note which magnitudes, layouts and places were tried, and how small an error would have been seen there.

    That error is not as small as with contiguous gradients, because the noise found with those is mostly reused.

    Args:
        ledger: Receives the note.
    """
    tried = list(coverages)
    if not tried:
        return
    limits = sorted(limit for _, coverage in tried for limit in coverage.detection_limit.values())
    seen = f"; half of them would have shown a relative error of {limits[len(limits) // 2]:.1e}" if limits else ""
    layouts = ", ".join(call.cotangents.value for call, _ in tried)
    ledger.note(f"gradients were also compared with incoming ones {layouts}{seen}")
