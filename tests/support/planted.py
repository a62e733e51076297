"""Faults planted inside Inductor, as data: what is patched, and a small program that has the operator.

A fault patches a lowering or a decomposition, so that what Inductor makes of one ATen operator is wrong. It can be
planted in this process (`planted`) or, with ``everywhere/`` on ``PYTHONPATH``, in every process of a program: see
``everywhere/sitecustomize.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

aten = torch.ops.aten

PLANTED = "PLANTED_IN_INDUCTOR"
"""Environment variable that names the fault to plant in a new process."""

Spoil = Callable[..., Any]
"""``spoil(right, *args, **kwargs)``: calls the right lowering or decomposition, and returns something wrong."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        operator: The packet that is patched: ``relu``.
        family: What kind of operator that is.
        table: Where it is patched.
        spoil: What is done instead.
        also: Other names under which the same error rightly shows: the operator's own backward, or the packet that the
            framework makes of it before Inductor sees it.
    """

    operator: str
    family: str
    table: Literal["lowering", "decomposition", "config"]
    spoil: Spoil
    also: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Packets that may be named."""
        return frozenset({self.operator, *self.also})


def scaled(right: Spoil, *args: Any, by: float = 1.5, **kwargs: Any) -> Any:
    """The (first) result is half as large again; one more for integers."""
    result = right(*args, **kwargs)
    if not isinstance(result, (tuple, list)):
        return _scaled(result, by)
    first = next(place for place, one in enumerate(result) if one is not None)
    return tuple(_scaled(one, by) if place == first else one for place, one in enumerate(result))


def _scaled(result: Any, by: float = 1.5) -> Any:
    if isinstance(result, torch.Tensor):
        return result * by if result.dtype.is_floating_point else result + 1
    from torch._inductor import ir
    from torch._inductor.virtualized import ops

    dtype, load = result.get_dtype(), result.make_loader()

    def inner(index: Any) -> Any:
        value = load(index)
        if dtype is torch.bool:
            return ops.logical_not(value)
        return ops.mul(value, ops.constant(by, dtype)) if dtype.is_floating_point else ops.add(value, one(dtype))

    def one(dtype: torch.dtype) -> Any:
        return ops.constant(1, dtype)

    return ir.Pointwise.create(device=result.get_device(), dtype=dtype, inner_fn=inner, ranges=list(result.get_size()))


def scaled_tail(right: Spoil, *args: Any, by: float = 1.5, **kwargs: Any) -> Any:
    """Wrong in the last column alone, as a kernel is whose tail was forgotten."""
    from torch._inductor import ir
    from torch._inductor.virtualized import ops

    result = right(*args, **kwargs)
    dtype, load, size = result.get_dtype(), result.make_loader(), list(result.get_size())

    def inner(index: Any) -> Any:
        value = load(index)
        last = ops.eq(ops.index_expr(index[-1], torch.int64), ops.index_expr(size[-1] - 1, torch.int64))
        return ops.where(last, ops.mul(value, ops.constant(by, dtype)), value)

    return ir.Pointwise.create(device=result.get_device(), dtype=dtype, inner_fn=inner, ranges=size)


def in_half_precision(right: Spoil, *args: Any, **kwargs: Any) -> Any:
    """Wrong by 5 % in bfloat16 alone, which the noise of a whole program hides."""
    result = right(*args, **kwargs)
    dtype = result.dtype if isinstance(result, torch.Tensor) else result.get_dtype()
    return scaled(lambda: result, by=1.05) if dtype is torch.bfloat16 else result


def tail_in_half_precision(right: Spoil, *args: Any, **kwargs: Any) -> Any:
    """Wrong by 6 % in the last column, in bfloat16 alone."""
    result = right(*args, **kwargs)
    return scaled_tail(lambda: result, by=1.06) if result.get_dtype() is torch.bfloat16 else result


def scaled_if_fused(right: Spoil, *args: Any, **kwargs: Any) -> Any:
    """Wrong only where the first argument was not written to memory before: where the operator is fused with it."""
    from torch._inductor import ir

    storage = getattr(args[0], "data", None)
    fused = isinstance(storage, ir.StorageBox) and isinstance(storage.data, (ir.Pointwise, ir.Reduction))
    return scaled(right, *args, **kwargs) if fused else right(*args, **kwargs)


