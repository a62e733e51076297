"""Find the results that an operator does not round: halves, sums of small integers, counts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checked_backend._torch.modes import DisableTorchDispatch
from checked_backend._torch.operators import OpOverload
from checked_backend.graphs.operators import Operator, argument
from checked_backend.modes.base import PLAIN

# IEEE 754 demands that these return the nearest number. A result that can be represented is therefore exact, and every
# compiler gets it right. IEEE 754 demands the same of roots and of all quotients, but the fast instructions of some
# processors do not comply.
_CORRECTLY_ROUNDED = frozenset({"add", "sub", "rsub", "mul", "div", "square"})
_CASTS = frozenset({"_to_copy", "to", "copy", "convert_element_type"})
# Integers as wide as these dtypes, and the lower half of their significand's bits.
_LOW_HALF = {
    torch.float64: (torch.int64, 0x3FFFFFF),
    torch.float32: (torch.int32, 0xFFF),
    torch.bfloat16: (torch.int16, 0xF),
    torch.float16: (torch.int16, 0x1F),
}
# Operators that add up or multiply their inputs, so that integers give integers.
_ADDING = frozenset({
    "sum", "nansum", "cumsum", "prod", "cumprod", "trace", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv",
    "index_add", "scatter_add", "scatter_reduce", "index_reduce", "index_put", "_index_put_impl", "scatter",
    "embedding_dense_backward", "convolution", "bincount", "segment_reduce", "addcmul", "addr", "add", "sub", "rsub",
    "mul",
})  # fmt: skip
_AVERAGES = ("mean",)
_COUNTING = frozenset({"histc", "histogram", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors", "bincount"})
_LOOKED_AT = 32
"""The number of elements that are tested first. In most tensors they show that not all elements are integers."""
_FEW = 1 / 8
"""A smaller share of elements is taken out of their tensors, which costs more for each of them."""


def counts(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call counts elements, so that its (first) result consists of integers, whatever its dtype."""
    if operator.base not in _COUNTING or argument(operator, args, kwargs, "density"):
        return False
    return all(argument(operator, args, kwargs, name) is None for name in ("weight", "weights"))


