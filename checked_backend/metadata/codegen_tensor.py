"""The code that compares one tensor with its recorded metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from checked_backend._torch.operators import OpOverload
from checked_backend.graphs.schema import is_custom, read_only_inputs
from checked_backend.metadata.codegen_call import CallWriter
from checked_backend.metadata.expected import ExpectedTensor, Size, recorded
from checked_backend.metadata.plan import CheckSettings, NodePlan, is_index
from checked_backend.metadata.symbols import SymbolTable

__all__ = ["TensorCheckWriter"]


class TensorCheckWriter(CallWriter):
    """Writes the comparisons of tensors, in graph order, and learns symbols from them on the way.

    Args:
        settings: The user's choice of checks.
        subgraphs: For nodes that fetch a graph for a higher-order operator, the module to hand to the operator instead.
    """

    def __init__(self, gm: fx.GraphModule, settings: CheckSettings, subgraphs: Mapping[fx.Node, Any]) -> None:
        super().__init__(gm, settings, subgraphs)
        self.table = SymbolTable()
        self.lines: list[str] = []
        self.plans = [NodePlan(node) for node in gm.graph.nodes]
        self.tensors: dict[fx.Node, ExpectedTensor] = {}  # the recorded metadata of nodes that are one tensor
        self.storages: dict[fx.Node, str] = {}  # the variable that holds the identity of a node's storage
        self.exact: set[fx.Node] = set()  # nodes whose storage offset is the recorded one, whatever the inputs' are
        values = (recorded(node)[1] for node in gm.graph.nodes)
        self.lazy_bits = any(
            isinstance(value, torch.Tensor) and (value.is_complex() or value.is_neg()) for value in values
        )
        self.checkers: dict[tuple[str, str], str] = {}  # shared functions, by what they compare and for which device
        self.tuples: dict[str, str] = {}  # variables that hold symbolic shapes and strides

    def tensor(self, node: fx.Node, k: int, want: ExpectedTensor, variable: str, carrier: fx.Node | None) -> None:
        """Compare one tensor.

        Args:
            node: The node whose output it is.
            k: Which of its outputs.
            want: The recorded metadata.
            variable: The variable that holds the tensor.
            carrier: The node whose value the tensor is: the node itself, or the ``getitem`` that picks it. None if no
                node picks it.
        """
        given = node.op == "placeholder"
        base = None if given else self.base(node, want)
        if base is not None:
            held = self.storages.get(base, "")
            self.plans[self.position[node]].bases[k] = (self.position[base], self.tensors[base].offset or 0, held)
        self.bind(want, variable)
        failed = f"run.fail({self.position[node]}, {k}, {variable}, locals())"
        # a kernel of torch may leave out an unneeded result, such as the gradient of an input that requires none
        absent = f"{variable} is None or " if is_custom(node) else f"{variable} is not None and "
        absent = absent if carrier is None else ""
        quick = None if carrier is None else self.quick(node, want, variable, base)
        terms = self.lazy_terms(node, want, variable)
        if quick is None:
            terms = [*self.terms(node, want, variable, base), *terms]
        if "alias" not in self.settings.checks or self.settings.light or want.storage is None:
            terms = [f"{quick} is None", *terms] if quick else terms
            self.lines.append(f"if {absent}({' or '.join(terms)}): {failed}")
        else:
            storage = f"_c{self.position[node]}_{k}"
            terms = [f"({storage} := {quick or f'identity({variable})'}) is None", *terms]
            self.lines.append(f"if {absent}({' or '.join(terms)}): {storage} = {failed}")
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
        Returns None if the user's choice of checks, or the tensor, is not the usual one.
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
        """The comparisons in line. Each term is true if the tensor is not as expected."""
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
        """Compare an output's memory with the memory of the inputs."""
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
        """The input that shared memory with an output when the graph was traced."""
        if want.storage is None:
            return None
        for item in node.all_input_nodes:
            known = self.tensors.get(item)
            if known is not None and known.storage == want.storage:
                return item
        return None

    def bind(self, want: ExpectedTensor, variable: str) -> None:
        """Learn the symbols that appear here first: those of an input's sizes, or of sizes that depend on data."""
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
        """Sizes as code. Expressions are computed first, in lines of their own."""
        for size in sizes:
            self.lines.extend(self.table.define(size))
        return [self.table.text(size) for size in sizes]

    def sizes(self, sizes: Sequence[Size]) -> str:
        """Sizes as the code of a tuple."""
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
        """The storage offset that an output must have, as code."""
        expected: Size = want.offset or 0
        moved = self.define([expected])[0]
        if base is None or base in self.exact:
            return moved
        # an input may begin elsewhere in its storage than the traced one did; then its views move with it
        begins = self.tensors[base].offset or 0
        begun = f"{self.variable(base)}.storage_offset()"
        return begun if expected == begins else f"{begun} + {moved} - {self.define([begins])[0]}"
