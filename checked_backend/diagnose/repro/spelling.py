"""How people write calls of operators: a table, and rules for names. Each spelling is run before it is used."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from checked_backend._torch.operators import OpOverload

__all__ = ["Spelling", "spellings"]

Arguments = tuple[list[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to write a call.

    Attributes:
        text: The function's name, or an operator's sign between two arguments (``" + "``).
        function: The function that it calls.
        arguments: The function's positional and keyword arguments.
        first: Whether it only returns the first of the operator's results.
    """

    text: str
    function: Callable[..., Any]
    arguments: Arguments
    first: bool = False


_SIGNS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "aten.add.Tensor": ("+", operator.add),
    "aten.sub.Tensor": ("-", operator.sub),
    "aten.mul.Tensor": ("*", operator.mul),
    "aten.div.Tensor": ("/", operator.truediv),
    "aten.floor_divide.default": ("//", operator.floordiv),
    "aten.pow.Tensor_Scalar": ("**", operator.pow),
    "aten.remainder.Scalar": ("%", operator.mod),
    "aten.remainder.Tensor": ("%", operator.mod),
    "aten.mm.default": ("@", operator.matmul),
    "aten.bmm.default": ("@", operator.matmul),
    "aten.gt.Scalar": (">", operator.gt),
    "aten.gt.Tensor": (">", operator.gt),
    "aten.ge.Scalar": (">=", operator.ge),
    "aten.ge.Tensor": (">=", operator.ge),
    "aten.lt.Scalar": ("<", operator.lt),
    "aten.lt.Tensor": ("<", operator.lt),
    "aten.le.Scalar": ("<=", operator.le),
    "aten.le.Tensor": ("<=", operator.le),
    "aten.eq.Scalar": ("==", operator.eq),
    "aten.eq.Tensor": ("==", operator.eq),
    "aten.ne.Scalar": ("!=", operator.ne),
    "aten.ne.Tensor": ("!=", operator.ne),
    "aten.bitwise_and.Tensor": ("&", operator.and_),
    "aten.bitwise_or.Tensor": ("|", operator.or_),
    "aten.bitwise_xor.Tensor": ("^", operator.xor),
    "aten.__rshift__.Scalar": (">>", operator.rshift),
    "aten.__lshift__.Scalar": ("<<", operator.lshift),
}

_METHODS = frozenset(
    [
        "clamp",
        "clone",
        "contiguous",
        "copy_",
        "expand",
        "flatten",
        "flip",
        "masked_fill",
        "permute",
        "repeat",
        "reshape",
        "select",
        "squeeze",
        "sum",
        "t",
        "transpose",
        "unfold",
        "unsqueeze",
        "view",
    ]
)

_HOMES: tuple[tuple[str, Any, str], ...] = (
    ("torch", torch, ""),
    ("F", F, ""),
    ("torch.linalg", torch.linalg, "linalg_"),
    ("torch.special", torch.special, "special_"),
    ("torch.fft", torch.fft, "fft_"),
)

_REDUCTIONS = ("none", "mean", "sum")


def _layer_norm(a: Sequence[Any]) -> Iterator[Spelling]:
    yield Spelling("F.layer_norm", F.layer_norm, ([*a], {}), first=True)


def _group_norm(a: Sequence[Any]) -> Iterator[Spelling]:
    x, weight, bias, _, _, _, groups, eps = a
    yield Spelling("F.group_norm", F.group_norm, ([x, groups, weight, bias, eps], {}), first=True)


def _batch_norm_frozen(a: Sequence[Any]) -> Iterator[Spelling]:
    x, weight, bias, mean, var, momentum, eps = a
    yield Spelling("F.batch_norm", F.batch_norm, ([x, mean, var, weight, bias, False, momentum, eps], {}), first=True)


def _batch_norm_no_stats(a: Sequence[Any]) -> Iterator[Spelling]:
    x, weight, bias, training, momentum, eps = a
    arguments = [x, None, None, weight, bias, training, momentum, eps]
    yield Spelling("F.batch_norm", F.batch_norm, (arguments, {}), first=True)


def _softmax(a: Sequence[Any]) -> Iterator[Spelling]:
    yield Spelling("torch.softmax", torch.softmax, ([*a[:2]], {}))


def _log_softmax(a: Sequence[Any]) -> Iterator[Spelling]:
    yield Spelling("torch.log_softmax", torch.log_softmax, ([*a[:2]], {}))


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


def _max_pool(a: Sequence[Any]) -> Iterator[Spelling]:
    yield Spelling("F.max_pool2d", F.max_pool2d, ([*a], {}), first=True)


def _embedding(a: Sequence[Any]) -> Iterator[Spelling]:
    yield Spelling("F.embedding", F.embedding, ([a[1], a[0]], {}))


