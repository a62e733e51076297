"""Time calls of a region so small that the backend's own cost shows."""

from __future__ import annotations

import time
from typing import Any

import torch

import checked_backend as cb


def seconds_per_call(calls: int, **options: Any) -> tuple[float, float]:
    """Best seconds per call of a tiny region: compiled without a check, and by ``numcheck`` with these options."""

    def tiny(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    x = torch.zeros(4)
    torch.compiler.reset()
    runs = (
        torch.compile(tiny, backend="aot_eager"),
        torch.compile(tiny, backend=cb.numcheck, options={"compiler": "aot_eager", **options}),
    )
    best = [float("inf")] * 2
    with torch.no_grad():
        for run in runs:
            for _ in range(20):
                run(x)
        for _ in range(15):
            for index, run in enumerate(runs):
                began = time.perf_counter()
                for _ in range(calls // 15):
                    run(x)
                best[index] = min(best[index], (time.perf_counter() - began) / (calls // 15))
    return best[0], best[1]
