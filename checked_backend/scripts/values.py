"""Write values and tensors as Python source: tensors with the same strides and the same shared memory."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.tensors import is_zero_tensor, negative_view, storage_identity

LITERAL_ELEMENTS = 32
"""Tensors of up to this many elements are written out."""

_SEARCHED = 2**20
"""In tensors with more elements, only a constant is looked for: other forms would cost more than they give."""

_LONG = 10_000


class Untranslatable(Exception):
    """Raised for what cannot be written as a script. The message says which part cannot, and why."""


def write_value(value: Any, own: Callable[[Any], str | None] = lambda _value: None) -> str:
    """A constant as code; a device is its name.

    Args:
        own: Writes what stands inside of lists, tuples and slices and is no constant; None for what is one.

    Raises:
        Untranslatable: It is no constant.
    """
    if (text := own(value)) is not None:
        return text
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, complex):  # a repr has no sign for a real part that is -0.0
        return f"complex({write_value(value.real)}, {write_value(value.imag)})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return repr(str(value))
    if value is Ellipsis:
        return "..."
    if isinstance(value, slice):
        return f"slice({', '.join(write_value(end, own) for end in (value.start, value.stop, value.step))})"
    if isinstance(value, (tuple, list)):
        items = ", ".join(write_value(item, own) for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    raise Untranslatable(f"a constant of type {type(value).__name__}: {value!r}")


def write_index(index: Any, own: Callable[[Any], str | None]) -> str:
    """What stands between the brackets of ``x[...]``; arguments as of `write_value`."""

    def part(value: Any) -> str:
        if not isinstance(value, slice):
            return write_value(value, own)
        ends = ["" if end is None else write_value(end, own) for end in (value.start, value.stop, value.step)]
        return ":".join(ends if ends[2] else ends[:2])

    return ", ".join(map(part, index if isinstance(index, tuple) and index else (index,)))


def is_literal(value: Any) -> bool:
    """Whether a value's ``repr`` is code that makes it."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (SyntaxError, ValueError):  # an object, which no script can write
        return False


class TensorWriter:
    """Writes tensors as code.

    Args:
        tensors: All tensors of the script. Those that share memory share it in the script too.
        offsets: Whether tensors that share no memory keep their storage offsets.
        long: Writes the values of a contiguous tensor that are too many for a short form; they are saved if not given.

    Attributes:
        lines: Assignments that come first: the memory that several tensors share.
        saved: Values that the code reads as ``saved[name]``.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        *,
        offsets: bool = False,
        long: Callable[[torch.Tensor], str] | None = None,
    ) -> None:
        self.lines: list[str] = []
        self.saved: dict[str, torch.Tensor] = {}
        self._long = long
        self._bases: dict[int, tuple[str, torch.dtype, int]] = {}
        memories: dict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors:
            if _is_plain(tensor) and tensor.numel():
                memories[storage_identity(tensor)].append(tensor)
        for key, sharing in memories.items():
            if len(sharing) > 1 or (offsets and sharing[0].storage_offset()):
                self._write_memory(key, sharing)

    def write(self, tensor: torch.Tensor, name: str) -> str:
        """A tensor as an expression.

        Raises:
            Untranslatable: It is no plain strided tensor, or has values that no file here can hold.
        """
        if not _is_plain(tensor):
            raise Untranslatable(f"{name} is no plain strided tensor")
        if tensor.is_neg():
            return f"torch._neg_view({self.write(negative_view(tensor), name)})"
        if tensor.is_conj():
            return f"{self.write(tensor.conj(), name)}.conj()"
        if not tensor.numel() or (memory := self._bases.get(storage_identity(tensor))) is None:
            return self._strided(tensor.detach(), name)
        base, dtype, size = memory
        place = f"{tuple(tensor.shape)}, {tensor.stride()}, {tensor.storage_offset()}"
        if dtype is not tensor.dtype:  # bytes that are left over at the end belong to no element
            whole = size // tensor.element_size() * tensor.element_size()
            base += f"{f'[:{whole}]' if whole < size else ''}.view({tensor.dtype})"
        # AOT autograd asks whether inputs in one memory are views of one base
        return f"torch.as_strided({base}, {place}){'' if tensor._is_view() else '.detach()'}"

    def _write_memory(self, key: int, sharing: list[torch.Tensor]) -> None:
        """Write the memory of several tensors, in the dtype of all of them, or as bytes."""
        dtype = sharing[0].dtype if len({tensor.dtype for tensor in sharing}) == 1 else torch.uint8
        end = max((tensor.storage_offset() + span(tensor)) * tensor.element_size() for tensor in sharing)
        memory = torch.empty(0, dtype=dtype, device=sharing[0].device).set_(
            sharing[0].untyped_storage(), 0, (end // dtype.itemsize,), (1,)
        )
        name = f"memory{len(self._bases) or ''}"
        self._bases[key] = name, dtype, memory.numel()
        self.lines.append(f"{name} = {self._dense(memory, name)}")

    def _strided(self, value: torch.Tensor, name: str) -> str:
        """An expression for a tensor that owns its memory, of any strides."""
        if value.is_contiguous():
            return self._dense(value, name)
        once = each_element_once(value)
        expand = "" if once.shape == value.shape else f".expand({', '.join(map(str, value.shape))})"
        order = sorted(range(once.dim()), key=lambda at: (-once.stride()[at], at))
        permuted = once.permute(order)
        if permuted.is_contiguous():
            back = [order.index(at) for at in range(once.dim())]
            turned = "" if back == list(range(len(back))) else ".t()" if back == [1, 0] else f".permute({tuple(back)})"
            return f"{self._dense(permuted, name)}{turned}{expand}"
        memory = value.as_strided((span(value),), (1,), value.storage_offset())
        return f"torch.as_strided({self._dense(memory, name)}, {tuple(value.shape)}, {value.stride()})"

    def _dense(self, value: torch.Tensor, name: str) -> str:
        text = form_of(value).text
        if text is None and self._long is not None:
            text = self._long(value)
        elif text is None and value.dtype is torch.complex128:
            raise Untranslatable(f"{name} has {value.numel()} elements of complex128, which no file here can hold")
        elif text is None:
            self.saved[name] = value.cpu().clone(memory_format=torch.contiguous_format)
            text = f"saved[{name!r}]"
        return text if value.device.type == "cpu" else f"{text}.to({str(value.device)!r})"


def each_element_once(tensor: torch.Tensor) -> torch.Tensor:
    """A view that has each element of an expanded tensor once."""
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor.detach()) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or is_zero_tensor(tensor))
    )


def span(tensor: torch.Tensor) -> int:
    """The number of elements from a strided tensor's first to its last, in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(frozen=True, slots=True)
