"""The generated code of the operator that errs: its kernel, cut out of all code of the region.

A report shows the source. A script has the kernel with all that it needs, and runs it without the compiler, as it ran
in the program.
"""

from __future__ import annotations

import ast
import copy
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from checked_backend._torch.generated_modules import GeneratedModule, arguments_of, calls_kernel, kernel_calls
from checked_backend.diagnose.localize.subgraph import part_of
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Kernel
from checked_backend.graphs.effects import writes
from checked_backend.graphs.nodes import origin_of
from checked_backend.options import CheckOptions
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.operator_check.in_place import CheckedModule
from checked_backend.regions.operator_check.units import Unit

_MOST_LINES, _MOST_CHARACTERS = 300, 24_000
_MOST_NAMES = 40

_LANGUAGES: Mapping[str, str] = MappingProxyType({"cpp_pybinding": "C++", "cpp": "C++", "triton": "Triton"})
"""What compiles a kernel at run time, and the language of its source. Others are told by their own names."""

MOST_BYTES = 1 << 28
"""Bytes of what a kernel reads. A script that needs more is not written."""


def kernel_in(modules: Sequence[GeneratedModule], graph: str, node: str, dynamo: fx.GraphModule) -> Kernel:
    """The kernel that computes a node, of the code of the first graph of that kind.

    Args:
        graph: The kind of the graph; for ``dynamo``, any graph that has nodes made from that one.

    Raises:
        CheckedBackendError: No code is known, or none of it computes the node.
    """
    if not modules:
        raise CheckedBackendError("the compiler generated none that can be seen")
    for module in modules:
        if graph not in (module.kind, "dynamo"):
            continue
        wanted = {node}
        if graph == "dynamo":
            origins = {one.name: origin_of(one, dynamo) for one in module.graph.graph.nodes}
            wanted = {name for name, origin in origins.items() if origin is not None and origin.name == node}
        calls = [call for call in kernel_calls(module) if not wanted.isdisjoint(call.nodes)]
        names = list(dict.fromkeys(call.name for call in calls))
        for call in calls[:1]:
            compiled = rf"^{re.escape(call.name)} = async_compile\.(\w+)\(.*?r?'''(.*?)^'''"
            found = re.search(compiled, module.text, re.MULTILINE | re.DOTALL)
            source = ("call", call.statement) if found is None else (_LANGUAGES.get(found[1], found[1]), found[2])
            return _kernel(call.name, *source, call.nodes, [name for name in names if name != call.name])
    raise CheckedBackendError(f"no kernel computes {node}")


def _kernel(name: str, language: str, source: str, computes: Sequence[str], others: Sequence[str]) -> Kernel:
    lines = source.strip("\n").splitlines()
    kept = lines[:_MOST_LINES]
    while sum(map(len, kept)) + len(kept) > _MOST_CHARACTERS and len(kept) > 1:
        kept.pop()
    code = "\n".join(kept)[:_MOST_CHARACTERS]
    return Kernel(
        name, language, code, len(lines) - len(kept), tuple(computes[:_MOST_NAMES]), tuple(others[:_MOST_NAMES])
    )


@dataclass(frozen=True, slots=True)
class KernelCode:
    """A kernel by itself.

    Attributes:
        case: The operators that it stands for, on the values that it read.
        lines: They define ``compiled``, which calls it on the same values.
    """

    case: GraphCase
    lines: Sequence[str]


def kernel_code(checked: CheckedModule, node: fx.Node, options: CheckOptions) -> KernelCode | None:
    """The kernel that computes a node whose value is known, with those before it whose results are no node's.

    Returns:
        The kernel; None if its code cannot be cut out of the module, or reads too much.
    """
    module = checked.module
    name = next((name for name, nodes in module.held.items() if node in nodes and checked.lines.get(name)), None)
    if name is None or node.op == "placeholder":  # a copy of an input
        return None
    written, held = checked.lines[name], [*module.held[name]]
    line = written[held.index(node)] if len(written) == len(held) else written[-1]  # one may fill it and add to it
    definition = next(one for _, one in module.functions if one.lineno <= line <= (one.end_lineno or line))
    known = _known(checked, node)
    needed, read = _needed(definition, name, line, checked.lines, known)
    unit = checked.units.of(node)
    changed = read.intersection(module.written)
    calls = [one for one in _statements(definition, line) if calls_kernel(one) and one.lineno not in needed]
    if any(not changed.isdisjoint(_names(one)) for one in calls) or _is_written_to(unit, node):
        return None  # it may read what another kernel wrote there
    part, sources = part_of(module.graph, unit.nodes, [node])
    case = GraphCase(part, tuple(_value(checked, source) for source in sources), options)
    case = FailingCase.of(case, "output[0]").case  # constants become inputs
    own = [str(one.target) for one in case.graph.graph.find_nodes(op="placeholder")[len(sources) :]]
    function = _Only(needed, name).visit(copy.deepcopy(definition))
    # what else the kernel reads: for another result, or a constant
    more = {one: _value(checked, known[one]) for one in sorted(read) if known[one] not in sources}
    constants = module.functions[0][0].__globals__.items()
    unknown = _names(function).difference(own)
    more |= {one: value for one, value in constants if isinstance(value, torch.Tensor) and one in unknown}
    for one in more:
        with case.graph.graph.inserting_before(next(one for one in case.graph.graph.nodes if one.op != "placeholder")):
            case.graph.graph.placeholder(one)
    case.graph.recompile()
    values = (*case.inputs, *more.values())
    if any(value is None for value in values):
        return None  # there was no room to keep it
    if sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor)) > MOST_BYTES:
        return None
    names = {known[one]: one for one in read}
    function.name = "compiled"
    function.args.args = [ast.arg(one) for one in (*(names.get(one, one.name) for one in sources), *own, *more)]
    text = ast.unparse(ast.fix_missing_locations(function)).splitlines()
    start = ["", "", "# what Inductor generated for it", *_definitions(module.text, function)]
    return KernelCode(replace(case, inputs=values), [*start, "", "", *text, "", ""])


