"""The user's own source line of a node."""

from __future__ import annotations

import os
import re
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx

from checked_backend.findings.paths import shown_path

__all__ = ["module_path", "source_line", "users_frame"]

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\s*$')
_MODULE = re.compile(r"_modules\['([^']+)'\]")
_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = str(Path(__file__).parent.parent) + os.sep


def source_line(node: fx.Node) -> str | None:
    """The user's source line of a node: the innermost recorded frame outside of torch.

    Returns:
        ``"src/model.py:41 in forward: x = torch.relu(x)"``, or None if nothing was recorded.
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
        best = f"{shown_path(frame['file'])}:{frame['line']} in {frame['function']}{code}"
    return best


def users_frame(frame: FrameSummary) -> str | None:
    """A frame as `source_line` writes it; None for one of torch, of this package or of a graph."""
    if frame.filename.startswith((_TORCH, _HERE, "<")):
        return None
    place = f"{shown_path(frame.filename)}:{frame.lineno} in {frame.name}"
    return f"{place}: {frame.line}" if frame.line else place


def module_path(node: fx.Node) -> str | None:
    """The path of the user's innermost module that a node belongs to, from the module that was compiled.

    Args:
        node: A node of a Dynamo or AOT graph. Nodes of a backward graph remember the forward's module.

    Returns:
        ``"encoder.layers.0.linear1"``, or None if nothing was recorded, or it is the compiled module's own.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    path, _kind = list(stack.values())[-1]
    return _ROOT.sub("", _MODULE.sub(r"\1", str(path))) or None
