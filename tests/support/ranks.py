"""Run a function as the ranks of a distributed program, with a watchdog that ends them all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240.0
"""Seconds after which ranks that have not ended are killed, and the test fails."""

_MAIN = """
import importlib, json, os, sys
import torch, torch.distributed as dist
from datetime import timedelta
torch.set_num_threads(1)
rank, world, store, where, result, given = json.loads(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
                        timeout=timedelta(seconds=60))
module, name = where.split(":")
value = getattr(importlib.import_module(module), name)(rank, world, **given)
with open(result, "w") as file:
    json.dump(value, file)
dist.destroy_process_group()
"""


class HungError(AssertionError):
    """Ranks did not end by themselves."""


@dataclass
class Rank:
    """How one rank ended: what its function returned, if it did; the exit code; what it printed."""

    value: Any
    code: int
    output: str


def start(folder: Path, output: str, *words: str) -> subprocess.Popen[bytes]:
    """Start Python in a process group of its own; what it prints is in a file of the folder."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CHECKED_BACKEND")},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, *words]
    with open(folder / output, "wb") as out:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True)


def run_ranks(program: str, folder: Path, *, world: int = 2, limit: float = LIMIT, **given: Any) -> list[Rank]:
    """Run ``module:function`` once for each rank: ``function(rank, world, **given)``, in a gloo group.

    Raises:
        HungError: A rank still ran at the limit. All are killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank in range(world):
        arguments = [rank, world, str(folder / "store"), program, str(folder / f"result{rank}.json"), given]
        ranks.append(start(folder, f"output{rank}.txt", "-c", _MAIN, json.dumps(arguments)))
    end = time.monotonic() + limit
    while any(process.poll() is None for process in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    late = [rank for rank, process in enumerate(ranks) if process.poll() is None]
    for rank in late:
        os.killpg(ranks[rank].pid, signal.SIGKILL)
    ended = [_ended(folder, rank, process.wait()) for rank, process in enumerate(ranks)]
    if late:
        raise HungError(f"ranks {late} hung:\n" + "\n".join(rank.output[-4000:] for rank in ended))
    return ended


def values_of(ranks: list[Rank]) -> list[Any]:
    """What each rank's function returned; all must have ended well."""
    for rank in ranks:
        if rank.code:
            raise AssertionError(rank.output[-6000:])
    return [rank.value for rank in ranks]


def _ended(folder: Path, rank: int, code: int) -> Rank:
    result = folder / f"result{rank}.json"
    value = json.loads(result.read_text()) if result.exists() else None
    return Rank(value, code, (folder / f"output{rank}.txt").read_text(errors="replace"))
