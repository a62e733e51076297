"""How an error flows through a graph."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from checked_backend.findings import NodeError
from checked_backend.report.flow_chart import diverges, flow_chart, flow_sentence

FLOW = (
    NodeError("mm", "aten.mm.default", (), 0.0, 0.0, 1e-7),
    NodeError("relu", "aten.relu.default", ("mm",), 0.01, 0.01, 1e-7),
    NodeError("getitem", "aten.native_layer_norm.default", ("relu",), 0.004, 0.0, 1e-7),
    NodeError("add", "aten.add.Tensor", ("mm", "getitem"), 2e-7, 0.0, 1e-7),
    NodeError("mul", "aten.mul.Tensor", ("add",), 0.002, 0.0, 1e-7),
)


def drawn(flow: tuple[NodeError, ...], at_fault: str | None = "relu") -> ElementTree.Element:
    return ElementTree.fromstring(flow_chart(flow, at_fault))


def texts(picture: ElementTree.Element) -> list[str]:
    return [str(text.text) for text in picture.iter("text")]


def classes(picture: ElementTree.Element, tag: str) -> list[str]:
    return [str(one.get("class")) for one in picture.iter(tag)]


def test_a_row_for_each_operator_an_arc_for_each_input_and_the_one_at_fault_stands_out() -> None:
    picture = drawn(FLOW)
    names = [text for text in texts(picture) if text[0].isalpha()]
    assert names == ["mm", "relu", "getitem (layer_norm)", "add", "mul"]
    assert classes(picture, "rect").count("fault") == 1
    assert classes(picture, "path") == ["arc", "arc hot", "arc", "arc hot", "arc"]
    assert classes(picture, "rect").count("error") == 3
    assert classes(picture, "rect").count("within") == 1  # no more than noise
    assert classes(picture, "rect").count("noise") == 5


def test_it_reads_as_text() -> None:
    assert flow_sentence(FLOW, "relu") == (
        "The error begins at relu (aten.relu.default): 1% off; given its inputs, the operator itself is 1% off; "
        "2 of 5 operators inherit it; the last, mul, is 0.2% off."
    )
    assert drawn(FLOW).get("aria-label") == flow_sentence(FLOW, "relu")
    right = tuple(replace(node, error=0.0) for node in FLOW)
    assert flow_sentence(right, "relu") == "No operator is off by more than its rounding noise."
    assert flow_chart(right, "relu") is None
    assert flow_chart((), None) is None


def test_a_longer_bar_is_a_greater_error_on_a_logarithmic_scale() -> None:
    bars = [float(str(one.get("width"))) for one in drawn(FLOW).iter("rect") if one.get("class") == "error"]
    assert bars[0] > bars[1] > bars[2]


def test_right_operators_long_before_the_error_are_not_drawn() -> None:
    before = tuple(NodeError(f"sin_{number}", "aten.sin.default", (), 0.0) for number in range(300))
    names = texts(drawn((*before, *FLOW)))
    assert "sin_299" in names
    assert "sin_250" not in names
    assert "mul" in names


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, 1e308, 5e-324, 0.0])
def test_a_strange_number_stays_inside_of_the_picture(number: float) -> None:
    strange = replace(FLOW[2], error=number, own=number, noise=number)
    assert isinstance(diverges(strange), bool)
    picture = drawn((*FLOW[:2], strange, *FLOW[3:]))
    width = float(str(picture.get("viewBox")).split()[2])
    for one in picture.iter("rect"):
        assert 0 <= float(str(one.get("x"))) + float(str(one.get("width"))) <= width
    assert all(0 <= float(str(one.get("cx"))) <= width for one in picture.iter("circle"))


def test_a_graph_that_is_none_is_drawn_all_the_same() -> None:
    """A file may name inputs that are not there, come later, or are the node itself."""
    evil = '<script>alert(1)</script>"'
    looped = (
        NodeError(evil, evil, ("gone", evil, "b"), 1.0, None, None, evil),
        NodeError("b", "b" * 500, (evil, "b"), 1.0),
        NodeError("b", "", ("b",), 1.0),
    )
    chart = flow_chart(looped, evil)
    assert "<script" not in chart
    assert len(list(ElementTree.fromstring(chart).iter("path"))) <= 6
