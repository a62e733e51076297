"""The Python code of graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.graph_module import _forward_from_src


def forward_from_source(source: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile the source of a function ``forward`` as FX compiles a graph's own code.

    FX keeps the source for tracebacks. The source must be generated from a graph in memory, because it is executed.
    """
    function: Callable[..., Any] = _forward_from_src(source, dict(names))
    return function


def graph_digest(gm: torch.fx.GraphModule) -> str:
    """A digest of a graph's code, names of nodes among it, and of the code of graphs inside of it."""
    codes = [one.code for one in gm.modules() if isinstance(one, torch.fx.GraphModule)]
    return hashlib.sha256("\n".join(codes).encode()).hexdigest()


def dump_code(graph: torch.fx.Graph) -> tuple[str, dict[str, Any]]:
    """The source of ``forward(self, <each placeholder>)`` with shapes, strides and source lines, and its globals."""
    codegen = graph._codegen
    graph.set_codegen(torch.fx.graph.CodeGen())  # a joint graph's own one makes it take two tuples
    try:
        code = graph.python_code("self", verbose=True, include_stride=True, include_device=True)
    finally:
        graph.set_codegen(codegen)
    return code.src, dict(code.globals)
