"""Tell a person who waits for a long check what it is doing: a twin may take as long to compile as the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, TextIO

from checked_backend.report.causes import short_region
from checked_backend.report.file_names import process_rank
from checked_backend.report.progress import Progress, current_progress
from checked_backend.verdict.runner import Control

CONTROL_RUNS: Mapping[Control, str] = MappingProxyType(
    {
        Control.REPEAT: "running eager again",
        Control.BARE: "running eager again",
        Control.CANDIDATE_REPLAYED: "running the compiled program again",
        Control.CANDIDATE_AGAIN: "running the compiled program again",
        Control.OTHER_THREADS: "running both again, for the random state",
        Control.MONTE_CARLO: "running eager with random roundings",
        Control.ONE_ZERO: "running eager with zeros of one sign",
        Control.FLOAT64: "running eager in float64",
        Control.FLOAT64_NOISE: "running eager in float64",
        Control.TWIN: "running the compiled program in float64",
        Control.UNFUSED: "running the compiled program without fusion",
        Control.RECOMPILED: "running what was compiled once more",
    }
)
"""What a control run does, by its name."""


class Waiting:
    """Tells what a check is doing once it has taken a while. A check that is quick says nothing.

    Args:
        tells: Whether to tell anything at all.
        stream: Where to; default stderr.
    """

    def __init__(
        self,
        region: str,
        *,
        tells: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._region = short_region(region)
        tells = tells and not process_rank()  # one rank tells it for all
        self._progress = Progress(stream, clock, on_interrupt="", patient=True) if tells else None

    def begin(self) -> None:
        """A call begins, or a backward pass: a program of many quick ones has nothing to wait for."""
        if self._progress is not None and current_progress() is None:
            self._progress.begin()

    def at(self, words: str) -> AbstractContextManager[None]:
        """A context manager around one step of a check: ``running eager``."""
        if self._progress is None:
            return nullcontext()
        return (current_progress() or self._progress).doing(f"checking {self._region}: {words}")

    def control_run(self, control: Control) -> AbstractContextManager[None]:
        """A context manager around a control run."""
        return self.at(CONTROL_RUNS[control])

    def compiling(
        self, words: str, compile_for: Callable[[Sequence[Any]], Callable[..., Any]]
    ) -> Callable[[Sequence[Any]], Callable[..., Any]]:
        """The same function, which tells that it compiles.

        Args:
            words: What the region is compiled for: ``in float64``.
        """

        def told(inputs: Sequence[Any]) -> Callable[..., Any]:
            with self.at(f"compiling it {words}"):
                return compile_for(inputs)

        return told
