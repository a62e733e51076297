"""Which operators a dump may call: a rule on their schemas, so that it holds for those of a newer torch too.

Allowed is what computes tensors and numbers of tensors and numbers. Refused are operators that take a storage, a file,
a stream or an object; that change where a tensor's memory is or ends; and that take the caller's word for indices.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator

from checked_backend._torch import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    find_op_packet,
    has_dispatched,
    operator_names,
)

__all__ = ["allowed_packets", "checked_form", "is_custom", "operator_problem", "refusal_by_name"]

_TENSORS = ("aten", "prims")
_NAMED = frozenset({"inductor.accumulate_grad_", "inductor._mm_plus_mm", "rngprims.philox_rand"})
_FAMILIES = ("quantized_decomposed",)

# What torch itself registers, besides what is above. Whoever has other operators registers them in a namespace of his.
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
# Kernels and objects that only live in the process that traced them.
_PROCESS_BOUND = ("triton_kernel_wrap", "call_torchbind", "aoti_call_delegate", "executorch_call_delegate")

_REFUSED = re.compile(
    r"""
      .*resize.* | set_? | set_data | .*(?<!sym_)storage(?!_offset$).*   # where memory is, and where it ends
    | (?!unsafe_(?:chunk|split|split_with_sizes)$|_unsafe_(?:view|masked_index|masked_index_put_accumulate)$).*unsafe.*
    | _reshape_alias(_copy)? | _lazy_clone | _index_put_impl_? | _copy_from.* | _fw_primal.* | _mkldnn_.* | to_mkldnn.*
    | from_file | save | load | data | record_stream | _?pin_memory | _print | _foobar | _test_.* | _propagate_xla_data
    | _backward | retain_grad | get_gradients | set_.* | manual_seed | .*plan_cache.* | _(add|remove)_batch_dim
    | .*sparse.* | .*_(csr|csc|bsr|bsc|coo).* | _?(coalesced?|indices|values|spdiags|spsolve|nnz)(_|_copy)? | spsolve
    | _?(ccol|col|crow|row)_indices(_copy)? | _convert_indices.* | _validate_.* | hspmm | sspaddmm | smm
    | .*(nested|jagged).* | _?(dim[IV])
    | quantize_.* | quantized_.* | q_.* | qscheme | .*affine_quantized.* | empty_quantized | .*quantized_tensor.*
    | int_repr.* | _?dequantize.* | fbgemm_.* | _wrapped_.* | _dyn_quant.* | _cslt_.* | _rowwise_prune | _sobol_.*
    | choose_qparams_optimized | _mixed_dtypes_linear | .*(mps|vulkan|nnpack|miopen_rnn|_xla).*
    # steps of a kernel that trust it, and that no traced graph holds
    | _batch_norm_(impl_index(_backward)?|no_update) | _cholesky_solve_helper | _compute_linear_combination | _stack
    | _conv_depthwise2d | _convolution_double_backward | _debug_has_internal_overlap | _slow_conv2d_.* | _dim_arange
    | _grid_sampler_2d_cpu_fallback(_backward)? | _reshape_from_tensor | _cum(max|min)_helper
    | _new_zeros_with_same_feature_meta | _thnn_differentiable_.*
    | _transform_bias_rescale_qkv | _saturate_weight_to_fp16 | _segment_reduce_backward
    | _cudnn_init_dropout_state | _triton_.* | _has_compatible_shallow_copy_type
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
_FILE_ARGUMENT = re.compile(r"file|path|folder|dir$|ur[il]$")

# They index without looking whether the index is there. These look, and compute the same.
_CHECKED = {"aten._unsafe_index": "aten.index", "aten._unsafe_index_put": "aten.index_put"}


def checked_form(name: str) -> str:
    """The operator, ``namespace.name``, that stands in a rebuilt graph for one that does not check its indices."""
    return _CHECKED.get(name, name)


def is_custom(name: str) -> bool:
    """Whether an operator, ``namespace.name``, is none of torch's own."""
    namespace = name.partition(".")[0]
    return namespace not in (*_TENSORS, *_FAMILIES) and namespace not in _TORCHS.split() and name not in _NAMED


def refusal_by_name(name: str) -> str | None:
    """Why a dump may not call an operator, as far as its name says; None if it may.

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
    if namespace in (*_TENSORS, *_FAMILIES) and not _REFUSED.fullmatch(rest):
        return None
    return "a dump may not call this operator"


def operator_problem(operator: OpOverload | OpOverloadPacket | HigherOrderOperator) -> str | None:
    """Why a dump may not call an operator, by its name and its schemas; None if it may."""
    if isinstance(operator, HigherOrderOperator):
        return refusal_by_name(f"higher_order.{operator.name()}")
    if isinstance(operator, OpOverload):
        overloads = [operator]
    else:
        overloads = [getattr(operator, name) for name in operator.overloads()]
        # those that only TorchScript has compute with Python's own values
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
        if not custom and _TEXT.search(kind) and argument.name not in _WORDS.split():
            yield f"a dump may not call an operator that takes a text ({argument.name})"
    for returned in schema.returns:
        if not _PLAIN_TYPE.fullmatch(str(returned.real_type)):
            yield f"a dump may not call an operator that returns a {returned.real_type}"


@functools.cache
def allowed_packets() -> Collection[str]:
    """The names of the operators in ``aten`` that a dump may call, without the namespace."""
    names = [name for name in operator_names("aten") if refusal_by_name(f"aten.{name}") is None]
    packets = {name: find_op_packet("aten", name) for name in names}
    return frozenset(name for name, packet in packets.items() if packet is not None and not operator_problem(packet))
