"""The error flow of findings as files that Google's Model Explorer opens: the graph, and its errors as node data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from checked_backend.findings import Finding, NodeError
from checked_backend.report.clean import clean, first_line
from checked_backend.report.flow_chart import diverges
from checked_backend.report.operator_names import operator_name

if TYPE_CHECKING:
    from checked_backend.report.report import Report

_AT_FAULT, _INHERITS = "#e5484d", "#f7c6c7"
_FIRST = {"sourceNodeOutputId": "0", "targetNodeInputId": "0"}
_GRADIENT = [{"stop": 0.0, "bgColor": "#fff5f5"}, {"stop": 1.0, "bgColor": _AT_FAULT}]


def encode_graphs(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the graphs as JSON values; the operator at fault, and those that inherit its error, are coloured."""
    graphs = [{"id": name, "nodes": _nodes(finding)} for name, finding in _flows(reports)]
    return {"label": "checked_backend", "graphs": graphs}


def encode_node_data(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the errors of the same graphs as JSON values, to be loaded as node data: the power of ten of each."""
    return {
        name: {
            "name": "error (power of ten)",
            "results": {
                clean(node.name): {"value": value} for node in finding.flow if (value := _value(node)) is not None
            },
            "gradient": _GRADIENT,
        }
        for name, finding in _flows(reports)
    }


def _flows(reports: Sequence[Report]) -> Iterator[tuple[str, Finding]]:
    """The findings that have a flow, each with the name of its graph."""
    number = 0
    for report in reports:
        for finding in report.findings:
            if finding.flow:
                number += 1
                operator = operator_name(finding.op or finding.subject)
                yield f"{number}. {first_line(operator)} in {first_line(finding.region or 'the program')}", finding


def _nodes(finding: Finding) -> list[dict[str, Any]]:
    known = {node.name for node in finding.flow}
    return [
        {
            "id": clean(node.name),
            "label": first_line(operator_name(node.op)) or "?",
            "namespace": "",
            "incomingEdges": [{"sourceNodeId": clean(name), **_FIRST} for name in node.inputs if name in known],
            "attrs": [{"key": key, "value": value} for key, value in _attributes(node)],
            **_style(node, finding),
        }
        for node in finding.flow
    ]


def _attributes(node: NodeError) -> Iterator[tuple[str, str]]:
    yield "error, relative", f"{node.error:.3g}"
    if node.own is not None:
        yield "made by the operator itself", f"{node.own:.3g}"
    if node.noise is not None:
        yield "rounding noise of eager", f"{node.noise:.3g}"
    if node.source:
        yield "your line", clean(node.source)


def _style(node: NodeError, finding: Finding) -> dict[str, Any]:
    if node.name == finding.node:
        return {"style": {"backgroundColor": _AT_FAULT}}
    return {"style": {"backgroundColor": _INHERITS}} if diverges(node) else {}


def _value(node: NodeError) -> float | None:
    """The error's power of ten; None for an operator that is right. Infinity is as large as a number can be."""
    if node.error <= 0:
        return None
    return math.log10(node.error) if math.isfinite(node.error) else 308.0
