"""Compare parameters that must be equal on all ranks, by fingerprint, at the same moments of the run on each rank.

One rank writes its fingerprints to the store of the process group: rank 0, or the first rank that a distributed tensor
lives on. Each other rank compares its own with them as soon as it finds them there. No rank waits.

Ranks need not call a region equally often: one evaluates more, or compiles anew for another shape. So a moment is named
by how often the parameters were written to, as every optimizer does to all of them. Only where nothing writes to them
it is named by the number of calls. Regions that compute with the same parameters count together.
"""

from __future__ import annotations

import json
import logging
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import torch

from checked_backend._torch.collectives import (
    default_store,
    distributed_is_on,
    is_distributed_tensor,
    is_replicated,
    ranks_of,
)
from checked_backend._torch.tensors import inner_tensors, version_of
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.regions.reporter import RegionReporter
from checked_backend.report.file_names import process_rank

__all__ = ["Moments", "Replicas"]

log = logging.getLogger(__name__)

OFTEN = 256
"""Parameters are compared at calls or after writes 1, 2, 4, 8, ..., and each time that another so many are reached."""

_SHOWN = 8

_SAMPLE = 16
"""Parameters whose writes are counted. The median is taken, so that one that drifts does not name another moment."""

_KEPT = 4
"""Moments that are kept until the other rank has written its fingerprints of them."""


@dataclass(frozen=True, slots=True)
class _Look:
    """Fingerprints of this rank's parameters, by name, that are held against those of another rank."""

    call: int
    key: str
    leader: int
    own: Mapping[str, int]


@dataclass(slots=True)
class _Layer:
    """Some parameters that regions compute with.

    Attributes:
        one: The first of them, by which they are known.
        key: The name that they have on all ranks.
        calls: Calls of regions with them.
        first: Writes to them before the first of these calls.
        writes: Writes to them before the latest one.
        pending: Their fingerprints that were not compared yet.
        missed: How many in a row were not compared, because the other rank has none of that moment.
    """

    one: weakref.ref[torch.Tensor]
    key: str
    first: int
    writes: int
    calls: int = 0
    pending: list[_Look] = field(default_factory=list)
    missed: int = 0

    def moment(self, writes: int) -> str | None:
        """Count a call. The name of its moment if parameters are compared at it, the same on all ranks; else None."""
        self.calls += 1
        before, self.writes = self.writes, writes
        if writes == self.first:
            return f"writes {writes} call {self.calls}" if _often(self.calls) else None
        passed = writes.bit_length() != before.bit_length() or writes // OFTEN != before // OFTEN
        return f"writes {writes}" if passed else None


@dataclass(slots=True)
class Moments:
    """The moments of a run on this rank.

    Attributes:
        origin: Writes to the parameters before the first call: a checkpoint may be loaded on one rank alone.
        layers: By the identity of their first parameter.
        numbers: How many layers of a name there were.
    """

    origin: int | None = None
    layers: dict[int, _Layer] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)

    def layer(self, name: str, one: torch.Tensor, writes: int) -> tuple[_Layer, int]:
        """The layer of a parameter, and how often it was written to since the run began."""
        self.origin = writes if self.origin is None else self.origin
        since = writes - self.origin
        known = self.layers.get(id(one))
        if known is None or known.one() is not one:  # another tensor may have had that identity before
            known = _Layer(weakref.ref(one), f"{name}/{self.numbers[name]}", since, since)
            self.numbers[name] += 1
            self.layers[id(one)] = known
        return known, since


# The process is one rank of one run.
_moments: ContextVar[Moments] = ContextVar("checked_backend_moments", default=Moments())  # noqa: B039


