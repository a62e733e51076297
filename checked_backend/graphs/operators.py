"""The facts about an operator that dispatch modes need: how it rounds, the length of its sums, what it mutates."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from checked_backend._torch.operators import OpOverload, is_composite


class OperatorKind(Enum):
    """How an operator rounds."""

    EXACT = auto()
    """Moves, selects, compares or creates values; its results carry no rounding error of its own."""
    POINTWISE = auto()
    """Rounds each element about once."""
    COMBINING = auto()
    """Adds up a few products. Where the products cancel, their roundings are left."""
    ACCUMULATING = auto()
    """Has many roundings inside: sums, matrix products, normalisations, linear algebra."""
    NARROWING = auto()
    """Rounds only if its result has fewer bits than its source: casts and copies."""
    UNINITIALISED = auto()
    """Returns memory with whatever was in it."""
    RANDOM = auto()
    """Draws from a random generator: its outcome is data."""
    COMPOSITE = auto()
    """A composition of other operators; only seen under inference mode."""


@dataclass(frozen=True, slots=True)
class Operator:
    """The facts about one operator overload.

    Attributes:
        base: Its name without namespace, overload and the trailing underscore of in-place variants: ``add``.
        kind: How it rounds.
        mutated: (position, name) of each argument that it writes to; the position is -1 for keyword-only ones.
        positions: Position of each argument that can be positional, by name.
        draws: Whether it draws from a random generator (attention with dropout too, which is not of kind RANDOM).
    """

    name: str
    base: str
    kind: OperatorKind
    mutated: tuple[tuple[int, str], ...]
    positions: Mapping[str, int]
    draws: bool


# The results of these are taken from inputs, or exact by IEEE 754. Selecting a value does not round it.
_EXACT_NAMES = """
    abs absolute neg negative positive relu relu6 hardtanh hardtanh_backward clamp clamp_min clamp_max clip
    threshold threshold_backward hardshrink hardshrink_backward copysign sign sgn signbit floor ceil round trunc
    fix frac fmod floor_divide heaviside nextafter nan_to_num frexp conj_physical _conj_physical complex real imag
    max min amax amin aminmax maximum minimum fmax fmin cummax cummin median nanmedian mode kthvalue sort msort
    topk argmax argmin argsort unique unique_dim unique_consecutive _unique _unique2 eq ne lt le gt ge isnan isinf
    isfinite isposinf isneginf isclose equal isin logical_and logical_or logical_not logical_xor bitwise_and
    bitwise_or bitwise_xor bitwise_not any all nonzero count_nonzero bucketize searchsorted clone contiguous alias
    lift lift_fresh detach _unsafe_view _reshape_copy fill zero masked_fill where cat concat stack hstack vstack
    dstack repeat repeat_interleave tile roll flip fliplr flipud rot90 tril triu diag diag_embed constant_pad_nd
    pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    pixel_shuffle pixel_unshuffle channel_shuffle im2col index _unsafe_index index_select index_copy index_fill
    masked_select masked_scatter gather take embedding slice_scatter select_scatter diagonal_scatter
    as_strided_scatter slice_backward select_backward diagonal_backward masked_scatter_backward
    value_selecting_reduction_backward max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    max_pool2d max_pool3d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
    max_unpool2d max_unpool3d zeros ones full eye arange range scalar_tensor zeros_like ones_like full_like
    new_zeros new_ones new_full tril_indices triu_indices _efficientzerotensor hann_window hamming_window
    _local_scalar_dense item is_same_size set _pin_memory record_stream _assert_async _assert_scalar
    _assert_tensor_metadata sym_size sym_stride sym_numel iota broadcast_in_dim device_put
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _wrap_tensor_autograd wait_tensor wait_tensors
"""
_EXACT = frozenset(_EXACT_NAMES.split())
# These round each element about once, but lack the pointwise tag.
_POINTWISE_NAMES = """
    hardswish hardswish_backward hardsigmoid_backward leaky_relu_backward elu_backward celu_backward
    softplus_backward softshrink_backward mish_backward silu_backward gelu_backward log_sigmoid log_sigmoid_forward
    log_sigmoid_backward glu glu_backward glu_jvp prelu _prelu_kernel _prelu_kernel_backward
    rrelu_with_noise_backward native_dropout _fused_dropout native_dropout_backward polar linspace
    logspace tanh_backward sigmoid_backward logit_backward true_divide sub subtract multiply divide
    rsub nan_to_num hypot square sqrt rsqrt pow float_power
"""
# These add up a few products. The products may cancel, and then only their roundings are left.
_COMBINING_NAMES = """
    addcmul addcdiv lerp addr cross linalg_cross upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa grid_sampler_2d
    grid_sampler_3d _grid_sampler_2d_cpu_fallback
