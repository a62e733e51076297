"""Write tensors to disk: the layout of each, the memory that they share, and the bytes of that memory.

Storages are saved as bytes, not tensors. So strides, offsets, overlaps and every dtype come back as they were.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.symbols import hint_of
from checked_backend._torch.tensors import (
    is_traceable_wrapper_subclass,
    is_zero_tensor,
    negative_view,
    storage_identity,
)
from checked_backend.numerics.bits import memory_of

_ALIGN = 64  # saved pieces start at multiples of this: the rounding of vectorised kernels may depend on alignment
_CHUNK = 64 << 20


def symbolic_text(value: Any) -> int | str:
    """A size as an integer, or as the text of its expression."""
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return int(expression) if expression.is_Integer else str(expression)
    return int(value)


def sizes_of(tensor: torch.Tensor, number: Callable[[Any], int | str]) -> dict[str, Any]:
    """Shape and strides, each number by `hint_of` or `symbolic_text`."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return {"shape": list(map(number, tensor.shape)), "stride": None if strides is None else list(map(number, strides))}


def unsupported_reason(tensor: torch.Tensor) -> str | None:
    """Why a tensor's memory cannot be written down; None if it can."""
    wrapper: Any = tensor  # mypy takes the test below for one that cannot hold
    if is_traceable_wrapper_subclass(wrapper):
        return f"a tensor subclass {type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return f"a quantized tensor of dtype {tensor.dtype}"
    try:
        storage_identity(tensor)
    except (NotImplementedError, RuntimeError):
        return f"a tensor without storage, {type(tensor).__qualname__}"
    return None


class TensorTable:
    """Describes tensors and collects the storages they lie in."""

    def __init__(self) -> None:
        self._storages: list[dict[str, Any]] = []
        self._places: dict[int, int] = {}
        self._owners: list[torch.Tensor] = []  # keeps storages alive, so that identities stay unique

    def describe(self, tensor: torch.Tensor) -> dict[str, Any]:
        """The JSON description of a tensor for which `unsupported_reason` is None.

        Sizes are hints. Expressions, if there are any, are under ``symbolic``.
        """
        plain, symbolic = (
            {**sizes_of(tensor, number), "storage_offset": number(tensor.storage_offset())}
            for number in (hint_of, symbolic_text)
        )
        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            **plain,
            "device": str(tensor.device),
            "requires_grad": bool(tensor.requires_grad),
            "leaf": bool(tensor.is_leaf),
            "parameter": isinstance(tensor, torch.nn.Parameter),
            "conj": bool(tensor.is_conj()),
            "neg": bool(tensor.is_neg()),
            "storage": self._place(tensor, **plain),
            "symbolic": None if symbolic == plain else symbolic,
            "range": None,
        }

    def _place(self, tensor: torch.Tensor, shape: list[int], stride: list[int], storage_offset: int) -> int:
        if is_zero_tensor(tensor):
            tensor = tensor.clone()  # the clone has memory
        identity = storage_identity(tensor)
        if identity not in self._places:
            self._places[identity] = len(self._storages)
            self._storages.append({"device": str(tensor.device), "start": None, "end": 0, "checksum": None})
            self._owners.append(tensor)
        index = self._places[identity]
        storage, size = self._storages[index], tensor.dtype.itemsize
        if 0 not in shape:
            span = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
            first = storage_offset * size // _ALIGN * _ALIGN
            storage["start"] = first if storage["start"] is None else min(storage["start"], first)
            storage["end"] = max(storage["end"], (storage_offset + span) * size)
        return index

    def storages(self) -> list[dict[str, Any]]:
        """The JSON descriptions of the storages: the device, and the bytes from ``start`` to ``end`` that are used."""
        return [{**storage, "start": storage["start"] or 0} for storage in self._storages]

    def save(self, path: Path) -> list[dict[str, Any]]:
        """Write the storages to a safetensors file, each as bytes under ``storage_<index>``.

        Returns:
            `storages`, with the checksums of the written ones. Fake and meta tensors have nothing to write.
        """
        found = self.storages()
        chosen = [i for i, owner in enumerate(self._owners) if _has_memory(owner)]
        regions = {f"storage_{i}": _region(self._owners[i], found[i]["start"], found[i]["end"]) for i in chosen}
        for i, checksum in zip(chosen, _write(path, regions), strict=True):
            found[i]["checksum"] = checksum
        return found


def value_range(tensor: torch.Tensor) -> list[float] | None:
    """Least and greatest value of a real tensor; None if one of them is not finite, or the dtype has no order."""
    if tensor.numel() == 0 or not _has_memory(tensor) or tensor.dtype.is_complex:
        return None
    once = [1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    compact = tensor.detach().as_strided(once, tensor.stride(), tensor.storage_offset())  # of what is expanded
    if tensor.is_neg():
        compact = negative_view(compact)
    try:
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            compact = compact.float()
        low, high = (bound.item() for bound in compact.aminmax())
    except (NotImplementedError, RuntimeError):  # unsigned and sub-byte dtypes: the data decides whether int64 fits
        try:
            low, high = (bound.item() for bound in compact.to(torch.int64).aminmax())
        except (NotImplementedError, RuntimeError):
            return None
        if low < 0:
            return None
    if isinstance(low, bool):
        return [int(low), int(high)]
    return [low, high] if math.isfinite(low) and math.isfinite(high) else None


def _has_memory(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta" and not is_zero_tensor(tensor)


def _region(owner: torch.Tensor, start: int, end: int) -> torch.Tensor:
    storage = owner.untyped_storage()
    end = min(end, storage.nbytes())
    return torch.empty(0, dtype=torch.uint8, device=owner.device).set_(storage, start, (max(0, end - start),), (1,))


def _write(path: Path, regions: dict[str, torch.Tensor]) -> list[int]:
    # by hand: the library copies everything to bytes objects first
    header: dict[str, Any] = {}
    position = 0
    for name, region in regions.items():
        after = position + region.numel()
        header[name] = {"dtype": "U8", "shape": [region.numel()], "data_offsets": [position, after]}
        position = after
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % _ALIGN)
    checksums = []
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for region in regions.values():
            checksum = 0
            for first in range(0, region.numel(), _CHUNK):
                piece = region[first : first + _CHUNK].cpu()
                stream.write(memory_of(piece))
                checksum = zlib.crc32(memory_of(piece), checksum)
            checksums.append(checksum)
    return checksums