def _attention(a: Sequence[Any]) -> Iterator[Spelling]:
    function = F.scaled_dot_product_attention
    yield Spelling("F.scaled_dot_product_attention", function, ([*a[:3]], {}), first=True)
    if len(a) > 4:
        keywords = {"dropout_p": a[3], "is_causal": a[4]}
        yield Spelling("F.scaled_dot_product_attention", function, ([*a[:3]], keywords), first=True)


def _iota(length: int, *, start: int, step: int, dtype: torch.dtype, **_more: Any) -> Iterator[Spelling]:
    ends = [length] if (start, step) == (0, 1) else [start, start + length * step, *([] if step == 1 else [step])]
    yield Spelling("torch.arange", torch.arange, (ends, {} if dtype is torch.int64 else {"dtype": dtype}))


def _to(a: Sequence[Any]) -> Iterator[Spelling]:
    yield Spelling(".to", torch.Tensor.to, ([*a[:2]], {}))


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


def _loss(name: str) -> Callable[[Sequence[Any]], Iterator[Spelling]]:
    def make(a: Sequence[Any]) -> Iterator[Spelling]:
        function = getattr(F, name)
        if name == "nll_loss":
            keywords = {"weight": a[2], "ignore_index": a[4], "reduction": _REDUCTIONS[a[3]]}
            yield Spelling("F.nll_loss", function, ([*a[:2]], keywords), first=True)
        else:
            yield Spelling(f"F.{name}", function, ([*a[:2]], {"reduction": _REDUCTIONS[a[2]]}), first=True)

    return make


def _renamed(name: str, *, first: bool = False) -> Callable[[Sequence[Any]], Iterator[Spelling]]:
    def make(a: Sequence[Any]) -> Iterator[Spelling]:
        home, _, last = name.rpartition(".")
        function = getattr({"torch": torch, "F": F}[home], last)
        yield Spelling(name, function, ([*a], {}), first=first)

    return make


_SPECIAL: Mapping[str, Callable[[Sequence[Any]], Iterator[Spelling]]] = {
    "aten._adaptive_avg_pool2d.default": _renamed("F.adaptive_avg_pool2d"),
    "aten._fused_dropout.default": _renamed("F.dropout", first=True),
    "aten._log_softmax.default": _log_softmax,
    "aten._native_batch_norm_legit.no_stats": _batch_norm_no_stats,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_frozen,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._softmax.default": _softmax,
    "aten._unsafe_view.default": _renamed("torch.reshape"),
    "aten.convolution.default": _convolution,
    "aten.embedding.default": _embedding,
    "aten.index.Tensor": _index,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.multi_margin_loss.default": _renamed("F.multi_margin_loss"),
    "aten.multilabel_margin_loss_forward.default": _loss("multilabel_margin_loss"),
    "aten.native_dropout.default": _renamed("F.dropout", first=True),
    "aten.native_group_norm.default": _group_norm,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.nll_loss_forward.default": _loss("nll_loss"),
    "aten.select.int": _select,
    "aten.slice.Tensor": _slice,
    "aten.split_with_sizes.default": _renamed("torch.split"),
    "prims.convert_element_type.default": _to,
}


def spellings(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Spelling]:
    """Ways to write a call, the plainest first. The caller must find out whether they do the same."""
    name = str(target)
    args, kwargs = _without_defaults(target, list(args), dict(kwargs))
    if name in _SIGNS and len(args) == 2 and not kwargs:
        sign, function = _SIGNS[name]
        yield Spelling(f" {sign} ", function, (args, {}))
    if name == "aten._to_copy.default":
        yield Spelling(".to", torch.Tensor.to, ([*args, *kwargs.values()], {}))
        yield Spelling(".to", torch.Tensor.to, (args, kwargs))
    if name == "prims.iota.default" and all(type(value) is int for value in (args[0], kwargs["start"], kwargs["step"])):
        yield from _iota(args[0], **kwargs)
    if name in _SPECIAL and not kwargs:
        full, _ = _with_defaults(target, args)
        with contextlib.suppress(IndexError, ValueError):  # other arguments in this version of torch
            yield from _SPECIAL[name](full)
    base = target._schema.name.partition("::")[2]
    if base in _METHODS:
        yield Spelling(f".{base}", getattr(torch.Tensor, base), (args, kwargs))
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


def _with_defaults(target: OpOverload, args: list[Any]) -> Arguments:
    missing = [argument for argument in target._schema.arguments[len(args) :] if not argument.kwarg_only]
    return [*args, *(argument.default_value for argument in missing)], {}


def _is(value: Any, default: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(default, torch.Tensor):
        return False
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return list(value) == list(default)
    return type(value) is type(default) and bool(value == default)
