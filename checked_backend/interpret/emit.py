"""Turn a graph into one Python function that runs it, with the checks of every node in line.

What the function looks like, for ``relu`` of a graph with a dynamic batch::

    def forward(run, args_list):
        _v0, _v1, = args_list
        args_list.clear()
        s0 = _v0 if isinstance(_v0, (int, float)) else UNKNOWN
        ...
        _s0 = (s0, 3)
        _v2 = _k1(_v1)
        if (_c2_0 := _as_recorded1(_v2, _k0, _s0, (3, 1), 0)) is None: _c2_0 = run.fail(2, 0, _v2, locals())
        elif _c2_0 == _c1_0: run.alias(2, 0, _c2_0, locals())
        del _v1
        return [_v2]

``_as_recorded1`` compares dtype, layout, device, shape, strides and offset, and returns the identity of the storage.
A check that holds costs a few attribute reads. One that does not goes to ``run``, which compares again in detail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from checked_backend._torch import OpOverload, deferred_asserts, forward_from_source
from checked_backend.interpret.calls import Calls
from checked_backend.interpret.expected import ExpectedTensor, ExpectedValue, Leaf, Size, expected_leaves, recorded
from checked_backend.interpret.plan import (
    NodePlan,
    Settings,
    is_getitem,
    is_index,
    items_of,
    last_uses,
    producer,
    shape_env,
    tokens,
    with_effects,
)
from checked_backend.interpret.schema import is_custom, read_only_inputs
from checked_backend.interpret.symbols import SymbolTable

__all__ = ["GraphCode", "emit"]


@dataclass(slots=True)
class GraphCode:
    """A graph's code.

    Attributes:
        function: ``(run, args_list) -> outputs``.
        source: Its source.
        plans: One per node.
        variables: Which variable of the function holds which symbolic size.
        asserts: What the trace took for granted of sizes that depend on data.
        unchecked: Nodes without recorded metadata.
    """

    function: Callable[..., Any]
    source: str
    plans: list[NodePlan]
    variables: Mapping[sympy.Basic, str]
    asserts: list[tuple[sympy.Basic, str]]
    unchecked: int


def emit(gm: fx.GraphModule, settings: Settings, subgraphs: Mapping[fx.Node, Any]) -> GraphCode:
    """Analyse a graph and compile its code.

    Args:
        gm: The graph.
        settings: What to check.
        subgraphs: For nodes that get a graph for a higher-order operator, what to hand to the operator instead.
    """
    return _Emitter(gm, settings, subgraphs).emit()


class _Emitter(Calls):
    def __init__(self, gm: fx.GraphModule, settings: Settings, subgraphs: Mapping[fx.Node, Any]) -> None:
        super().__init__(gm, settings, subgraphs)
        self.table = SymbolTable()
        self.lines: list[str] = []
        self.plans = [NodePlan(node) for node in gm.graph.nodes]
        self.tensors: dict[fx.Node, ExpectedTensor] = {}  # what is known of nodes that are one tensor
        self.storages: dict[fx.Node, str] = {}  # the variable that holds the identity of a node's storage
        self.exact: set[fx.Node] = set()  # nodes whose storage offset is the recorded one, whatever the inputs' are
        self.tokens = tokens(gm.graph)
        values = (recorded(node)[1] for node in gm.graph.nodes)
        self.lazy_bits = any(
            isinstance(value, torch.Tensor) and (value.is_complex() or value.is_neg()) for value in values
        )
        self.unchecked = 0
        self.checkers: dict[tuple[str, str], str] = {}  # shared functions, by what they compare and for which device
        self.tuples: dict[str, str] = {}  # variables that hold symbolic shapes and strides

    def emit(self) -> GraphCode:
        nodes = list(self.gm.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        if inputs:
            self.lines.append(f"{', '.join(map(self.variable, inputs))}, = args_list")
        self.lines.append("args_list.clear()")
        dying = last_uses(nodes)
        for node in nodes:
            if node.op == "output":
                self.asserts()
                self.lines.append(f"return {self.argument(node.args[0])}")
                continue
            if node.op != "placeholder":
                self.lines.append(f"{self.variable(node)} = {self.call(node)}")
            self.check(node)
            if dead := dying.get(node):
                self.lines.append(f"del {', '.join(map(self.variable, dead))}")
        source = self.prelude() + "def forward(run, args_list):\n    " + "\n    ".join(self.lines) + "\n"
        function = forward_from_source(source, {**self.names, **self.table.functions})
        return GraphCode(function, source, self.plans, self.table.variables, self.checked_asserts, self.unchecked)

    # checking a node

    def check(self, node: fx.Node) -> None:
        plan = self.plans[self.position[node]]
        plan.inputs = tuple(self.position[producer(item)] for item in node.all_input_nodes)
        has_value, value = recorded(node)
        if node in self.tokens or node in self.subgraphs or self.settings.ignores(node):
            return
        if not has_value:
            self.unchecked += node.op not in ("get_attr",)
            return
        if is_getitem(node) and self.passed_on(node, value):
            return
        plan.leaves = leaves = expected_leaves(value)
        plan.allowed = frozenset(self.position[item] for item in node.all_input_nodes) - frozenset(
            self.position[item] for item in read_only_inputs(node)
        )
        index, variable = self.position[node], self.variable(node)
        if len(leaves) == 1 and not isinstance(value, (tuple, list, dict)):
            self.leaf(node, 0, leaves[0], variable, node)
        else:
            parts = [f"_x{index}_{k}" for k in range(len(leaves))]
            if parts:
                names = ", ".join(parts)
                self.lines.append(f"if type({variable}) in (tuple, list) and len({variable}) == {len(parts)}:")
                self.lines.append(f"    {names}, = {variable}")
                self.lines.append(f"else: {names}, = run.leaves({index}, {variable}, {len(parts)}, locals())")
                items = items_of(node)
                first = 1 if with_effects(node) else 0  # its first result is a token
                for k, (leaf, part) in enumerate(zip(leaves, parts, strict=True)):
                    if k >= first:
                        self.leaf(node, k, leaf, part, items.get(k))
                self.lines.append(f"del {names}")
        if self.settings.nonfinite and not self.settings.light and node.op.startswith("call"):
            given = "".join(f"{self.variable(item)}, " for item in node.all_input_nodes)
            self.lines.append(f"run.finite({index}, {variable}, ({given}), locals())")

    def passed_on(self, node: fx.Node, value: Any) -> bool:
        """Whether a ``getitem`` hands on an output that was checked where it was made."""
        parent, key = node.args
        checked = isinstance(parent, fx.Node) and self.plans[self.position[parent]].leaves is not None
        outputs = recorded(parent)[1] if checked and isinstance(parent, fx.Node) else None
        if (
            not isinstance(outputs, (tuple, list))
            or not isinstance(key, int)
            or not -len(outputs) <= key < len(outputs)
        ):
            return False
        if outputs[key] is value:
            return True
        return expected_leaves(outputs[key]) == expected_leaves(value)

    def leaf(self, node: fx.Node, k: int, leaf: Leaf, variable: str, carrier: fx.Node | None) -> None:
        if isinstance(leaf, ExpectedTensor):
            self.tensor(node, k, leaf, variable, carrier)
        elif isinstance(leaf, ExpectedValue):
            self.value(node, k, leaf.value, variable)

    def value(self, node: fx.Node, k: int, value: Any, variable: str) -> None:
        if isinstance(value, sympy.Basic):
            if not self.table.known(value):
                bind = self.table.bind_truth if isinstance(value, sympy.logic.boolalg.Boolean) else self.table.bind
                given = f"({variable} if isinstance({variable}, (int, float)) else UNKNOWN)"
                self.lines.extend(bind(value, given))
                return
            self.lines.extend(self.table.define(value))
            expected = self.table.text(value)
            differs = (
                f"not isclose({variable}, {expected})" if value.is_integer is False else f"{variable} != {expected}"
            )
        elif value is None or isinstance(value, bool):
            differs = f"{variable} is not {value}"
        elif isinstance(value, float) and not math.isfinite(value):
            return
        else:
            differs = f"{variable} != {self.argument(value)}"
        failed = f"run.fail({self.position[node]}, {k}, {variable}, locals())"
        self.lines.append(f"if isinstance({variable}, Tensor) or {differs}: {failed}")

    def tensor(self, node: fx.Node, k: int, want: ExpectedTensor, variable: str, carrier: fx.Node | None) -> None:
        given = node.op == "placeholder"
        base = None if given else self.base(node, want)
        if base is not None:
            self.plans[self.position[node]].bases[k] = (self.position[base], self.tensors[base].offset or 0)
        self.bind(want, variable)
        failed = f"run.fail({self.position[node]}, {k}, {variable}, locals())"
        # a kernel may leave out what nobody asked for, such as the gradient of an input that needs none
        unless_absent = "" if carrier is not None else f"{variable} is not None and "
        quick = None if carrier is None else self.quick(node, want, variable, base)
        terms = self.lazy_terms(node, want, variable)
        if quick is None:
            terms = [*self.terms(node, want, variable, base), *terms]
        if "alias" not in self.settings.checks or self.settings.light or want.storage is None:
            terms = [f"{quick} is None", *terms] if quick else terms
            self.lines.append(f"if {unless_absent}({' or '.join(terms)}): {failed}")
        else:
            storage = f"_c{self.position[node]}_{k}"
            terms = [f"({storage} := {quick or f'identity({variable})'}) is None", *terms]
            self.lines.append(f"if {unless_absent}({' or '.join(terms)}): {storage} = {failed}")
            if carrier is None:
                self.lines.append(f"elif {variable} is None: {storage} = 0")
            self.alias(node, k, storage, base, given=given)
            if carrier is not None:
                self.storages[carrier] = storage
        if carrier is not None:
            self.tensors[carrier] = want
            if not given and (base is None or base in self.exact):
                self.exact.add(carrier)

    def quick(self, node: fx.Node, want: ExpectedTensor, variable: str, base: fx.Node | None) -> str | None:
        """The call of a shared function that makes the usual comparisons, and returns the storage's identity.

        One function that stays in the processor's caches is faster than the same comparisons in line at each node.
        None where a user's choice of checks, or the tensor, is not the usual one.
        """
        usual = {"dtype", "layout", "device", "shape", "stride", "offset"} <= set(self.settings.checks)
        if not usual or self.settings.light or want.stride is None or want.shape is None or want.offset is None:
            return None
        if any(isinstance(size, int) and size < 2 for size in want.shape):
            return None  # some strides are not significant
        given = node.op == "placeholder"
        name = "_any_offset" if given else "_as_recorded"
        self.checkers.setdefault((name, str(want.device)), f"{name}{len(self.checkers)}")
        name = self.checkers[name, str(want.device)]
        parts = [variable, self.constant(want.dtype), self.shared(want.shape), self.shared(want.stride)]
        if not given:
            parts.append(self.expected_offset(want, base))
        return f"{name}({', '.join(parts)})"

    def shared(self, sizes: Sequence[Size]) -> str:
        """Sizes as a tuple that is made once per run."""
        text = self.sizes(sizes)
        if all(isinstance(size, int) for size in sizes):
            return text
        if text not in self.tuples:
            self.tuples[text] = f"_s{len(self.tuples)}"
            self.lines.append(f"{self.tuples[text]} = {text}")
        return self.tuples[text]

    def prelude(self) -> str:
        """The shared functions."""
        strided = "isinstance(v, Tensor) and v.layout is strided"
        text = f"def identity(v):\n    return v.untyped_storage()._cdata if {strided} else None\n"
        for (kind, device), name in self.checkers.items():
            offset = ", offset" if kind == "_as_recorded" else ""
            where = "v.is_cpu" if device == "cpu" else f"v.device == {self.constant(torch.device(device))}"
            begins = " and v.storage_offset() == offset" if offset else ""
            text += (
                f"def {name}(v, dtype, shape, stride{offset}):\n"
                f"    if {strided} and v.dtype is dtype and {where}"
                f" and v.shape == shape and v.stride() == stride{begins}:\n"
                "        return v.untyped_storage()._cdata\n"
            )
        return text

    def terms(self, node: fx.Node, want: ExpectedTensor, variable: str, base: fx.Node | None) -> list[str]:
        """The comparisons in line: what is true if the tensor is not as expected."""
        checks, terms = self.settings.checks, [f"not isinstance({variable}, Tensor)"]
        if "dtype" in checks and not (self.settings.light and is_index(want.dtype)):
            terms.append(f"{variable}.dtype is not {self.constant(want.dtype)}")
        if "shape" in checks and want.shape is not None:
            terms.append(f"{variable}.shape != {self.sizes(want.shape)}")
        if self.settings.light:
            return terms
        if "layout" in checks:
            layout = "strided" if want.layout is torch.strided else self.constant(want.layout)
            terms.append(f"{variable}.layout is not {layout}")
        if "device" in checks:
            cpu = want.device.type == "cpu"
            terms.append(f"not {variable}.is_cpu" if cpu else f"{variable}.device != {self.constant(want.device)}")
        if want.stride is not None and "stride" in checks:
            terms.extend(self.strides(want, variable))
        if want.offset is not None and "offset" in checks and node.op != "placeholder":
            terms.append(f"{variable}.storage_offset() != {self.expected_offset(want, base)}")
        return terms

    def lazy_terms(self, node: fx.Node, want: ExpectedTensor, variable: str) -> list[str]:
        """Comparisons of the conjugate and negative bits, where there can be any."""
        if want.stride is None or self.settings.light or "bits" not in self.settings.checks:
            return []
        if not (self.lazy_bits or node.op == "placeholder" or is_custom(node)):
            return []
        conj = [f"{variable}.is_conj() is not {want.conj}"] if want.dtype.is_complex else []
        return [*conj, f"{variable}.is_neg() is not {want.neg}"]

    def alias(self, node: fx.Node, k: int, storage: str, base: fx.Node | None, *, given: bool) -> None:
        """Compare the memory that an output lies in with the memory of the inputs."""
        if given or not isinstance(node.target, OpOverload):
            return
        custom = is_custom(node)
        terms = [f"{storage} != {self.storages[base]}"] if base is not None and base in self.storages else []
        if base is None or custom:
            others = dict.fromkeys(self.storages[item] for item in read_only_inputs(node) if item in self.storages)
            if base is not None and self.storages.get(base) in others:
                terms = []
            terms += [f"{storage} == {other}" for other in others]
        if terms:
            self.lines.append(f"elif {' or '.join(terms)}: run.alias({self.position[node]}, {k}, {storage}, locals())")

    def base(self, node: fx.Node, want: ExpectedTensor) -> fx.Node | None:
        """The input that an output shared memory with while it was traced."""
        if want.storage is None:
            return None
        for item in node.all_input_nodes:
            known = self.tensors.get(item)
            if known is not None and known.storage == want.storage:
                return item
        return None

    def bind(self, want: ExpectedTensor, variable: str) -> None:
        """Learn the symbols that appear here first: in an input's size, or one that depends on data."""
        unknown: list[tuple[sympy.Basic, str]] = []
        before = set(self.table.variables)
        lines: list[str] = []
        for sizes, source in ((want.shape, "shape"), (want.stride, "stride()")):
            for dim, size in enumerate(sizes or ()):
                if isinstance(size, sympy.Basic) and not self.table.known(size):
                    unknown.append((size, source))
                    lines.extend(self.table.bind(size, f"{variable}.{source}[{dim}]"))
        if isinstance(want.offset, sympy.Basic) and not self.table.known(want.offset):
            lines.extend(self.table.bind(want.offset, f"{variable}.storage_offset()"))
        if lines:
            learnt = [name for size, name in self.table.variables.items() if size not in before]
            dims = len(want.shape or ())
            layout = f"{variable}.layout is {self.constant(want.layout)}"
            self.lines.append(f"if isinstance({variable}, Tensor) and {variable}.ndim == {dims} and {layout}:")
            self.lines.extend(f"    {line}" for line in lines)
            self.lines.append(f"else: {' = '.join(learnt)} = UNKNOWN")

    def define(self, sizes: Sequence[Size]) -> list[str]:
        for size in sizes:
            self.lines.extend(self.table.define(size))
        return [self.table.text(size) for size in sizes]

    def sizes(self, sizes: Sequence[Size]) -> str:
        return f"({''.join(text + ', ' for text in self.define(sizes))})"

    def strides(self, want: ExpectedTensor, variable: str) -> Iterator[str]:
        """Terms for the strides of dimensions that are not known to be insignificant."""
        if not want.shape or not want.stride or 0 in want.shape:
            return
        significant = [dim for dim, size in enumerate(want.shape) if size != 1]
        if len(significant) == len(want.shape):
            yield f"{variable}.stride() != {self.sizes(want.stride)}"
        elif significant:
            texts = self.define([want.stride[dim] for dim in significant])
            first, *others = zip(significant, texts, strict=True)
            yield f"(_t := {variable}.stride())[{first[0]}] != {first[1]}"
            yield from (f"_t[{dim}] != {text}" for dim, text in others)

    def expected_offset(self, want: ExpectedTensor, base: fx.Node | None) -> str:
        expected: Size = want.offset or 0
        moved = self.define([expected])[0]
        if base is None or base in self.exact:
            return moved
        # an input may begin elsewhere in its storage than the one that was traced: then so do its views
        begins = self.tensors[base].offset or 0
        begun = f"{self.variable(base)}.storage_offset()"
        return begun if expected == begins else f"{begun} + {moved} - {self.define([begins])[0]}"

    @property
    def checked_asserts(self) -> list[tuple[sympy.Basic, str]]:
        """The trace's assumptions about sizes that depend on data, as far as this graph knows those sizes."""
        environment = shape_env(self.gm.graph)
        if environment is None or "assert" not in self.settings.checks:
            return []
        return [
            item
            for item in deferred_asserts(environment)
            if all(s in self.table.variables for s in item[0].free_symbols)
        ]

    def asserts(self) -> None:
        # at the end: where the graph itself holds the assertion, it raises what eager raises
        for index, (condition, _) in enumerate(self.checked_asserts):
            self.lines.append(f"if not {self.table.code(condition)}: run.assertion({index}, locals())")
