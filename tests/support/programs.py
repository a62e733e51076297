"""A small program for each planted fault: the operator between others, so that finding it is not trivial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Program:
    """A function to compile and what makes its inputs; ``train``: its backward pass is run too."""

    run: Callable[..., Any]
    inputs: Callable[[], Tensors]
    train: bool = False


def _square() -> Tensors:
    return (torch.randn(12, 12),)


def _pair() -> Tensors:
    return torch.randn(12, 12), torch.randn(12, 12)


def _image() -> Tensors:
    return (torch.randn(2, 3, 9, 9),)


def _leaf() -> Tensors:
    return (torch.randn(12, 12, requires_grad=True),)


def _image_leaf() -> Tensors:
    return (torch.randn(2, 3, 9, 9, requires_grad=True),)


def _indexed() -> Tensors:
    return torch.randn(12, 12), torch.randint(0, 12, (7,))


def _scattered() -> Tensors:
    index = torch.stack([torch.randperm(12)[:5] for _ in range(12)], 1)
    return torch.randn(12, 12), index, torch.randn(5, 12)


def around(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator in the middle of others."""

    def run(x: torch.Tensor, *rest: Any) -> Any:
        result = operator(torch.sin(x) + 2.5, *rest)
        return torch.cos(result * 0.5) if result.dtype.is_floating_point else result * 3

    return run


