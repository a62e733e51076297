"""Find the operator at which eager itself raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from checked_backend.diagnose.localize.graph_modes import modes_left
from checked_backend.regions.compile import eager_graph

__all__ = ["raising_node"]


def raising_node(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.Node, Exception] | None:
    """Run a graph in eager until a node raises.

    Args:
        gm: A Dynamo graph; it is not changed.
        inputs: Its inputs; they may be written to.

    Returns:
        The node and what it raised; None if none does.
    """
    reached: list[fx.Node] = []

    class _Follower(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            reached[:] = [n]
            return super().run_node(n)

    follower = _Follower(eager_graph(gm))
    follower.extra_traceback = False
    try:
        with modes_left():
            follower.run(*inputs)
    except Exception as error:  # what is looked for
        name = reached[0].name
        return next(node for node in gm.graph.nodes if node.name == name), error
    return None
