"""Copy tensors into other memory layouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["at_an_offset", "channels_last", "expanded", "transposed", "with_gaps"]

_OFFSET = 3
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def transposed(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy with the last two dimensions in the other order in memory; None if there are fewer than two."""
    if tensor.dim() < 2:
        return None
    return tensor.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)


def channels_last(tensor: torch.Tensor) -> torch.Tensor | None:
    """An image or a volume with its channels last; None for any other tensor."""
    form = _CHANNELS_LAST.get(tensor.dim())
    return None if form is None else tensor.clone(memory_format=form)


def expanded(tensor: torch.Tensor, dims: Sequence[int] = (0,)) -> torch.Tensor | None:
    """The first element along some dimensions, repeated with a stride of 0; None if nothing changes.

    Args:
        tensor: A tensor with elements.
        dims: The dimensions, from 0 on.
    """
    if all(tensor.shape[dim] < 2 for dim in dims if dim < tensor.dim()):
        return None
    first = tensor[tuple(slice(1) if dim in dims else slice(None) for dim in range(tensor.dim()))]
    return first.clone(memory_format=torch.contiguous_format).expand(tensor.shape)


def with_gaps(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A copy in every other element of memory of twice its size, from an offset on."""
    memory = tensor.new_zeros(2 * tensor.numel() + offset)
    return memory[offset:].view(*tensor.shape, 2)[..., 0].copy_(tensor)


def at_an_offset(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that does not begin at the beginning of its memory."""
    memory = tensor.new_zeros(tensor.numel() + _OFFSET)
    return memory[_OFFSET:].view(tensor.shape).copy_(tensor)
