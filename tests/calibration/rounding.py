"""Run an ATen graph with roundings that a correct compiler may have, and eager has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

aten = torch.ops.aten

VARIANTS: dict[str, dict[str, bool]] = {
    # Inductor's decompositions alone
    "decomposed": {},
    # half precision is kept in float32 between products, as in a fused kernel
    "fused": {"fused": True},
    # sums run sequentially in 16 lanes, products are split along the reduction
    "reordered": {"reordered": True},
    # a multiplication and an addition round once
    "contracted": {"contracted": True},
    # elementary functions and quotients that are not 0 are too large by one unit in the last place, always
    "library": {"library": True},
    "everything": {"fused": True, "reordered": True, "contracted": True, "library": True},
}
"""Clean candidates by name."""

_LOW = (torch.bfloat16, torch.float16)
_LANES = 16

# What a fused kernel does not contain: these read and write memory in the dtype that the graph says.
_KERNELS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "_fft_r2c", "_fft_c2r", "_fft_c2c")
_ELEMENTARY = ("exp", "log", "tanh", "sigmoid", "erf", "sin", "cos", "rsqrt", "pow", "log1p", "expm1", "div")
_ELEMENTARY += ("reciprocal",)


def _float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64, *_LOW)


class Rounding(fx.Interpreter):
    """Runs a graph of AOT autograd.

    Args:
        graph: The graph.
        fused: Keep half precision in float32, except where matrix products and convolutions read it, and in results.
        reordered: Add up in another order.
        contracted: Round once for a product and the sum it goes into.
        library: Make elementary functions wrong by one unit in the last place.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        *,
        fused: bool = False,
        reordered: bool = False,
        contracted: bool = False,
        library: bool = False,
    ) -> None:
        super().__init__(graph, garbage_collect_values=not contracted)  # the factors of a product are read again
        self.extra_traceback = False
        self._fused, self._reordered, self._contracted, self._library = fused, reordered, contracted, library

    def run_node(self, n: fx.Node) -> Any:
        """Run one node with the roundings asked for."""
        if n.op == "output":
            values = [self.env[arg] if isinstance(arg, fx.Node) else arg for arg in n.args[0]]
            return tuple(
                _nominal(arg, value) if isinstance(arg, fx.Node) else value
                for arg, value in zip(n.args[0], values, strict=True)
            )
        if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        name = n.target._schema.name.split("::")[1]
        if self._fused and name not in _KERNELS and not n.target._schema.is_mutable:
            args, kwargs = tree_map(_raised, args), tree_map(_raised, kwargs)
        else:
            args, kwargs = self._as_written(n)
        try:
            result = self._call(n, name, args, kwargs)
        except RuntimeError:  # an operator that wants equal dtypes
            args, kwargs = self._as_written(n)
            result = n.target(*args, **kwargs)
        if self._library and name in _ELEMENTARY and _float(result):
            # no library returns anything but 0 for 0 / 4 or log(1), and next to 0 is no unit in the last place
            wrong = torch.nextafter(result, torch.full_like(result, torch.inf))
            kept = result == 0
            if name == "div":  # nor anything but the half for x / 2
                divisor = torch.as_tensor(args[1], dtype=torch.float64)
                kept = kept | (torch.frexp(divisor).mantissa.abs() == 0.5)
            result = torch.where(kept, result, wrong)
        return result

    def _as_written(self, n: fx.Node) -> tuple[Any, Any]:
        def value_of(node: fx.Node) -> Any:
            return _nominal(node, self.env[node])

        return fx.map_arg(n.args, value_of), fx.map_arg(n.kwargs, value_of)

    def _call(self, n: fx.Node, name: str, args: Any, kwargs: Any) -> Any:
        if self._fused and name in ("_to_copy", "convert_element_type") and _float(args[0]):
            dtype = kwargs.get("dtype") or (args[1] if len(args) > 1 else None)
            if dtype in _LOW:
                return args[0]
        if self._contracted and name in ("add", "sub") and len(args) == 2 and not kwargs:
            fused = self._multiply_add(n, name, args)
            if fused is not None:
                return fused
        if self._reordered:
            other = _REORDERED.get(name)
            if other is not None and _float(args[0]):
                result = other(n.target, args, kwargs)
                if result is not None:
                    return result
        return n.target(*args, **kwargs)

    def _multiply_add(self, n: fx.Node, name: str, args: Any) -> Tensor | None:
        first = n.args[0]
        if not isinstance(first, fx.Node) or first.target is not aten.mul.Tensor or not _float(args[0]):
            return None
        one, two = (self.env.get(arg) if isinstance(arg, fx.Node) else arg for arg in first.args)
        if one is None or two is None or not _float(one) or args[0].dtype == torch.float64:
            return None
        product = one.double() * (two.double() if isinstance(two, Tensor) else two)
        other = args[1].double() if isinstance(args[1], Tensor) else args[1]
        total = product + other if name == "add" else product - other
        return total.to(torch.result_type(args[0], args[1]))


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value


