"""Replace the data of tensors by fresh random data, and keep everything else of the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from checked_backend._torch.pytree import tree_flatten
from checked_backend._torch.tensors import is_zero_tensor, negative_view, storage_identity
from checked_backend.numerics.bits import bit_view

_T = TypeVar("_T")


def randomize(values: _T, seed: int = 0) -> _T:
    """Replace the data of every tensor in some containers; the originals are not touched.

    A function that was traced on the originals must work on these too, so the data stay valid in the same ways:

    - Floating-point numbers are uniform between the least and the greatest number of the tensor, so that positive
      numbers stay positive and probabilities stay below 1. If a tensor has only one value, they are between 0 and that
      value; if that value is 0, between 0 and 1. NaN, infinities, and the greatest numbers of the dtype, which masks
      are made of, stay where they are.
    - Integers and booleans are shuffled, so that indices stay in range, a permutation stays a permutation, and sizes
      keep their sum. Sorted ones (offsets, segment boundaries) are kept.

    Shape, dtype, strides, storage offset, device, ``requires_grad``, ``nn.Parameter`` and the conjugate and negative
    bits are the original's. Tensors that share memory still do. Every tensor that requires grad is a leaf.

    A tensor whose data cannot be varied is returned as the same object: one integer or sorted integers, sparse and
    quantized tensors, wrapper subclasses, fake tensors, memory that is seen in two dtypes.

    Source: ``randomize`` of ``torch/testing/_internal/optests/make_fx.py``, which knows floating point only.

    Args:
        values: Tensors in any pytree; values that are not tensors are kept.
        seed: The seed of the new data. The global random generators are not used.

    Returns:
        The same containers with new tensors.
    """
    leaves, spec = tree_flatten(values)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for place, tensor in zip(places, randomize_tensors([leaves[place] for place in places], seed), strict=True):
        leaves[place] = tensor
    result: _T = spec.unflatten(leaves)
    return result


def randomize_tensors(tensors: Sequence[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    """`randomize` for a list of tensors, aliases among them included."""
    generator = torch.Generator().manual_seed(seed)
    result = list(tensors)
    groups: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if _has_plain_memory(tensor):
            groups.setdefault(storage_identity(tensor), []).append(place)
    for places in groups.values():
        views = [tensors[place] for place in places]
        if len({view.dtype for view in views}) > 1:
            continue  # one dtype's numbers are another's bits
        memory = _fresh_memory(views, generator)
        if memory is not None:
            owners = {id(view._base) for view in views if view._is_view()}
            for place in sorted(places, key=lambda place: id(tensors[place]) not in owners):
                is_base = id(tensors[place]) in owners
                result[place] = _on(memory, tensors[place], related=len(places) > 1 and not is_base)
                memory = result[place] if is_base else memory
    return result


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return (
        plain
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.numel() > 0
        and not is_zero_tensor(tensor)
    )


def _fresh_memory(views: Sequence[torch.Tensor], generator: torch.Generator) -> torch.Tensor | None:
    """A copy of the memory that some tensors share, with new data in every place that any of them reads."""
    memory = _whole_memory(views[0]).clone()
    order = torch.arange(memory.numel(), device=memory.device)
    read = torch.cat([order.as_strided(v.size(), v.stride(), v.storage_offset()).reshape(-1) for v in views]).unique()
    new = _new_numbers(memory[read], generator)
    if new is None:
        return None
    if memory.is_complex():
        memory[read] = new
    else:  # written as bits, because not every dtype has an indexed write
        bit_view(memory)[read] = bit_view(new)
    return memory


def _whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def _new_numbers(old: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """New numbers in place of given ones; None if no other numbers are sure to be valid."""
    if old.is_complex():
        parts = _new_floats(torch.view_as_real(old).reshape(-1), generator)
        return None if parts is None else torch.view_as_complex(parts.view(-1, 2))
    if old.is_floating_point():
        return _new_floats(old, generator)
    # compared as int64, because not every integer dtype has a comparison
    if bool((old[1:].long() >= old[:-1].long()).all()):
        return None
    return old[torch.randperm(old.numel(), generator=generator).to(old.device)]


def _new_floats(old: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    wide = old.to(torch.float64)
    data = wide.abs() < torch.finfo(old.dtype).max  # this is false for NaN
    if not bool(data.any()):
        return None
    low, high = wide[data].min().item(), wide[data].max().item()
    if low == high:
        low, high = min(0.0, low), max(0.0, high)
        if low == high:
            high = 1.0
    share = torch.rand(old.numel(), dtype=torch.float64, generator=generator).to(old.device)
    fresh = (low * (1 - share) + high * share).clamp(low, high)  # no high - low: that can overflow
    return torch.where(data, fresh, wide).to(old.dtype)


def _on(memory: torch.Tensor, like: torch.Tensor, *, related: bool) -> torch.Tensor:
    """A tensor in other memory, otherwise like a given one; if they are related, a view, whose writes count there."""
    if related and not like.requires_grad:
        with torch.enable_grad():  # a view that is made without may not be written to with
            fresh = memory.as_strided(like.size(), like.stride(), like.storage_offset())
    else:
        fresh = torch.empty(0, dtype=like.dtype, device=like.device)
        fresh.set_(memory.untyped_storage(), like.storage_offset(), like.size(), like.stride())
    if like.is_conj():
        fresh = fresh.conj()
    if like.is_neg():
        fresh = negative_view(fresh)
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(fresh, requires_grad=like.requires_grad)
    return fresh.requires_grad_(like.requires_grad)
