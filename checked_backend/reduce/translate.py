"""Write the calls of a graph as a person would, where running both shows that they do the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch import OpOverload, custom_op_module
from checked_backend.reduce.program import Program, compact, is_getitem, outputs, record_values
from checked_backend.reduce.spelling import Spelling, spellings

__all__ = ["Untranslatable", "Written", "write_program"]

_INPUT_NAMES = ("x", "y", "z", "w")
_BUILT_IN = ("aten", "prims", "quantized", "inductor", "mkldnn")


class Untranslatable(Exception):
    """A graph that cannot be written as a script; the message says what cannot, and why."""


class Written:
    """A graph as the body of a function.

    Attributes:
        parameters: Names of the inputs.
        lines: The body, without indentation; it returns one value, or a tuple of several.
        imports: Modules that register the operators that are not torch's.
    """

    def __init__(self, parameters: Sequence[str], lines: Sequence[str], imports: Sequence[str]) -> None:
        self.parameters = tuple(parameters)
        self.lines = tuple(lines)
        self.imports = tuple(imports)


def write_program(program: Program, *, plain: bool) -> Written:
    """Write a program.

    Args:
        program: The program.
        plain: Write calls of ``torch`` where one gives the same results bit for bit; else only ``torch.ops``.

    Raises:
        Untranslatable: A call or a constant cannot be written.
    """
    return _Writer(program, plain).write()


class _Writer:
    def __init__(self, program: Program, plain: bool) -> None:
        self._graph = program.trial.graph.graph
        self._values: dict[str, Any] = {**record_values(program), **program.placeholders()} if plain else {}
        self._names: dict[fx.Node, str] = {}
        self._imports: dict[str, None] = {}

    def write(self) -> Written:
        places = list(self._graph.find_nodes(op="placeholder"))
        for index, node in enumerate(places):
            self._names[node] = _INPUT_NAMES[index] if len(places) <= len(_INPUT_NAMES) else f"x{index}"
        parameters = [self._names[node] for node in places]
        lines: list[str] = []
        for node in self._graph.nodes:
            if node.op not in ("placeholder", "output") and node not in self._names:
                text = self._call(node)
                self._names.setdefault(node, self._new_name(node))
                lines.append(f"{self._names[node]} = {text}")
        returned = [self._text(value) for value in outputs(self._graph)]
        if lines and len(returned) == 1 and lines[-1].startswith(f"{returned[0]} = "):
            lines[-1] = f"return {lines[-1].partition(' = ')[2]}"
        else:
            lines.append(f"return {', '.join(returned)}")
        return Written(parameters, lines, list(self._imports))

    def _new_name(self, node: fx.Node) -> str:
        target = node.target
        base = target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else node.name
        base = base.strip("_").replace(".", "_") or "value"
        taken = set(self._names.values())
        # a name of a module that is used, or of an input, would be hidden
        if base in taken or base in ("torch", "F") or not base.isidentifier():
            base = next(f"{base}_{number}" for number in range(1, 10**6) if f"{base}_{number}" not in taken)
        return base

    def _call(self, node: fx.Node) -> str:
        if is_getitem(node):
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        if node.op == "call_method":
            receiver, *others = node.args
            return f"{self._text(receiver)}.{node.target}({self._arguments(others, node.kwargs)})"
        if not isinstance(node.target, OpOverload):
            raise Untranslatable(f"{node.name} calls {node.target}, which a script cannot name")
        if node.target.namespace not in _BUILT_IN:
            module = custom_op_module(node.target._schema.name)
            if module is None:
                raise Untranslatable(f"{node.target} is not torch's, and which module registers it is not known")
            self._imports[module] = None
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
            places = ", ".join(self._place(at) for at in args[1])
            return f"{self._text(args[0])}[{places}]"
        if spelling.text.startswith(" "):
            return spelling.text.join(map(self._text, args))
        if spelling.text.startswith("."):
            return f"{self._text(args[0])}{spelling.text}({self._arguments(args[1:], kwargs)})"
        return f"{spelling.text}({self._arguments(args, kwargs)})"

    def _place(self, value: Any) -> str:
        if not isinstance(value, slice):
            return self._text(value)
        ends = ["" if end is None else self._text(end) for end in (value.start, value.stop)]
        return ":".join(ends if value.step is None else [*ends, self._text(value.step)])

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        return ", ".join([*map(self._text, args), *(f"{key}={self._text(value)}" for key, value in kwargs.items())])

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return repr(str(value))
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(self._text, value))}]"
        raise Untranslatable(f"a constant of type {type(value).__name__}: {value!r}")


def _equal(expected: Any, actual: Any) -> bool:
    """Bit for bit, with dtype, shape and strides."""
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
