"""Write the calls of a graph as a person would, if running both shows that they do the same.

That is: signs, the names of functions, and other calls that do what an operator does.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.graph import inplace_methods, magic_methods

from checked_backend._torch.operators import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    custom_op_module,
    registering_module,
)
from checked_backend.diagnose.reduce.failing_case import FailingCase, compact, record_values
from checked_backend.graphs.mode_blocks import block_of, leaves_block
from checked_backend.graphs.nodes import followed, is_getitem, outputs_of, recorded_value
from checked_backend.numerics.bits import same_bits
from checked_backend.scripts.values import Untranslatable, write_index, write_value

SIGNS: Mapping[Any, str] = {
    operator.not_: "not {}",
    **{getattr(operator, name): text for name, text in magic_methods.items() if name != "div"},
}
"""How Python writes a function of its ``operator`` module: ``{} + {}``."""

_SIGNED: Mapping[str, Callable[..., Any]] = {text: function for function, text in SIGNS.items()} | {
    "[]": operator.getitem
}

IN_PLACE_SIGNS: Mapping[Any, str] = {getattr(operator, name): text for name, text in inplace_methods.items()}
"""Functions that are statements. They change their first argument and return it."""


_HOMES: tuple[tuple[str, Any, str], ...] = (
    ("torch", torch, ""),
    ("F", F, ""),
    ("torch.linalg", torch.linalg, "linalg_"),
    ("torch.special", torch.special, "special_"),
    ("torch.fft", torch.fft, "fft_"),
    ("torch.nested", torch.nested, "nested_"),
)
_NAMED: Mapping[str, Any] = {"": torch.Tensor, **{text: home for text, home, _ in _HOMES}}


@dataclass(frozen=True, slots=True)
class Name:
    """The code that names a function.

    Attributes:
        module: A module that must be imported for it; None if ``import torch`` is enough.
    """

    text: str
    module: str | None = None


_HIGHER_ORDER: Mapping[str, Name] = MappingProxyType(
    {
        "cond": Name("torch.cond"),
        "while_loop": Name("torch.ops.higher_order.while_loop", "torch._higher_order_ops"),
    }
)
"""Functions that take functions, by the name of their operator."""


def name_of(function: Callable[..., Any]) -> Name | None:
    """The plainest name under which a fresh process finds a function that a Dynamo graph calls.

    None if it has none, because it was made at run time or in the main program.
    """
    if isinstance(function, OpOverloadPacket):
        return Name(f"torch.ops.{function!s}")
    if isinstance(function, HigherOrderOperator):
        return _HIGHER_ORDER.get(function.name())
    own = str(getattr(function, "__name__", ""))
    if not own:
        return None
    for text, home, prefix in _HOMES:
        short = own.removeprefix(prefix)
        if getattr(home, short, None) is function:
            return Name(f"{text}.{short}")
    if getattr(builtins, own, None) is function:
        return Name(own)
    for module, holder in (("math", math), ("operator", operator)):
        if getattr(holder, own, None) is function:
            return Name(f"{module}.{own}", module)
    module = str(getattr(function, "__module__", None) or "")
    path = str(getattr(function, "__qualname__", own))
    if followed(sys.modules.get(module), path) is not function or module in ("", "__main__"):
        return None
    return Name(f"{module}.{path}", None if module.partition(".")[0] == "torch" and module.count(".") == 0 else module)


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to write a call.

    Attributes:
        text: The function's name (``F.relu``; ``.view`` of a tensor), ``[]``, or how Python's sign for it is written
            (``{} + {}``).
        first: Whether it only returns the first of the operator's results.
    """

    text: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    first: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """What the text names."""
        if self.text in _SIGNED:
            return _SIGNED[self.text]
        home, _, name = self.text.rpartition(".")
        found: Callable[..., Any] = getattr(_NAMED[home], name)
        return found


_OPERATORS = {
    "bitwise_and": "and_",
    "bitwise_or": "or_",
    "bitwise_xor": "xor",
    "bmm": "matmul",
    "div": "truediv",
    "floor_divide": "floordiv",
    "mm": "matmul",
    "remainder": "mod",
    "__lshift__": "lshift",
    "__rshift__": "rshift",
}
"""The name in Python's ``operator`` module, where it is not ATen's."""

_REDUCTIONS = ("none", "mean", "sum")