class Form:
    """Code of a contiguous tensor with a tensor's values, None if it is too long; a smaller rank is simpler."""

    rank: int
    text: str | None


def form_of(tensor: torch.Tensor) -> Form:
    """The simplest form that gives a tensor's values bit for bit. Its strides are not part of it."""
    values = tensor.detach()
    if type(values) is not torch.Tensor or values.layout is not torch.strided or values.is_quantized:
        return Form(_LONG * 10, None)
    shape, dtype = list(values.shape), "" if values.dtype is torch.float32 else f", dtype={values.dtype}"
    sizes = ", ".join(map(str, shape)) if shape else "()"
    if values.numel() == 0:
        return Form(0, f"torch.empty({sizes}{dtype})")
    flat = values.contiguous().cpu().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # one element of an expanded tensor is contiguous with a stride of 0
    if not values.dtype.is_complex:
        first = flat[0].item()
        if _same(flat, torch.full_like(flat, first)):
            if not shape:
                return _literal(values)
            if first == 0 and not torch.signbit(flat[0].double()):
                return Form(1, f"torch.zeros({sizes}{dtype})")
            if first == 1:
                return Form(2, f"torch.ones({sizes}{dtype})")
            number = _number(first, values.dtype)
            return Form(3 + len(number), f"torch.full({tuple(shape)}, {number}, dtype={values.dtype})")
        if flat.numel() > _SEARCHED:
            return Form(_LONG, None)
        if values.dtype is not torch.bool and _same(flat, ramp(flat.numel(), values.dtype)):
            last = "" if len(shape) == 1 else f".reshape({sizes})"
            kind = "" if values.dtype is torch.int64 else f", dtype={values.dtype}"
            end = f"{kind})" if _counts(values.dtype) else f").to({values.dtype})"
            return Form(20, f"torch.arange({flat.numel()}{end}{last}")
    if flat.numel() <= LITERAL_ELEMENTS:
        return _literal(values)
    if values.dtype.is_floating_point and _same(flat, seeded(values.shape, values.dtype).reshape(-1)):
        cast = "" if values.dtype is torch.float32 else f".to({values.dtype})"
        return Form(40, f"torch.randn({sizes}, generator=torch.Generator().manual_seed(0)){cast}")
    return Form(_LONG, None)


def ramp(count: int, dtype: torch.dtype) -> torch.Tensor:
    """0, 1, 2, ... as ``torch.arange`` makes it."""
    if dtype is torch.bool or dtype.is_complex:
        return torch.zeros(count, dtype=dtype)
    return torch.arange(count, dtype=torch.int64).to(dtype)


def _counts(dtype: torch.dtype) -> bool:
    """Whether ``torch.arange`` makes this dtype by itself."""
    if dtype.is_floating_point:
        return dtype.itemsize > 1
    return dtype not in (torch.uint16, torch.uint32, torch.uint64)


def seeded(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Normal random numbers from a fixed seed, as a script can draw them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def literal(values: torch.Tensor) -> str:
    """Code of a contiguous tensor with each of its values."""
    # torch.tensor gives such numbers this dtype
    natural = values.dtype in (torch.float32, torch.int64, torch.bool) if values.numel() else False
    dtype = "" if natural else f", dtype={values.dtype}"
    return f"torch.tensor({_nested(values.tolist(), values.dtype)}{dtype})"


def _literal(values: torch.Tensor) -> Form:
    distinct = len(set(map(str, values.reshape(-1).tolist())))
    numbers = len(_nested(values.tolist(), values.dtype))
    return Form((2 if not values.dim() else 30) + numbers + distinct, literal(values))


def _nested(value: object, dtype: torch.dtype) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_nested(item, dtype) for item in value)}]"
    return _number(value, dtype)


def _number(value: object, dtype: torch.dtype) -> str:
    if not isinstance(value, float) or not math.isfinite(value):
        return write_value(value)
    for digits in range(1, 17):  # the fewest digits that give this very number in its dtype
        text = repr(float(f"{value:.{digits}g}"))
        if torch.tensor(float(text), dtype=dtype).item() == value:
            return text
    return repr(value)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, also in signs of zeros and in NaN."""
    if one.dtype is not other.dtype:
        return False
    return bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))
