"""Operators are called what people call them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from checked_backend._torch.operators import operator_names
from checked_backend.report import operator_names as module
from checked_backend.report.operator_names import operator_name

HOMES = (torch, torch.Tensor, nn.functional, nn.utils, nn.utils.rnn, torch.linalg, torch.fft, torch.special)

OTHERWISE = {
    "_backward": "it is autograd's own",
    "_make_dual": "torch.func makes it",
    "_pack_sequence": "it is no operator of a graph",
    **dict.fromkeys(
        (
            *("_indices", "_indices_copy", "_nnz", "_sparse_mm", "_sparse_sum", "_to_sparse", "_to_sparse_bsc"),
            *("_to_sparse_bsr", "_to_sparse_csc", "_to_sparse_csr", "_values", "_values_copy"),
        ),
        "sparse tensors are not compiled",
    ),
}
"""Operators of ATen that share a name with a function, without its underscore, and keep theirs."""


def is_written(name: str) -> bool:
    """Whether users call something by this name."""
    outer, _, inner = name.rpartition(".")
    homes = (getattr(torch, outer),) if outer else HOMES
    return name == "index" or any(callable(getattr(home, inner, None)) for home in homes)  # `x[...]` is called index


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten.relu.default", "relu"),
        ("aten.add.Tensor", "add"),
        ("aten.add_.Tensor", "add_"),
        ("aten._softmax.default", "softmax"),
        ("aten._softmax_backward_data.default", "softmax_backward"),
        ("aten.native_layer_norm_backward.default", "layer_norm_backward"),
        ("aten._native_batch_norm_legit_functional.default", "batch_norm"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "scaled_dot_product_attention"),
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "scaled_dot_product_attention_backward"),
        ("aten.linalg_vector_norm.default", "linalg.vector_norm"),
        ("aten.upsample_bilinear2d.vec", "interpolate"),
        ("aten._foreach_add.List", "_foreach_add"),
        ("aten.sum.dim_IntList", "sum"),
        ("mylib.op.default", "mylib.op"),
        ("mylib._op.default", "mylib._op"),
        ("mylib::op", "mylib::op"),
        ("", ""),
    ],
)
def test_names_of_operators(op: str, name: str) -> None:
    assert operator_name(op) == name


@pytest.mark.parametrize("name", sorted(module._CALLED))
def test_every_name_that_is_given_is_one_that_users_call(name: str) -> None:
    assert is_written(name)


def test_no_operator_keeps_an_underscore_that_its_function_lacks() -> None:
    kept = {
        name
        for name in operator_names("aten")
        if name.startswith("_") and operator_name(f"aten.{name}.default") == name and is_written(name[1:])
    }
    assert kept <= {*OTHERWISE}
