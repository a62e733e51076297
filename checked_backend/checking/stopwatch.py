"""How long something took, on a machine that others use too."""

from __future__ import annotations

import time

__all__ = ["Stopwatch"]


class Stopwatch:
    """Counts from when it is made: what this process has used, and no more than what has passed."""

    def __init__(self) -> None:
        self._passed, self._used = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """The seconds so far: several threads use more than passes, and beside other programs less is used."""
        return min(time.perf_counter() - self._passed, time.process_time() - self._used)
