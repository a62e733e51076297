"""The facts that the graphs and calls of one region leave to those that run after them."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable

import torch

from checked_backend._torch.tensors import StorageWeakRef, is_functorch_wrapped_tensor
from checked_backend.findings import Finding

__all__ = ["History", "KnownStorages", "storage_of"]

_FIRST_SWEEP = 1024  # freed storages are forgotten for the first time when this many are known


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None if it has no elements, or no memory that others could share."""
    if tensor.layout is not torch.strided or tensor.is_nested or is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage() if tensor.numel() > 0 else None


class KnownStorages:
    """Storages that were seen before, each with a description of where.

    A storage is identified by a weak reference, not by its address, because an allocator may reuse the address of a
    freed storage.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, tuple[StorageWeakRef, str]] = {}
        self._sweep_at = _FIRST_SWEEP

    def note(self, tensors: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Remember the storages of tensors, each with a description of where it was seen."""
        with self._lock:
            for tensor, words in tensors:
                storage = storage_of(tensor)
                if storage is not None:
                    self._known[storage._cdata] = (StorageWeakRef(storage), words)
            if len(self._known) >= self._sweep_at:
                self._known = {key: item for key, item in self._known.items() if not item[0].expired()}
                self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._known))

    def seen(self, tensor: torch.Tensor) -> str | None:
        """The description of where a tensor's storage was seen before; None for a new storage.

        While a weak reference to a storage is held, no other storage can get its identity.
        """
        storage = storage_of(tensor)
        if storage is None:
            return None
        with self._lock:
            found = self._known.get(storage._cdata)
        return None if found is None else found[1]


class History:
    """The facts that earlier graphs and calls of one region leave to later ones.

    Attributes:
        wrong: Names of values that were found wrong in forward graphs, which hand them on to the backward graph under
            the same names. Each has a bool: whether it is wrong only because of something that the user ignores.
        memory: Storages that custom operators, and graphs with custom operators, were given or returned.
        told: Findings of earlier calls, by their facts, so that attribution is not repeated at every training step.
        own_faults: For a graph's nodes whose inputs were wrong, whether the operator is wrong by itself.
    """

    def __init__(self) -> None:
        self.wrong: dict[str, bool] = {}
        self.memory = KnownStorages()
        self.own_faults: dict[str, bool] = {}
        self.told: dict[Hashable, Finding] = {}

    def hand_on(self, names: Iterable[str], *, ignored: bool) -> None:
        """Note values of a forward graph that are wrong."""
        for name in names:
            self.wrong[name] = ignored and self.wrong.get(name, True)
