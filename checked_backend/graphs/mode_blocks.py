"""Turn the calls by which a Dynamo graph enters and leaves modes back into ``with`` blocks.

Dynamo writes ``with torch.autocast(...)`` as a call that enters the mode and a call that leaves it. It cannot trace
these calls. A graph that is compiled anew, or written as a script, therefore needs the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import fx

from checked_backend.graphs.effects import mode_name

_NAME = re.compile(r"\s*(\w+)(?: : [^=]*)? = ")


def block_of(node: fx.Node) -> str | None:
    """The context manager that a call enters, as code; None if it enters none of the known ones."""
    name = mode_name(node)
    if name == "_enter_autocast":
        device, dtype, enabled, cache = (*node.args, *(None,) * 4)[:4]
        return f"torch.autocast({device!r}, dtype={dtype!r}, enabled={enabled!r}, cache_enabled={cache!r})"
    if name == "_enter_inference_mode":
        return f"torch.inference_mode({node.args[0] if node.args else True!r})"
    return None


def leaves_block(node: fx.Node) -> bool:
    """Whether a call leaves a context manager that `block_of` knows."""
    return mode_name(node) in ("_exit_autocast", "_exit_inference_mode")


def with_mode_blocks(gm: fx.GraphModule) -> fx.GraphModule:
    """Give a graph module code with blocks, which Dynamo can trace. The graph itself stays as it is.

    Args:
        gm: A graph of the caller's own.

    Returns:
        The same graph module.
    """
    opened = {node.name: block for node in gm.graph.nodes if (block := block_of(node)) is not None}
    if opened:
        closing = {node.name for node in gm.graph.nodes if leaves_block(node)}
        gm.graph.on_generate_code(lambda before: _in_blocks(before, opened, closing))
        gm.recompile()
    return gm


_Transform = Callable[[list[str]], list[str]]


def _in_blocks(before: _Transform | None, opened: dict[str, str], closing: set[str]) -> _Transform:
    def transform(body: list[str]) -> list[str]:
        lines, depth = [], 0
        for line in "".join(body if before is None else before(body)).splitlines():
            made = _NAME.match(line)
            name = made[1] if made else ""
            if name in closing:
                depth -= 1
                continue
            lines.append("    " * depth + (f"with {opened[name]}:" if name in opened else line) + "\n")
            if name in opened:
                depth += 1
                lines.append("    " * depth + "pass\n")  # the block may be empty
        return lines

    return transform
