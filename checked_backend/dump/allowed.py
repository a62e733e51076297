"""What a dump may call: a closed table of functions and methods, and operators by a rule that fits a newer torch too.

Operators are allowed if they compute tensors and numbers from tensors and numbers. Operators are refused if they take a
storage, a file, a stream or an object, if they change where a tensor's memory is or ends, and if they do not check
indices. Private operators are only allowed if they are on a list. Most of torch's functions are operators by another
name, and are allowed if the operator is.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from checked_backend._torch.operators import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    find_op_packet,
    has_dispatched,
    homes_of_operators,
    internal_functions,
    operator_names,
)

__all__ = [
    "checked_form",
    "function_names",
    "functions",
    "is_allowed_method",
    "is_attribute",
    "is_custom",
    "operator_problem",
    "refusal_by_name",
]

_TENSORS = ("aten", "prims")
_NAMED = frozenset({"inductor.accumulate_grad_", "inductor._mm_plus_mm", "rngprims.philox_rand"})
_FAMILIES = ("quantized_decomposed",)

# Other namespaces that torch itself registers. Custom operators have namespaces of their own.
_TORCHS = (
    "_c10d_functional _c10d_functional_autograd _caffe2 _dtensor _inductor_test _native _quantized _test aoti "
    "aoti_torch c10d c10d_functional caffe2 cuda debug_mode_ops debugprims executorch export fbgemm flex_lib fsdp "
    "inductor inductor_prims mkl mkldnn mkldnn_prepacked mta onednn onnx onnx_symbolic opaque_lib prepacked prim "
    "profiler quantization quantized rngprims rpc sparse static_runtime streams symm_mem tensorexpr torch_attn "
    "torch_c10d triton xnnpack loaded_libraries classes higher_order"
)

_HIGHER_ORDER = (
    "associative_scan auto_functionalized auto_functionalized_v2 autograd_function_apply cond flex_attention "
    "flex_attention_backward foreach_map graphsafe_run_with_rng_state hints_wrapper invoke_quant invoke_quant_packed "
    "invoke_subgraph local_map_hop map_impl out_dtype run_and_save_rng_state run_const_graph run_with_rng_state scan "
    "strict_mode tag_activation_checkpoint while_loop while_loop_stack_output with_effects wrap "
    "wrap_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled"
)
# Kernels and objects that exist only in the process that traced them.
_PROCESS_BOUND = ("triton_kernel_wrap", "call_torchbind", "aoti_call_delegate", "executorch_call_delegate")

# Operators whose names begin with an underscore are steps of others: torch calls them with arguments that it has
# checked, and some kernels rely on that. Those that Dynamo, AOT autograd and torch's decompositions write into graphs
# are allowed.
_PRIVATE = re.compile(
    r"""
      __(i?(and|or|xor|lshift|rshift))__
    | _to_copy | _reshape_copy | _(conj|neg_view)(_copy)? | _conj_physical | _shape_as_tensor | _cast_[A-Z][a-z]+
    | _unsafe_(index|index_put|view|masked_index|masked_index_put_accumulate) | _chunk_cat | _pad_(circular|enum)
    | _local_scalar_dense | _efficientzerotensor | _version | _make_dual(_copy)? | _unpack_dual
    | _make_(dep_)?token | _sink_tokens | _is_(all|any)_true
    | _(functional_)?assert_(async|scalar|tensor_metadata) | _functional_sym_constrain_range(_for_size)?
    | _foreach_\w+ | _fused_(adam|adamw|sgd|adagrad)_? | _amp_(foreach_non_finite_check_and_unscale|update_scale)_?
    # layers and their gradients
    | _(log_|safe_|masked_)?softmax | _(log_)?softmax_backward_data | _masked_softmax_backward | _masked_scale
    | _scaled_dot_product_(?!\w*mps)\w+ | _(flash|efficient|cudnn)_attention_(forward|backward) | _fused_dropout
    | _native_multi_head_attention | _transformer_encoder_layer_fwd
    | _native_batch_norm_legit(_functional|_no_training)? | _batch_norm_with_update(_functional)?
    | _fused_rms_norm(_backward)? | _weight_norm(_interface|_differentiable)?(_backward)? | _prelu_kernel(_backward)?
    | _convolution(_mode)? | _adaptive_avg_pool[23]d(_backward)? | _low_memory_max_pool_\w+
    | _upsample_\w+ | _trilinear | _(cudnn_)?ctc_loss(_backward)?
    | _embedding_bag(_forward_only|(_dense|_per_sample_weights)?_backward)?
    | _cudnn_rnn(_backward|_flatten_weight)? | _thnn_fused_(gru|lstm)_cell(_backward)?(_impl)?
    | _pack_padded_sequence(_backward)? | _pad_packed_sequence
    # linear algebra, transforms, statistics
    | _addmm_activation | _(int|grouped|scaled|scaled_grouped)_mm(_v2)?
    | _weight_int[48]pack_mm(_for_cpu|_with_scales_and_zeros)? | _convert_weight_to_int4pack(_for_cpu)?
    | _linalg_(check_errors|det|eigh|eigvals|slogdet|solve_ex|svd) | _lu_with_info | _logcumsumexp
    | _fft_(c2c|c2r|r2c) | _(cdist|pdist)_(forward|backward) | _euclidean_dist | _histogramdd_\w+ | _unique2?
    | _standard_gamma(_grad)? | _sample_dirichlet | _dirichlet_grad | _philox_\w+
    # quantization-aware training
    | _fake_quantize_\w+ | _fused_moving_avg_obs_fq_helper(_functional)? | _choose_qparams_per_\w+
    """,
    re.VERBOSE,
)
_REFUSED = re.compile(
    r"""
      .*resize.* | set_? | set_data | .*(?<!sym_)storage(?!_offset$).*   # where memory is, and where it ends
    | (?!unsafe_(?:chunk|split|split_with_sizes)$).*unsafe.*
    | to_mkldnn.* | from_file | save | load | data | record_stream | pin_memory
    | retain_grad | get_gradients | set_.* | manual_seed | .*plan_cache.*
    | .*sparse.* | .*_(csr|csc|bsr|bsc|coo).* | (coalesced?|indices|values|spdiags|spsolve|nnz)(_|_copy)?
    | (ccol|col|crow|row)_indices(_copy)? | hspmm | sspaddmm | smm | .*(nested|jagged).*
    | quantize_.* | quantized_.* | q_.* | qscheme | .*affine_quantized.* | empty_quantized | .*quantized_tensor.*
    | int_repr.* | dequantize.* | fbgemm_.* | choose_qparams_optimized | .*(mps|vulkan|nnpack|miopen_rnn|_xla).*
    """,
    re.VERBOSE,
)
_PLAIN_TYPE = re.compile(
    r"(Optional\[|List\[)*"
    r"(Tensor|int|SymInt|float|bool|number|complex|str|ScalarType|Layout|Device|MemoryFormat|Generator)\]*"
)
_TEXT = re.compile(r"\bstr\b")
_WORDS = (
    "norm reduce rounding_mode interpolation interpolation_mode padding_mode driver UPLO approximate ord side padding "
    "mode activation p algorithm padding_side pad_mode equation indexing assert_msg api_name reduction"
)
# names of dimensions, which torch 2.11 and 2.12 take in overloads of the most common operators
_DIMENSIONS = "dim dims start_dim end_dim dim0 dim1 dim2 out_dim outdim names"
_FILE_ARGUMENT = re.compile(r"file|path|folder|dir$|ur[il]$")

# The first of each pair indexes without a check of the index. The second checks the index, and computes the same.
_CHECKED = {"aten._unsafe_index": "aten.index", "aten._unsafe_index_put": "aten.index_put"}


def checked_form(name: str) -> str:
    """The operator, ``namespace.name``, that replaces one without a check of its indices in a rebuilt graph."""
    return _CHECKED.get(name, name)


def is_custom(name: str) -> bool:
    """Whether an operator, ``namespace.name``, is none of torch's own."""
    namespace = name.partition(".")[0]
    return namespace not in (*_TENSORS, *_FAMILIES) and namespace not in _TORCHS.split() and name not in _NAMED


