"""Collectives: operators by which the ranks of a distributed program exchange tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from typing import Any

import torch

_FUNCTIONAL = "torch.distributed._functional_collectives"
_TENSOR = "torch.distributed.tensor"


def distributed_is_on() -> bool:
    """Whether this process is one of several ranks that can exchange tensors now."""
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def collectives_issued() -> int:
    """How many collectives this process has begun, in all groups that are there now; 0 outside of a group.

    Those that write to a tensor in place, as ``torch.distributed.all_reduce`` does, are no writes that torch counts.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    total = 0
    for group in list(distributed.distributed_c10d._world.pg_map):
        try:
            total += int(group._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):  # a backend that does not count
            continue
    return total


def _instance(value: object, module: str, name: str) -> bool:
    # a value can be an instance only if the module of its class was imported
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def is_async_result(value: object) -> bool:
    """Whether a tensor is a collective's result in eager, which waits for the other ranks when it is first used."""
    return _instance(value, _FUNCTIONAL, "AsyncCollectiveTensor")


def is_distributed_tensor(value: object) -> bool:
    """Whether a tensor is a `torch.distributed.tensor.DTensor`, whose operators may exchange its shards."""
    return _instance(value, _TENSOR, "DTensor")


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collective behind an `is_async_result` tensor, and return the plain tensor inside."""
    result: Any = tensor
    plain: torch.Tensor = result.trigger_wait()
    return plain


def wait_for_result(tensor: torch.Tensor) -> None:
    """Wait until a functional collective has written its result. Return at once if no collective is under way."""
    torch.ops._c10d_functional.wait_tensor(tensor)


def own_rank(group: object) -> int | None:
    """This process's rank in a group that a functional collective names; None where it is not known."""
    try:
        name: Any = group
        if isinstance(group, str):
            return int(torch._C._distributed_c10d._resolve_process_group(name).rank())
        known: Any = group
        return int(known.rank())
    except (AttributeError, RuntimeError, LookupError, TypeError, ValueError):
        return None


def patience_of_ranks() -> float | None:
    """Seconds that ranks wait for one of them in a collective of the default group; None where it is not known."""
    if not distributed_is_on():
        return None
    found = []
    for kind in ("cpu", "cuda"):
        try:
            group: Any = torch.distributed.distributed_c10d._get_default_group()
            found.append(float(group._get_backend(torch.device(kind)).options._timeout.total_seconds()))
        except (AttributeError, RuntimeError, TypeError, ValueError):
            continue
    return min(found, default=None)


def with_changed_shard(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A `is_distributed_tensor` like the given one, with another local tensor, whose dtype is also that of the whole.

    Torch remembers how such tensors are laid out by what they say of themselves, so this must be true.
    """
    distributed: Any = tensor
    shard = distributed._local_tensor
    local = change(waited(shard) if is_async_result(shard) else shard)
    spec = copy(distributed._spec)
    spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    kind: Any = type(tensor)
    changed: torch.Tensor = kind(local, spec, requires_grad=False)
    return changed


def default_store() -> Any:
    """The store of the process group, which all ranks can write to and read from; None outside of a group."""
    if not distributed_is_on():
        return None
    try:
        return torch.distributed.distributed_c10d._get_default_store()
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return None


def is_replicated(tensor: torch.Tensor) -> bool:
    """Whether every rank of a distributed tensor's mesh has all of the tensor."""
    distributed: Any = tensor
    return all(placement.is_replicate() for placement in distributed.placements)


def ranks_of(tensor: torch.Tensor) -> list[int]:
    """The ranks that a distributed tensor lives on."""
    distributed: Any = tensor
    return [int(rank) for rank in distributed.device_mesh.mesh.flatten().tolist()]
