"""Measure the cost of a workaround: the region's time with it, compiled without it, and in eager."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from checked_backend._torch.dynamo import TracingContext, compiling, tracing
from checked_backend._torch.fake_tensors import detect_fake_mode
from checked_backend.regions.compile import Compiler, compile_candidate, copy_graph, eager_graph
from checked_backend.regions.execution import execute
from checked_backend.regions.failure import Failure

__all__ = ["Cost", "measure_cost"]

ROUNDS = 7
"""Runs of each variant; the fastest counts."""

SECONDS = 4.0
"""Seconds after which no further round is begun."""

LIKE_EAGER = 0.9
"""A region that takes this share of eager's time or more is no faster than eager."""

LITTLE = 1.25
"""Up to this many times the compiled region's time, no better workaround is looked for."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one run of a region, with its backward pass if that failed. The fastest of several runs counts.

    Attributes:
        workaround: With the workaround.
        compiled: Compiled without it; None if that does not run.
        eager: In eager.
    """

    workaround: float
    compiled: float | None
    eager: float

    @property
    def is_eager(self) -> bool:
        """Whether the workaround loses everything that compiling gained over eager."""
        gained = self.compiled is None or self.compiled < LIKE_EAGER * self.eager
        return gained and self.workaround >= LIKE_EAGER * self.eager

    @property
    def is_little(self) -> bool:
        """Whether no better workaround need be looked for."""
        return self.compiled is not None and self.workaround <= LITTLE * self.compiled

    def __str__(self) -> str:
        if self.compiled is None:
            told = f"costs {self.workaround / self.eager:.2g} times eager's time (compiled without it, it does not run)"
        else:
            times, eager = self.workaround / self.compiled, self.eager / self.compiled
            told = f"costs {times:.2g} times the compiled region; eager costs {eager:.2g}"
        return f"{told}: it amounts to eager, at eager's speed" if self.is_eager else told

    def to_json(self) -> str:
        """The cost as text, for another process."""
        return json.dumps(asdict(self))


def measure_cost(failure: Failure, workaround: Compiler, compiled: Compiler) -> Cost:
    """Compile the region of a failure twice, and time it.

    Args:
        failure: The failed call.
        workaround: The compiler under the workaround.
        compiled: The compiler without it, which gives wrong results, or raises.

    Returns:
        The times.

    Raises:
        Exception: Whatever the region raises in eager, or under the workaround.
    """
    runs: dict[str, Callable[..., Any]] = {
        "eager": eager_graph(failure.graph).forward,
        "workaround": _compiled(failure, workaround),
    }
    best: dict[str, float] = {}
    for name in ("eager", "workaround"):
        _seconds(failure, runs[name])  # compiles the backward pass, and warms up
    try:
        runs["compiled"] = _compiled(failure, compiled)
        _seconds(failure, runs["compiled"])
    except Exception:  # the finding may be that it does not run
        runs.pop("compiled", None)
    begun = time.monotonic()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            best[name] = min(best.get(name, math.inf), _seconds(failure, run))
        if time.monotonic() - begun > SECONDS:
            break
    return _cost(best)


def _cost(best: Mapping[str, float]) -> Cost:
    return Cost(best["workaround"], best.get("compiled"), best["eager"])


def _compiled(failure: Failure, compiler: Compiler) -> Callable[..., Any]:
    fake_mode = detect_fake_mode(failure.example_inputs)
    context = None if fake_mode is None else TracingContext(fake_mode)
    with compiling(), failure.ambient.entered(), tracing(context):
        return compile_candidate(compiler, copy_graph(failure.graph), list(failure.example_inputs))


def _seconds(failure: Failure, run: Callable[..., Any]) -> float:
    """The seconds of one run. Devices work asynchronously, so the clock stops when their work is done."""
    arguments, leaves = failure.inputs.fresh()
    failure.rng.restore()
    _wait()
    begun = time.perf_counter()
    with failure.ambient.entered():
        execution = execute(run, arguments, leaves if failure.cotangents is not None else {})
    if failure.cotangents is not None:
        graph = execution.graph(failure.inputs.mutated)
        graph.backward(failure.cotangents.copied(), retain_graph=False)
    _wait()
    return time.perf_counter() - begun


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
