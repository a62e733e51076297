"""Check arguments that torch's kernels trust: wrong indices and sizes would lead out of a tensor's memory.

Most kernels check their arguments before they run. The kernels below only check some of them, because autograd, which
usually calls them, cannot get them wrong. A stranger's graph can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["argument_problem", "memory_problem"]

_GATES = MappingProxyType({0: 1, 1: 1, 2: 4, 3: 3})
"""The number of gates of a recurrent cell, by the number of its kind: plain with ReLU or tanh, LSTM, GRU."""

_Named = Mapping[str, Any]


def memory_problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor is not within its storage; None if it is."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return None
    try:
        there = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return None  # the tensor has no memory of its own: a zero that torch does not store, or a level of a transform
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + span) * tensor.element_size()
    if needed <= there:
        return None
    return f"a tensor of shape {tuple(tensor.shape)} reaches to byte {needed} of a storage of {there}"


def argument_problem(name: str, given: _Named) -> str | None:
    """Why an operator would leave its memory; None if it does not, as far as is known.

    Args:
        name: ``namespace::name``.
        given: Its arguments by name.
    """
    rule = _RULES.get(name)
    if rule is None:
        return None
    try:
        return next(rule(given), None)
    except (IndexError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        return f"its arguments do not fit together ({type(error).__name__}: {error})"


def _within(what: str, indices: torch.Tensor | None, low: int, end: int) -> Iterator[str]:
    if indices is None or not indices.numel():
        return
    least, greatest = (int(bound) for bound in indices.detach().to(torch.int64).aminmax())
    if least < low or greatest >= end:
        yield f"{what} from {least} to {greatest}, where {low} to {end - 1} are there"


def _counts(count: int, **tensors: torch.Tensor | None) -> Iterator[str]:
    for what, tensor in tensors.items():
        if tensor is not None and tensor.numel() != count:
            yield f"{what} has {tensor.numel()} elements, not {count}"


def _shaped(shape: Sequence[int], **tensors: torch.Tensor | None) -> Iterator[str]:
    for what, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            yield f"{what} is of shape {tuple(tensor.shape)}, not {tuple(shape)}"


def _pooled(spatial: int) -> Callable[[_Named], Iterator[str]]:
    def rule(given: _Named) -> Iterator[str]:
        source, result = given["self"], given["grad_output"].shape
        yield from _shaped(result, indices=given["indices"])
        if source.dim() not in (spatial + 1, spatial + 2) or len(result) != source.dim():
            yield f"self has {source.dim()} dimensions, grad_output {len(result)}"
        yield from _shaped((*source.shape[:-spatial], *result[-spatial:]), grad_output=given["grad_output"])
        for what in ("kernel_size", "output_size"):
            if len(given.get(what, range(spatial))) not in (1, spatial):
                yield f"{what} has {len(given[what])} sizes"
        if "output_size" in given and tuple(given["output_size"]) != tuple(result[-spatial:]):
            yield f"output_size is {tuple(given['output_size'])}, and grad_output of shape {tuple(result)}"
        yield from _within("indices", given["indices"], 0, math.prod(source.shape[-spatial:]))

    return rule


def _averaged(spatial: int) -> Callable[[_Named], Iterator[str]]:
    def rule(given: _Named) -> Iterator[str]:
        gradient, source = given["grad_output"], given["self"]
        yield from _shaped((*source.shape[:-spatial], *gradient.shape[-spatial:]), grad_output=gradient)

    return rule


def _indexed(given: _Named) -> Iterator[str]:
    sizes = list(given["self"].shape)
    for dimension, index in enumerate(given["indices"]):
        if index is not None and index.dtype not in (torch.bool, torch.uint8):
            yield from _within("indices", index, -sizes[dimension], sizes[dimension])


def _embedded_back(given: _Named) -> Iterator[str]:
    yield from _within("indices", given["indices"], 0, int(given["num_weights"]))
    yield from _counts(given["indices"].numel() * given["grad_output"].shape[-1], grad_output=given["grad_output"])


def _bags(given: _Named) -> Iterator[str]:
    yield from _within("indices", given["indices"], 0, given["weight"].shape[0])
    yield from _within("offsets", given["offsets"], 0, given["indices"].numel() + 1)
    weights = given.get("per_sample_weights")
    yield from _counts(given["indices"].numel(), per_sample_weights=weights)


def _bags_back(given: _Named) -> Iterator[str]:
    indices, weight = given["indices"], given.get("weight")
    rows = weight.shape[0] if weight is not None else int(given["num_weights"])
    grad = given.get("grad")
    yield from _within("indices", indices, 0, rows)
    yield from _within("offset2bag", given["offset2bag"], 0, grad.shape[0] if grad is not None else 0)
    yield from _within("maximum_indices", given.get("maximum_indices"), -1, rows)
    yield from _within("offsets", given.get("offsets"), 0, indices.numel() + 1)
    if given["offset2bag"].numel():
        yield from _counts(indices.numel(), offset2bag=given["offset2bag"])
    yield from _counts(indices.numel(), per_sample_weights=given.get("per_sample_weights"))


def _segments(given: _Named) -> Iterator[str]:
    if given.get("unsafe"):
        yield "its lengths are not checked"


def _layer_norm_back(given: _Named) -> Iterator[str]:
    source, inner = given["input"], math.prod(given["normalized_shape"])
    outer = source.numel() // inner if inner else 0
    yield from _shaped(source.shape, grad_out=given["grad_out"])
    yield from _shaped(given["normalized_shape"], weight=given["weight"], bias=given.get("bias"))
    yield from _counts(outer, mean=given.get("mean"), rstd=given["rstd"])


def _batch_norm(given: _Named) -> Iterator[str]:
    channels = given["input"].shape[1]
    if "grad_out" in given and not given["input"].numel():
        yield "there are no elements, and the backward pass divides by their number"
    training = given.get("train", given.get("training", given.get("update", True)))
    backward = "train" in given or "update" in given
    needed = ("save_mean", "save_invstd" if "save_invstd" in given else "save_var") if backward else ()
    for what in needed if training else ("running_mean", "running_var"):
        if given.get(what) is None:
            yield f"there is no {what}"
    for what in ("weight", "bias", "running_mean", "running_var"):
        yield from _counts(channels, **{what: given.get(what)})
    for what in ("save_mean", "save_invstd", "save_var"):
        saved = given.get(what)
        if saved is not None and (saved.numel() or given.get("train") or given.get("update")):
            yield from _counts(channels, **{what: saved})
    yield from _shaped(given["input"].shape, grad_out=given.get("grad_out"))


def _group_norm(given: _Named) -> Iterator[str]:
    source = given.get("input", given.get("X"))
    n, channels, rest, groups = (int(given[what]) for what in ("N", "C", "HxW", "group"))
    if source is None or min(n, channels, rest, groups) < 0 or source.numel() != n * channels * rest:
        yield f"N * C * HxW is {n * channels * rest}, and there are other elements"
    if groups < 1 or channels % groups:
        yield f"{channels} channels are not {groups} groups"
    yield from _counts(channels, weight=given.get("weight", given.get("gamma")), bias=given.get("bias"))
    yield from _counts(n * groups, mean=given.get("mean"), rstd=given.get("rstd"))
    if source is not None:
        yield from _counts(source.numel(), grad_out=given.get("grad_out"))


def _fused_steps(given: _Named) -> Iterator[str]:
    names = ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list", "state_sums")
    for what in names:
        lists = given.get(what)
        if lists:
            if len(lists) != len(given["self"]):
                yield f"{what} has {len(lists)} tensors for {len(given['self'])} parameters"
            for parameter, other in zip(given["self"], lists, strict=False):
                yield from _shaped(parameter.shape, **{what: other})
    for step in given.get("state_steps") or ():
        yield from _counts(1, state_steps=step)


def _pivots(given: _Named) -> Iterator[str]:
    matrix = given.get("LU", given.get("LD", given.get("LU_data")))
    pivots = given.get("pivots", given.get("LU_pivots"))
    if matrix is None or pivots is None or pivots.dtype is not torch.int32:
        yield "the pivots are not of a factorization"
        return
    rows = matrix.shape[-2]
    yield from _within("pivots", pivots.abs(), 1, rows + 1)
    yield from _counts(math.prod(matrix.shape[:-2]) * min(matrix.shape[-2:]), pivots=pivots)


def _attention_back(given: _Named) -> Iterator[str]:
    query, key, value = given["query"], given["key"], given["value"]
    if min(query.dim(), key.dim(), value.dim()) != 4:
        yield "query, key and value have four dimensions"
        return
    yield from _shaped((*query.shape[:3], value.shape[3]), grad_out=given["grad_out"], out=given["out"])
    yield from _counts(math.prod(query.shape[:3]), logsumexp=given["logsumexp"])
    yield from _shaped((query.shape[0], key.shape[1], key.shape[2], query.shape[3]), key=key)
    yield from _shaped((query.shape[0], key.shape[1], key.shape[2], value.shape[3]), value=value)
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        yield f"{query.shape[1]} heads of the query do not fit {key.shape[1]} of the key"


def _alike(given: _Named) -> Iterator[str]:
    yield from _shaped(given["grad_output"].shape, output=given["output"])


def _transformed(given: _Named) -> Iterator[str]:
    dimensions = given["self"].dim()
    chosen = [int(dimension) for dimension in given["dim"]]
    if any(not 0 <= dimension < dimensions for dimension in chosen):  # the operator around it counts from the front
        yield f"dimensions {chosen} of a tensor that has {dimensions}"
    elif len(set(chosen)) < len(chosen):
        yield f"dimensions {chosen} are not distinct"


def _copied(given: _Named) -> Iterator[str]:
    if len(given["self"]) != len(given["src"]):
        yield f"{len(given['src'])} tensors are copied to {len(given['self'])}"


def _weight_norm(given: _Named) -> Iterator[str]:
    v, g = given.get("v", given.get("saved_v")), given.get("g", given.get("saved_g"))
    if v is None or g is None or not v.numel() or int(given["dim"]) not in (0, v.dim() - 1):
        yield "it is along the first or the last dimension of a tensor that is not empty"
        return
    length = v.shape[int(given["dim"])]
    yield from _counts(length, g=g, saved_norms=given.get("saved_norms"))
    yield from _shaped(v.shape, grad_w=given.get("grad_w"))


def _unfolded(given: _Named) -> Iterator[str]:
    whole = torch.empty([int(size) for size in given["input_sizes"]], device="meta")
    try:
        parts = whole.unfold(given["dim"], given["size"], given["step"])
    except RuntimeError as error:
        yield str(error).partition("\n")[0]
        return
    yield from _shaped(parts.shape, grad_in=given["grad_in"])


def _smoothed(given: _Named) -> Iterator[str]:
    if not given["self"].is_floating_point() or not given["target"].is_floating_point():
        yield "integers are divided by beta, which is zero as an integer"


def _arriving(given: _Named) -> Any:
    """Return the incoming gradient, which has another name in torch 2.15."""
    return given["grad_output"] if "grad_output" in given else given["grad"]


def _pairs_back(given: _Named) -> Iterator[str]:
    rows = given["self"].shape[0]
    yield from _shaped((rows * (rows - 1) // 2,), pdist=given["pdist"], grad=_arriving(given))


def _distances_back(given: _Named) -> Iterator[str]:
    shape = (given["x1"].shape[-2], given["x2"].shape[-2])
    batch = torch.broadcast_shapes(given["x1"].shape[:-2], given["x2"].shape[:-2])
    yield from _shaped((*batch, *shape), cdist=given["cdist"], grad=_arriving(given))


def _aligned(given: _Named) -> Iterator[str]:
    classes = given["log_probs"].shape[-1]
    yield from _within("targets", given["targets"], 0, classes)
    yield from _within("blank", torch.tensor([given.get("blank", 0)]), 0, classes)
    alpha = given.get("log_alpha")
    if alpha is not None:
        longest = max((int(length) for length in given["target_lengths"]), default=0)
        times, batch = given["log_probs"].shape[0], given["log_probs"].shape[1]
        if alpha.dim() != 3 or alpha.shape[0] != batch or alpha.shape[1] != times or alpha.shape[2] < 2 * longest + 1:
            yield f"log_alpha is of shape {tuple(alpha.shape)}"
        yield from _counts(batch, neg_log_likelihood=given["neg_log_likelihood"], grad=given["grad"])


def _recurrent(given: _Named) -> Iterator[str]:
    source, hidden = given["input"], int(given["hidden_size"])
    first = "weight0" if "weight0" in given else "weight1"
    start = int(first[-1])
    weights = [given[f"weight{start + place}"] for place in range(4)]
    gates = _GATES[int(given["mode"])]
    yield from _shaped((gates * hidden, source.shape[-1]), **{first: weights[0]})
    yield from _shaped((gates * hidden, hidden), weights=weights[1])
    yield from _counts(gates * hidden, bias=weights[2], hidden_bias=weights[3])
    batch = source.shape[1]  # also with batch_first: the operator around it has transposed them
    state = given.get("hx_"), given.get("cx_", given.get("cx_tmp"))
    yield from _counts(batch * hidden, hx=state[0], cx=state[1])
    for what in ("output", "grad_output"):
        tensor = given.get(what)
        if isinstance(tensor, torch.Tensor):
            yield from _counts(source.shape[0] * source.shape[1] * hidden, **{what: tensor})


_RULES: Mapping[str, Callable[[_Named], Iterator[str]]] = MappingProxyType(
    {
        f"aten::{name}": rule
        for names, rule in (
            (
                "max_pool2d_with_indices_backward adaptive_max_pool2d_backward fractional_max_pool2d_backward",
                _pooled(2),
            ),
            (
                "max_pool3d_with_indices_backward adaptive_max_pool3d_backward fractional_max_pool3d_backward",
                _pooled(3),
            ),
            ("_adaptive_avg_pool2d_backward", _averaged(2)),
            ("_adaptive_avg_pool3d_backward", _averaged(3)),
            ("_unsafe_index _unsafe_index_put _index_put_impl_ _index_put_impl", _indexed),
            ("embedding_dense_backward", _embedded_back),
            ("_embedding_bag _embedding_bag_forward_only", _bags),
            (
                "_embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward",
                _bags_back,
            ),
            ("segment_reduce", _segments),
            ("native_layer_norm_backward _fused_rms_norm_backward", _layer_norm_back),
            (
                "native_batch_norm native_batch_norm_backward batch_norm_backward _native_batch_norm_legit "
                "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update "
                "_batch_norm_with_update_functional batch_norm_update_stats",
                _batch_norm,
            ),
            ("native_group_norm native_group_norm_backward", _group_norm),
            (
                "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_ _fused_adam _fused_adamw _fused_sgd "
                "_fused_adagrad",
                _fused_steps,
            ),
            ("linalg_lu_solve linalg_ldl_solve lu_unpack", _pivots),
            ("_scaled_dot_product_flash_attention_for_cpu_backward", _attention_back),
            ("_softmax_backward_data _log_softmax_backward_data", _alike),
            ("_fft_r2c _fft_c2r _fft_c2c", _transformed),
            ("_foreach_copy", _copied),
            ("_weight_norm_interface _weight_norm_interface_backward", _weight_norm),
            ("unfold_backward", _unfolded),
            ("smooth_l1_loss_backward", _smoothed),
            ("_pdist_backward", _pairs_back),
            ("_cdist_backward", _distances_back),
            ("_ctc_loss _ctc_loss_backward", _aligned),
            ("mkldnn_rnn_layer mkldnn_rnn_layer_backward", _recurrent),
        )
        for name in names.split()
    }
)
