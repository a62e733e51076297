"""Rerun an eager program, forward and backward, in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.modes import DisableTorchDispatch
from checked_backend._torch.operators import OpOverload, decomposition
from checked_backend.graphs.operators import Operator, argument
from checked_backend.modes.base import OperatorMode, tensors_in
from checked_backend.modes.grouped_mm import grouped_mm
from checked_backend.tensors.float64_copies import (
    Float64Copies,
    PromotionError,
    promoted_dtype,
    to_float64,
)

__all__ = ["Float64Mode", "PromotionError", "to_float64"]

_REFUSED_NAMESPACES = ("quantized", "onednn", "mkldnn", "_quantized")
_REFUSED_NAMES = re.compile(
    r"_scaled_mm|_scaled_grouped_mm|quantize|_weight_int[48]pack|_int4_|int_repr|^mkldnn|qlinear"
)
# The messages of kernels that were not written for float64.
_NO_KERNEL = re.compile(
    r"not implemented for '?(Complex)?Double|not supported for (Complex)?Double"
    r"|[Ee]xpected.*(Half|Float|BFloat16).*Double|only supports?.*([Ff]loat|[Hh]alf)"
    r"|expected.*dtype|[Uu]nsupported.*([Dd]ouble|float64)",
    re.DOTALL,
)
# Kernels whose constants (1/6) are float32 even in float64. Their own decompositions are better.
_COARSE = ("aten.hardsigmoid_backward.default",)
# Operators without a float64 kernel, each with a function that computes its meaning.
_MEANINGS = {"aten._grouped_mm.default": grouped_mm}
_HALF_TO_FLOAT = ("_softmax", "_log_softmax")


class Float64Mode(OperatorMode):
    """Run a program in float64 (complex128), whatever it asks for.

    dtype arguments and casts to a floating dtype become float64, and so does the default dtype while the mode is
    active. A program may hold low-precision tensors (constants, buffers that are not among the promoted inputs). Where
    an operator meets one, a float64 copy of its memory replaces it. In-place operators change that copy, never the
    original. A tensor whose gradient is taken must come from :func:`to_float64`, because autograd itself refuses a
    float64 gradient of a float32 leaf. Autocast does not cast float64.

    Args:
        default_dtype: Whether to set torch's default dtype to float64. It belongs to the whole process, so leave it
            alone for a program that does not depend on it (one that makes no floating tensor out of integers or of
            nothing).
        coarse: Whether to use kernels as they are that have float32 constants in float64. A program compiled in float64
            may call such a kernel, or its decomposition. The difference of the two belongs to float64's noise.

    Attributes:
        lossy: Names of operators that returned low precision even so. Their results were converted to float64, but
            computed with less.

    Raises:
        PromotionError: From the program, at the first operator without meaning or kernel in float64: bit casts,
            quantised and scaled products.
    """

    def __init__(self, *, default_dtype: bool = True, coarse: bool = False) -> None:
        super().__init__()
        self._coarse = coarse
        self._default_dtype = default_dtype
        self.lossy: set[str] = set()
        self._float64_copies = Float64Copies()
        self._before: list[torch.dtype] = []

    def __enter__(self) -> OperatorMode:
        self._before.append(torch.get_default_dtype())
        if self._default_dtype:
            torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        dtype = self._before.pop()
        if self._default_dtype:
            torch.set_default_dtype(dtype)

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator on promoted tensors and dtypes."""
        if _is_traced(args, kwargs):  # torch asks for the layout of a result, and remembers the answer
            return func(*args, **kwargs)
        self._refuse(func, operator, args, kwargs)
        args = tuple([self._promote(value, operator) for value in args])
        if kwargs:
            kwargs = {name: self._promote(value, operator) for name, value in kwargs.items()}
        if operator.base in _HALF_TO_FLOAT and len(args) > 2 and args[2] and args[0].dtype == torch.float64:
            args = (*args[:2], False, *args[3:])
        try:
            result = self._kernel(func, operator)(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if _NO_KERNEL.search(str(error)):
                raise PromotionError(f"{operator.name} cannot run in float64: {error}") from error
            raise
        return self._check(result, operator)

    def _kernel(self, func: OpOverload, operator: Operator) -> Callable[..., Any]:
        if operator.name in _COARSE and not self._coarse:
            return decomposition(func)
        return _MEANINGS.get(operator.name, func)

    @staticmethod
    def _refuse(func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func.namespace in _REFUSED_NAMESPACES or _REFUSED_NAMES.search(operator.base):
            raise PromotionError(f"{operator.name} (quantised or scaled low precision) has no meaning in float64.")
        if operator.name in ("aten.view.dtype", "aten.view_copy.dtype"):
            target = argument(operator, args, kwargs, "dtype")
            floating = _is_float(args[0].dtype) or _is_float(target)
            if floating and args[0].dtype != target:
                raise PromotionError(
                    f"{operator.name} from {args[0].dtype} to {target} reads bits, which has no meaning in float64."
                )
        if operator.base == "set" and "Storage" in operator.name and _is_float(args[0].dtype):
            raise PromotionError(f"{operator.name} on a floating tensor reads raw memory, which is not in float64.")

    def _promote(self, value: Any, operator: Operator) -> Any:
        if isinstance(value, torch.Tensor):
            dtype = value.dtype
            if dtype is torch.float64 or not _is_float(dtype):
                if value.is_quantized:
                    raise PromotionError(f"{operator.name} takes a quantised tensor, which has no meaning in float64.")
                return value
            return self._float64_copies.of(value)
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self._promote(item, operator) for item in value])
        return promoted_dtype(value) if kind is torch.dtype else value

    def _check(self, result: Any, operator: Operator) -> Any:
        """Convert results that are in low precision even so, and note the operator."""
        if isinstance(result, torch.Tensor):
            dtype = result.dtype
            if dtype is torch.float64 or promoted_dtype(dtype) == dtype:
                return result
            if result.device.type == "meta":
                return result
            self.lossy.add(operator.name)
            with DisableTorchDispatch():
                return result.to(promoted_dtype(dtype))
        if isinstance(result, (list, tuple)):
            return type(result)([self._check(item, operator) for item in result])
        return result


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator computes no values, but only finds out what its result would look like."""
    if any(isinstance(arg, FakeTensor) for arg in tensors_in(args)):
        return True
    device = kwargs.get("device")
    return isinstance(device, torch.device) and device.type == "meta"
