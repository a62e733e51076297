"""Convert the target of a node to text and back. What a dump may call is a closed table, and operators by a rule.

A dump may come from a stranger. Its text is never imported, evaluated or looked up by attribute. It is a key of a table
of functions that compute, or the name of an operator in torch's own registry. Of a module that the user names with
``--import`` it may call the module's own operators and functions, and neither names that the module merely imports, nor
anything behind an attribute: ``from os import system`` in the module gives a dump no shell.

Operators are allowed if they compute tensors and numbers from tensors and numbers. Operators are refused if they take a
storage, a file, a stream or an object, if they change where a tensor's memory is or ends, and if they do not check
indices. Private operators are only allowed if they are on a list. Most of torch's functions are operators by another
name, and are allowed if the operator is.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch

from checked_backend._torch.operators import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    custom_op_module,
    find_op_packet,
    has_dispatched,
    homes_of_operators,
    internal_functions,
    operator_names,
    registration_file,
)
from checked_backend.graphs.nodes import followed

_COMPUTING = ("aten", "prims", "quantized_decomposed")
_NAMED = frozenset({"inductor.accumulate_grad_", "inductor._mm_plus_mm", "rngprims.philox_rand"})

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
_REFUSAL = "a dump may not call this operator"
_FILE_ARGUMENT = re.compile(r"file|path|folder|dir$|ur[il]$")

# The first of each pair indexes without a check of the index. The second checks the index, and computes the same.
_CHECKED = {"aten._unsafe_index": "aten.index", "aten._unsafe_index_put": "aten.index_put"}


def checked_form(name: str) -> str:
    """The operator, ``namespace.name``, that replaces one without a check of its indices in a rebuilt graph."""
    return _CHECKED.get(name, name)


def is_custom(name: str) -> bool:
    """Whether an operator, ``namespace.name``, is none of torch's own."""
    namespace = name.partition(".")[0]
    return namespace not in _COMPUTING and namespace not in _TORCHS.split() and name not in _NAMED


def refusal_by_name(name: str) -> str | None:
    """Why a dump may not call an operator by its name, ``namespace.name`` or a higher-order one's; None if it may."""
    name = checked_form(name)
    namespace, dot, rest = name.rpartition(".")
    if not dot or namespace == "higher_order":
        if any(word in rest for word in _PROCESS_BOUND):
            return "it needs a kernel or an object that lived in the process that was traced"
        return None if rest in _HIGHER_ORDER.split() else _REFUSAL
    fine = _PRIVATE.fullmatch(rest) if rest.startswith("_") else not _REFUSED.fullmatch(rest)
    return None if name in _NAMED or is_custom(name) or (namespace in _COMPUTING and fine) else _REFUSAL


def operator_problem(called: OpOverload | OpOverloadPacket | HigherOrderOperator) -> str | None:
    """Why a dump may not call an operator, by its name and its schemas; None if it may."""
    if isinstance(called, HigherOrderOperator):
        return refusal_by_name(f"higher_order.{called.name()}")
    overloads = [called] if isinstance(called, OpOverload) else [getattr(called, name) for name in called.overloads()]
    # overloads that only TorchScript has compute with Python's own values
    overloads = [overload for overload in overloads if has_dispatched(overload)]
    if not overloads:
        return _REFUSAL
    name = overloads[0].name().partition(".")[0].replace("::", ".", 1)
    by_name = refusal_by_name(name)
    if by_name is not None:
        return by_name
    return next((why for overload in overloads for why in _schema_problems(overload, custom=is_custom(name))), None)


def _schema_problems(overload: OpOverload, *, custom: bool) -> Iterator[str]:
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
_PYTHON: Mapping[str, str] = {
    "torch": _TORCH,
    "torch.functional": "lu pca_lowrank svd_lowrank unique unravel_index",
    "torch.nn.functional": _FUNCTIONAL,
}
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


