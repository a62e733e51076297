"""A root cause in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checked_backend.findings import Coverage, Finding, Kind, Metrics, Severity
from checked_backend.report import Report
from checked_backend.report.causes import Cause
from checked_backend.report.one_line import annotation, one_line, user_line
from tests.support import report_tools

RELU = replace(report_tools.RELU, repro="reports/repro.py", workaround="# costs nothing\nconfig.fma = False")


def line(*findings: Finding) -> str:
    return one_line(Cause(findings))


WRONG = "model.py:52: relu is wrong (compiled code)"


def test_the_operator_comes_first_with_the_line_the_repro_and_the_workaround() -> None:
    assert line(RELU) == f"{WRONG}: repro reports/repro.py, workaround config.fma = False"
    long = replace(RELU, repro=f"reports/{'repro' * 20}.py")
    assert line(long) == f"{WRONG}: repro and workaround in the report"
    unconfirmed = replace(RELU, repro_confirmed=False, workaround="x" * 70)
    assert line(unconfirmed) == f"{WRONG}: no confirmed repro, workaround {'x' * 70}"
    backward = replace(RELU, graph="backward", repro=None, workaround="a = 1\nb = 2")
    assert line(backward) == "model.py:52: relu is wrong (compiled code, backward): workaround in the report"


def test_of_a_node_that_is_an_operator_and_its_gradient_is_said_which() -> None:
    gradient = replace(RELU, graph="dynamo", subject="grad[w]", repro=None, workaround=None)
    assert line(gradient) == "model.py:52: the gradient of relu is wrong (compiled code)"
    assert line(gradient, replace(gradient, subject="output[0]")) == WRONG
    assert line(replace(gradient, graph="forward")) == WRONG


def test_where_no_line_is_known_the_module_is_said() -> None:
    in_module = replace(RELU, repro=None, workaround=None, source=None, module="head.1")
    assert line(in_module) == "head.1 of Net: relu is wrong (compiled code)"
    assert "1. relu (aten.relu.default) in head.1 of Net, compiled code" in Report((in_module,), Coverage()).to_text()


def test_no_line_is_blamed_until_an_operator_is_known() -> None:
    vague = replace(RELU, op=None, node=None, stage=None, repro=None, workaround=None)
    assert line(vague) == "Net: output[0] is wrong"
    assert line(vague, replace(vague, subject="grad[w]")) == "Net: output[0] and 1 other result are wrong"
    stride = replace(vague, kind=Kind.STRUCTURE, detail="structure.stride")
    assert line(stride) == "model.py:52: output[0] has other strides than in eager"


def test_how_many_regions_show_it_is_said_where_no_operator_is_known() -> None:
    named = [replace(RELU, region=f"Net [0/{n}]", repro=None, workaround=None) for n in range(3)]
    assert line(*named) == WRONG
    vague = [replace(one, op=None, node=None, stage=None) for one in named]
    assert line(*vague) == "Net: output[0] is wrong in 3 regions"


METRICS = Metrics(4, 1, 0.0, 0.0, None, 0.0, 1.0, 1.0, 1, 0, 0, 0, 0, (0,), 1.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "metrics", "said"),
    [
        (Kind.NONFINITE, replace(METRICS, nan_candidate=1), "has NaN or infinity where eager has none"),
        (Kind.NONFINITE, replace(METRICS, nan_reference=1), "has numbers where eager has NaN or infinity"),
        (Kind.CRASH, None, "fails where eager runs"),
        (Kind.PRECISION, METRICS, "is less precise than in eager"),
    ],
)
def test_kinds(kind: Kind, metrics: Metrics | None, said: str) -> None:
    assert line(Finding(kind, "output[0]", "m", metrics=metrics)) == f"output[0] {said}"


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_a_line(kind: Kind) -> None:
    assert line(Finding(kind, "x", "m", detail=f"{kind.value}.something.new")).startswith("x ")


def test_lines_of_the_user() -> None:
    parts = ("my model.py", 41, "<lambda>", "lambda x: x[1:2]")
    assert user_line("my model.py:41 in <lambda>: lambda x: x[1:2]") == parts
    assert user_line("model.py:41") == ("model.py", 41, "", "")
    assert user_line("no line") is None
    assert user_line(None) is None


def test_annotations_cannot_be_ended_or_begun_by_a_name() -> None:
    assert annotation(Cause((replace(RELU, workaround=None),))) == (
        "::error file=model.py,line=52,title=checked_backend%3A logic::"
        "model.py:52: relu is wrong (compiled code): repro reports/repro.py"
    )
    hostile = replace(RELU, source="a,b::c\n::error::%.py:1 in f", subject="x\n::error::y", op=None, kind=Kind.CRASH)
    text = annotation(Cause((replace(hostile, severity=Severity.WARNING),)))
    assert text.startswith("::warning ")
    assert "\n" not in text
    assert text.count("::error") <= text.count("%0A") + 1