_Rule = Callable[[Sequence[Any]], Iterator[Spelling]]
"""Writes an operator's arguments for other functions."""


def _convolution(a: Sequence[Any]) -> Iterator[Spelling]:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = a
    text = f"F.conv_transpose{len(stride)}d" if transposed else f"F.conv{len(stride)}d"
    short = [x, weight] if bias is None else [x, weight, bias]
    keywords = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    yield Spelling(text, short)
    yield Spelling(text, short, {**keywords, "output_padding": output_padding} if transposed else keywords)


def _attention(a: Sequence[Any]) -> Iterator[Spelling]:
    yield Spelling("F.scaled_dot_product_attention", a[:3], first=True)
    if len(a) > 4:
        keywords = {"dropout_p": a[3], "is_causal": a[4]}
        yield Spelling("F.scaled_dot_product_attention", a[:3], keywords, first=True)


def _iota(length: int, *, start: int, step: int, dtype: torch.dtype, **_more: Any) -> Spelling:
    ends = [length] if (start, step) == (0, 1) else [start, start + length * step, *([] if step == 1 else [step])]
    return Spelling("torch.arange", ends, {} if dtype is torch.int64 else {"dtype": dtype})


def _sliced(x: Any, dim: int, start: int | None, end: int | None, step: int) -> tuple[Any, ...]:
    part = slice(start or None, None if end == 2**63 - 1 else end, None if step == 1 else step)
    return _taken(x, dim, part)


def _taken(x: Any, dim: int, part: Any) -> tuple[Any, ...]:
    if dim < 0:
        raise ValueError("places are counted from the first dimension")
    return x, (*[slice(None)] * dim, part)


def _named(text: str, arguments: Callable[..., Any] = lambda *a: a, *, first: bool = False) -> _Rule:
    """A function of another name.

    Args:
        arguments: Makes its arguments of the operator's: positional ones, or a pair of these and a dictionary.
    """

    def written(a: Sequence[Any]) -> Iterator[Spelling]:
        given = arguments(*a)
        args, kwargs = given if isinstance(given[-1], dict) else (given, {})
        yield Spelling(text, args, kwargs, first)

    return written


