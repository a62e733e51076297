"""The Python modules that Inductor generates: what of its graph their buffers hold, and what each kernel computes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

import torch
from torch import fx

from checked_backend._torch.graph_json import graph_from_json, graph_to_json
from checked_backend._torch.operators import OpOverload
from checked_backend._torch.patches import replaced

_BUFFER = re.compile(r"buf\d+")
_NO_KERNEL = re.compile(r"empty_strided|reinterpret_tensor|assert_|args\.clear|get_raw_stream|device\(")
"""The beginnings of calls that write no element."""

_KEPT, _FORMAT = "checked_backend_module", "region, format 1"
"""The attribute that torch keeps, and the key of the region's digest in it. Another format has another key."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of a kernel in a module's text.

    Attributes:
        name: The kernel's name in the module, or that of a function of a library.
        nodes: The names of the nodes that it computes.
    """

    name: str
    statement: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GeneratedModule:
    """One module, which calls the kernels of one graph.

    Attributes:
        kind: Which graph of the region it is: ``forward``, ``backward`` or ``inference``.
        graph: The graph as it was lowered, with recorded values.
        held: By the name of a buffer in the module: the nodes whose values it holds one after the other, in the order
            of its writes. None stands for a value that is no node's.
        functions: The functions that call kernels, each with its definition in the module's text.
        written: The graph's inputs that are written to.
        text: The module's text, which has the sources of the kernels as strings.
        made: By the name of a buffer: the names of the nodes that it is computed from.
    """

    kind: Literal["forward", "backward", "inference"]
    graph: fx.GraphModule
    held: Mapping[str, Sequence[fx.Node | None]]
    functions: Sequence[tuple[FunctionType, ast.FunctionDef]]
    written: Collection[str]
    text: str = ""
    made: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def to_json(self) -> list[Any]:
        """What of the module is not in its text, for JSON.

        Raises:
            NotInJsonError: Its graph cannot be kept.
        """
        held = {name: [node and node.name for node in nodes] for name, nodes in self.held.items()}
        made = {name: [*nodes] for name, nodes in self.made.items()}
        return [self.kind, graph_to_json(self.graph), held, sorted(self.written), made]


@contextmanager
def generated_modules_noted(found: list[GeneratedModule], region: str = "") -> Iterator[None]:
    """Note the module of each graph that Inductor compiles in this block, in this process.

    What is noted is kept beside the module in torch's cache of graphs, as JSON. A graph that comes from the cache is
    noted if that was kept (`graph_to_json`) by the same region: its nodes have the names of that one's. A module in C++
    is not noted.

    Args:
        found: Gets the modules, in the order in which they are generated or loaded.
        region: The digest of Dynamo's graph.
    """
    from torch._inductor.output_code import CompiledFxGraph  # noqa: PLC0415  Inductor is slow to import

    def generated(init: Callable[..., None]) -> Callable[..., None]:
        def note(compiled: Any, function: Any, lowering: Any, *args: Any, **kwargs: Any) -> None:
            init(compiled, function, lowering, *args, **kwargs)
            if not lowering.cpp_wrapper:
                with suppress(Exception):  # a release of torch that names these otherwise: the module is not noted
                    found.append(_noted(lowering, function.__globals__, compiled.source_code))
                    setattr(compiled, _KEPT, json.dumps({_FORMAT: region, "module": found[-1].to_json()}))

        return note

    def loaded(load: Callable[..., Any]) -> Callable[..., Any]:
        def note(compiled: Any, *args: Any, **kwargs: Any) -> Any:
            path = load(compiled, *args, **kwargs)
            with suppress(Exception):  # nothing was kept
                kept = json.loads(getattr(compiled, _KEPT))
                if kept[_FORMAT] == region:
                    scope = compiled.current_callable.__globals__
                    found.append(_from_json(kept["module"], scope, compiled.source_code))
            return path

        return note

    with (
        replaced(CompiledFxGraph, "__init__", generated),
        replaced(CompiledFxGraph, "after_deserialization", loaded),
    ):
        yield


def _noted(lowering: Any, scope: Mapping[str, Any], text: str) -> GeneratedModule:
    forward: Literal["forward", "inference"] = "inference" if lowering.is_inference else "forward"
    kind = "backward" if lowering.is_backward else forward
    made = {
        buffer.get_name(): [node.name for node in operation.get_origins()]
        for operation in lowering.operations
        for buffer in operation.get_outputs()
    }
    written = frozenset(lowering.mutated_inputs)
    return GeneratedModule(kind, lowering.module, _held(lowering), _functions(scope, text), written, text, made)


def _from_json(kept: list[Any], scope: Mapping[str, Any], text: str) -> GeneratedModule:
    kind, entries, held, written, made = kept
    graph = graph_from_json(entries)
    nodes = {None: None, **{node.name: node for node in graph.graph.nodes}}
    known = {name: [nodes[one] for one in names] for name, names in held.items()}
    return GeneratedModule(kind, graph, known, _functions(scope, text), frozenset(written), text, made)


def kernel_calls(module: GeneratedModule) -> Iterator[KernelCall]:
    """The calls of kernels, in order. A buffer is computed by the first call that has it."""
    inside = (one for _, definition in module.functions for one in ast.walk(definition))
    statements = [one for one in inside if isinstance(one, (ast.Expr, ast.Assign)) and calls_kernel(one)]
    lines = module.text.splitlines()
    known: set[str] = set()
    for statement in sorted(statements, key=lambda one: one.lineno):
        buffers = sorted(buffers_in(statement) - known)
        known.update(buffers)
        nodes = tuple(dict.fromkeys(node for name in buffers for node in module.made.get(name, ())))
        if nodes:
            name = ast.unparse(statement.value.func).removesuffix(".run")  # type: ignore[attr-defined]
            own = lines[statement.lineno - 1 : statement.end_lineno]
            yield KernelCall(name, "\n".join(line.strip() for line in own), nodes)


def calls_kernel(statement: ast.Expr | ast.Assign) -> bool:
    """Whether a statement may call a kernel."""
    return isinstance(statement.value, ast.Call) and not _NO_KERNEL.match(ast.unparse(statement.value))


def arguments_of(definition: ast.FunctionDef) -> list[str]:
    """The names of a function's arguments, which it takes from a list."""
    for one in definition.body:
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Name) and isinstance(one.targets[0], ast.Tuple):
            return [ast.unparse(name) for name in one.targets[0].elts]
    return []


