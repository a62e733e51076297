"""Measure how long something took, on a machine that others use too."""

from __future__ import annotations

import time

__all__ = ["Stopwatch"]


class Stopwatch:
    """Counts the processor time of this process since it was made, but no more than the time that has passed."""

    def __init__(self) -> None:
        self._passed, self._used = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """The seconds so far. Several threads use more than the time that passes; a shared machine gives less of it."""
        return min(time.perf_counter() - self._passed, time.process_time() - self._used)
