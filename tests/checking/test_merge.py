"""Regions and the whole program: what a region's finding says of a finding of the program, and one coverage of both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checked_backend.checking.merge import joined, merged, told_once
from checked_backend.findings import Coverage, Finding, Kind, RegionInfo, Skip


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
    assert [one.finding for one in merged(run(own, region))] == [region, own]


def test_limits_of_results_in_another_order_are_not_mixed_up() -> None:
    region = RegionInfo("f [0/0]")
    regions = Coverage((region,), detection_limit={"output[0]": 1e-9, "output[1]": 1e-3, "grad[x]": 1e-5})
    program = Coverage(detection_limit={"output[0]": 1e-4, "grad[x]": 1e-2})
    told, whole = told_once(regions, program, {("f [0/0]", "output[1]"): "output[0]"})
    assert told.detection_limit == {"output[0] of f [0/0]": 1e-9, "output[0]": 1e-4, "grad[x]": 1e-5}
    assert whole.detection_limit == {"output[0]": 1e-4, "grad[x]": 1e-5}
    # without the names it is not known which is which
    told, whole = told_once(regions, program, {})
    assert whole.detection_limit["output[0]"] == 1e-4
    assert "output[0]" not in told.detection_limit


def test_runs_of_one_program_are_one_coverage() -> None:
    skip = Skip("gradients", "nothing was differentiated")
    region, limits = RegionInfo("f [0/0]"), {"output[0]": 1e-6}
    first = Coverage((region,), {"outputs": 1}, (skip,), notes=("a",), detection_limit=limits)
    second = Coverage((RegionInfo("f [0/1]"),), {"outputs": 2, "gradients": 1}, (skip,), notes=("a", "b"))
    both = joined([first, second, Coverage(detection_limit={"output[0]": 1e-4})])
    assert [region.name for region in both.regions] == ["f [0/0]", "f [0/1]"]
    assert both.checked == {"outputs": 3, "gradients": 1}
    assert (both.skipped, both.notes) == ((skip,), ("a", "b"))
    assert both.detection_limit == {"output[0]": 1e-4}  # the bluntest
