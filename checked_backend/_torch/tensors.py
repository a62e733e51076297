"""Tensors: their memory, and their special kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _is_alias_of as is_alias_of  # type: ignore[attr-defined]
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    maybe_get_bdim,
)
from torch._prims_common import clone_preserve_strides
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
    transform_subclass,
)

__all__ = [
    "StorageWeakRef",
    "clone_preserve_strides",
    "differences_of",
    "inner_tensors",
    "is_alias_of",
    "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor",
    "is_traceable_wrapper_subclass",
    "is_wrapper_type",
    "is_zero_tensor",
    "middle_lane",
    "negative_view",
    "norms_of",
    "rewrapped",
    "storage_again",
    "storage_identity",
    "storage_users",
    "version_of",
    "zero_tensor_like",
]


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a wrapper subclass is made of, by name; empty for any other tensor."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return {}
    names, _ = wrapper.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    return {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}  # others are opaque: meshes


def is_wrapper_type(kind: type) -> bool:
    """Whether tensors of this type are wrapper subclasses, which run operators on the tensors they are made of."""
    return bool(is_traceable_wrapper_subclass_type(kind))


def rewrapped(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A wrapper subclass like the given one, made of changed inner tensors."""

    def changed_part(_name: str, part: object) -> object:
        return change(part) if isinstance(part, torch.Tensor) else part

    changed: torch.Tensor = transform_subclass(tensor, changed_part)
    return changed


def middle_lane(value: Any) -> Any:
    """What vmap computes for one of its elements, the middle one of each level; anything but its tensors as it is."""
    while isinstance(value, torch.Tensor) and is_batchedtensor(value):
        dim = maybe_get_bdim(value)
        value = get_unwrapped(value)
        value = value.select(dim, value.shape[dim] // 2)
    return value


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor with its negative bit flipped."""
    return torch._neg_view(tensor)


def differences_of(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The differences of two lists of tensors, in few kernels."""
    return torch._foreach_sub(tensors, others)


def norms_of(tensors: list[torch.Tensor] | tuple[torch.Tensor, ...], order: float) -> tuple[torch.Tensor, ...]:
    """The norm of each tensor of a list, in few kernels."""
    return torch._foreach_norm(tensors, order)


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether torch keeps a tensor as a zero without memory, as ``sgn``'s gradient (``ZeroTensorFallback.cpp``)."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.ZeroTensor)


def storage_users(reference: StorageWeakRef) -> int:
    """The number of owners (tensors and others) of the storage behind a weak reference; 0 if the storage is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less the one made here


def storage_again(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage behind a weak reference; None if the storage is gone."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


def zero_tensor_like(tensor: torch.Tensor) -> torch.Tensor:
    """A new leaf tensor of the kind that `is_zero_tensor` describes, with the metadata of the given one."""
    zeros = torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return (zeros.conj() if tensor.is_conj() else zeros).requires_grad_(tensor.requires_grad)


def storage_identity(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, equal for tensors that share memory. It is valid while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, as autograd counts; 0 for a tensor of inference mode, which is not counted."""
    return 0 if tensor.is_inference() else tensor._version
