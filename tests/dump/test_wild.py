"""Operators with arguments that fit nothing: refused by the guard of a replay or by torch, or the child dies alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from checked_backend._torch.pytree import tree_leaves
from checked_backend.dump.eager import OutOfRange, _Guard
from checked_backend.dump.targets import refusal_by_name
from tests.support.dump_tools import told_by

WRITING = (
    "_adaptive_avg_pool2d_backward _ctc_loss_backward _fft_c2c _fft_c2r _fft_r2c _foreach_copy _fused_adam_ "
    "_fused_sgd_ _native_batch_norm_legit _weight_norm_interface _weight_norm_interface_backward batch_norm_backward "
    "batch_norm_update_stats fractional_max_pool2d_backward fractional_max_pool3d_backward native_batch_norm_backward "
    "native_layer_norm_backward reflection_pad1d_backward reflection_pad2d_backward nanmedian "
    "rrelu_with_noise unfold_backward"
)
"""Kernels that write out of their memory where nothing looks at their arguments."""


@pytest.mark.process
def test_what_trusts_its_caller_writes_nowhere_else(tmp_path: Path) -> None:
    told = told_by("wild_program.py", 60, *WRITING.split(), folder=tmp_path)
    assert told["deaths"] == {}
    assert told["worked"] > 50


def test_steps_of_a_kernel_are_not_called_by_themselves() -> None:
    steps = "_compute_linear_combination _slow_conv2d_backward _batch_norm_no_update _stack _cummax_helper"
    for name in steps.split():
        assert refusal_by_name(f"aten.{name}") == "a dump may not call this operator"
    for name in ("convolution_backward", "native_batch_norm", "_log_softmax", "stack"):
        assert refusal_by_name(f"aten.{name}") is None


X = torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)
HONEST: dict[str, Any] = {
    "reflection_pad2d": lambda x: torch.nn.functional.pad(x, (1, 1, 2, 1), "reflect"),
    "avg_pool2d": lambda x: torch.nn.functional.avg_pool2d(x, 3, 2, 1, True),
    "adaptive_avg_pool2d": lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 3),
    "fractional_max_pool2d": lambda x: torch.nn.functional.fractional_max_pool2d(x, 2, 3),
    "upsample": lambda x: torch.nn.functional.interpolate(x, scale_factor=1.5, mode="bicubic"),
    "grid_sampler": lambda x: torch.nn.functional.grid_sample(x, x.permute(0, 2, 3, 1), align_corners=False),
    "fft": lambda x: torch.fft.irfft2(torch.fft.rfft2(x, dim=(-1, 1)), dim=(1, -1)),
    "batch_norm": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
    "weight_norm": lambda x: torch._weight_norm(x[0, 0], x[0, 1, :, :1], 0),
    "log_softmax": lambda x: x.log_softmax(1),
    "nll_loss": lambda x: torch.nn.functional.nll_loss(x, torch.zeros(1, 4, 4, dtype=torch.int64)),
    "pdist": lambda x: torch.pdist(x.reshape(8, 4)),
    "smooth_l1": lambda x: torch.nn.functional.smooth_l1_loss(x, x.detach() * 2),
    "unfold": lambda x: x.unfold(2, 3, 1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (4, 4), torch.ones(4, 4)),
    "max_pool3d": lambda x: torch.nn.functional.max_pool3d(x, 2),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "ctc": lambda x: torch.nn.functional.ctc_loss(
        x[0].log_softmax(2), torch.ones(4, 1, dtype=torch.int64), [2] * 4, [1] * 4
    ),
    "embedding_bag": lambda x: torch.nn.functional.embedding_bag(torch.tensor([[0, 3]]), x[0, 0], mode="max"),
    "lstm": lambda x: torch.nn.LSTM(4, 2)(x[0])[0],
    "solve": lambda x: torch.linalg.solve(x + 9 * torch.eye(4), x),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_autograd_calls_is_not_refused(name: str) -> None:
    x = X.clone().requires_grad_()
    with _Guard():
        result = HONEST[name](x)
        torch.autograd.backward(result, torch.ones_like(result))
    assert x.grad is not None
    assert all(math.isfinite(leaf.sum()) for leaf in tree_leaves(x.grad))


def test_a_gradient_must_fit_its_forward() -> None:
    backward = torch.ops.aten.reflection_pad2d_backward.default
    with _Guard():
        assert backward(torch.ones(1, 2, 6, 6), X, [1, 1, 1, 1]).shape == X.shape
        with pytest.raises(OutOfRange, match=r"grad_output is of shape \(1, 2, 4, 4\), not \(1, 2, 6, 6\)"):
            backward(X, X, [1, 1, 1, 1])
        with pytest.raises(OutOfRange, match="its arguments do not fit together"):
            backward(X, X, [])


def test_inner_operators_are_not_told_where_to_write() -> None:
    with _Guard():
        torch.add(X, X, out=(out := torch.empty(0)))
        assert out.shape == X.shape
        with pytest.raises(OutOfRange, match="it may not be told where to write"):
            torch.ops.aten._softmax.out(X, 1, False, out=torch.empty(0))
