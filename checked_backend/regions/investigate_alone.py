"""Look for the operator in a region that exchanges tensors with other ranks, on this rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from checked_backend._torch.collectives import patience_of_ranks
from checked_backend.findings import EvidenceKey, Finding
from checked_backend.options import CheckOptions
from checked_backend.regions.call import Call
from checked_backend.regions.execution import Cotangents
from checked_backend.regions.failure import Failure, Investigator, Keep
from checked_backend.regions.local_region import LocalRegion

__all__ = ["investigate_alone", "not_investigated", "time_to_search"]

SHARE = 1 / 3
"""The share of the time that other ranks wait in a collective which looking for an operator may take."""

_EXCHANGED = "no: the collective itself is named; the operators around it were not looked at"


def investigate_alone(
    local: LocalRegion,
    call: Call,
    cotangents: Cotangents | None,
    findings: Sequence[Finding],
    keep: Keep,
    options: tuple[CheckOptions, str | None],
    investigator: Investigator,
) -> Sequence[Finding]:
    """Hand an investigator a failed call, with what it received from other ranks in place of its exchanges.

    Other ranks may wait for this one meanwhile, so it takes less time than they have patience.

    Args:
        local: The region without its exchanges.
        cotangents: The gradients that had arrived, if its backward pass failed.
        keep: Keeps the findings so far.
        options: The user's options, and what the user passed as ``torch.compile(mode=...)``.
        investigator: Finds out where a failure comes from.

    Returns:
        The findings, with their origin.

    Raises:
        Exception: The call cannot be run again.
    """
    if any(finding.detail == "structure.collective" for finding in findings):
        return not_investigated(findings, _EXCHANGED)
    given = local.call(call)
    groups = [local.renamed(finding) for finding in findings]

    def in_own_names(known: Sequence[Finding]) -> list[Finding]:
        places = iter(known)
        found = []
        for own, group in zip(findings, groups, strict=True):
            first, *_ = [next(places) for _ in group]
            found.append(replace(first, subject=own.subject))
        return found

    failure = Failure(
        local.graph,
        local.traced,
        given.inputs,
        given.ambient,
        given.rng,
        given.subjects,
        None if cotangents is None else local.cotangents(call, cotangents),
        *options,
        keep=lambda known: keep(in_own_names(known)),
        patience=time_to_search(),
    )
    return in_own_names(investigator(failure, [one for group in groups for one in group]))


def time_to_search() -> float | None:
    """Seconds that looking for an operator may take; None where no other rank can wait meanwhile.

    They may wait for a rank whose region exchanges nothing, too: DDP and FSDP2 exchange gradients outside of regions.
    """
    patience = patience_of_ranks()
    return None if patience is None else SHARE * patience


def not_investigated(findings: Sequence[Finding], why: str) -> Sequence[Finding]:
    """The findings, with the reason why nobody looked for their operator."""
    return [replace(one, searched=True, evidence={**one.evidence, EvidenceKey.LOCALIZED: why}) for one in findings]
