"""Make graphs as Inductor's last passes leave them, with patterns of operators fused into one before code generation.

If every tensor is exposed, such a pattern does not match (``mm`` and ``add`` become ``addmm`` only if nothing else
reads the product), and an error of the fused operator does not show. In these graphs the fused operator is an operator
like any other.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx

from checked_backend._torch.inductor import inductor_passed
from checked_backend.diagnose.localize.stages import Recorded
from checked_backend.diagnose.localize.subgraph import calls_of, can_be_walked
from checked_backend.options import CheckOptions

__all__ = ["fused_graph", "is_fused"]


def fused_graph(recorded: Recorded, options: CheckOptions) -> Recorded | None:
    """A graph of a region with its patterns fused.

    Returns:
        The graph, with the same inputs; None if the candidate is not Inductor, if nothing is fused, or if the fused
        graph cannot be taken apart.
    """
    if options.compiler != "inductor" or recorded.kind == "dynamo":
        return None
    inference = recorded.kind == "inference"
    graph = inductor_passed(recorded.graph, inference=inference, patches=options.compiler_options)
    if graph is None or _operators(graph) == _operators(recorded.graph) or not can_be_walked(graph):
        return None
    return Recorded(recorded.kind, graph, recorded.inputs)


def is_fused(node: fx.Node, before: fx.GraphModule) -> bool:
    """Whether a node of a fused graph is not in the graph before fusion."""
    return all(one.name != node.name or one.target != node.target for one in calls_of(before))


def _operators(gm: fx.GraphModule) -> Counter[Any]:
    return Counter(node.target for node in calls_of(gm))