_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,200}"
_PATH = rf"{_NAME}(?:\.{_NAME}){{0,20}}"
_TARGET = re.compile(
    rf"op:(?P<operator>{_NAME}\.{_NAME})\.(?P<overload>{_NAME})|packet:(?P<packet>{_NAME}\.{_NAME})"
    rf"|higher_order:(?P<higher_order>{_NAME})|method:(?P<method>{_NAME})|function:(?P<module>{_PATH}):(?P<function>{_PATH})"
)
_EMPTY = r"(?:empty|empty_like|empty_strided|empty_permuted|new_empty|new_empty_strided)"
_UNINITIALIZED = re.compile(
    rf"op:(?:aten|prims)\.{_EMPTY}\.\w+|packet:(?:aten|prims)\.{_EMPTY}|function:torch[\w.]*:{_EMPTY}|method:{_EMPTY}"
)
_LISTED = "it is not among the functions of torch and Python that a dump may call"
_NEVER = ("torch", "checked_backend", "builtins", *sys.stdlib_module_names)


class Unresolved(Exception):
    """Raised for a target that does not exist here, or that a dump may not call."""


@dataclass(frozen=True, slots=True)
class Trusted:
    """The operators and functions that a dump may call besides torch's own.

    Attributes:
        operators: The operators that were registered while these modules were imported, as ``namespace::name``; None
            if every operator that this program registered is trusted.
    """

    modules: frozenset[str] = frozenset()
    operators: frozenset[str] | None = None

    def operator(self, name: str) -> bool:
        """Whether an operator that is not torch's, ``namespace::name``, may be called: a module registered it."""
        if self.operators is None:
            return True
        home = custom_op_module(name)
        if home is not None:
            return any(_top(home) == _top(module) for module in self.modules)
        file = registration_file(name)
        if file.endswith(".py") and not _is_in_package(file, "torch"):
            own = {getattr(sys.modules.get(module), "__file__", None) for module in self.modules}
            return file in own or any(_is_in_package(file, _top(module)) for module in self.modules)
        # registered in C++, or by torch for another module: its owner is unknown, but not when it was registered
        namespace = _plain(name.partition("::")[0])
        return name in self.operators or any(namespace == _plain(_top(module)) for module in self.modules)


def encode_target(op: str, target: Any) -> str:
    """The text of the target of a node with this opcode.

    Returns:
        ``op:aten.add.Tensor``, ``packet:mylib.foo``, ``higher_order:cond``, ``function:torch:cat``, ``method:view``,
        or the name itself for placeholders, attributes and the output.
    """
    if op in ("placeholder", "get_attr", "output", "call_module"):
        return str(target)
    if op == "call_method":
        return f"method:{target}"
    if isinstance(target, OpOverload):
        return f"op:{target}"
    if isinstance(target, HigherOrderOperator):
        return f"higher_order:{target.name()}"
    if isinstance(target, OpOverloadPacket):
        return f"packet:{target}"
    known = known_function(target)
    if known is not None:
        return f"function:{known}"
    module = getattr(target, "__module__", None) or type(target).__module__
    return f"function:{module}:{getattr(target, '__qualname__', type(target).__qualname__)}"


def needed_import(text: str) -> str | None:
    """The module that must be imported before a target can be resolved or run; None if torch is enough."""
    match = _TARGET.fullmatch(text)
    name = match and (match["operator"] or match["packet"])
    if name and is_custom(name):
        return custom_op_module(name.replace(".", "::", 1)) or f"the module that registers {name.partition('.')[0]}::"
    return match["module"] if match and text.removeprefix("function:") not in functions() else None


def known_function(function: Any) -> str | None:
    """``module:name`` of a function that a dump may call; None for any other function."""
    return function_names().get(function) if callable(function) and type(function).__hash__ is not None else None


def is_importable(text: str, target: Any) -> bool:
    """Whether a function's text, from `encode_target`, leads to it again in a process that imports its module."""
    match = _TARGET.fullmatch(text)
    if match is None or match["function"] is None:
        return False
    return followed(sys.modules.get(match["module"]), match["function"]) is target


def leaves_uninitialized(text: str) -> bool:
    """Whether a target's result is uninitialised memory."""
    return _UNINITIALIZED.fullmatch(text) is not None


