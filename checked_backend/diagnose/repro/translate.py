"""Write the calls of a graph as a person would, if running both shows that they do the same."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Mapping, Sequence
from keyword import iskeyword
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import OpOverload, custom_op_module, registering_module
from checked_backend.diagnose.reduce.failing_case import FailingCase, compact, record_values
from checked_backend.diagnose.repro.spelling import (
    IN_PLACE_SIGNS,
    SIGNS,
    Spelling,
    name_of,
    spellings,
)
from checked_backend.graphs.mode_blocks import block_of, leaves_block
from checked_backend.graphs.nodes import is_getitem, outputs_of, recorded_value
from checked_backend.scripts.values import Untranslatable, write_value

_INPUT_NAMES = ("x", "y", "z", "w")
_BUILT_IN = ("aten", "prims", "quantized", "inductor", "mkldnn")


def write_program(program: FailingCase, *, plain: bool) -> GraphWriter:
    """Write a program.

    Args:
        plain: Write a call of ``torch`` wherever one gives the same results bit for bit. If False, only ``torch.ops``.

    Raises:
        Untranslatable: A call or a constant cannot be written.
    """
    values = program.placeholders() if plain else {}
    if plain:
        with contextlib.suppress(Exception):  # a program that raises in eager has no results to compare
            values |= record_values(program)
    writer = GraphWriter(program.case.graph, values)
    returned = [writer.text(value) for value in outputs_of(program.case.graph.graph)]
    last = writer.lines[-1] if writer.lines else ""
    if len(returned) == 1 and last.startswith(f"{returned[0]} = "):
        writer.lines[-1] = f"return {last.partition(' = ')[2]}"
    else:
        writer.lines.append(f"return {', '.join(returned)}")
    return writer


class GraphWriter:
    """A graph as the body of a function.

    Args:
        values: The values of its nodes in eager, by name; empty to write operators only.
        taken: Names that an enclosing function uses.

    Attributes:
        lines: The body, without indentation.
        imports: Modules that register the operators that are not torch's.
        imported: Operators that these register, ``namespace::name``.
        operators: Operators that the main program itself registers.
    """

    def __init__(self, gm: fx.GraphModule, values: Mapping[str, Any], taken: Collection[str] = ()) -> None:
        self.imports: dict[str, None] = {}
        self.imported: dict[str, None] = {}
        self.operators: dict[str, None] = {}
        self._module = gm
        self._values = values
        self._taken = set(taken)
        self._names: dict[fx.Node, str] = {}
        places = list(gm.graph.find_nodes(op="placeholder"))
        for index, node in enumerate(places):
            plain = _INPUT_NAMES[index] if len(places) <= len(_INPUT_NAMES) else f"x{index}"
            self._names[node] = self._free(plain)
        self.parameters = [self._names[node] for node in places]
        self.lines = self._body()

    def _body(self) -> list[str]:
        lines: list[str] = []
        depth = 0  # of blocks that set modes
        for node in self._module.graph.nodes:
            if node.op in ("placeholder", "output") or node in self._names:
                continue
            if (block := block_of(node)) is not None:
                lines += [f"{'    ' * depth}with {block}:", f"{'    ' * (depth + 1)}pass"]
                depth += 1
            elif leaves_block(node):
                depth -= 1
            else:
                lines += [f"{'    ' * depth}{line}" for line in self._lines(node)]
        return lines

    def _lines(self, node: fx.Node) -> list[str]:
        """The lines of one node."""
        if node.op == "get_attr":
            return self._function(node)
        statement = self._statement(node)
        if statement is not None:
            return [statement]
        text = self._call(node)
        self._names.setdefault(node, self._new_name(node))
        return [f"{self._names[node]} = {text}"]

    def _function(self, node: fx.Node) -> list[str]:
        """A graph that a higher-order operator runs, as a function inside the program."""
        inner = getattr(self._module, str(node.target), None)
        if not isinstance(inner, fx.GraphModule):
            raise Untranslatable(f"{node.name} is {str(node.target)!r}, a {type(inner).__name__}")
        self._names[node] = self._new_name(node)
        writer = GraphWriter(inner, {}, self._taken | set(self._names.values()))
        returned = inner.graph.output_node().args[0]
        self.imports |= writer.imports
        self.imported |= writer.imported
        self.operators |= writer.operators
        lines = [*writer.lines, f"return {writer.text(returned)}"]
        return [f"def {self._names[node]}({', '.join(writer.parameters)}):", *(f"    {line}" for line in lines)]

    def _statement(self, node: fx.Node) -> str | None:
        """The statement for a call that changes its first argument; None for a call without such a statement."""
        if node.target is operator.setitem:
            target, place, value = node.args
            self._names[node] = "None"  # an assignment's value, if a cut returns it
            return f"{self.text(target)}[{self._index(place)}] = {self.text(value)}"
        first = node.args[0] if node.args else None
        is_tensor = isinstance(first, fx.Node) and isinstance(recorded_value(first), torch.Tensor)
        if node.target in IN_PLACE_SIGNS and isinstance(first, fx.Node) and is_tensor:
            self._names[node] = self._names[first]
            return IN_PLACE_SIGNS[node.target].format(*map(self.text, node.args))
        return None

    def _free(self, base: str) -> str:
        taken = self._taken | set(self._names.values())
        # the name must not hide a used module or an input
        if base in taken or base in ("torch", "F", *self.imports) or not base.isidentifier() or iskeyword(base):
            return next(f"{base}_{number}" for number in range(1, 10**6) if f"{base}_{number}" not in taken)
        return base

    def _new_name(self, node: fx.Node) -> str:
        target = node.target
        base = target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else node.name
        return self._free(base.strip("_").replace(".", "_") or "value")

    def _call(self, node: fx.Node) -> str:
        if is_getitem(node):
            return f"{self.text(node.args[0])}[{self._index(node.args[1])}]"
        if node.op == "call_method":
            receiver, *others = node.args
            return f"{self.text(receiver)}.{node.target}({self._arguments(others, node.kwargs)})"
        if not isinstance(node.target, OpOverload):
            return self._python(node)
        if node.target.namespace not in _BUILT_IN:
            module = registering_module(node.target)
            if module is None:
                raise Untranslatable(f"{node.target} is not torch's, and which module registers it is not known")
            if module == "__main__" and custom_op_module(node.target._schema.name) is None:
                raise Untranslatable(
                    f"{node.target} is registered by the program itself, and not with torch.library.custom_op: only "
                    "that can be copied. Move it to a module, which can be imported"
                )
            if module == "__main__":
                self.operators[node.target._schema.name] = None
            else:
                self.imports[module] = self.imported[node.target._schema.name] = None
        for spelling in spellings(node.target, node.args, node.kwargs) if self._values else ():
            if self._does_the_same(node, spelling):
                if spelling.first:
                    for user in node.users:
                        self._names[user] = self._new_name(node)
                    self._names[node] = (
                        self._new_name(node) if not node.users else next(self._names[user] for user in node.users)
                    )
                return self._spelled(spelling)
        return f"torch.ops.{node.target}({self._arguments(node.args, node.kwargs)})"

    def _python(self, node: fx.Node) -> str:
        """A call of a function, as a Dynamo graph has it."""
        target, args = node.target, node.args
        if isinstance(target, str):
            raise Untranslatable(f"{node.name} calls the module {target}, which a script cannot make")
        if target in SIGNS:
            return SIGNS[target].format(*map(self.text, args))
        if target is getattr and len(args) == 2:
            return f"{self.text(args[0])}.{args[1]}"
        name = name_of(target)
        if name is None:
            raise Untranslatable(f"{node.name} calls {target}, which a script cannot name")
        if name.module is not None:
            self.imports[name.module] = None
        return f"{name.text}({self._arguments(args, node.kwargs)})"

    def _does_the_same(self, node: fx.Node, spelling: Spelling) -> bool:
        if spelling.first and not all(is_getitem(user) and user.args[1] == 0 for user in node.users):
            return False
        try:
            expected = self._run(node.target, node.args, node.kwargs)
            actual = self._run(spelling.function, *spelling.arguments)
        except Exception:  # it takes other arguments
            return False
        return _equal(expected[0] if spelling.first else expected, actual)

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        real: Any = fx.map_arg((tuple(args), dict(kwargs)), lambda item: self._copy(item))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return function(*real[0], **real[1])

    def _copy(self, node: fx.Node) -> Any:
        value = self._values[node.name]
        return compact(value) if isinstance(value, torch.Tensor) else value

    def _spelled(self, spelling: Spelling) -> str:
        args, kwargs = spelling.arguments
        if spelling.text == "[]":
            return f"{self.text(args[0])}[{self._index(args[1])}]"
        if "{}" in spelling.text:
            return spelling.text.format(*map(self.text, args))
        if spelling.text.startswith("."):
            return f"{self.text(args[0])}{spelling.text}({self._arguments(args[1:], kwargs)})"
        return f"{spelling.text}({self._arguments(args, kwargs)})"

    def _index(self, place: Any) -> str:
        places = place if isinstance(place, tuple) and place else (place,)
        return ", ".join(map(self._place, places))

    def _place(self, value: Any) -> str:
        if not isinstance(value, slice):
            return self.text(value)
        ends = ["" if end is None else self.text(end) for end in (value.start, value.stop)]
        return ":".join(ends if value.step is None else [*ends, self.text(value.step)])

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        return ", ".join([*map(self.text, args), *(f"{key}={self.text(value)}" for key, value in kwargs.items())])

    def text(self, value: Any) -> str:
        """A value as code."""
        return write_value(value, lambda item: self._names[item] if isinstance(item, fx.Node) else None)


def _equal(expected: Any, actual: Any) -> bool:
    """Whether two results are equal bit for bit, also in dtype, shape and strides."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor) or (expected.dtype, expected.shape, expected.stride()) != (
            actual.dtype,
            actual.shape,
            actual.stride(),
        ):
            return False
        with contextlib.suppress(RuntimeError, NotImplementedError):
            one, other = (compact(tensor).contiguous().reshape(-1).view(torch.uint8) for tensor in (expected, actual))
            return bool(torch.equal(one, other))
        return False
    if isinstance(expected, (tuple, list)):
        return (
            isinstance(actual, (tuple, list))
            and len(expected) == len(actual)
            and all(_equal(one, other) for one, other in zip(expected, actual, strict=True))
        )
    return type(expected) is type(actual) and bool(expected == actual)
