"""Work around FX's code for powers of negative numbers, which computes another value than the graph."""

from __future__ import annotations

import copy
import math
import operator

from torch import fx


def powers_called(graph: fx.Graph) -> fx.Graph:
    """The graph with powers of negative numbers written as calls of ``pow``.

    FX writes ``operator.pow(-2.0, x)`` as ``-2.0 ** x`` (``magic_methods`` in ``torch/fx/graph.py``), which Python
    reads as ``-(2.0 ** x)``. Compilers are not affected, because they interpret the nodes.

    Args:
        graph: Any graph; it is not changed.

    Returns:
        A copy; the graph itself if it has no such power.
    """
    if not any(map(_misread, graph.nodes)):
        return graph
    copied = copy.deepcopy(graph)
    for node in filter(_misread, copied.nodes):
        node.target = pow
    return copied


def _misread(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not operator.pow:
        return False
    base = node.args[0]
    return isinstance(base, (int, float)) and math.copysign(1.0, base) < 0
