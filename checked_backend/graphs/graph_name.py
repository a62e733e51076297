"""Name a Dynamo graph after the module or the function that it comes from."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

from torch import fx, nn

from checked_backend._torch.dynamo import enters_compiled

_CALLS = frozenset({"__call__", "_call_impl", "_wrapped_call_impl"})
"""Functions of torch that a call of a module goes through."""

_OWN = 3
"""References to a frame's dict that nobody else holds: the frame's, ours, and that of the call which counts them."""


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
    owner = self_of(frame) if frame.f_code.co_varnames[:1] == ("self",) else None
    return owner if isinstance(owner, nn.Module) and not isinstance(owner, fx.GraphModule) else None


def self_of(frame: FrameType) -> Any:
    """What a frame calls ``self``; None if it calls nothing so.

    Before Python 3.13 a frame that was asked keeps its values in a dict until it returns. They are taken out again, so
    that the user's tensors die when they would; not where the user holds that dict, or a tracer writes it back.
    """
    code = frame.f_code
    if "self" not in code.co_varnames and "self" not in code.co_freevars:
        return None
    values = frame.f_locals
    owner = values.get("self")
    snapshot = sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED
    if snapshot and sys.getrefcount(values) <= _OWN and sys.gettrace() is None:
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            values.pop(name, None)
    return owner


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
