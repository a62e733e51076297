"""Compare parameters that must be equal on all ranks, by fingerprint, at the same calls of a region on each rank.

Rank 0 writes its fingerprints to the store of the process group. Each other rank compares its own with them as soon as
it finds them there. No rank waits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checked_backend._torch.collectives import default_store, is_distributed_tensor, is_replicated
from checked_backend._torch.tensors import inner_tensors
from checked_backend.findings import Finding, Kind
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.report.file_names import process_rank

__all__ = ["Replicas"]

log = logging.getLogger(__name__)

OFTEN = 256
"""Parameters are compared at calls 1, 2, 4, 8, ..., and at every call whose number is a multiple of this."""

_SHOWN = 8


class Replicas:
    """The replicated parameters of one region.

    Args:
        region: The region's name, which is the same on all ranks.
    """

    def __init__(self, region: str) -> None:
        self._region = region
        self._pending: dict[int, dict[str, int]] = {}
        self._told: set[str] = set()
        self.compared = 0

    def due(self, call: int) -> bool:
        """Whether there is something to do at a call. Its number decides, so all ranks compare at the same calls."""
        return bool(self._pending) or _looks(call)

    def look(self, call: int, args: Sequence[Any], names: Sequence[str]) -> None:
        """Take the fingerprints of the parameters before a call, if they are to be compared at it.

        Args:
            call: The number of the call.
            args: The region's inputs.
            names: The user's names of the inputs.
        """
        own = _fingerprints(args, names) if _looks(call) else {}
        if not own:
            return
        if process_rank() != 0:
            self._pending[call] = own
            return
        store = default_store()
        try:
            if store is not None:
                store.set(self._key(call), json.dumps(own))
        except Exception as error:  # nothing is compared then, and the count of comparisons shows that
            log.debug("fingerprints were not written: %s", error)

    def findings(self) -> list[Finding]:
        """Findings about parameters that differ from rank 0's, for calls whose fingerprints rank 0 has written."""
        found = []
        for call in sorted(self._pending):
            theirs = self._theirs(call)
            if theirs is None:
                break
            own = self._pending.pop(call)
            self.compared += len(own.keys() & theirs.keys())
            differing = [name for name in own if name in theirs and own[name] != theirs[name]]
            new = [name for name in differing if name not in self._told]
            self._told.update(new)
            found += [_differs(name, call, own[name], theirs[name], len(differing)) for name in new[:_SHOWN]]
        return found

    def _key(self, call: int) -> str:
        return f"checked_backend/ranks/{self._region}/{call}"

    def _theirs(self, call: int) -> Mapping[str, int] | None:
        store = default_store()
        try:
            if store is None or not store.check([self._key(call)]):
                return None
            told = json.loads(store.get(self._key(call)))
        except Exception as error:  # the rank that has the store may be gone
            log.debug("fingerprints could not be read: %s", error)
            return None
        return told if isinstance(told, dict) else {}


def _looks(call: int) -> bool:
    return call & (call - 1) == 0 or call % OFTEN == 0


def _fingerprints(args: Sequence[Any], names: Sequence[str]) -> dict[str, int]:
    found = {}
    for arg, name in zip(args, names, strict=False):
        if not isinstance(arg, torch.nn.Parameter):
            continue
        value: torch.Tensor = arg.detach()
        if is_distributed_tensor(value):
            if not is_replicated(value):
                continue
            value = next(iter(inner_tensors(value).values()))
        checksum = None if inner_tensors(value) else fingerprint(value)
        if checksum is not None:
            found[name] = checksum
    return found


def _differs(name: str, call: int, own: int, theirs: int, count: int) -> Finding:
    return Finding(
        kind=Kind.LOGIC,
        detail="logic.ranks",
        subject=f"param[{name}]",
        message=(
            f"before call {call} it has other bits on this rank than on rank 0, and option ranks says that parameters "
            f"are equal on all ranks; {count} of them differ"
        ),
        expected=f"fingerprint {theirs:016x}",
        actual=f"fingerprint {own:016x}",
    )
