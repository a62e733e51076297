"""The metadata that tracing recorded for a node, and the ways in which a real value differs from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from checked_backend._torch.pytree import tree_leaves
from checked_backend._torch.tensors import storage_identity

Size: TypeAlias = "int | float | bool | sympy.Basic"
ValueOf: TypeAlias = Callable[[Size], "int | float | bool | None"]
Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The real arguments of a node, positional and by keyword."""

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def symbolic(value: Any) -> Size:
    """A size as a plain number, or as the sympy expression behind a `torch.SymInt`."""
    if not isinstance(value, _SYMBOLIC):
        return value
    expression = value.node.expr
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, (sympy.logic.boolalg.BooleanTrue, sympy.logic.boolalg.BooleanFalse)):
        return bool(expression)
    return float(expression) if isinstance(expression, sympy.Float) else expression


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """Recorded metadata of one tensor.

    Attributes:
        shape: Its sizes, integers or sympy expressions; None if they cannot be compared (nested tensors).
        stride: Its strides in elements; None for a layout without strides.
        offset: Its storage offset; None for a layout without one.
        conj: Whether it is a lazily conjugated view.
        neg: Whether it is a lazily negated view.
        storage: The identity of its storage, the same for tensors of one trace that share memory; None without one.
    """

    dtype: torch.dtype
    shape: tuple[Size, ...] | None
    stride: tuple[Size, ...] | None
    offset: Size | None
    device: torch.device
    layout: torch.layout
    conj: bool
    neg: bool
    storage: int | None

    @classmethod
    def of(cls, value: torch.Tensor) -> ExpectedTensor:
        """Read the metadata of a (fake) tensor."""
        strided = value.layout is torch.strided and not value.is_nested
        return cls(
            dtype=value.dtype,
            shape=None if value.is_nested else tuple(map(symbolic, value.shape)),
            stride=tuple(map(symbolic, value.stride())) if strided else None,
            offset=symbolic(value.storage_offset()) if strided else None,
            device=value.device,
            layout=value.layout,
            conj=value.is_conj(),
            neg=value.is_neg(),
            storage=storage_identity(value) if strided else None,
        )


@dataclass(frozen=True, slots=True)
class ExpectedValue:
    """A recorded value that is not a tensor: a size, a float, a bool, None, or another constant."""

    value: Any


