"""Write inputs as code: values in a short form, with the same strides and the same shared memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from checked_backend.diagnose.reduce.failing_case import compact
from checked_backend.diagnose.reduce.forms import form_of
from checked_backend.diagnose.repro.translate import Untranslatable
from checked_backend.regions.inputs import storage_key

__all__ = ["InputsCode", "write_inputs"]


@dataclass(slots=True)
class InputsCode:
    """Code that makes inputs.

    Attributes:
        lines: Assignments that come first.
        values: One expression for each input.
        saved: Tensors that are too large to be written, by the name under which the code reads them.
    """

    lines: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    saved: dict[str, torch.Tensor] = field(default_factory=dict)


def write_inputs(inputs: Mapping[str, Any]) -> InputsCode:
    """Write inputs.

    Args:
        inputs: Values by the name of the parameter.

    Raises:
        Untranslatable: An input is neither a plain strided tensor nor a number.
    """
    code = InputsCode()
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    uses = Counter(storage_key(value) for value in tensors if value.numel())
    bases: dict[int | None, str] = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            if value is not None and not isinstance(value, (bool, int, float, str)):
                raise Untranslatable(f"input {name} is a {type(value).__name__}")
            code.values.append(f'float("{value}")' if value != value or value in _INFINITE else repr(value))
            continue
        if type(value.detach()) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
            raise Untranslatable(f"input {name} is no plain strided tensor")
        key = storage_key(value)
        if uses[key] > 1 and value.numel():
            if key not in bases:
                bases[key] = f"memory{len(bases) or ''}"
                whole = torch.empty(0, dtype=_memory_dtype(inputs, key), device=value.device)
                whole = whole.set_(value.untyped_storage())
                code.lines.append(f"{bases[key]} = {_dense(whole, bases[key], code)}")
            place = f"{tuple(value.shape)}, {value.stride()}, {value.storage_offset()}"
            if value.is_conj() or value.is_neg():
                raise Untranslatable(f"input {name} shares memory and is conjugated or negated when it is read")
            view = "" if value.dtype is _memory_dtype(inputs, key) else _reread(value)
            # AOT autograd asks whether inputs in one memory are views of one base
            alone = "" if value._is_view() else ".detach()"
            code.values.append(f"torch.as_strided({bases[key]}{view}, {place}){alone}")
        else:
            code.values.append(_strided(compact(value), name, code))
    return code


_INFINITE = (float("inf"), float("-inf"))


def _memory_dtype(inputs: Mapping[str, Any], key: int | None) -> torch.dtype:
    """The dtype in which memory is written: that of the inputs that share it, or bytes."""
    sharing = {v.dtype for v in inputs.values() if isinstance(v, torch.Tensor) and storage_key(v) == key}
    return sharing.pop() if len(sharing) == 1 else torch.uint8


def _reread(value: torch.Tensor) -> str:
    """Code that reads bytes as elements of a dtype. Bytes that are left over at the end belong to no element."""
    size = value.untyped_storage().nbytes()
    whole = size // value.element_size() * value.element_size()
    return f"{f'[:{whole}]' if whole < size else ''}.view({value.dtype})"


def _strided(value: torch.Tensor, name: str, code: InputsCode) -> str:
    """An expression for a tensor that owns its memory, of any strides."""
    if value.is_contiguous():
        return _dense(value, name, code)
    once = value[tuple(slice(0, 1) if step == 0 else slice(None) for step in value.stride())]
    expand = "" if once.shape == value.shape else f".expand({', '.join(map(str, value.shape))})"
    order = sorted(range(once.dim()), key=lambda at: (-once.stride()[at], at))
    permuted = once.permute(order)
    if permuted.is_contiguous():
        back = [order.index(at) for at in range(once.dim())]
        turned = "" if back == list(range(len(back))) else ".t()" if back == [1, 0] else f".permute({tuple(back)})"
        return f"{_dense(permuted, name, code)}{turned}{expand}"
    span = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    memory = value.as_strided((span,), (1,), value.storage_offset())
    return f"torch.as_strided({_dense(memory, name, code)}, {tuple(value.shape)}, {value.stride()})"


def _dense(value: torch.Tensor, name: str, code: InputsCode) -> str:
    text = form_of(value).text
    device = "" if value.device.type == "cpu" else f".to({str(value.device)!r})"
    if text is None and value.dtype is torch.complex128:
        raise Untranslatable(f"{name} has {value.numel()} elements of complex128, which no file here can hold")
    if text is None:
        code.saved[name] = value.detach().cpu().contiguous()
        text = f"saved[{name!r}]"
    return text + device
