"""Fold findings that follow from other random numbers: every result that depends on these differs, for one reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from checked_backend.findings import EvidenceKey, Finding

__all__ = ["fold_other_random_numbers"]


def fold_other_random_numbers(findings: Sequence[Finding], known: Finding | None = None) -> list[Finding]:
    """Fold findings of one region that are seen to follow from other random numbers.

    Only findings whose tensors agree with eager on its random numbers are folded. An error beside them stays a finding.

    Args:
        known: The finding of the region's forward pass, if these are of its backward pass.

    Returns:
        The findings. Several of detail ``rng.stream`` are replaced by the first, or by the known one, which then
        ``explains`` the others.
    """
    streams = [finding for finding in findings if finding.detail == "rng.stream"]
    if not streams:
        return list(findings)
    first = streams[0] if known is None else known
    others = tuple(finding.subject for finding in streams if finding.subject != first.subject)
    explained = tuple(dict.fromkeys((*first.explains, *others)))
    folded = first
    if explained:
        evidence = {**first.evidence, EvidenceKey.EXPLAINS: explained}
        folded = replace(first, explains=explained, evidence=evidence)
    rest = [finding for finding in findings if finding.detail != "rng.stream"]
    place = next(place for place, finding in enumerate(findings) if finding.detail == "rng.stream")
    return [*rest[:place], folded, *rest[place:]]