Leaf: TypeAlias = "ExpectedTensor | ExpectedValue | None"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One difference between expected and actual.

    Attributes:
        what: ``structure``, ``dtype``, ``shape``, ``stride``, ``offset``, ``device``, ``layout``, ``bits``, ...
        index: Which of a node's outputs; None if the node has a single one.
        expected: The recorded metadata, as text.
        actual: The real metadata, as text.
    """

    what: str
    index: int | None
    expected: str
    actual: str
    remark: str = ""


def expected_leaves(value: Any) -> list[Leaf]:
    """The expected values of a recorded value, flat. None stands for a value that cannot be compared."""
    flat: list[Leaf] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            flat.append(ExpectedTensor.of(leaf))
        elif isinstance(leaf, _SYMBOLIC):
            flat.append(ExpectedValue(symbolic(leaf)))
        elif isinstance(leaf, _PLAIN):
            flat.append(ExpectedValue(leaf))
        else:
            flat.append(None)
    return flat


def compare(want: Leaf, got: Any, index: int | None, value_of: ValueOf, checks: Collection[str]) -> list[Mismatch]:
    """Compare one real value with the recorded metadata, in detail, after a fast check failed.

    Args:
        index: Which of a node's outputs it is.
        value_of: The value of a symbolic size in this run, None if it is not known.
    """
    if want is None:
        return []
    if isinstance(want, ExpectedValue):
        found = list(_compare_value(want, got, index, value_of))
    elif isinstance(got, torch.Tensor):
        found = list(_compare_tensor(want, got, index, value_of))
    else:
        found = [Mismatch("structure", index, "a tensor", "None" if got is None else type(got).__name__)]
    return [mismatch for mismatch in found if mismatch.what in checks]


def _compare_value(want: ExpectedValue, got: Any, index: int | None, value_of: ValueOf) -> Iterator[Mismatch]:
    expected = want.value
    if isinstance(got, torch.Tensor):
        yield Mismatch("structure", index, _kind_of(expected), "a tensor")
        return
    is_symbolic = isinstance(expected, sympy.Basic)
    value = value_of(expected) if is_symbolic else expected
    if value is None and expected is not None:
        return
    if isinstance(value, float) and isinstance(got, (int, float)):
        # a symbolic float is not computed in the operator's order
        same = math.isclose(value, got, rel_tol=1e-9 if is_symbolic else 1e-12) or (value != value and got != got)
    else:
        same = bool(value == got)
    if not same:
        yield Mismatch("value", index, _render_one(expected, value_of), str(got))


def _kind_of(value: Any) -> str:
    return "a number" if isinstance(value, (int, float, sympy.Basic)) else "None" if value is None else repr(value)


def _compare_tensor(
    want: ExpectedTensor, got: torch.Tensor, index: int | None, value_of: ValueOf
) -> Iterator[Mismatch]:
    if got.dtype != want.dtype:
        yield Mismatch("dtype", index, str(want.dtype), str(got.dtype))
    if got.device != want.device:
        yield Mismatch("device", index, str(want.device), str(got.device))
    if got.layout != want.layout:
        yield Mismatch("layout", index, str(want.layout), str(got.layout))
    if (got.is_conj(), got.is_neg()) != (want.conj, want.neg):
        yield Mismatch("bits", index, _bits(want.conj, want.neg), _bits(got.is_conj(), got.is_neg()))
    if want.shape is None or got.is_nested:
        return
    if len(want.shape) != got.ndim or any(map(_differs, map(value_of, want.shape), got.shape)):
        yield Mismatch("shape", index, _render(want.shape, value_of), str(tuple(got.shape)))
        return
    if want.stride is None or got.layout is not torch.strided:
        return
    if got.numel() > 0:
        significant = zip(map(value_of, want.stride), got.stride(), got.shape, strict=True)
        if any(size > 1 and _differs(stride, real) for stride, real, size in significant):
            recorded, ran = (memory_format(got.shape, s) for s in ([*map(value_of, want.stride)], got.stride()))
            remark = "" if recorded == ran else f"{recorded} recorded, {ran} ran"
            yield Mismatch("stride", index, _render(want.stride, value_of), str(tuple(got.stride())), remark)
    # the offset of an empty tensor says nothing
    if want.offset is not None and got.numel() > 0 and _differs(value_of(want.offset), got.storage_offset()):
        yield Mismatch("offset", index, _render_one(want.offset, value_of), str(got.storage_offset()))


def _bits(conj: bool, neg: bool) -> str:
    return " and ".join([*["conjugated"] * conj, *["negated"] * neg]) or "plain"


def _differs(expected: float | None, actual: Any) -> bool:
    return expected is not None and expected != actual


def memory_format(shape: Sequence[int], stride: Sequence[Any]) -> str:
    """The name of the order in which a tensor's dimensions lie in memory."""
    orders = {"contiguous": list(range(len(shape)))}
    if len(shape) in (4, 5):
        orders["channels_last" if len(shape) == 4 else "channels_last_3d"] = [0, *range(2, len(shape)), 1]
    for name, order in orders.items():
        expected, fits = 1, True
        for dim in reversed(order):
            fits = fits and (shape[dim] == 1 or stride[dim] == expected)
            expected *= shape[dim]
        if fits:
            return name
    return "not contiguous"


def _symbols(sizes: Sequence[Size], value_of: ValueOf) -> str:
    symbolic = (size for size in sizes if isinstance(size, sympy.Basic))
    symbols = dict.fromkeys(symbol for size in symbolic for symbol in sorted(size.free_symbols, key=str))
    known = [f"{symbol}={value}" for symbol in symbols if (value := value_of(symbol)) is not None]
    return f" with {', '.join(known)}" if known else ""


def _render(sizes: tuple[Size, ...], value_of: ValueOf) -> str:
    text = str(tuple(sizes)) if all(isinstance(size, int) for size in sizes) else _tuple([str(s) for s in sizes])
    if not any(isinstance(size, sympy.Basic) for size in sizes):
        return text
    values = ["?" if (value := value_of(size)) is None else str(value) for size in sizes]
    return f"{text} is {_tuple(values)}{_symbols(sizes, value_of)}"


def _render_one(size: Any, value_of: ValueOf) -> str:
    if not isinstance(size, sympy.Basic):
        return str(size)
    value = value_of(size)
    return str(size) if value is None else f"{size} is {value}{_symbols([size], value_of)}"


def _tuple(parts: Sequence[str]) -> str:
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