def _known(checked: CheckedModule, node: fx.Node) -> dict[str, fx.Node]:
    """By the names that the code has for them: the inputs, and the nodes whose values are known, but for one node."""
    module = checked.module
    known = {
        name: nodes[0]
        for name, nodes in module.held.items()
        if len(nodes) == 1 and nodes[0] is not None and nodes[0] is not node and nodes[0].name in checked.values
    }
    names = arguments_of(next(one for _, one in module.functions if one.name == "call"))
    return known | dict(zip(names, module.graph.graph.find_nodes(op="placeholder"), strict=False))


def _is_written_to(unit: Unit, node: fx.Node) -> bool:
    """Whether a call that is no part of a unit writes to what it is computed of: the unit alone lacks that."""
    own = {*unit.nodes, *unit.sources}
    before = itertools.takewhile(lambda one: one is not node, node.graph.nodes)
    return any(writes(one) and one not in own and not own.isdisjoint(one.all_input_nodes) for one in before)


def _value(checked: CheckedModule, node: fx.Node) -> Any:
    if node.op == "placeholder":
        return checked.inputs[checked.module.graph.graph.find_nodes(op="placeholder").index(node)]
    return checked.values[node.name]


def _needed(
    definition: ast.FunctionDef, name: str, last: int, lines: Mapping[str, Sequence[int]], known: Collection[str]
) -> tuple[set[int], set[str]]:
    """The lines that a buffer's value needs, up to the last one that writes to it, and the known names that they read.

    Args:
        lines: By the name of a buffer: the lines that write to it.
    """
    wanted, needed, read = {name}, set[int](), set[str]()
    views = _views(definition)
    for one in sorted(_statements(definition, last), key=lambda one: one.lineno, reverse=True):
        wanted |= {view for view, base in views.items() if base in wanted}  # a kernel may write through it
        made = {*_bound(one)} | {name for name in wanted if one.lineno in lines.get(name, ())}
        if made.isdisjoint(wanted):
            continue
        needed.add(one.lineno)
        for used in _names(one) - made:
            is_read = used in known and all(line < one.lineno for line in lines.get(used, ()))
            (read if is_read else wanted).add(used)
    return needed, read


def _statements(definition: ast.FunctionDef, last: int) -> list[ast.Assign | ast.Expr]:
    return [one for one in ast.walk(definition) if isinstance(one, (ast.Assign, ast.Expr)) and one.lineno <= last]


def _views(definition: ast.FunctionDef) -> dict[str, str]:
    """The names of views, each with the name of the buffer whose memory it is, which is not used for it anew."""
    nodes = [*ast.walk(definition)]
    ended = {(one.lineno, ast.unparse(name)) for one in nodes if isinstance(one, ast.Delete) for name in one.targets}
    views: dict[str, str] = {}
    for one in nodes:
        if isinstance(one, ast.Assign) and ast.unparse(one.value).startswith("reinterpret_tensor("):
            base = ast.unparse(one.value).removeprefix("reinterpret_tensor(").partition(",")[0]
            if (one.lineno, base) not in ended:
                views[ast.unparse(one.targets[0])] = base
    return views


class _Only(ast.NodeTransformer):
    """Leave some statements of a function, and return one name."""

    def __init__(self, lines: Collection[int], returned: str) -> None:
        self._lines, self._returned = lines, returned

    def visit_Assign(self, node: ast.Assign | ast.Expr) -> ast.stmt | None:
        return node if node.lineno in self._lines else None

    visit_Expr = visit_Assign

    def visit_Delete(self, _node: ast.Delete) -> None:
        return None

    def visit_With(self, node: ast.With) -> ast.stmt | None:
        self.generic_visit(node)
        return node if node.body else None

    def visit_Return(self, _node: ast.Return) -> ast.stmt:
        return ast.Return(ast.Name(self._returned))


def _definitions(text: str, function: ast.FunctionDef) -> list[str]:
    """The statements of generated code that a function needs."""
    lines = text.splitlines()
    needed: list[list[str]] = []
    wanted = _names(function)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.Expr) or not wanted.isdisjoint(_bound(node)):
            needed.insert(0, lines[node.lineno - 1 : node.end_lineno])
            wanted |= _names(node)
    return [line for statement in needed for line in statement]


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement gives a meaning."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
