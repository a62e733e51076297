"""How much memory the probe takes, beside what the region's own activations take."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from checked_backend.diagnose.localize.locate import probe_limit
from checked_backend.diagnose.localize.probe import probe
from checked_backend.diagnose.localize.stages import Recorded
from checked_backend.process.worker import run_in_worker

STEPS, ROWS = 128, 1 << 18
OWN = STEPS * ROWS * 4
"""Bytes of the activations that such a forward graph keeps for its backward pass."""


def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kept = []
    for _ in range(STEPS):
        x = torch.sin(torch.cos(x) + 1)  # two of three values are not kept
        kept.append(x)
    return tuple(kept)


def bytes_of_process(what: str) -> int:
    return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) * 1024


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's peak")
def test_the_probe_takes_less_than_twice_the_regions_own_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["checked_backend.diagnose.localize.locate"], "LEAST_PROBE_BYTES", 0)
    x = torch.rand(ROWS)
    gm = make_fx(forward, tracing_mode="fake")(x)

    def measured() -> str:
        before = bytes_of_process("VmRSS")
        limit = probe_limit(Recorded("forward", gm))
        assert limit == OWN
        faulty = probe(gm, (x,), lambda graph, _inputs: graph.forward, limit=limit)
        return f"{faulty} {bytes_of_process('VmHWM') - before}"

    faulty, extra = run_in_worker(measured, timeout=300).split()
    assert faulty == "None"
    print(int(extra) / OWN)
    assert int(extra) < 2 * OWN
