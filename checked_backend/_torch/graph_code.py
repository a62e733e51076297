"""The Python code of graphs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["dump_code"]


def dump_code(graph: torch.fx.Graph) -> tuple[str, dict[str, Any]]:
    """The source of ``forward(self, <each placeholder>)`` with shapes, strides and source lines, and its globals."""
    codegen = graph._codegen
    graph.set_codegen(torch.fx.graph.CodeGen())  # a joint graph's own one makes it take two tuples
    try:
        code = graph.python_code("self", verbose=True, include_stride=True, include_device=True)
    finally:
        graph.set_codegen(codegen)
    return code.src, dict(code.globals)