def given(edit: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Spoil:
    """The right thing for other arguments."""

    def spoil(right: Spoil, *args: Any, **kwargs: Any) -> Any:
        other, more = edit(*args, **kwargs)
        return right(*other, **more)

    return spoil


def dropped(right: Spoil, target: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Nothing is done to the first argument."""
    return target


def _swapped_where(condition: Any, one: Any, other: Any) -> Any:
    return (condition, other, one), {}


def _later_start(x: Any, dim: int = 0, start: Any = 0, end: Any = 2**63 - 1, step: int = 1, **more: Any) -> Any:
    return (x, dim, max(0, (start or 0) - 1) if start else 0, end if not start else end - 1, step), more


def _reversed_pair(tensors: Any, dim: int = 0) -> Any:
    sizes = [[int(size) for size in tensor.get_size()] for tensor in tensors]
    same = all(size == sizes[0] for size in sizes)
    return ([*reversed(tensors)] if same else tensors, dim), {}


def _swapped_last(x: Any, dims: Any) -> Any:
    sizes = [int(x.get_size()[dim]) for dim in dims]
    order = list(dims)
    if len(sizes) > 1 and sizes[-1] == sizes[-2]:
        order[-1], order[-2] = order[-2], order[-1]
    return (x, order), {}


def _with_tanh(x: Any, approximate: str = "none") -> Any:
    return (x * 1.01,), {"approximate": approximate}


def _beta_two(*args: Any, **kwargs: Any) -> Any:
    return args, {**kwargs, "beta": 2}


def _other_padding(x: Any, pad: Any, value: Any = 0) -> Any:
    return (x, pad, 0.5), {}


def _counted(
    x: Any, size: Any, stride: Any = (), padding: Any = 0, ceil: bool = False, count: bool = True, d: Any = None
) -> Any:
    return (x, size, stride, padding, ceil, not count, d), {}


def _source(position: int) -> Spoil:
    """One argument is scaled."""

    def edit(*args: Any, **kwargs: Any) -> Any:
        spoiled = [_scaled(arg) if place == position else arg for place, arg in enumerate(args)]
        return tuple(spoiled), kwargs

    return given(edit)


def _rounded(right: Spoil, x: Any, dtype: torch.dtype, *rest: Any, **more: Any) -> Any:
    """A cast from float to integer rounds instead of truncating; every other cast is right."""
    if x.get_dtype().is_floating_point and not dtype.is_floating_point and dtype is not torch.bool:
        from torch._inductor.lowering import lowerings

        x = lowerings[aten.ceil.default](x)
    return right(x, dtype, *rest, **more)


def _low(operator: str, family: str, spoil: Spoil = scaled, *also: str) -> tuple[str, Fault]:
    return operator, Fault(operator, family, "lowering", spoil, also)


def _dec(operator: str, family: str, spoil: Spoil = scaled, *also: str) -> tuple[str, Fault]:
    return operator, Fault(operator, family, "decomposition", spoil, also)


FAULTS: Mapping[str, Fault] = dict(
    [
        ("inject_relu", Fault("relu", "pointwise", "config", scaled, ("hardtanh",))),
        _low("exp", "pointwise"),
        _low("sqrt", "pointwise"),
        _low("rsqrt", "pointwise"),
        _low("sigmoid", "pointwise"),
        _low("tanh", "pointwise", scaled_tail),
        ("tanh_fused", Fault("tanh", "pointwise", "lowering", scaled_if_fused)),
        _low("erf", "pointwise"),
        _low("div", "pointwise", scaled, "true_divide"),
        _low("maximum", "pointwise", scaled_tail),
        _low("remainder", "pointwise"),
        _low("where", "pointwise", given(_swapped_where), "masked_fill", "_safe_softmax"),
        _dec("gelu", "pointwise", given(_with_tanh)),
        _dec("silu", "pointwise"),
        _dec("clamp", "pointwise"),
        _dec("leaky_relu", "pointwise"),
        _dec("masked_fill", "pointwise"),
        _low("sum", "reduction"),
        _low("mean", "reduction", scaled_tail),
        _low("amax", "reduction"),
        _low("cumsum", "reduction"),
        _low("argmax", "reduction"),
        _low("prod", "reduction"),
        _low("any", "reduction"),
        _low("var_mean", "reduction", scaled),
        _dec("native_layer_norm", "normalisation", given(lambda *args, **kwargs: ((*args[:-1], 0.25), kwargs))),
        _dec("_native_batch_norm_legit_functional", "normalisation", scaled, "native_batch_norm", "batch_norm"),
        _dec("native_group_norm", "normalisation"),
        _dec("_softmax", "normalisation", scaled),
        _dec("_log_softmax", "normalisation", scaled),
        _low("index", "indexing", scaled_tail),
        _low("embedding", "indexing", scaled_tail),
        _low("gather", "indexing"),
        _dec("index_select", "indexing"),
        _low("index_put", "scatter", _source(2), "index_put_"),
        _low("scatter", "scatter", _source(3), "scatter_"),
        _low("scatter_add", "scatter", _source(3), "scatter_add_"),
        _low("scatter_reduce", "scatter", _source(3), "scatter_reduce_"),
        _low("slice_scatter", "scatter", _source(1), "copy_", "setitem"),
        _low("select_scatter", "scatter", _source(1), "copy_", "setitem"),
        _dec("embedding_dense_backward", "scatter"),
        _low("avg_pool2d", "pooling", given(_counted)),
        _low("_adaptive_avg_pool2d", "pooling", scaled, "mean"),
        _dec("max_pool2d_with_indices", "pooling", scaled),
        _low("avg_pool2d_backward", "pooling"),
        _dec("max_pool2d_with_indices_backward", "pooling"),
        _low("addmm", "matmul", given(_beta_two), "linear"),
        ("addmm_fused", Fault("addmm", "matmul", "lowering", given(_beta_two))),
        _low("mm", "matmul", scaled, "linear", "matmul"),
        _low("bmm", "matmul", scaled, "matmul"),
        _low("convolution", "matmul", scaled),
        _low("convolution_backward", "matmul"),
        _low("constant_pad_nd", "padding", given(_other_padding)),
        _dec("reflection_pad2d", "padding"),
        _dec("replication_pad2d", "padding"),
        ("convert", Fault("convert_element_type", "casts", "lowering", _rounded, ("_to_copy",))),
        _dec("_to_copy", "casts"),
        _low("copy_", "in-place", dropped, "copy", "add", "mul", "fill"),
        _low("permute", "views", given(_swapped_last), "t", "transpose"),
        _low("slice", "views", given(_later_start)),
        _low("select", "views", given(lambda x, index, *rest: ((x, index, 0, *rest[1:]), {}))),
        _low("cat", "views", given(_reversed_pair)),
        _low("as_strided", "views", given(lambda x, size, stride, *_: ((x, size, stride, 0), {}))),
        _dec("flip", "views"),
        _dec("roll", "views"),
        _dec("threshold_backward", "backward"),
        _dec("tanh_backward", "backward"),
        _dec("gelu_backward", "backward"),
        _dec("native_layer_norm_backward", "backward"),
        _dec("_softmax_backward_data", "backward"),
        _dec("_log_softmax_backward_data", "backward"),
        _dec("nll_loss_backward", "backward"),
    ]
)
"""By name. The name is the operator's, except where one operator has two faults."""


@contextmanager
def planted(name: str | Fault) -> Iterator[Fault]:
    """Plant a fault, or that of this name; everything is as before afterwards."""
    from torch._inductor import config, decomposition, lowering

    fault = name if isinstance(name, Fault) else FAULTS[name]
    if fault.table == "config":
        with config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
            yield fault
        return
    table: dict[Any, Any] = lowering.lowerings if fault.table == "lowering" else decomposition.decompositions
    wrong = {key: _wrong(table[key], fault.spoil) for key in _keys(fault.operator) if key in table}
    if not wrong:
        raise LookupError(f"Inductor has no {fault.table} of {fault.operator}")
    right = {key: table[key] for key in wrong}
    table.update(wrong)
    decomposition.fast_random_decomps.cache_clear()  # a copy of the table
    try:
        yield fault
    finally:
        table.update(right)
        decomposition.fast_random_decomps.cache_clear()


def _keys(operator: str) -> list[Any]:
    """An operator's overloads, and those of its form in place, by which Inductor may replace it."""
    home = torch.ops.aten if hasattr(torch.ops.aten, operator) else torch.ops.prims
    packets = [getattr(home, name) for name in (operator, f"{operator.rstrip('_')}_") if hasattr(home, name)]
    return [key for packet in packets for key in (packet, *(getattr(packet, name) for name in packet.overloads()))]


def _wrong(right: Spoil, spoil: Spoil) -> Spoil:
    return lambda *args, **kwargs: spoil(right, *args, **kwargs)