def checked_target(text: str) -> re.Match[str]:
    """The parts of a target, whether or not it is registered here; `Unresolved` where a dump may not call it."""
    match = _TARGET.fullmatch(text)
    if match is None:
        why: str | None = "it names no operator, function or method"
    elif match["method"]:
        why = None if is_allowed_method(match["method"]) else "a dump may not call this method"
    elif match["function"]:
        torchs = _top(match["module"]) == "torch" and text.removeprefix("function:") not in functions()
        why = f"a dump may not call this function; {_LISTED}" if torchs else None
    else:
        why = refusal_by_name(match["operator"] or match["packet"] or match["higher_order"])
    if match is None or why is not None:
        raise Unresolved(f"{text[:300]!r}: {why}")
    return match


def resolve_target(text: str, trusted: Trusted | None = None) -> Any:
    """The target for a text of `encode_target`. By default every operator that this program registered is trusted.

    Raises:
        Unresolved: The target is not registered here, or a dump may not call it.
    """
    match = checked_target(text)
    trusted = trusted or Trusted()
    if match["method"]:
        return match["method"]
    if match["function"]:
        return _function(text, match["module"], match["function"], trusted)
    name = match["operator"] or match["packet"]
    found: Any = find_op_packet(*(checked_form(name).split(".") if name else ("higher_order", match["higher_order"])))
    if match["overload"]:
        known = isinstance(found, OpOverloadPacket) and match["overload"] in found.overloads()
        found = getattr(found, match["overload"]) if known else None
    if not isinstance(found, (OpOverload, OpOverloadPacket) if name else HigherOrderOperator):
        raise Unresolved(f"{text!r} is not registered here{_hint(text)}")
    if name and is_custom(name) and not trusted.operator(name.replace(".", "::", 1)):
        raise Unresolved(f"{text!r} is not an operator of a module that you named{_hint(text)}")
    why = operator_problem(found)
    if why is not None:
        raise Unresolved(f"{text!r}: {why}")
    return found


def provides_nothing(module: str) -> bool:
    """Whether naming a module allows nothing more. Of torch and Python, a dump may call only the listed functions."""
    return _top(module) in _NEVER and module != "__main__"


def _function(text: str, module: str, name: str, trusted: Trusted) -> Callable[..., Any]:
    """A function on the list, or one that a trusted module defines itself."""
    known = functions().get(f"{module}:{name}")
    if known is not None:
        return known
    if module not in trusted.modules:
        raise Unresolved(f"{text!r}: {_LISTED}{_hint(text)}")
    if provides_nothing(module):
        raise Unresolved(f"{text!r}: of {module}, a dump may call what is on the list only")
    home = sys.modules.get(module)
    found = vars(home).get(name) if isinstance(home, ModuleType) else None
    if found is None:
        raise Unresolved(f"{text!r}: {module} has no function {name!r}")
    if name.startswith("__") or not isinstance(found, FunctionType):
        raise Unresolved(f"{text!r}: {module}.{name} is no plain function")
    # A decorator may wrap the function, but the function inside must be the module's own. Its ``__module__`` does not
    # show that: numpy.load, which opens files, has the ``__module__`` numpy.
    namespace = getattr(inspect.unwrap(found), "__globals__", {})
    if found.__module__ != module or found.__qualname__ != name or namespace is not vars(home):
        elsewhere = namespace.get("__name__", found.__module__)
        raise Unresolved(f"{text!r}: {module}.{name} is defined elsewhere, in {elsewhere}")
    return found


def _top(module: str) -> str:
    return module.partition(".")[0]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _is_in_package(file: str, package: str) -> bool:
    return any(Path(file).is_relative_to(path) for path in getattr(sys.modules.get(package), "__path__", ()))


def _hint(text: str) -> str:
    match = _TARGET.fullmatch(text)
    if match and match["function"]:
        name = match["function"]
        if provides_nothing(match["module"]) or "." in name or name.startswith("__"):
            return ", whatever is imported"
    needed = needed_import(text)
    return "" if needed is None else f". Import {needed} first, if you trust it"
