"""Tell a person who waits for a long check what it is doing: a twin may take as long to compile as the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TextIO

from checked_backend.report.file_names import process_rank
from checked_backend.report.progress import Progress
from checked_backend.verdict.runner import Control

PATIENCE = 3.0
"""Seconds that a person waits at a terminal without asking why."""

PATIENCE_OF_A_LOG = 20.0
"""The same where output is piped: each line stays there, and most checks are followed by thousands of others."""

SLOW_NODES = 50
"""Inductor takes seconds to compile this many calls, though its cache may have given the candidate at once."""

_PAUSE = 5.0
"""Seconds after which a control run is one of another check."""

CONTROL_RUNS: Mapping[Control, str] = MappingProxyType(
    {
        Control.REPEAT: "running eager again",
        Control.BARE: "running eager again",
        Control.CANDIDATE_REPLAYED: "running the compiled program again",
        Control.CANDIDATE_AGAIN: "running the compiled program again",
        Control.RESEEDED: "running eager on other random numbers",
        Control.OTHER_THREADS: "running both again, for the random state",
        Control.MONTE_CARLO: "running eager with random roundings",
        Control.ONE_ZERO: "running eager with zeros of one sign",
        Control.FLOAT64: "running eager in float64",
        Control.FLOAT64_NOISE: "running eager in float64",
        Control.TWIN: "running the compiled program in float64",
        Control.GIVEN_CHOICES: "running eager's choices in float64",
        Control.UNFUSED: "running the compiled program without fusion",
        Control.RECOMPILED: "running what was compiled once more",
    }
)
"""What a control run does, by its name."""


class Waiting:
    """Tells what a check is doing once it has taken a while. A check that is quick says nothing.

    Args:
        region: The region's name.
        tells: Whether to tell anything at all.
        stream: Where to; default stderr.
        clock: Gives seconds.

    Attributes:
        compiles_slowly: Whether compiling the region once more surely takes a while.
    """

    def __init__(
        self,
        region: str,
        *,
        tells: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.compiles_slowly = False
        self._region = region
        self._tells = tells
        self._stream = stream
        self._clock = clock
        self._progress: Progress | None = None
        self._begun = self._ended = 0.0

    def expect(self, compiling: float, nodes: int, *, inductor: bool) -> None:
        """Note how long the candidate took to compile, and how many calls it has."""
        self.compiles_slowly = compiling >= PATIENCE or (inductor and nodes >= SLOW_NODES)

    def control_run(self, control: Control) -> Any:
        """A context manager around a control run."""
        return self._at(CONTROL_RUNS[control], slow=False)

    def compiling(
        self, words: str, compile_for: Callable[[Sequence[Any]], Callable[..., Any]]
    ) -> Callable[[Sequence[Any]], Callable[..., Any]]:
        """The same function, which tells that it compiles.

        Args:
            words: What the region is compiled for: ``in float64``.
        """

        def told(inputs: Sequence[Any]) -> Callable[..., Any]:
            with self._at(f"compiling it {words}", slow=self.compiles_slowly):
                return compile_for(inputs)

        return told

    @contextmanager
    def _at(self, words: str, *, slow: bool) -> Iterator[None]:
        if not self._tells:
            yield
            return
        now = self._clock()
        if self._progress is None or now - self._ended > _PAUSE:
            self._progress, self._begun = Progress(self._stream, self._clock, on_interrupt=""), now
        progress = self._progress
        patience = PATIENCE if progress.is_terminal() else PATIENCE_OF_A_LOG
        told = (slow or now - self._begun >= patience) and not process_rank()  # the others do the same
        if told:
            progress(f"checking {self._region}: {words}")
        try:
            yield
        finally:
            self._ended = self._clock()
            if told:
                progress.end()
