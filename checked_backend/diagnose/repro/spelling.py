"""How people write calls: signs, the names of functions, and other calls that do what an operator does."""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.graph import inplace_methods, magic_methods

from checked_backend._torch.operators import HigherOrderOperator, OpOverload, OpOverloadPacket

Arguments = tuple[list[Any], dict[str, Any]]

SIGNS: Mapping[Any, str] = {
    operator.not_: "not {}",
    **{getattr(operator, name): text for name, text in magic_methods.items() if name != "div"},
}
"""How Python writes a function of its ``operator`` module: ``{} + {}``."""

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
    """Find the name under which a fresh process finds a function.

    Args:
        function: A function that a Dynamo graph calls: of torch, of Python, or of a module that can be imported.

    Returns:
        Its plainest name; None if it has none, because it was made at run time or in the main program.
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
    return _imported(function, own)


def _imported(function: Callable[..., Any], own: str) -> Name | None:
    module = str(getattr(function, "__module__", None) or "")
    path = str(getattr(function, "__qualname__", own))
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    if found is not function or module in ("", "__main__"):
        return None
    return Name(f"{module}.{path}", None if module.partition(".")[0] == "torch" and module.count(".") == 0 else module)


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to write a call.

    Attributes:
        text: The function's name, or how Python's sign for it is written (``{} + {}``).
        first: Whether it only returns the first of the operator's results.
    """

    text: str
    function: Callable[..., Any]
    arguments: Arguments
    first: bool = False


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
    kind = f"conv_transpose{len(stride)}d" if transposed else f"conv{len(stride)}d"
    function = getattr(F, kind, None)
    if function is None:
        return
    short: list[Any] = [x, weight] if bias is None else [x, weight, bias]
    keywords = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        keywords["output_padding"] = output_padding
    yield Spelling(f"F.{kind}", function, (short, {}))
    yield Spelling(f"F.{kind}", function, (short, keywords))


def _attention(a: Sequence[Any]) -> Iterator[Spelling]:
    function = F.scaled_dot_product_attention
    yield Spelling("F.scaled_dot_product_attention", function, ([*a[:3]], {}), first=True)
    if len(a) > 4:
        keywords = {"dropout_p": a[3], "is_causal": a[4]}
        yield Spelling("F.scaled_dot_product_attention", function, ([*a[:3]], keywords), first=True)


def _iota(length: int, *, start: int, step: int, dtype: torch.dtype, **_more: Any) -> Iterator[Spelling]:
    ends = [length] if (start, step) == (0, 1) else [start, start + length * step, *([] if step == 1 else [step])]
    yield Spelling("torch.arange", torch.arange, (ends, {} if dtype is torch.int64 else {"dtype": dtype}))


def _index(a: Sequence[Any]) -> Iterator[Spelling]:
    x, places = a
    yield Spelling("[]", operator.getitem, ([x, tuple(slice(None) if at is None else at for at in places)], {}))


def _slice(a: Sequence[Any]) -> Iterator[Spelling]:
    _, dim, start, end, step = a
    if dim >= 0:
        end = None if end == 2**63 - 1 else end
        part = slice(start or None, end, None if step == 1 else step)
        yield Spelling("[]", operator.getitem, ([a[0], (*[slice(None)] * dim, part)], {}))


def _select(a: Sequence[Any]) -> Iterator[Spelling]:
    x, dim, at = a
    if dim >= 0:
        yield Spelling("[]", operator.getitem, ([x, (*[slice(None)] * dim, at)], {}))


def _named(name: str, arguments: Callable[..., Any] = lambda *a: a, *, first: bool = False) -> _Rule:
    """A function of another name.

    Args:
        arguments: Makes its arguments of the operator's: positional ones, or a pair of these and a dictionary.
    """
    home, _, last = name.rpartition(".")
    function = getattr({"torch": torch, "F": F, "": torch.Tensor}[home], last)

    def written(a: Sequence[Any]) -> Iterator[Spelling]:
        given = arguments(*a)
        args, kwargs = given if isinstance(given[-1], dict) else (given, {})
        yield Spelling(name, function, ([*args], kwargs), first=first)

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
    "aten.index.Tensor": _index,
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
    "aten.select.int": _select,
    "aten.slice.Tensor": _slice,
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
        yield Spelling(SIGNS[function], function, (args, {}))
    if name == "aten._to_copy.default":
        yield Spelling(".to", torch.Tensor.to, ([*args, *kwargs.values()], {}))
        yield Spelling(".to", torch.Tensor.to, (args, kwargs))
    if name == "prims.iota.default" and all(type(value) is int for value in (args[0], kwargs["start"], kwargs["step"])):
        yield from _iota(args[0], **kwargs)
    if name in _SPECIAL and not kwargs:
        missing = [argument for argument in target._schema.arguments[len(args) :] if not argument.kwarg_only]
        full = [*args, *(argument.default_value for argument in missing)]
        with contextlib.suppress(IndexError, TypeError, ValueError):  # other arguments in this version of torch
            yield from _SPECIAL[name](full)
    for text, home, prefix in _HOMES:
        if base.startswith(prefix) and callable(found := getattr(home, base.removeprefix(prefix), None)):
            yield Spelling(f"{text}.{base.removeprefix(prefix)}", found, (args, kwargs))
    if callable(method := getattr(torch.Tensor, base, None)):
        yield Spelling(f".{base}", method, (args, kwargs))


def _without_defaults(target: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
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
