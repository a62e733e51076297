"""The coverages of a program's runs, put together."""

from __future__ import annotations

from checked_backend.checking.coverages import joined, told_once
from checked_backend.findings import Coverage, RegionInfo, Skip


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
    first = Coverage(
        (RegionInfo("f [0/0]"),), {"outputs": 1}, (skip,), notes=("a",), detection_limit={"output[0]": 1e-6}
    )
    second = Coverage((RegionInfo("f [0/1]"),), {"outputs": 2, "gradients": 1}, (skip,), notes=("a", "b"))
    both = joined([first, second, Coverage(detection_limit={"output[0]": 1e-4})])
    assert [region.name for region in both.regions] == ["f [0/0]", "f [0/1]"]
    assert both.checked == {"outputs": 3, "gradients": 1}
    assert (both.skipped, both.notes) == ((skip,), ("a", "b"))
    assert both.detection_limit == {"output[0]": 1e-4}  # the bluntest
