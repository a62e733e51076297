"""An FX graph as Graphviz DOT text, without pydot."""

from __future__ import annotations

import operator
import os
import shutil
import subprocess
import warnings
from pathlib import Path

import torch
from torch import Tensor, fx

from checked_backend._torch.operators import HigherOrderOperator, OpOverload

_FILL = {
    "input": "#dbe9f6",
    "constant": "#e8e8e8",
    "operator": "#fdf6d8",
    "view": "#eef7ee",
    "in place": "#fbe0d8",
    "random": "#f0e2f8",
    "higher order": "#f8d8ec",
    "custom": "#ffe2b0",
    "scalar": "#f4f4f4",
    "output": "#dcf0dc",
}
_OURS = ("aten", "prims", "prim")


def graph_to_dot(graph: fx.Graph, title: str = "graph") -> str:
    """Render a graph as DOT text: each node with name, target, recorded dtype, shape and strides, coloured by kind."""
    lines = [
        f"digraph {_quote(title)} {{",
        "    rankdir=TB; nslimit=1; nslimit1=1;",  # bounds on Graphviz's search, else minutes for some hundred nodes
        '    node [shape=box, style=filled, fontname="monospace"];',
    ]
    for node in graph.nodes:
        rows = [node.name] if node.op in ("placeholder", "output") else [node.name, str(node.target)]
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, Tensor):
            rows.append(_describe(value))
        label = "\\n".join(_escape(row) for row in rows)
        lines.append(f'    {_quote(node.name)} [label="{label}", fillcolor="{_FILL[_kind(node)]}"];')
    for node in graph.nodes:
        lines.extend(f"    {_quote(source.name)} -> {_quote(node.name)};" for source in node.all_input_nodes)
    lines.append("}")
    return "\n".join(lines) + "\n"


def render_svg(source: Path, seconds: float) -> None:
    """Draw a ``.dot`` file as ``.svg`` next to it, where Graphviz is installed. A failure is a warning.

    Graphviz is stopped after some seconds: its layout can take hours on a graph of many thousand nodes.
    """
    program = shutil.which("dot")
    if program is None:
        return
    target = source.with_suffix(".svg")
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        command = [program, "-Tsvg", str(source), "-o", str(temporary)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode == 0 and temporary.exists():
            os.replace(temporary, target)
            return
        problem = f"Graphviz failed on {source}: {done.stderr.strip()}"
    except subprocess.TimeoutExpired:
        problem = f"Graphviz took more than {seconds:.0f} s on {source}; only the .dot is there"
    except OSError as error:
        problem = f"Graphviz cannot be run on {source}: {error}"
    temporary.unlink(missing_ok=True)
    warnings.warn(problem, stacklevel=3)


def _kind(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr", "output"):
        return {"placeholder": "input", "get_attr": "constant", "output": "output"}[node.op]
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return "higher order"
    if isinstance(target, OpOverload):
        if target.namespace not in _OURS:
            return "custom"
        if torch.Tag.nondeterministic_seeded in target.tags:
            return "random"
        if target._schema.is_mutable:
            return "in place"
        return "view" if target.is_view else "operator"
    if target is operator.getitem or isinstance(
        node.meta.get("val", node.meta.get("example_value")), (torch.SymInt, torch.SymFloat, torch.SymBool)
    ):
        return "scalar"
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return "in place" if name.endswith("_") and not name.startswith("_") else "operator"


def _describe(value: Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    sizes = ", ".join(str(size) for size in value.shape)
    try:
        strides = ", ".join(str(stride) for stride in value.stride())
    except RuntimeError:  # sparse and other layouts have no strides
        return f"{dtype}[{sizes}]"
    return f"{dtype}[{sizes}] strides ({strides})"


def _escape(text: str) -> str:
    # Netron's reader of DOT knows no escaped quote
    return text.replace("\\", "\\\\").replace('"', "'").replace("\n", " ")


def _quote(text: str) -> str:
    return f'"{_escape(text)}"'
