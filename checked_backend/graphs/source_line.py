"""The user's own source line of a node."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx

from checked_backend.findings.paths import is_in_library, shown_path

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\s*$')
_MODULE = re.compile(r"(?:__dict__\['_modules'\]|_modules)\['([^']+)'\]")
_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = str(Path(__file__).parent.parent) + os.sep


def source_line(node: fx.Node) -> str | None:
    """The user's source line of a node: the innermost recorded frame outside of torch.

    Returns:
        ``"src/model.py:41 in forward: x = torch.relu(x)"``, or None if nothing was recorded.
    """
    return next(_lines(node), None)


def callers_line(node: fx.Node) -> str | None:
    """The line of the user's own program that led to a node; None if `source_line` is that, or none is recorded."""
    lines = list(_lines(node))
    own = next((line for line in lines if not is_in_library(line)), None)
    return own if lines[:1] != [own] else None


def _lines(node: fx.Node) -> Iterator[str]:
    """The recorded lines outside of torch, the innermost first; those of torch where there are no others."""
    trace = node.meta.get("stack_trace") or node.stack_trace or ""
    lines = trace.splitlines()
    found = [(place, frame) for place, line in enumerate(lines) if (frame := _FRAME.match(line))]
    for place, frame in [one for one in found if not one[1]["file"].startswith(_TORCH)][::-1] or found[:1]:
        following = lines[place + 1].strip() if place + 1 < len(lines) else ""
        code = "" if not following or _FRAME.match(following) else f": {following}"
        yield f"{shown_path(frame['file'])}:{frame['line']} in {frame['function']}{code}"


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
