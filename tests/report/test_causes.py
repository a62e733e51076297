"""Findings with one origin are one thing to read."""

from __future__ import annotations

from dataclasses import replace

from checked_backend.findings import Finding, Kind, Severity
from checked_backend.report.causes import causes_of, short_region
from tests.support.report_tools import RELU

VAGUE = Finding(Kind.LOGIC, "output[0]", "wrong", region="Net [0/0]")


def test_results_of_one_operator_are_one_cause_also_where_it_was_compiled_again() -> None:
    gradients = [replace(RELU, subject=f"grad[layers.{i}.weight]") for i in range(40)]
    again = replace(RELU, region="Net [0/1]", kind=Kind.MUTATION, detail="mutation.wrong", subject="mutated[mean]")
    (cause,) = causes_of([RELU, *gradients, again])
    assert len(cause.findings) == 42
    assert cause.subjects[-1] == "mutated[mean]"


def test_other_operators_lines_stages_and_graphs_are_other_causes() -> None:
    others = [
        RELU,
        replace(RELU, op="aten.sin.default", node="sin"),
        replace(RELU, source="model.py:4 in forward: x.relu()"),
        replace(RELU, stage="aot"),
        replace(RELU, graph="backward"),
        replace(RELU, source=None),
        replace(RELU, source=None, region="Other [1/0]"),
    ]
    assert len(causes_of(others)) == len(others)


def test_an_operator_on_one_line_is_one_cause_in_however_many_regions() -> None:
    (cause,) = causes_of([RELU, replace(RELU, region="Other [1/0]", node="relu_3")])
    assert cause.regions == 2


def test_wrong_values_of_a_region_are_one_cause_until_an_operator_is_known() -> None:
    found = [VAGUE, replace(VAGUE, subject="grad[w]", kind=Kind.PRECISION), replace(VAGUE, region="Other [1/0]")]
    assert [cause.subjects for cause in causes_of(found)] == [("output[0]", "grad[w]"), ("output[0]",)]


def test_what_is_not_about_values_is_told_by_its_finer_kind() -> None:
    stride = replace(VAGUE, kind=Kind.STRUCTURE, detail="structure.stride", message="other strides")
    alias = replace(VAGUE, kind=Kind.ALIAS, detail="alias.identity", message="another object")
    causes = causes_of([stride, alias, replace(stride, subject="output[1]"), VAGUE])
    assert [cause.subjects for cause in causes] == [("output[0]", "output[1]"), ("output[0]",), ("output[0]",)]


def test_what_fails_is_told_first_and_a_warning_is_no_part_of_it() -> None:
    warning = replace(RELU, severity=Severity.WARNING)
    unsure = replace(VAGUE, kind=Kind.NONDETERMINISTIC)
    causes = causes_of([warning, unsure, RELU])
    assert [cause.main for cause in causes] == [RELU, unsure, warning]
    assert [cause.is_warning for cause in causes] == [False, False, True]


def test_the_finding_of_which_most_is_known_is_told() -> None:
    known = replace(RELU, subject="output[1]", repro="repro.py")
    (cause,) = causes_of([RELU, known])
    assert cause.main == known


def test_a_compile_id_is_no_part_of_a_regions_name() -> None:
    assert [short_region(name) for name in ("Net [0/12]", "f [0/1_1]", "f", "")] == ["Net", "f", "f", ""]


LEFT = replace(VAGUE, subject="grad[w]", graph="backward", searched=True)


def test_layers_of_one_class_are_told_apart_and_one_that_was_compiled_again_is_not() -> None:
    found = [replace(VAGUE, region=f"Linear [{place}/0]") for place in range(3)]
    causes = causes_of([*found, *(replace(VAGUE, region=f"Linear [0/{number}]") for number in ("1", "2_1"))])
    assert [cause.regions for cause in causes] == [3, 1, 1]
    assert not any(cause.is_named for cause in causes)


def test_what_is_known_to_be_one_cause_is_called_one() -> None:
    stride = replace(VAGUE, kind=Kind.STRUCTURE, detail="structure.stride")
    assert [cause.is_named for cause in causes_of([RELU, stride, VAGUE])] == [True, True, False]


def test_what_was_not_traced_again_is_told_with_the_operator_of_the_same_code() -> None:
    (cause,) = causes_of([LEFT, RELU, replace(LEFT, region="Net [0/7]")])
    assert (cause.main, cause.assumed) == (RELU, 2)
    assert causes_of([RELU])[0].assumed == 0
    assert causes_of([replace(LEFT, stage=RELU.stage), RELU])[0].assumed == 1


def test_what_may_have_another_cause_is_not_assumed_to_have_this_one() -> None:
    others = [
        replace(LEFT, kind=Kind.NONFINITE),
        replace(LEFT, region="Net [3/0]"),
        replace(LEFT, stage="aot"),  # it was traced, and this far only
        replace(LEFT, searched=False),
    ]
    for other in others:
        assert [cause.assumed for cause in causes_of([RELU, other])] == [0, 0], other
