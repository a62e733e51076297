"""What a region's finding says of a finding of the whole program."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checked_backend.checking.merge import merged
from checked_backend.findings import Finding, Kind


def finding(kind: Kind, subject: str = "grad[weight]") -> Finding:
    return Finding(kind=kind, subject=subject, message="told")


def run(own: Finding, region: Finding) -> Any:
    reference = SimpleNamespace(backward_error=None, evaluations=1)
    program = SimpleNamespace(continued=False, calls=())
    return SimpleNamespace(found=[(0, own)], in_regions=[(0, region)], references=[reference], program=program)


@pytest.mark.parametrize("kind", [Kind.NONFINITE, Kind.LOGIC, Kind.PRECISION])
def test_values_that_eager_does_not_repeat_in_a_region_are_not_wrong_in_the_program(kind: Kind) -> None:
    shown = merged(run(finding(kind), finding(Kind.NONDETERMINISTIC)))
    assert [one.finding.kind for one in shown] == [Kind.NONDETERMINISTIC]


@pytest.mark.parametrize(
    ("own", "region"),
    [
        (finding(Kind.LOGIC), finding(Kind.NONDETERMINISTIC, "grad[bias]")),
        (finding(Kind.ALIAS), finding(Kind.NONDETERMINISTIC)),
    ],
)
def test_what_else_is_wrong_beside_them_is_told(own: Finding, region: Finding) -> None:
    shown = merged(run(own, region))
    assert [one.finding for one in shown] == [region, own]
