"""Progress of long work: one line that changes on a terminal, plain lines if output is piped."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from checked_backend.report.clean import first_line

_WIDTH = 110
_USUAL_WIDTH = 79
"""Of a terminal that does not say how wide it is."""

_LEAST_WIDTH = 10
_ROOM = 48
"""Characters for what is being done and how long it has taken, which are more use than what Ctrl-C does."""

_OFTEN = 5.0
"""Seconds between two lines where each of them stays."""


class Progress:
    """Tells a person what is being done and how long it has taken.

    A stream that breaks, or has gone, ends the telling and nothing else.

    Args:
        stream: Where to; default stderr.
        clock: Gives seconds.
        on_interrupt: What Ctrl-C does, in brackets behind a space; "" where it just ends the program.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_interrupt: str = " (Ctrl-C keeps what is known)",
    ) -> None:
        self._on_interrupt = on_interrupt
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._begun = clock()
        self._latest = float("-inf")

    def __call__(self, text: str) -> None:
        """Tell what is being done now."""
        now = self._clock()
        line = f"numcheck: {now - self._begun:4.0f} s: {first_line(text)}"
        if self.is_terminal():
            width = self._width()
            remark = self._on_interrupt if width - len(self._on_interrupt) >= _ROOM else ""
            room = width - len(remark)
            shown = line if len(line) <= room else f"{line[: room - 3]}..."
            self._write(f"\r{f'{shown}{remark}':<{width}}")
        elif now - self._latest >= _OFTEN:
            self._write(f"{line}{self._on_interrupt}\n")
            self._latest = now

    def end(self) -> None:
        """Leave the terminal with an empty line, for what is printed next. A forked process may have written on it."""
        if self.is_terminal():
            self._write(f"\r{'':<{self._width()}}\r")

    def _width(self) -> int:
        """How long a line may be: one that wraps could not be written over."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (AttributeError, OSError, ValueError):
            return _WIDTH
        return max(_LEAST_WIDTH, min(_WIDTH, columns - 1)) if columns else _USUAL_WIDTH

    def is_terminal(self) -> bool:
        """Whether a line can be written over."""
        try:
            return self._stream.isatty()
        except (AttributeError, ValueError):
            return False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (AttributeError, OSError, ValueError):
            return