def refusal_by_name(name: str) -> str | None:
    """Why a dump may not call an operator, by its name alone; None if it may.

    Args:
        name: ``namespace.name``, or the name of a higher-order operator.
    """
    name = checked_form(name)
    namespace, dot, rest = name.rpartition(".")
    if not dot or namespace == "higher_order":
        if any(word in rest for word in _PROCESS_BOUND):
            return "it needs a kernel or an object that lived in the process that was traced"
        return None if rest in _HIGHER_ORDER.split() else "a dump may not call this operator"
    if name in _NAMED or is_custom(name):
        return None
    if namespace in (*_TENSORS, *_FAMILIES):
        fine = _PRIVATE.fullmatch(rest) if rest.startswith("_") else not _REFUSED.fullmatch(rest)
        if fine:
            return None
    return "a dump may not call this operator"


def operator_problem(called: OpOverload | OpOverloadPacket | HigherOrderOperator) -> str | None:
    """Why a dump may not call an operator, by its name and its schemas; None if it may."""
    if isinstance(called, HigherOrderOperator):
        return refusal_by_name(f"higher_order.{called.name()}")
    if isinstance(called, OpOverload):
        overloads = [called]
    else:
        overloads = [getattr(called, name) for name in called.overloads()]
        # overloads that only TorchScript has compute with Python's own values
        overloads = [overload for overload in overloads if has_dispatched(overload)]
        if not overloads:
            return "a dump may not call this operator"
    name = overloads[0].name().partition(".")[0].replace("::", ".", 1)
    by_name = refusal_by_name(name)
    if by_name is not None:
        return by_name
    return next((why for overload in overloads for why in _schema_problems(overload, custom=is_custom(name))), None)


