"""Repeat the program's own call with incoming gradients of other layouts or values, or at some outputs alone.

A loss is often a sum or a mean, whose gradient is one number expanded over a whole tensor. Other gradients arrive as
slices or transposed, and those of a scaled loss overflow. A compiled backward pass may be wrong for such ones only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from checked_backend.checking.backward import roots_of
from checked_backend.checking.cotangents import variants_of
from checked_backend.checking.program import ProgramCall
from checked_backend.findings import Coverage, Finding, Kind, Skip
from checked_backend.report.ledger import Ledger

_OF_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE})

ROUNDOFFS = 32.0
"""Differences up to this many roundoffs of the same gradient in the user's own call are rounding."""


def gradient_variants(call: ProgramCall, outputs: Mapping[str, Any]) -> Iterator[ProgramCall]:
    """The same call, once for each kind of gradients that can enter at its outputs."""
    for incoming in variants_of(list(roots_of(outputs).values())):
        yield replace(call, label=f"with incoming gradients {incoming.value}", incoming=incoming)


def roundings(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """How large the rounding of each gradient may be, by the gradients of the user's own call.

    If one number is expanded over a whole tensor, gradients through a normalisation or a softmax vanish. Only their
    rounding is left, and no run repeats that.
    """
    found = {}
    for subject, gradient in gradients.items():
        if isinstance(gradient, torch.Tensor) and gradient.layout is torch.strided and gradient.numel():
            size = gradient.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()
            found[subject] = ROUNDOFFS * torch.finfo(gradient.dtype).eps * float(size)
    return found


def without_rounding(
    findings: Sequence[Finding], call: ProgramCall, rounding: Mapping[str, float], ledger: Ledger
) -> list[Finding]:
    """The findings of a gradient variant that are errors. The ledger gets reasons for the others."""
    left = []
    for finding in findings:
        greatest = math.inf if finding.metrics is None else finding.metrics.max_abs_diff
        if not finding.kind.fails:
            why = f"{finding.kind}: {finding.message}"
        elif (
            finding.kind in _OF_VALUES - {Kind.NONFINITE}
            and call.incoming.is_laid_out
            and greatest <= rounding.get(finding.subject, -1.0)
        ):
            why = "it is zero but for rounding"
        elif not call.incoming.is_finite and finding.kind in _OF_VALUES and not _is_lost(finding):
            why = "it is NaN or infinite in other elements"
        else:
            left.append(finding)
            continue
        ledger.skip(Skip(f"{finding.subject} {call.label}", why))
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


def coverage_of(call: ProgramCall, coverage: Coverage) -> Coverage:
    """The part of a gradient variant's coverage that is added to that of the user's own calls.

    Tensors that stay undecided here were decided about there, with contiguous gradients. The detection limit is that of
    the user's own calls. So are the numbers of calls, tensors and gradients, because they describe the user's program.
    """
    skipped = [replace(skip, subject=f"{skip.subject} {call.label}", matters=False) for skip in coverage.skipped]
    return Coverage(skipped=tuple(skipped), ignored=coverage.ignored, notes=coverage.notes)


def note_tried(ledger: Ledger, coverages: Iterable[tuple[ProgramCall, Coverage]]) -> None:
    """Note which kinds of gradients were tried, and how small an error would have been seen there.

    That error is not as small as with contiguous gradients, because the noise found with those is mostly reused.
    """
    tried = list(coverages)
    if not tried:
        return
    limits = sorted(limit for _, coverage in tried for limit in coverage.detection_limit.values())
    seen = f"; half of them would have shown a relative error of {limits[len(limits) // 2]:.1e}" if limits else ""
    kinds = ", ".join(call.incoming.value for call, _ in tried)
    ledger.note(f"gradients were also compared with incoming ones {kinds}{seen}")
