"""The error flow of findings as Graphviz DOT text, which Netron opens too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from checked_backend.findings import Finding, NodeError
from checked_backend.report.clean import first_line
from checked_backend.report.flow_chart import diverges
from checked_backend.report.svg import fits

if TYPE_CHECKING:
    from checked_backend.report.report import Report

__all__ = ["render_dot"]

_AT_FAULT, _INHERITS, _RIGHT = "#e5484d", "#f7c6c7", "#ffffff"
_LONGEST = 200
_UNSAFE = re.compile(r"[^\w .,:/()\[\]+*=-]", re.ASCII)
"""Characters that mean something in a label of fields, or that Netron's reader cannot take in a string."""


def render_dot(reports: Sequence[Report]) -> str:
    """Return the graphs as one drawing: each operator with its errors, coloured where it is wrong.

    A node is written as torch's own drawings of FX graphs are (``FxGraphDrawer``), from which Netron takes the operator
    as the node's type, and the errors as its attributes.

    Args:
        reports: The reports. A finding without an error flow is not in the drawing.
    """
    flows = [finding for report in reports for finding in report.findings if finding.flow]
    lines = [
        'digraph "checked_backend" {',
        "    rankdir=TB;",
        '    node [shape=record, style=filled, fontname="monospace"];',
    ]
    for number, finding in enumerate(flows, 1):
        lines += _graph(finding, f"{number}." if len(flows) > 1 else "")
    return "\n".join([*lines, "}"]) + "\n"


def _graph(finding: Finding, prefix: str) -> Iterator[str]:
    names = {node.name: f"{prefix}{_safe(node.name)}" for node in finding.flow}
    for node in finding.flow:
        at_fault = node.name == finding.node
        colour = _AT_FAULT if at_fault else _INHERITS if diverges(node) else _RIGHT
        attributes = [f'label="{_label(node, names[node.name])}"', f'fillcolor="{colour}"']
        if node.source:
            attributes.append(f'comment="{_safe(node.source)}"')
        yield f'    "{names[node.name]}" [{", ".join(attributes)}];'
    for node in finding.flow:
        yield from (f'    "{names[name]}" -> "{names[node.name]}";' for name in node.inputs if name in names)


def _label(node: NodeError, name: str) -> str:
    errors = {"error": node.error, "own": node.own, "noise": node.noise}
    told = "".join(f"{key}: {value:.3g}\\l" for key, value in errors.items() if value is not None)
    return f"{{{name}|op_code=call_function\\l|{_safe(node.op) or 'operator'}\\l{told}}}"


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", fits(first_line(text), _LONGEST))