def plain(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator with others around, its input positive and negative."""

    def run(x: torch.Tensor, *rest: Any) -> Any:
        result = operator(torch.sin(x) * 2, *rest)
        return result * 0.5 + 1 if result.dtype.is_floating_point else result * 3

    return run


def _written(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    x.add_(torch.abs(y))
    return torch.cos(y)


def _slice_written(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    y[2:7] = torch.cos(x[2:7])
    return y * 2


def _row_written(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    y[3] = torch.cos(x[3])
    return y * 2


def _put(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    y[index[:3]] = torch.cos(x[0])
    return y + 1


def _batch_norm(x: torch.Tensor) -> torch.Tensor:
    mean, var = torch.zeros(3), torch.ones(3)
    return torch.cos(F.batch_norm(torch.sin(x), mean, var, training=True))


def _table_leaf() -> Tensors:
    return torch.randn(12, 12, requires_grad=True), torch.randint(0, 12, (7,))


def _program(operator: Callable[..., Any], inputs: Callable[[], Tensors] = _square) -> Program:
    return Program(plain(operator), inputs)


def _positive(operator: Callable[..., Any], inputs: Callable[[], Tensors] = _square) -> Program:
    return Program(around(operator), inputs)


def _trained(operator: Callable[..., Any], inputs: Callable[[], Tensors] = _leaf) -> Program:
    return Program(plain(operator), inputs, train=True)


PROGRAMS: Mapping[str, Program] = {
    "inject_relu": _program(torch.relu),
    "exp": _program(torch.exp),
    "sqrt": _positive(torch.sqrt),
    "rsqrt": _positive(torch.rsqrt),
    "sigmoid": _program(torch.sigmoid),
    "tanh": _program(torch.tanh),
    "tanh_fused": _program(torch.tanh),
    "erf": _program(torch.erf),
    "div": _positive(lambda x, y: y / x, _pair),
    "maximum": _program(torch.maximum, _pair),
    "remainder": _positive(lambda x, y: torch.remainder(y, x), _pair),
    "where": _program(lambda x: torch.where(x > 0, x, x * 0.1)),
    "gelu": _program(F.gelu),
    "silu": _program(F.silu),
    "clamp": _program(lambda x: torch.clamp(x, -0.5, 0.75)),
    "leaky_relu": _program(F.leaky_relu),
    "masked_fill": _program(lambda x: x.masked_fill(x > 0.3, 0.0)),
    "sum": _program(lambda x: x.sum(1)),
    "mean": _program(lambda x: x.mean(1)),
    "amax": _program(lambda x: x.amax(1)),
    "cumsum": _program(lambda x: x.cumsum(1)),
    "argmax": _program(lambda x: x.argmax(1)),
    "prod": _positive(lambda x: x.prod(1)),
    "any": _program(lambda x: (x > 1.9).any(1)),
    "var_mean": _program(lambda x: torch.var_mean(x, 1)[0]),
    "native_layer_norm": Program(lambda x: torch.cos(F.layer_norm(torch.sin(x), (12,))), _square),
    "_native_batch_norm_legit_functional": Program(_batch_norm, _image),
    "native_group_norm": _program(lambda x: F.group_norm(x, 3), _image),
    "_softmax": _program(lambda x: torch.softmax(x, 1)),
    "_log_softmax": _program(lambda x: torch.log_softmax(x, 1)),
    "index": _program(lambda x, index: x[index], _indexed),
    "embedding": _program(lambda x, index: F.embedding(index, x), _indexed),
    "gather": _program(lambda x, index, _src: x.gather(0, index), _scattered),
    "index_select": _program(lambda x, index: x.index_select(0, index), _indexed),
    "index_put": Program(_put, _indexed),
    "scatter": _program(lambda x, index, src: x.scatter(0, index, src), _scattered),
    "scatter_add": _program(lambda x, index, src: x.scatter_add(0, index, src), _scattered),
    "scatter_reduce": _program(lambda x, index, src: x.scatter_reduce(0, index, src, "amax"), _scattered),
    "slice_scatter": Program(_slice_written, _square),
    "select_scatter": Program(_row_written, _square),
    "embedding_dense_backward": _trained(lambda x, index: F.embedding(index, x), _table_leaf),
    "avg_pool2d": _program(lambda x: F.avg_pool2d(x, 3, 2, 1), _image),
    "_adaptive_avg_pool2d": _program(lambda x: F.adaptive_avg_pool2d(x, 4), _image),
    "max_pool2d_with_indices": _program(lambda x: F.max_pool2d(x, 3, 2, 1), _image),
    "avg_pool2d_backward": _trained(lambda x: F.avg_pool2d(x, 3, 2, 1), _image_leaf),
    "max_pool2d_with_indices_backward": _trained(lambda x: F.max_pool2d(x, 3, 2, 1), _image_leaf),
    "addmm": _program(torch.nn.functional.linear, lambda: (torch.randn(12, 12), torch.randn(12, 12), torch.randn(12))),
    "addmm_fused": _program(lambda x, y: x @ y + x, _pair),
    "mm": _program(torch.mm, _pair),
    "bmm": _program(torch.bmm, lambda: (torch.randn(2, 12, 12), torch.randn(2, 12, 12))),
    "convolution": _program(F.conv2d, lambda: (torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3))),
    "convolution_backward": _trained(
        F.conv2d, lambda: (torch.randn(2, 3, 9, 9, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True))
    ),
    "constant_pad_nd": _program(lambda x: F.pad(x, (1, 2, 0, 1))),
    "reflection_pad2d": _program(lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"), _image),
    "replication_pad2d": _program(lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"), _image),
    "convert": _program(lambda x: (x * 3).to(torch.int32)),
    "_to_copy": _program(lambda x: x.to(torch.float64)),
    "copy_": Program(_written, _square),
    "permute": _program(lambda x: x.reshape(4, 6, 6).permute(0, 2, 1) + x.reshape(4, 6, 6)),
    "slice": _program(lambda x: x[:, 2:5] * x[:, 4:7]),
    "select": _program(lambda x: x[3] + x[:, 4]),
    "cat": _program(lambda x, y: torch.cat([x, y], 1), _pair),
    "as_strided": _program(lambda x: torch.as_strided(x.clone(), (4, 3), (3, 1), 7)),
    "flip": _program(lambda x: x.flip(1)),
    "roll": _program(lambda x: x.roll(2, 1)),
    "threshold_backward": _trained(torch.relu),
    "tanh_backward": _trained(torch.tanh),
    "gelu_backward": _trained(F.gelu),
    "native_layer_norm_backward": _trained(lambda x: F.layer_norm(x, (12,))),
    "_softmax_backward_data": _trained(lambda x: torch.softmax(x, 1)),
    "_log_softmax_backward_data": _trained(lambda x: torch.log_softmax(x, 1)),
    "nll_loss_backward": Program(lambda x: F.cross_entropy(torch.sin(x) * 3, torch.arange(12) % 5), _leaf, train=True),
}
"""By the name of the fault."""
