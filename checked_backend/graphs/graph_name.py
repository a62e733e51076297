"""Name a Dynamo graph after the module or the function that it comes from."""

from __future__ import annotations

import sys
from types import FrameType

from torch import fx, nn

from checked_backend._torch.dynamo import enters_compiled

_CALLS = frozenset({"__call__", "_call_impl", "_wrapped_call_impl"})
"""Functions of torch that a call of a module goes through."""


def graph_name(gm: fx.GraphModule) -> str:
    """The name of a Dynamo graph, for people.

    Args:
        gm: The graph. Dynamo must be compiling it now, because the user's frames are read from the stack.

    Returns:
        The class of the outermost module that is compiled, else the function that was traced, else ``graph``. Modules
        around what is compiled do not count: of a model whose layers are compiled each by itself, the layer is named.
    """
    return _outermost_module() or _traced_function(gm) or "graph"


def _outermost_module() -> str | None:
    name = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if enters_compiled(frame):
            return _name_of(_module_called_by(frame.f_back)) or name
        name = _name_of(_module_of(frame)) or name
        frame = frame.f_back
    return name


def _module_of(frame: FrameType) -> nn.Module | None:
    owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
    return owner if isinstance(owner, nn.Module) and not isinstance(owner, fx.GraphModule) else None


def _module_called_by(frame: FrameType | None) -> nn.Module | None:
    """The compiled module, if one is called; None for a compiled function that a module may call."""
    is_call = frame is not None and frame.f_code.co_name in _CALLS
    return _module_of(frame) if frame is not None and is_call else None


def _name_of(module: nn.Module | None) -> str | None:
    if module is None:
        return None
    return type(getattr(module, "_orig_mod", module)).__name__  # torch.compile(module) wraps the user's module


def _traced_function(gm: fx.GraphModule) -> str | None:
    for node in gm.graph.nodes:
        if node.stack_trace:
            outermost = node.stack_trace.strip().splitlines()[0]
            return outermost.rpartition(", in ")[2].strip() or None
    return None