"""
_COMBINING = frozenset(_COMBINING_NAMES.split())
_POINTWISE = frozenset(_POINTWISE_NAMES.split())
_SUMMING = ("sum", "mean", "prod", "nansum", "norm", "std", "var", "trace")
_NARROWING = frozenset({"_to_copy", "to", "copy", "convert_element_type", "_foreach_copy"})
_UNINITIALISED_NAMES = "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize resize_as"
_UNINITIALISED = frozenset(_UNINITIALISED_NAMES.split())
_FUSED_OPTIMIZERS = ("_fused_adam", "_fused_sgd", "_fused_adagrad")
# These are tagged as random, but draw only with dropout.
_SOMETIMES_RANDOM = ("attention", "cudnn_rnn", "miopen_rnn")


def _base_name(func: OpOverload) -> str:
    base = func._schema.name.split("::")[-1].removeprefix("_foreach_")
    if base.endswith("_") and not base.endswith("__"):
        base = base[:-1]
    return base


def _kind(func: OpOverload, base: str) -> OperatorKind:
    if is_composite(func):
        return OperatorKind.COMPOSITE
    if base in _UNINITIALISED:
        return OperatorKind.UNINITIALISED
    if base in _NARROWING:
        return OperatorKind.NARROWING
    sometimes = any(part in base for part in _SOMETIMES_RANDOM)
    random = torch.Tag.nondeterministic_seeded in func.tags
    if random and not sometimes and base not in _POINTWISE:
        return OperatorKind.RANDOM
    arguments, returns = func._schema.arguments, func._schema.returns
    is_view = any(item.alias_info is not None and not item.alias_info.is_write for item in returns)
    if is_view and not any(item.alias_info is not None and item.alias_info.is_write for item in arguments):
        return OperatorKind.EXACT
    if base in _EXACT or base.endswith("_copy") or base.startswith(("_assert", "sym_")):
        return OperatorKind.EXACT
    if base in _COMBINING:
        return OperatorKind.COMBINING
    foreach = "::_foreach_" in func._schema.name and base not in ("norm", "max")
    if torch.Tag.pointwise in func.tags or base in _POINTWISE or foreach or base.startswith(_FUSED_OPTIMIZERS):
        return OperatorKind.POINTWISE
    return OperatorKind.ACCUMULATING


@functools.lru_cache(maxsize=4096)  # it takes tens of microseconds
def describe_operator(func: OpOverload) -> Operator:
    """Read an operator's schema and tags."""
    base = _base_name(func)
    positions: dict[str, int] = {}
    mutated: list[tuple[int, str]] = []
    for item in func._schema.arguments:
        position = -1
        if not item.kwarg_only:
            position = positions[item.name] = len(positions)
        if item.alias_info is not None and item.alias_info.is_write:
            mutated.append((position, item.name))
    return Operator(
        name=str(func),
        base=base,
        kind=_kind(func, base),
        mutated=tuple(mutated),
        positions=positions,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
    )


UNMARKED_STATISTICS = ("running_mean", "running_var")
"""Arguments that the `UPDATING` operators write to in training, though their schemas do not declare it."""

UPDATING = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
"""Operators of ``aten`` with undeclared writes (torch/_subclasses/schema_check_mode.py)."""


def argument(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """An argument of a call by its schema name, positional or not; ``default`` if it was left out."""
    position = operator.positions.get(name, -1)
    if 0 <= position < len(args):
        return args[position]
    return kwargs.get(name, default)


def _reduced(shape: torch.Size, dim: Any) -> int:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return shape.numel()
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return math.prod(shape[index] for index in dims) if shape else 1


def _convolution_backward_length(grad: torch.Tensor, weight: torch.Tensor) -> int:
    channels = grad.shape[1] if grad.dim() > 1 else 1
    over_batch = grad.numel() // max(1, channels)
    over_channels = weight.numel() // max(1, weight.shape[1])
    return max(over_batch, over_channels)


def accumulation_length(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The number of terms that an accumulating operator adds up for one element of its result.

    Returns:
        The number of terms, at least 1; an estimate from shapes alone.
    """
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not tensors:
        return 1
    base, first, last = operator.base, tensors[0], tensors[-1]
    length = 1
    if base in ("mm", "bmm", "addmm", "baddbmm", "addbmm", "_addmm_activation", "_scaled_mm"):
        length = last.shape[-2]
    elif base in ("mv", "addmv", "dot", "vdot"):
        length = last.shape[-1] if last.dim() else 1
    elif "convolution" in base or base.startswith(("conv", "_slow_conv", "_conv")):
        if "backward" in base:
            length = _convolution_backward_length(tensors[0], tensors[2] if len(tensors) > 2 else last)
        elif len(tensors) > 1:
            length = tensors[1].numel() // max(1, tensors[1].shape[0])
    elif "batch_norm" in base:
        length = first.numel() // max(1, first.shape[1] if first.dim() > 1 else 1)
    elif "attention" in base:
        length = max(first.shape[-1], tensors[1].shape[-2] if len(tensors) > 1 else 1)
    elif "dim" in operator.positions:
        length = _reduced(first.shape, argument(operator, args, kwargs, "dim"))
    elif base == "embedding_dense_backward":
        length = first.numel() // max(1, first.shape[-1])
    elif base in ("scatter_add", "index_add", "index_put", "_index_put_impl", "scatter_reduce", "scatter"):
        length = -(-last.numel() // max(1, first.numel()))
    elif base.startswith(("linalg_", "_linalg_", "cholesky", "triangular", "lu_")):
        length = first.shape[-1] if first.dim() else 1
    elif base in _SUMMING or any(part in base for part in ("loss", "entropy", "kl_div")):
        length = 1 if argument(operator, args, kwargs, "reduction", 1) == 0 else first.numel()
    return max(1, int(length))
