"""Compare parameters that must be equal on all ranks, by fingerprint."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from torch import nn

from checked_backend._torch.collectives import default_store, is_distributed_tensor, is_replicated, ranks_of
from checked_backend._torch.tensors import inner_tensors
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.report import Report
from checked_backend.report.file_names import process_rank
from checked_backend.report.ledger import Ledger
from checked_backend.report.peers import this_rank
from checked_backend.report.session import active_sessions


def compare_ranks(module: nn.Module) -> Report:
    """Compare a module's replicated parameters with those of rank 0, bit by bit.

    A distributed parameter that is replicated on some ranks is held against the first of them; one that is sharded is
    left out. The ranks exchange checksums through the store of the process group. All of them must call it, at the same
    place of the program: a rank waits until rank 0 has come.

    Args:
        module: The module, with the same parameters on each rank.

    Returns:
        A report of this rank's parameters. The sessions around the call have its findings too.
    """
    ledger = Ledger()
    ledgers = (ledger, *(session.ledger for session in active_sessions()))
    rank, store = process_rank(), default_store()
    if store is None or rank is None:
        ledger.skip(Skip("parameters", "there are no other ranks: torch.distributed is not set up", matters=True))
        return ledger.report("parameters of all ranks")
    call = store.add(f"checked_backend/compare_ranks/{rank}", 1)
    by_leader: dict[int, dict[str, int]] = {}
    for name, leader, checksum in _fingerprints(module):
        by_leader.setdefault(leader, {})[name] = checksum
    for leader, own in by_leader.items():
        key = f"checked_backend/compare_ranks/{leader}/{call}"
        if rank == leader:
            store.set(key, json.dumps(own))
            continue
        expected = json.loads(store.get(key))
        message = f"it has other bits on this rank than on rank {leader}, on which it is to be the same"
        findings = [
            Finding(
                Kind.LOGIC,
                f"param[{name}]",
                message,
                "logic.ranks",
                expected=f"fingerprint {expected[name]:016x}",
                actual=f"fingerprint {checksum:016x}",
                ranks=(this_rank(),),
            )
            for name, checksum in own.items()
            if checksum != expected.get(name, checksum)
        ]
        for each in ledgers:
            each.count({"parameters held against rank 0": len(own.keys() & expected.keys())})
            each.add_findings(findings)
    return ledger.report("parameters of all ranks")


def _fingerprints(module: nn.Module) -> Iterator[tuple[str, int, int]]:
    """The name of each replicated parameter, the rank against which it is held, and its fingerprint."""
    for name, parameter in module.named_parameters():
        value: torch.Tensor = parameter.detach()
        leader = 0
        if is_distributed_tensor(value):
            if not is_replicated(value):
                continue
            leader = min(ranks_of(value))
            value = next(iter(inner_tensors(value).values()))
        checksum = None if inner_tensors(value) else fingerprint(value)
        if checksum is not None:
            yield name, leader, checksum
