"""The code that runs one node: its arguments, constants and call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import OpOverload
from checked_backend.graphs.nodes import is_getitem
from checked_backend.graphs.schema import is_custom
from checked_backend.metadata.plan import CheckSettings
from checked_backend.metadata.symbols import UNKNOWN

__all__ = ["CallWriter"]


class CallWriter:
    """Writes the calls of a graph's nodes, and keeps the constants that they name.

    Args:
        settings: The user's choice of checks.
        subgraphs: For nodes that fetch a graph for a higher-order operator, the module to hand to the operator instead.
    """

    def __init__(self, gm: fx.GraphModule, settings: CheckSettings, subgraphs: Mapping[fx.Node, Any]) -> None:
        self.gm = gm
        self.settings = settings
        self.subgraphs = subgraphs
        self.names: dict[str, Any] = {
            "Tensor": torch.Tensor,
            "UNKNOWN": UNKNOWN,
            "isclose": math.isclose,
            "math": math,
            "module": gm,
            "strided": torch.strided,
        }
        self.constants: dict[Any, str] = {}
        self.position = {node: index for index, node in enumerate(gm.graph.nodes)}

    def variable(self, node: fx.Node) -> str:
        """The variable that holds a node's value."""
        return f"_v{self.position[node]}"

    def constant(self, value: Any) -> str:
        """The name, in the generated code, of a value that cannot be written as code."""
        key = value if isinstance(value, (torch.dtype, torch.device, torch.layout, OpOverload)) else id(value)
        if key not in self.constants:
            self.constants[key] = f"_k{len(self.constants)}"
            self.names[self.constants[key]] = value  # this also keeps the value alive, so that its id stays its own
        return self.constants[key]

    def argument(self, value: Any) -> str:
        """An argument as code. A constant that Python can write is written; any other gets a name."""
        if isinstance(value, fx.Node):
            return self.variable(value)
        if value is None or type(value) in (int, bool, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return f"({''.join(self.argument(item) + ', ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.argument, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.argument(key)}: {self.argument(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self.argument(value.start)}, {self.argument(value.stop)}, {self.argument(value.step)})"
        if isinstance(value, tuple):
            return f"{self.constant(type(value))}({', '.join(map(self.argument, value))})"
        return self.constant(value)

    def call(self, node: fx.Node) -> str:
        """The call of a node."""
        if node.op == "get_attr":
            if node in self.subgraphs:
                return self.constant(self.subgraphs[node])
            return f"module.{node.target}"
        parts = [self.argument(value) for value in node.args]
        if node.op == "call_method":
            return f"{parts[0]}.{node.target}({', '.join([*parts[1:], *self.keywords(node)])})"
        if node.op == "call_module":
            return f"module.get_submodule({node.target!r})({', '.join([*parts, *self.keywords(node)])})"
        if is_getitem(node):
            return f"{parts[0]}[{parts[1]}]"
        if self.watches(node):
            keywords = f"{{{', '.join(f'{key!r}: {self.argument(value)}' for key, value in node.kwargs.items())}}}"
            positional = "".join(f"{part}, " for part in parts)
            return f"run.custom({self.position[node]}, {self.constant(node.target)}, ({positional}), {keywords})"
        return f"{self.constant(node.target)}({', '.join([*parts, *self.keywords(node)])})"

    def watches(self, node: fx.Node) -> bool:
        """Whether a node's operator is watched while it runs. Under vmap tensors have no memory to look at."""
        wanted = {"alias", "mutation", "requires_grad"} & set(self.settings.checks)
        return bool(wanted) and is_custom(node) and not self.settings.light and self.settings.ignores(node) is None

    def keywords(self, node: fx.Node) -> list[str]:
        """A node's keyword arguments as code."""
        if all(key.isidentifier() for key in node.kwargs):
            return [f"{key}={self.argument(value)}" for key, value in node.kwargs.items()]
        items = ", ".join(f"{key!r}: {self.argument(value)}" for key, value in node.kwargs.items())
        return [f"**{{{items}}}"]
