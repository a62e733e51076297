"""Copy tensors to float64, one copy per storage, with the same strides, offsets and aliasing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from checked_backend._torch.collectives import is_distributed_tensor, with_changed_shard
from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.modes import DisableTorchDispatch
from checked_backend._torch.tensors import is_wrapper_type, is_zero_tensor, negative_view, rewrapped, storage_identity
from checked_backend.errors import CheckedBackendError


class PromotionError(CheckedBackendError):
    """Raised for a program or a tensor that has no meaning in float64."""


def promoted_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for real floating dtypes, complex128 for complex ones, others as they are."""
    if dtype.is_floating_point:
        return torch.float64
    return torch.complex128 if dtype.is_complex else dtype


class Float64Copies:
    """Float64 copies, one for each low-precision storage, so that views and in-place changes stay consistent."""

    def __init__(self) -> None:
        # The original storage is kept alive. Else another storage could get its identity.
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.dtype, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The promoted counterpart of a tensor: same shape, strides, offset, and aliasing among counterparts.

        Args:
            tensor: Any tensor; integer and float64 tensors, fake ones and those without data are their own counterpart.

        Returns:
            A detached tensor. The same memory gives the same memory at each call; sparse tensors are copied each time.
            A wrapper subclass gives one that is made of the counterparts of its inner tensors.

        Raises:
            PromotionError: A tensor subclass wraps nothing, or is not float64 if its inner tensors are. Or one storage
                is seen through several dtypes.
        """
        dtype = tensor.dtype
        target = promoted_dtype(dtype)
        if target == dtype or isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return tensor
        if is_wrapper_type(type(tensor)):
            return self._wrapper(tensor, target)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise PromotionError(f"{type(tensor).__name__} (a tensor subclass) cannot be promoted to float64.")
        with DisableTorchDispatch(), torch.no_grad():
            if tensor.layout != torch.strided or is_zero_tensor(tensor):
                return tensor.detach().to(target)
            flat = self._storage(tensor, target)
            view = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            if tensor.is_conj():
                view = view.conj()
            return negative_view(view) if tensor.is_neg() else view

    def _wrapper(self, tensor: torch.Tensor, target: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            change = with_changed_shard if is_distributed_tensor(tensor) else rewrapped
            wide = change(tensor, self.of)
        if wide.dtype != target:
            raise PromotionError(
                f"{type(tensor).__name__} (a tensor subclass) stays {wide.dtype} if what it wraps is in float64."
            )
        return wide

    def _storage(self, tensor: torch.Tensor, target: torch.dtype) -> torch.Tensor:
        identity = storage_identity(tensor)
        known = self._copies.get(identity)
        if known is None:
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            known = self._copies[identity] = (storage, tensor.dtype, flat.to(target))
        if known[1] != tensor.dtype:
            raise PromotionError(
                f"memory is seen both as {known[1]} and as {tensor.dtype}: such bit casts have no meaning in float64."
            )
        return known[2]


def to_float64(values: Sequence[Any]) -> list[Any]:
    """Copies of the tensors among a program's inputs in float64 (complex128); other values as they are.

    Shapes, strides, storage offsets and the aliasing between the tensors are kept. Tensors that require grad become
    fresh leaves that do. Tensors that are not floating, or float64 already, are passed on as they are.

    Returns:
        The copies, in the same order; the same tensor twice gives the same copy twice.

    Raises:
        PromotionError: A tensor is quantised, or a subclass that has no float64 form (see `Float64Copies.of`). Or
            tensors of several dtypes share memory, and one of them is promoted.
    """
    float64_copies = Float64Copies()
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if tensor.is_quantized:
            raise PromotionError(f"a quantised tensor ({tensor.dtype}) cannot be promoted to float64.")
    promoted_memory = {
        storage_identity(tensor): tensor.dtype
        for tensor in tensors
        if _has_memory(tensor) and promoted_dtype(tensor.dtype) != tensor.dtype
    }
    copies: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) in copies:
            continue
        if _has_memory(tensor) and promoted_memory.get(storage_identity(tensor), tensor.dtype) != tensor.dtype:
            raise PromotionError(
                f"memory is shared by tensors of {tensor.dtype} and {promoted_memory[storage_identity(tensor)]}: "
                f"such bit casts have no meaning in float64."
            )
        copy = float64_copies.of(tensor)
        # detached: a view that is made without grad mode may not be written to with it
        copies[id(tensor)] = copy if copy is tensor else copy.detach().requires_grad_(tensor.requires_grad)
    return [copies.get(id(value), value) for value in values]


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel() > 0
