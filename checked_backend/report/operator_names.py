"""The names of operators as people write them: ``softmax`` for ``aten._softmax.default``."""

from __future__ import annotations

import re
from collections.abc import Mapping

_CALLED: Mapping[str, str] = {
    "batch_norm": (
        "_batch_norm_impl_index _batch_norm_no_update _batch_norm_with_update "
        "_batch_norm_with_update_functional _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_native_batch_norm_legit_no_training"
    ),
    "bilinear": "_trilinear",
    "cat": "_chunk_cat",
    "cdist": "_cdist_forward _euclidean_dist",
    "conv2d": "_conv_depthwise2d _nnpack_spatial_convolution _slow_conv2d _slow_conv2d_forward",
    "conv3d": "slow_conv3d slow_conv3d_forward",
    "ctc_loss": "_cudnn_ctc_loss",
    "cummax": "_cummax_helper",
    "cummin": "_cummin_helper",
    "embedding": "embedding_dense",
    "embedding_bag": "_embedding_bag_dense _embedding_bag_forward_only",
    "fft.fft": "_fft_c2c",
    "fft.irfft": "_fft_c2r",
    "fft.rfft": "_fft_r2c",
    "grid_sample": "_grid_sampler_2d_cpu_fallback cudnn_grid_sampler grid_sampler_2d grid_sampler_3d",
    "gru_cell": "_thnn_differentiable_gru_cell _thnn_fused_gru_cell",
    "histogramdd": "_histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors",
    "index": "_unsafe_index _unsafe_masked_index",
    "index_put": "_unsafe_index_put _unsafe_masked_index_put_accumulate",
    "index_put_": "_index_put_impl_",
    "item": "_local_scalar_dense",
    "linalg.lu_factor": "_lu_with_info",
    "linalg.solve": "_linalg_solve_ex",
    "logsigmoid": "log_sigmoid log_sigmoid_forward",
    "lstm_cell": "_thnn_differentiable_lstm_cell _thnn_fused_lstm_cell",
    "max_pool1d": "max_pool1d_with_indices",
    "max_pool2d": "max_pool2d_with_indices",
    "max_pool3d": "max_pool3d_with_indices",
    "multilabel_margin_loss": "multilabel_margin_loss_forward",
    "nll_loss": "nll_loss2d nll_loss2d_forward nll_loss_forward",
    "pad": "_pad_circular _pad_enum constant_pad_nd",
    "pdist": "_pdist_forward",
    "prelu": "_prelu_kernel",
    "reshape": "_reshape_alias _reshape_copy",
    "rms_norm": "_fused_rms_norm",
    "scaled_dot_product_attention": (
        "_cudnn_attention _cudnn_attention_forward _efficient_attention _efficient_attention_forward "
        "_flash_attention _flash_attention_forward"
    ),
    "softmax": "_masked_softmax _safe_softmax",
    "to": "_to_copy",
    "unique": "_unique2",
    "view": "_unsafe_view",
    "weight_norm": "_weight_norm_differentiable _weight_norm_interface",
}
"""Operators of ATen by what they are called. What has a gradient of its own is here without ``_backward``."""

_WRITTEN: Mapping[str, str] = {name: called for called, names in _CALLED.items() for name in names.split()}

_RULES = (
    (
        re.compile(
            r"_(adaptive_avg_pool[23]d|aminmax|cdist|coalesce|conj|conj_physical|convolution|ctc_loss|"
            r"embedding_bag|grouped_mm|log_softmax|logcumsumexp|pack_padded_sequence|pad_packed_sequence|"
            r"pdist|pin_memory|scaled_grouped_mm|scaled_mm|segment_reduce|softmax|stack|to_dense|"
            r"unique|weight_norm)"
        ),
        r"\1",
    ),
    (
        re.compile(
            r"(?:cudnn|miopen|mkldnn|native)_(batch_norm|channel_shuffle|convolution|dropout|group_norm|layer_norm|"
            r"linear|max_pool[23]d|norm)"
        ),
        r"\1",
    ),
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