def _nominal(node: fx.Node, value: Any) -> Any:
    """A value in the dtype that the graph says it has."""
    meant = node.meta.get("val")
    if isinstance(value, Tensor) and isinstance(meant, Tensor) and value.dtype != meant.dtype:
        return value.to(meant.dtype)
    return value


def _lanes(x: Tensor, dim: int) -> Tensor:
    """Sum along one dimension as a loop of 16 lanes does."""
    wide = x.float() if x.dtype in _LOW else x
    wide = wide.movedim(dim, 0)
    count = wide.shape[0]
    total = torch.zeros_like(wide[:_LANES]) if count >= _LANES else torch.zeros_like(wide)
    whole = count // max(total.shape[0], 1) * total.shape[0]
    for start in range(0, whole, max(total.shape[0], 1)):
        total = total + wide[start : start + total.shape[0]]
    result = torch.zeros_like(wide[0]) if count else wide.sum(0)
    for row in (*total, *wide[whole:]):
        result = result + row
    return result


def _sum(target: Any, args: Any, kwargs: Any) -> Tensor | None:
    x = args[0]
    dims = args[1] if len(args) > 1 else list(range(x.dim()))
    if kwargs or dims is None or not isinstance(dims, (list, tuple)) or x.numel() > 1 << 16:
        return None
    keep = len(args) > 2 and args[2]
    dims = sorted({dim % x.dim() for dim in dims}) or list(range(x.dim())) if x.dim() else []
    if not dims:
        return None
    moved = x.movedim(dims, list(range(len(dims))))
    result = _lanes(moved.reshape(-1, *moved.shape[len(dims) :]), 0)
    if target in (aten.mean.dim, aten.mean.default):
        result = result / (x.numel() // max(result.numel(), 1))
    if keep:
        for dim in dims:
            result = result.unsqueeze(dim)
    return result.to(x.dtype)


def _var_mean(target: Any, args: Any, kwargs: Any) -> Any:
    x, dims = args[0], args[1] if len(args) > 1 else None
    keep = kwargs.get("keepdim", False)
    correction = kwargs.get("correction", 1)
    if dims is None or not isinstance(dims, (list, tuple)) or set(kwargs) - {"keepdim", "correction"}:
        return None
    wide = x.float() if x.dtype in _LOW else x
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    mean = _sum(aten.sum.dim_IntList, (wide, dims, True), {})
    if mean is None:
        return None
    mean = mean / count
    square = _sum(aten.sum.dim_IntList, ((wide - mean).square(), dims, keep), {})
    if square is None:
        return None
    var = (square / (count - (1 if correction is None else correction))).to(x.dtype)
    shown = (mean if keep else mean.squeeze(tuple(dims))).to(x.dtype)
    return (var, shown) if target is aten.var_mean.correction else var


def _split(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """A matrix product in four parts of the reduction, added one after the other."""
    wide_a, wide_b = (a.float(), b.float()) if a.dtype in _LOW else (a, b)
    parts = zip(wide_a.chunk(4, -1), wide_b.chunk(4, -2), strict=True)
    total: Tensor | None = None
    for left, right in parts:
        part = product(left, right)
        total = part if total is None else total + part
    if total is None:
        raise RuntimeError("an empty reduction")
    return total.to(a.dtype)


def _mm(target: Any, args: Any, kwargs: Any) -> Tensor | None:
    return None if kwargs else _split(torch.matmul, args[0], args[1])


def _addmm(target: Any, args: Any, kwargs: Any) -> Tensor | None:
    if kwargs:
        return None
    wide = [arg.float() if arg.dtype in _LOW else arg for arg in args]
    return (_split(torch.matmul, wide[1], wide[2]) + wide[0]).to(args[0].dtype)


_REORDERED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": _sum,
    "mean": _sum,
    "var_mean": _var_mean,
    "var": _var_mean,
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
}