class Replicas:
    """The replicated parameters of one region.

    Args:
        function: The name of the compiled function, which is the same on all ranks.
        reporter: Receives what is found.
        moments: The moments of the run; None for those of this process.
    """

    def __init__(self, function: str, reporter: RegionReporter, moments: Moments | None = None) -> None:
        self._moments = moments or _moments.get()
        self._function = function
        self._reporter = reporter
        self._watched: list[int] | None = None
        self._name = function
        self._told: set[tuple[str, str]] = set()

    def compare(self, call: int, args: Sequence[Any], names: Sequence[str]) -> None:
        """Compare the parameters before a call, if it is time for that.

        Args:
            call: The number of the call.
            args: The region's inputs.
            names: The user's names of the inputs.
        """
        if self._watched is None:
            self._watched = self._to_watch(args, names)
        if not self._watched:
            return
        writes = median_low([version_of(args[place]) for place in self._watched])
        layer, since = self._moments.layer(self._name, args[self._watched[0]], writes)
        moment = layer.moment(since)
        if not distributed_is_on():
            return
        if moment is not None:
            self._look(layer, f"{layer.key}/{moment}", call, args, names)
        if layer.pending:
            self._compare(layer, call)

    def _to_watch(self, args: Sequence[Any], names: Sequence[str]) -> list[int]:
        parameters = [place for place, arg in enumerate(args) if isinstance(arg, torch.nn.Parameter)]
        told = "\n".join(names[place] for place in parameters)
        self._name = f"{self._function}/{zlib.crc32(told.encode()):08x}"
        return ([place for place in parameters if args[place].requires_grad] or parameters)[:_SAMPLE]

    def _look(self, layer: _Layer, key: str, call: int, args: Sequence[Any], names: Sequence[str]) -> None:
        """Take the fingerprints of the parameters: write them to the store, or keep them until they are there."""
        by_leader: dict[int, dict[str, int]] = {}
        for name, leader, checksum in _fingerprints(args, names):
            by_leader.setdefault(leader, {})[name] = checksum
        store = default_store()
        for leader, own in by_leader.items():
            look = _Look(call, f"checked_backend/ranks/{leader}/{key}", leader, own)
            if process_rank() != leader:
                layer.pending.append(look)
                continue
            try:
                if store is not None:
                    store.set(look.key, json.dumps(own))
            except Exception as error:  # nothing is compared then, and the count of comparisons shows that
                log.debug("fingerprints were not written: %s", error)
        while len(layer.pending) > _KEPT:
            del layer.pending[0]
            layer.missed += 1
            if layer.missed == _KEPT:
                self._reporter.skip(Skip("parameters", _APART, matters=True))

    def _compare(self, layer: _Layer, call: int) -> None:
        compared = 0
        findings: list[Finding] = []
        for look in [one for one in layer.pending if _often(call - one.call)]:
            theirs = self._theirs(look)
            if theirs is not None:
                layer.pending.remove(look)
                layer.missed = 0
                compared += len(look.own.keys() & theirs.keys())
                findings += self._differing(layer, look, theirs)
        if compared:
            self._reporter.count({"parameters held against rank 0": compared})
        self._reporter.call = call
        if findings:
            self._reporter.report(findings)

    @staticmethod
    def _theirs(look: _Look) -> Mapping[str, int] | None:
        store = default_store()
        try:
            if store is None or not store.check([look.key]):
                return None
            told = json.loads(store.get(look.key))
        except Exception as error:  # the rank that has the store may be gone
            log.debug("fingerprints could not be read: %s", error)
            return None
        return told if isinstance(told, dict) else {}

    def _differing(self, layer: _Layer, look: _Look, theirs: Mapping[str, int]) -> Iterator[Finding]:
        differing = [name for name in look.own if name in theirs and look.own[name] != theirs[name]]
        new = [name for name in differing if (layer.key, name) not in self._told]
        self._told.update((layer.key, name) for name in new)
        for name in new[:_SHOWN]:
            yield _differs(name, look, theirs[name], len(differing))


_APART = (
    "not held against those of other ranks any more: the ranks have not written to them equally often, or have not "
    "called the region between the same writes (option ranks)"
)


def _often(number: int) -> bool:
    return number & (number - 1) == 0 or number % OFTEN == 0


def _fingerprints(args: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """The name of each replicated parameter, the rank against which it is held, and its fingerprint."""
    for arg, name in zip(args, names, strict=False):
        if not isinstance(arg, torch.nn.Parameter):
            continue
        value: torch.Tensor = arg.detach()
        leader = 0
        if is_distributed_tensor(value):
            if not is_replicated(value):
                continue
            leader = min(ranks_of(value))
            value = next(iter(inner_tensors(value).values()))
        checksum = None if inner_tensors(value) else fingerprint(value)
        if checksum is not None:
            yield name, leader, checksum


def _differs(name: str, look: _Look, theirs: int, count: int) -> Finding:
    return Finding(
        kind=Kind.LOGIC,
        detail="logic.ranks",
        subject=f"param[{name}]",
        message=(
            f"before call {look.call} it has other bits on this rank than on rank {look.leader}, and option ranks says "
            f"that parameters are equal on all ranks; {count} of them differ"
        ),
        expected=f"fingerprint {theirs:016x}",
        actual=f"fingerprint {look.own[name]:016x}",
    )
