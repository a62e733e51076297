"""The coverages of a program's runs, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from checked_backend.findings import Coverage
from checked_backend.subjects import Subject, SubjectKind

__all__ = ["joined", "told_once"]


def told_once(
    regions: Coverage, program: Coverage, names: Mapping[tuple[str, str], str | None]
) -> tuple[Coverage, Coverage]:
    """Both coverages of a run, with the better detection limit for tensors that both compared.

    In a program of one region, the region's gradients are the program's, and so are the results that the program
    returns. The region's float64 twin says nothing about Dynamo's translation of the program: such an error only shows
    in the program's own comparison.

    Args:
        names: The program's names of the regions' results; the order may differ.
    """
    if len(regions.regions) != 1:
        return regions, program
    region = regions.regions[0].name

    def named(subject: str) -> str:
        """The program's name of a result; a result that the program does not return gets a name of its own."""
        known = names.get((region, subject))
        return known or (f"{subject} of {region}" if Subject(subject).kind is SubjectKind.OUTPUT else subject)

    limits = {named(subject): limit for subject, limit in regions.detection_limit.items()}
    own = {named(subject): limit for subject, limit in regions.own_precision_limit.items()}
    whole = dict(program.detection_limit)
    for name in limits.keys() & whole.keys():
        if Subject(name).kind in (SubjectKind.GRADIENT, SubjectKind.OUTPUT):
            own[name] = max(own.get(name, 0.0), whole[name])
            limits[name] = whole[name] = min(limits[name], whole[name])
    return (
        replace(regions, detection_limit=limits, own_precision_limit=own),
        replace(program, detection_limit=whole),
    )


def joined(coverages: Sequence[Coverage]) -> Coverage:
    """The coverage of several runs of one program, as one: what was checked in all, and the bluntest limits."""
    counts: dict[str, int] = {}
    limit: dict[str, float] = {}
    own: dict[str, float] = {}
    for coverage in coverages:
        for name, number in coverage.checked.items():
            counts[name] = counts.get(name, 0) + number
        for known, new in (limit, coverage.detection_limit), (own, coverage.own_precision_limit):
            for name, smallest in new.items():
                known[name] = max(smallest, known.get(name, 0.0))
    return replace(
        coverages[0],
        regions=tuple(region for coverage in coverages for region in coverage.regions),
        checked=counts,
        skipped=tuple(dict.fromkeys(skip for coverage in coverages for skip in coverage.skipped)),
        ignored=tuple(finding for coverage in coverages for finding in coverage.ignored),
        notes=tuple(dict.fromkeys(note for coverage in coverages for note in coverage.notes)),
        detection_limit=limit,
        own_precision_limit=own,
    )
