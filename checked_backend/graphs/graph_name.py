"""Name a Dynamo graph after the module or the function that it comes from."""

from __future__ import annotations

import sys
from types import FrameType

from torch import fx, nn

__all__ = ["graph_name"]


def graph_name(gm: fx.GraphModule) -> str:
    """The name of a Dynamo graph, for people.

    Args:
        gm: The graph. Dynamo must be compiling it now, because the user's frames are read from the stack.

    Returns:
        The class of the outermost module that is being called, else the function that was traced, else ``graph``.
    """
    return _outermost_module() or _traced_function(gm) or "graph"


def _outermost_module() -> str | None:
    name = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(owner, nn.Module) and not isinstance(owner, fx.GraphModule):
            name = type(getattr(owner, "_orig_mod", owner)).__name__  # torch.compile(module) wraps the user's module
        frame = frame.f_back
    return name


def _traced_function(gm: fx.GraphModule) -> str | None:
    for node in gm.graph.nodes:
        if node.stack_trace:
            outermost = node.stack_trace.strip().splitlines()[0]
            return outermost.rpartition(", in ")[2].strip() or None
    return None
