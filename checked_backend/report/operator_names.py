"""The names of operators as people write them: ``softmax`` for ``aten._softmax.default``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["operator_name"]

_WRITTEN: Mapping[str, str] = MappingProxyType(
    {
        "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
        "_adaptive_avg_pool3d": "adaptive_avg_pool3d",
        "_aminmax": "aminmax",
        "_batch_norm_impl_index": "batch_norm",
        "_batch_norm_no_update": "batch_norm",
        "_batch_norm_with_update": "batch_norm",
        "_batch_norm_with_update_functional": "batch_norm",
        "_cdist": "cdist",
        "_cdist_forward": "cdist",
        "_chunk_cat": "cat",
        "_coalesce": "coalesce",
        "_conj": "conj",
        "_conj_physical": "conj_physical",
        "_conv_depthwise2d": "conv2d",
        "_convolution": "convolution",
        "_ctc_loss": "ctc_loss",
        "_cudnn_attention": "scaled_dot_product_attention",
        "_cudnn_attention_forward": "scaled_dot_product_attention",
        "_cudnn_ctc_loss": "ctc_loss",
        "_cummax_helper": "cummax",
        "_cummin_helper": "cummin",
        "_efficient_attention": "scaled_dot_product_attention",
        "_efficient_attention_forward": "scaled_dot_product_attention",
        "_embedding_bag": "embedding_bag",
        "_embedding_bag_dense": "embedding_bag",
        "_embedding_bag_forward_only": "embedding_bag",
        "_euclidean_dist": "cdist",
        "_fft_c2c": "fft.fft",
        "_fft_c2r": "fft.irfft",
        "_fft_r2c": "fft.rfft",
        "_flash_attention": "scaled_dot_product_attention",
        "_flash_attention_forward": "scaled_dot_product_attention",
        "_fused_rms_norm": "rms_norm",
        "_grid_sampler_2d_cpu_fallback": "grid_sample",
        "_grouped_mm": "grouped_mm",
        "_histogramdd_bin_edges": "histogramdd",
        "_histogramdd_from_bin_cts": "histogramdd",
        "_histogramdd_from_bin_tensors": "histogramdd",
        "_index_put_impl_": "index_put_",
        "_linalg_solve_ex": "linalg.solve",
        "_local_scalar_dense": "item",
        "_log_softmax": "log_softmax",
        "_logcumsumexp": "logcumsumexp",
        "_lu_with_info": "linalg.lu_factor",
        "_masked_softmax": "softmax",
        "_native_batch_norm_legit": "batch_norm",
        "_native_batch_norm_legit_functional": "batch_norm",
        "_native_batch_norm_legit_no_training": "batch_norm",
        "_nnpack_spatial_convolution": "conv2d",
        "_pack_padded_sequence": "pack_padded_sequence",
        "_pad_circular": "pad",
        "_pad_enum": "pad",
        "_pad_packed_sequence": "pad_packed_sequence",
        "_pdist": "pdist",
        "_pdist_forward": "pdist",
        "_pin_memory": "pin_memory",
        "_prelu_kernel": "prelu",
        "_reshape_alias": "reshape",
        "_reshape_copy": "reshape",
        "_safe_softmax": "softmax",
        "_scaled_grouped_mm": "scaled_grouped_mm",
        "_scaled_mm": "scaled_mm",
        "_segment_reduce": "segment_reduce",
        "_slow_conv2d": "conv2d",
        "_slow_conv2d_forward": "conv2d",
        "_softmax": "softmax",
        "_stack": "stack",
        "_thnn_differentiable_gru_cell": "gru_cell",
        "_thnn_differentiable_lstm_cell": "lstm_cell",
        "_thnn_fused_gru_cell": "gru_cell",
        "_thnn_fused_lstm_cell": "lstm_cell",
        "_to_copy": "to",
        "_to_dense": "to_dense",
        "_trilinear": "bilinear",
        "_unique": "unique",
        "_unique2": "unique",
        "_unsafe_index": "index",
        "_unsafe_index_put": "index_put",
        "_unsafe_masked_index": "index",
        "_unsafe_masked_index_put_accumulate": "index_put",
        "_unsafe_view": "view",
        "_weight_norm": "weight_norm",
        "_weight_norm_differentiable": "weight_norm",
        "_weight_norm_interface": "weight_norm",
        "constant_pad_nd": "pad",
        "cudnn_batch_norm": "batch_norm",
        "cudnn_convolution": "convolution",
        "cudnn_grid_sampler": "grid_sample",
        "embedding_dense": "embedding",
        "grid_sampler_2d": "grid_sample",
        "grid_sampler_3d": "grid_sample",
        "log_sigmoid": "logsigmoid",
        "log_sigmoid_forward": "logsigmoid",
        "max_pool1d_with_indices": "max_pool1d",
        "max_pool2d_with_indices": "max_pool2d",
        "max_pool3d_with_indices": "max_pool3d",
        "miopen_batch_norm": "batch_norm",
        "miopen_convolution": "convolution",
        "mkldnn_convolution": "convolution",
        "mkldnn_linear": "linear",
        "mkldnn_max_pool2d": "max_pool2d",
        "mkldnn_max_pool3d": "max_pool3d",
        "multilabel_margin_loss_forward": "multilabel_margin_loss",
        "native_batch_norm": "batch_norm",
        "native_channel_shuffle": "channel_shuffle",
        "native_dropout": "dropout",
        "native_group_norm": "group_norm",
        "native_layer_norm": "layer_norm",
        "native_norm": "norm",
        "nll_loss2d": "nll_loss",
        "nll_loss2d_forward": "nll_loss",
        "nll_loss_forward": "nll_loss",
        "slow_conv3d": "conv3d",
        "slow_conv3d_forward": "conv3d",
    }
)
"""Operators of ATen that are called by another name. What has a gradient of its own is here without ``_backward``."""

_RULES = (
    (re.compile(r"_scaled_dot_product_\w+"), "scaled_dot_product_attention"),
    (re.compile(r"_scaled_addmm_?"), "scaled_addmm"),  # since torch 2.15
    (re.compile(r"_?upsample_\w+"), "interpolate"),
    (re.compile(r"(reflection|replication)_pad[123]d"), "pad"),
    (re.compile(r"_?(linalg|fft|special)_(\w+)"), r"\1.\2"),
)
"""The same for families of operators."""

_BACKWARD = re.compile(r"(\w+?)(_backward)(_data)?")


def operator_name(op: str) -> str:
    """The name that people use for an operator: ``relu`` for ``aten.relu.default``, ``softmax`` for ``_softmax``.

    Args:
        op: The operator, as a finding has it: with its namespace and overload. One that is not ATen's keeps its own.
    """
    name = op.removeprefix("aten.")
    if name == op:
        return op.removesuffix(".default")
    name = name.partition(".")[0]
    backward = _BACKWARD.fullmatch(name)
    return f"{_written(backward[1])}{backward[2]}" if backward else _written(name)


def _written(name: str) -> str:
    if name in _WRITTEN:
        return _WRITTEN[name]
    for pattern, written in _RULES:
        found = pattern.fullmatch(name)
        if found is not None:
            return found.expand(written)
    return name