def _schema_problems(overload: OpOverload, *, custom: bool) -> Iterator[str]:
    if not has_dispatched(overload):
        yield "a dump may not call this operator"
    schema = overload._schema
    for argument in schema.arguments:
        kind = str(argument.real_type)
        if _TEXT.search(kind) and _FILE_ARGUMENT.search(argument.name.lower()):
            yield f"a dump may not call an operator that opens a file ({argument.name})"
        if not _PLAIN_TYPE.fullmatch(kind):
            yield f"a dump may not call an operator that takes a {kind} ({argument.name})"
        if not custom and _TEXT.search(kind) and argument.name not in _WORDS.split() + _DIMENSIONS.split():
            yield f"a dump may not call an operator that takes a text ({argument.name})"
    for returned in schema.returns:
        if not _PLAIN_TYPE.fullmatch(str(returned.real_type)):
            yield f"a dump may not call an operator that returns a {returned.real_type}"


@functools.cache
def _allowed_packets() -> Collection[str]:
    """The names of the operators in ``aten`` that a dump may call, without the namespace."""
    names = [name for name in operator_names("aten") if refusal_by_name(f"aten.{name}") is None]
    packets = {name: find_op_packet("aten", name) for name in names}
    return frozenset(name for name, packet in packets.items() if packet is not None and not operator_problem(packet))


# functions that are written in Python, or made of several operators
_TORCH = (
    "Size _check _check_is_size _constrain_as_size _sym_sqrt as_tensor asarray autocast_decrement_nesting "
    "autocast_increment_nesting broadcast_shapes is_autocast_enabled is_grad_enabled is_tensor lobpcg "
    "set_autocast_enabled sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum tensor unravel_index"
)
_FUNCTIONAL = (
    "_threshold adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices "
    "affine_grid cross_entropy dropout1d dropout2d dropout3d fold fractional_max_pool2d_with_indices "
    "fractional_max_pool3d_with_indices gaussian_nll_loss grid_sample grouped_mm gumbel_softmax interpolate "
    "linear_cross_entropy local_response_norm lp_pool1d lp_pool2d lp_pool3d max_unpool1d multi_head_attention_forward "
    "multilabel_soft_margin_loss normalize scaled_grouped_mm scaled_mm softmin softsign tanhshrink "
    "triplet_margin_with_distance_loss upsample upsample_bilinear upsample_nearest"
)
_PYTHON: Mapping[str, str] = MappingProxyType(
    {
        "torch": _TORCH,
        "torch.functional": "lu pca_lowrank svd_lowrank unique unravel_index",
        "torch.nn.functional": _FUNCTIONAL,
    }
)
_METHODS = (
    "__contains__ __getitem__ __len__ __setitem__ bfloat16 bool byte cdouble cfloat char cpu cuda dim dim_order "
    "double element_size float half int is_contiguous long lu ndimension nelement new_tensor numel short size split "
    "storage_offset stride type unflatten unique xpu"
)
_OPERATORS = (
    "abs add and_ concat contains delitem eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul "
    "index inv invert ior ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos "
    "pow rshift setitem sub truediv truth xor"
)
_BUILTINS = "abs bool complex divmod float getattr int len list max min pow range round slice sum tuple"
_MATH = (
    "acos acosh asin asinh atan atan2 atanh cbrt ceil comb copysign cos cosh degrees dist erf erfc exp exp2 expm1 fabs "
    "factorial floor fmod frexp fsum gamma gcd hypot isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 "
    "log1p log2 modf nextafter perm pow prod radians remainder sin sinh sqrt tan tanh trunc ulp"
)
_ATTRIBUTES = "H T data device dtype grad imag is_cuda mH mT ndim real requires_grad shape"


def is_attribute(name: object) -> bool:
    """Whether a graph may read this attribute of a tensor with ``getattr``."""
    return isinstance(name, str) and name in _ATTRIBUTES.split()


def is_allowed_method(name: str) -> bool:
    """Whether a graph may call this method of a tensor."""
    return name in _METHODS.split() or name in _allowed_packets()


@functools.cache
def functions() -> Mapping[str, Callable[..., Any]]:
    """All functions that a dump may call, by ``module:name``."""
    table: dict[str, Callable[..., Any]] = {}
    for home, (owner, prefix) in homes_of_operators().items():
        names = {name.removeprefix(prefix) for name in _allowed_packets() if name.startswith(prefix)}
        names |= {*_PYTHON.get(home, "").split()}
        if owner is torch.Tensor:
            names |= {name for name in _METHODS.split() if not name.startswith("_")}
        for name in sorted(names):
            function = getattr(owner, name, None)
            if callable(function) and not isinstance(function, ModuleType):
                table[f"{home}:{name}"] = function
    table |= internal_functions()
    for module, names_there in ((operator, _OPERATORS), (builtins, _BUILTINS), (math, _MATH)):
        table |= {
            f"{module.__name__}:{name}": getattr(module, name)
            for name in names_there.split()
            if hasattr(module, name)  # newer Pythons have more functions
        }
    return MappingProxyType(table)


@functools.cache
def function_names() -> Mapping[Callable[..., Any], str]:
    """The reverse of `functions`."""
    return MappingProxyType({function: name for name, function in reversed(list(functions().items()))})
