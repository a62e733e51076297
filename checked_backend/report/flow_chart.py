"""SVG of an error that flows through a graph: each operator has a row, arcs for its inputs, bars for its error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from checked_backend.findings import NodeError
from checked_backend.report.charts import LogAxis, fits, picture, tag
from checked_backend.report.clean import percent
from checked_backend.report.operator_names import operator_name

CLEAR = 10.0
"""An error of more than this many times the rounding noise is drawn as one."""

_MOST = 120
_BEFORE = 10
_HEAD = 26
_ROW = 24
_ARCS = 84
"""The width of the arcs, left of the names."""

_LEFT, _PLOT = 334, 330
"""Where the bars begin, and how long they are at most."""

_WIDTH = _LEFT + _PLOT + 76
_LONGEST = 33
"""The most characters of a name."""


def diverges(node: NodeError) -> bool:
    """Whether a node's error is more than rounding noise."""
    if math.isnan(node.error):
        return True
    return node.error > CLEAR * node.noise if node.noise is not None and node.noise > 0 else node.error > 0


def flow_chart(flow: Sequence[NodeError], at_fault: str | None) -> Markup | None:
    """Draw a graph from top to bottom with each operator's error on a logarithmic axis; None without any."""
    if not any(map(diverges, flow)):
        return None
    first = next((place for place, node in enumerate(flow) if diverges(node) or node.name == at_fault), 0)
    nodes = flow[max(0, first - _BEFORE) :][:_MOST]
    numbers = (number for node in nodes for number in (node.error, node.noise or 0.0, node.own or 0.0))
    axis = LogAxis.of(numbers, _LEFT, _PLOT)
    height = _HEAD + _ROW * len(nodes) + 6
    rows = {node.name: place for place, node in enumerate(nodes)}
    parts = [axis.grid(_HEAD, height)]
    for place, node in enumerate(nodes):
        parts += [_arc(rows[name], place, nodes[rows[name]]) for name in node.inputs if rows.get(name, place) < place]
    for place, node in enumerate(nodes):
        parts += _row(place, node, axis, is_at_fault=node.name == at_fault)
    return picture("chart flow", f"0 0 {_WIDTH} {height}", flow_sentence(flow, at_fault), parts)


def flow_sentence(flow: Sequence[NodeError], at_fault: str | None) -> str:
    """The picture in words: where the error begins, and how far it goes."""
    wrong = [node for node in flow if diverges(node)]
    if not wrong:
        return "No operator is off by more than its rounding noise."
    first = next((node for node in wrong if node.name == at_fault), wrong[0])
    words = [f"The error begins at {fits(first.name, 60)} ({fits(first.op, 60)}): {_size(first.error)}"]
    if first.own is not None:
        words.append(f"given its inputs, the operator itself is {_size(first.own)}")
    after = wrong[wrong.index(first) + 1 :]
    if after:
        inherited = f"{len(after)} of {len(flow)} operators inherit it"
        words += [inherited, f"the last, {fits(after[-1].name, 60)}, is {_size(after[-1].error)}"]
    return "; ".join(words) + "."


def _label(node: NodeError) -> str:
    """The node's name, and its operator where the name does not tell it: ``getitem (convolution)``."""
    name = operator_name(node.op)
    operator = name.partition(".")[0] if node.op.startswith("aten.") else name.rpartition(".")[2]
    return node.name if operator and node.name.startswith(operator) else f"{node.name} ({operator or name})"


def _size(error: float) -> str:
    return f"{percent(error)} off" if math.isfinite(error) else "NaN or infinite on one side"


def _middle(place: int) -> int:
    return _HEAD + _ROW * place + _ROW // 2


def _arc(source: int, target: int, node: NodeError) -> Markup:
    """A line from an operator to one that reads its result; the further it goes, the wider it swings."""
    x, begin, end = _ARCS - 8, _middle(source), _middle(target)
    swing = x if target == source + 1 else max(4, x - 10 - 7 * (target - source))
    return tag(
        "path",
        class_=f"arc{' hot' * diverges(node)}",
        d=f"M{x} {begin:.0f}C{swing} {begin:.0f} {swing} {end:.0f} {x} {end:.0f}",
    )


def _row(place: int, node: NodeError, axis: LogAxis, *, is_at_fault: bool) -> Iterator[Markup]:
    middle, left = _middle(place), axis.left
    hot, long = diverges(node), axis.length(node.error if not math.isnan(node.error) else math.inf)
    if is_at_fault:
        yield tag("rect", class_="fault", x=0, y=middle - _ROW // 2, width=_WIDTH, height=_ROW)
    yield tag("circle", class_=f"dot{' hot' * hot}", cx=_ARCS - 8, cy=middle, r=4)
    yield tag("text", fits(_label(node), _LONGEST), x=_ARCS + 4, y=middle + 4)
    if node.error > 0 or math.isnan(node.error):
        kind = "error" if hot else "within"
        yield tag("rect", class_=kind, x=left, y=middle - 8, width=f"{long:.1f}", height=9)
        yield tag("text", f"{node.error:.2g}", class_="value", x=f"{left + long + 6:.1f}", y=middle + 1)
    if node.noise:
        yield tag("rect", class_="noise", x=left, y=middle + 3, width=f"{axis.length(node.noise):.1f}", height=5)
    if node.own is not None and node.own > 0:
        yield tag("circle", class_="own", cx=f"{left + axis.length(node.own):.1f}", cy=middle - 3, r=3.5)
