"""The functions and methods that a dump may call, by name: a closed table.

Most of torch's functions are operators by another name, and are allowed if the operator is. The others are listed here.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from checked_backend._torch.operators import homes_of_operators, internal_functions
from checked_backend.dump.operators import allowed_packets

__all__ = ["function_names", "functions", "is_allowed_method", "is_attribute"]

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
    return name in _METHODS.split() or name in allowed_packets()


@functools.cache
def functions() -> Mapping[str, Callable[..., Any]]:
    """All functions that a dump may call, by ``module:name``."""
    table: dict[str, Callable[..., Any]] = {}
    for home, (owner, prefix) in homes_of_operators().items():
        names = {name.removeprefix(prefix) for name in allowed_packets() if name.startswith(prefix)}
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
