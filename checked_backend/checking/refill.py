"""Put the values of one call's arguments into the tensors of another's, as a program does that reuses its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["refill"]


def refill(held: Sequence[tuple[str, object]], fresh: Sequence[tuple[str, object]]) -> bool:
    """Put the values of some tensors into others, with whatever their memory holds beside them.

    Returns:
        Whether it was done. Nothing is changed if a leaf is no plain tensor, or is not what it was when it was given:
        a call has changed its shape, or has given it an autograd history.
    """
    pairs: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    for (_, old), (_, new) in zip(held, fresh, strict=True):
        if type(old) is not torch.Tensor or type(new) is not torch.Tensor or _layout(old) != _layout(new):
            return False
        storages = old.untyped_storage(), new.untyped_storage()
        if storages[0].nbytes() != storages[1].nbytes():
            return False
        pairs[storages[0].data_ptr()] = storages
    for old_storage, new_storage in pairs.values():
        old_storage.copy_(new_storage)
    return True


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.layout is not torch.strided:
        return (tensor.layout, id(tensor))
    place = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
    return (*place, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf)
