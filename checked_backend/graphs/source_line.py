"""The user's own source line of a node."""

from __future__ import annotations

import os
import re
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx

__all__ = ["module_path", "source_line", "users_frame"]

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\s*$')
_MODULE = re.compile(r"_modules\['([^']+)'\]")
_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = str(Path(__file__).parent.parent) + os.sep


def source_line(node: fx.Node) -> str | None:
    """The user's source line of a node: the innermost recorded frame outside of torch.

    Returns:
        ``"model.py:41 in forward: x = torch.relu(x)"``, or None if nothing was recorded.
    """
    trace = node.meta.get("stack_trace") or node.stack_trace
    if not trace:
        return None
    lines = trace.splitlines()
    best: str | None = None
    for position, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame is None or (best is not None and frame["file"].startswith(_TORCH)):
            continue
        following = lines[position + 1].strip() if position + 1 < len(lines) else ""
        code = "" if not following or _FRAME.match(following) else f": {following}"
        best = f"{os.path.basename(frame['file'])}:{frame['line']} in {frame['function']}{code}"
    return best


def users_frame(frame: FrameSummary) -> str | None:
    """A frame as `source_line` writes it; None for one of torch, of this package or of a graph."""
    if frame.filename.startswith((_TORCH, _HERE, "<")):
        return None
    place = f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return f"{place}: {frame.line}" if frame.line else place


def module_path(node: fx.Node) -> str | None:
    """The path of the user's innermost module that a node belongs to.

    Args:
        node: A node of a Dynamo or AOT graph. Nodes of a backward graph remember the forward's module.

    Returns:
        ``"encoder.layers.0.linear1 (Linear)"``, or None if nothing was recorded.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    path, kind = list(stack.values())[-1]
    name = kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", "")
    text = _ROOT.sub("", _MODULE.sub(r"\1", str(path)))
    return f"{text} ({name})" if text else f"({name})"