def buffers_in(statement: ast.stmt) -> set[str]:
    """The names of the buffers in a statement."""
    return {one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and _BUFFER.fullmatch(one.id)}


def _functions(scope: Mapping[str, Any], text: str) -> list[tuple[FunctionType, ast.FunctionDef]]:
    found = []
    tree = ast.parse(text)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for names, body in [(scope, tree.body), *((vars(scope.get(node.name)), node.body) for node in classes)]:
        for node in body:
            if isinstance(node, ast.FunctionDef) and (node.name == "call" or node.name.startswith("partition_")):
                function = names.get(node.name)
                if isinstance(function, FunctionType):
                    found.append((function, node))
    return found


def _held(lowering: Any) -> dict[str, list[fx.Node | None]]:
    writes: dict[str, list[tuple[fx.Node | None, Collection[fx.Node]]]] = {}
    order = {node: place for place, node in enumerate(lowering.module.graph.nodes)}
    for operation in lowering.operations:
        outputs = operation.get_outputs()
        for buffer in outputs:
            targets = list(buffer.get_mutation_names()) or [buffer.get_name()]
            for name in targets:
                writes.setdefault(name, []).append((_node_of(buffer, operation, order), operation.get_origins()))
    # kernels are called with these, and write nothing to them: what reads them is in the same kernel
    for name in lowering.inplaced_to_remove:
        writes.pop(name, None)
    # one node may be computed by several writes: the last leaves its value
    return {
        name: [
            None if any(node in origins for _, origins in of_name[place + 1 :]) else node
            for place, (node, _) in enumerate(of_name)
        ]
        for name, of_name in writes.items()
    }


def _node_of(buffer: Any, operation: Any, order: Mapping[fx.Node, int]) -> fx.Node | None:
    """The node whose value an operation makes.

    Torch does not say it of every buffer that a later operator made it compute (``ir.assign_origin_node``): then it is
    the origin that all others lead to, if it makes one tensor like the buffer. A reduction is computed at once: one
    that torch does not name is a part of an operator, like the sum of squares from which a variance is made.
    """
    from torch._inductor.ir import Reduction, Scan, Sort  # noqa: PLC0415  Inductor is slow to import

    node: fx.Node | None = operation.get_origin_node()
    if node in order:
        return node
    if isinstance(getattr(operation, "data", None), (Reduction, Scan, Sort)):
        return None
    origins = [one for one in operation.get_origins() if one in order and isinstance(one.target, OpOverload)]
    last = max(origins, key=order.__getitem__, default=None)
    return last if last is not None and _is_alike(last, buffer) and _leads_here(origins, last) else None


def _leads_here(sources: Iterable[fx.Node], node: fx.Node) -> bool:
    """Whether a node is computed from each of the others."""
    before = {node}
    pending = [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in before:
                before.add(source)
                pending.append(source)
    return before.issuperset(sources)


def _is_alike(node: fx.Node, buffer: Any) -> bool:
    value, layout = node.meta.get("val"), buffer.layout
    if not isinstance(value, torch.Tensor):
        return False
    shape: Sequence[Any] = value.shape
    sizes = [size.node.expr if isinstance(size, torch.SymInt) else size for size in shape]
    return value.dtype == getattr(layout, "dtype", None) and sizes == list(layout.size)