def adds_integers(func: OpOverload, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a sum (or product) has small integers as its terms, and is exact in whatever order it is computed.

    Args:
        func: The operator. If all its inputs are integers, it is run again on their absolute values.
        args: Its positional arguments, before it ran.
    """
    if operator.base not in _ADDING or "out" in kwargs or argument(operator, args, kwargs, "reduce") in _AVERAGES:
        return False
    values = _leaves([*args, *kwargs.values()], [])
    if not any(map(_is_floating, values)) or not all(map(_is_integer, values)):
        return False
    with DisableTorchDispatch():
        results = _leaves(func(*map(_absolute, args), **{name: _absolute(kwargs[name]) for name in kwargs}), [])
    return all(_is_small(result) for result in results if isinstance(result, torch.Tensor))


def unrounded(
    func: OpOverload, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> torch.Tensor | None:
    """Find the elements of a call's result that were not rounded, now or before: a half, a sum of small integers.

    Args:
        func: The operator. It is run again in float64 where that shows whether it rounds.

    Returns:
        Their places in the flattened result, as for `torch.take`; None if there are none.
    """
    cast = operator.base in _CASTS
    if not cast and (operator.mutated or "out" in kwargs or operator.base not in _CORRECTLY_ROUNDED):
        return None
    source = args[1] if operator.base == "copy" else args[0]
    if type(result) not in PLAIN or result.is_meta or result.layout is not torch.strided:
        return None
    if result.dtype not in _LOW_HALF or (cast and result.shape != source.shape):
        return None
    with DisableTorchDispatch():
        inputs = [source] if cast else list(args)
        numbers = [torch.tensor(each, dtype=result.dtype) for each in inputs if isinstance(each, float)]
        # with a long number hardly a result is exact, unless it is short: 5 * 0.7
        places = _all_short([*inputs, result] if any(map(_lower_half, numbers)) else inputs, result)
        if not len(places):
            return None
        few = len(places) < _FEW * result.numel()
        value, *inputs = [_at(places, each, result.shape) if few else each for each in (result, *inputs)]
        if cast:
            exact = inputs[0].double() == value.double()
        elif result.dtype is torch.float64:  # no dtype is wider; but integers that are small enough are exact
            exact = _is_whole(value) & (value.abs() <= 1 / torch.finfo(result.dtype).eps)
            for each in inputs:
                exact &= _is_whole(torch.as_tensor(each, dtype=torch.float64, device=result.device))
        else:
            exact = func(*map(_as_float64, inputs), **kwargs) == value
        if operator.base == "div":
            # the reciprocals of powers of two are exact, so the division is a product
            exact &= torch.frexp(torch.as_tensor(inputs[1], dtype=torch.float64)).mantissa.abs() == 0.5
        places = places[exact if few else exact.take(places)]
        return places if len(places) else None


def _all_short(inputs: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """The places in a flattened result where each input has a short number, with a `_lower_half` of 0."""
    rests = [_lower_half(each) for each in inputs if isinstance(each, torch.Tensor) and each.dtype in _LOW_HALF]
    if not rests:
        return torch.arange(result.numel(), device=result.device)
    rest = functools.reduce(torch.bitwise_or, rests)
    # a result of the same dtype, in words with several of them: a comparison that gives booleans is four times as slow
    short = torch.eq(rest, 0, out=torch.empty_like(rest)).expand(result.shape).contiguous().flatten()
    each = torch.int64.itemsize // short.element_size()
    if len(short) % each:
        return short.nonzero().squeeze(1)
    words = short.view(torch.int64).nonzero().squeeze(1)
    inside = short.view(-1, each)[words].nonzero()
    return words[inside[:, 0]] * each + inside[:, 1]


def _at(places: torch.Tensor, value: Any, shape: torch.Size) -> Any:
    """A value's elements at places of a result to whose shape it is broadcast."""
    return value.expand(shape).take(places) if isinstance(value, torch.Tensor) and value.dim() else value


def _leaves(value: Any, found: list[Any]) -> list[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            _leaves(item, found)
    else:
        found.append(value)
    return found


def _is_floating(value: Any) -> bool:
    dtype = value.dtype if isinstance(value, torch.Tensor) else value
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _is_integer(value: Any) -> bool:
    """Whether a value is not a floating-point number or tensor, or consists of small integers."""
    if isinstance(value, float):
        return value.is_integer()
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return not isinstance(value, complex)
    if type(value) not in PLAIN or value.is_meta or value.layout is not torch.strided or value.dtype not in _LOW_HALF:
        return False
    with DisableTorchDispatch():
        first = value.detach()
        while first.dim() > 1:
            first = first[0] if len(first) else first.flatten()
        return bool(_is_whole(first[:_LOOKED_AT] if first.dim() else first).all()) and bool(
            (_is_whole(value) & (_lower_half(value) == 0)).all()
        )


def _is_whole(value: torch.Tensor) -> torch.Tensor:
    return (value == value.round()) & value.isfinite()


def _is_small(result: torch.Tensor) -> bool:
    if not result.is_floating_point():
        return True
    limit = 1 / torch.finfo(result.dtype).eps
    return not result.numel() or bool((result.abs() <= limit).all())


def _absolute(value: Any) -> Any:
    """Absolute values in fresh memory, so that an in-place operator changes nothing of the program's."""
    if isinstance(value, torch.Tensor):
        return value.detach().abs() if value.is_floating_point() else value
    if isinstance(value, float):
        return abs(value)
    return type(value)(map(_absolute, value)) if type(value) in (list, tuple) else value


def _lower_half(value: torch.Tensor) -> torch.Tensor:
    """The lower half of each element's bits; 0 in small integers.

    A rounded product has no such zeros. ``round(y) - y`` is exact, but if ``y`` is a product, a compiler may contract
    both operations, and then the result differs.
    """
    integers, low_half = _LOW_HALF[value.dtype]
    return value.contiguous().view(integers) & low_half


def _as_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