_SPECIAL: Mapping[str, _Rule] = {
    "aten._adaptive_avg_pool2d.default": _named("F.adaptive_avg_pool2d"),
    "aten._fused_dropout.default": _named("F.dropout", first=True),
    "aten._log_softmax.default": _named("torch.log_softmax", lambda x, dim, _half: (x, dim)),
    "aten._native_batch_norm_legit.no_stats": _named(
        "F.batch_norm",
        lambda x, weight, bias, training, momentum, eps: (x, None, None, weight, bias, training, momentum, eps),
        first=True,
    ),
    "aten._native_batch_norm_legit_no_training.default": _named(
        "F.batch_norm",
        lambda x, weight, bias, mean, var, momentum, eps: (x, mean, var, weight, bias, False, momentum, eps),
        first=True,
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._softmax.default": _named("torch.softmax", lambda x, dim, _half: (x, dim)),
    "aten._unsafe_view.default": _named("torch.reshape"),
    "aten.convolution.default": _convolution,
    "aten.embedding.default": _named("F.embedding", lambda weight, indices, *_: (indices, weight)),
    "aten.index.Tensor": _named("[]", lambda x, at: (x, tuple(slice(None) if one is None else one for one in at))),
    "aten.max_pool2d_with_indices.default": _named("F.max_pool2d", first=True),
    "aten.multi_margin_loss.default": _named("F.multi_margin_loss"),
    "aten.multilabel_margin_loss_forward.default": _named(
        "F.multilabel_margin_loss",
        lambda x, target, reduction: ((x, target), {"reduction": _REDUCTIONS[reduction]}),
        first=True,
    ),
    "aten.native_dropout.default": _named("F.dropout", first=True),
    "aten.native_group_norm.default": _named(
        "F.group_norm",
        lambda x, weight, bias, _n, _c, _size, groups, eps: (x, groups, weight, bias, eps),
        first=True,
    ),
    "aten.native_layer_norm.default": _named("F.layer_norm", first=True),
    "aten.nll_loss_forward.default": _named(
        "F.nll_loss",
        lambda x, target, weight, reduction, index: (
            (x, target),
            {"weight": weight, "ignore_index": index, "reduction": _REDUCTIONS[reduction]},
        ),
        first=True,
    ),
    "aten.select.int": _named("[]", _taken),
    "aten.slice.Tensor": _named("[]", _sliced),
    "aten.split_with_sizes.default": _named("torch.split"),
    "prims.convert_element_type.default": _named(".to"),
}


def spellings(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Spelling]:
    """Ways to write a call, the plainest first. The caller must find out whether they do the same."""
    name = str(target)
    args, kwargs = _without_defaults(target, list(args), dict(kwargs))
    base = target._schema.name.partition("::")[2]
    function: Any = getattr(operator, _OPERATORS.get(base, base), None)
    if function in SIGNS and len(args) == 2 and not kwargs:
        yield Spelling(SIGNS[function], args)
    if name == "aten._to_copy.default":
        yield Spelling(".to", [*args, *kwargs.values()])
        yield Spelling(".to", args, kwargs)
    if name == "prims.iota.default" and all(type(value) is int for value in (args[0], kwargs["start"], kwargs["step"])):
        yield _iota(args[0], **kwargs)
    if name in _SPECIAL and not kwargs:
        missing = [argument for argument in target._schema.arguments[len(args) :] if not argument.kwarg_only]
        full = [*args, *(argument.default_value for argument in missing)]
        with contextlib.suppress(IndexError, TypeError, ValueError):  # other arguments in this version of torch
            yield from _SPECIAL[name](full)
    for text, home, prefix in _HOMES:
        if base.startswith(prefix) and callable(getattr(home, base.removeprefix(prefix), None)):
            yield Spelling(f"{text}.{base.removeprefix(prefix)}", args, kwargs)
    if callable(getattr(torch.Tensor, base, None)):
        yield Spelling(f".{base}", args, kwargs)


def _without_defaults(target: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    declared = target._schema.arguments
    plain: Mapping[str, Any] = {"device": torch.device("cpu"), "pin_memory": False, "layout": torch.strided}
    for argument in declared:
        if argument.name in kwargs:
            value = kwargs[argument.name]
            if argument.has_default_value() and (
                _is(value, argument.default_value) or _is(value, plain.get(argument.name, kwargs))
            ):
                del kwargs[argument.name]
    while args and len(args) <= len(declared):
        argument = declared[len(args) - 1]
        if not argument.has_default_value() or not _is(args[-1], argument.default_value):
            break
        args.pop()
    return args, kwargs


def _is(value: Any, default: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(default, torch.Tensor):
        return False
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return list(value) == list(default)
    return type(value) is type(default) and bool(value == default)


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
            actual = self._run(spelling.function, spelling.args, spelling.kwargs)
            return _equal(expected[0] if spelling.first else expected, actual)
        except Exception:  # it takes other arguments, or has no memory whose bits could be compared
            return False

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        real: Any = fx.map_arg((tuple(args), dict(kwargs)), self._copy)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return function(*real[0], **real[1])

    def _copy(self, node: fx.Node) -> Any:
        value = self._values[node.name]
        return compact(value) if isinstance(value, torch.Tensor) else value

    def _spelled(self, spelling: Spelling) -> str:
        args = spelling.args
        if spelling.text == "[]":
            return f"{self.text(args[0])}[{self._index(args[1])}]"
        if "{}" in spelling.text:
            return spelling.text.format(*map(self.text, args))
        if spelling.text.startswith("."):
            return f"{self.text(args[0])}{spelling.text}({self._arguments(args[1:], spelling.kwargs)})"
        return f"{spelling.text}({self._arguments(args, spelling.kwargs)})"

    def _index(self, index: Any) -> str:
        return write_index(index, self._name_of)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        return ", ".join([*map(self.text, args), *(f"{key}={self.text(value)}" for key, value in kwargs.items())])

    def text(self, value: Any) -> str:
        """A value as code."""
        return write_value(value, self._name_of)

    def _name_of(self, value: Any) -> str | None:
        return self._names[value] if isinstance(value, fx.Node) else None


def _equal(expected: Any, actual: Any) -> bool:
    """Whether two results are equal bit for bit, also in dtype, shape and strides."""
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        one, other = ((tensor.dtype, tensor.shape, tensor.stride()) for tensor in (expected, actual))
        return one == other and same_bits(expected, actual)
    if isinstance(expected, (tuple, list)) and isinstance(actual, (tuple, list)):
        return len(expected) == len(actual) and all(map(_equal, expected, actual))
    return type(expected) is type(actual) and bool(expected == actual)
