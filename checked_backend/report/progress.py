"""Progress of long work: one line that changes on a terminal, plain lines if output is piped."""

from __future__ import annotations

import _thread
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Event
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

_SAME_AGAIN = 15.0
"""Seconds after which such a line is said once more, if there is no news: what is silent for longer looks hung."""

_TICK = 1.0
"""Seconds after which the time on a terminal goes on."""

_PATIENCE, _PATIENCE_OF_A_LOG = 3.0, 12.0
"""Seconds that a person waits without asking why: at a terminal, and where each line stays."""

_NEVER = float("-inf")

_QUICK = 0.5
"""What took fewer seconds is expected to do so again: no thread is started for it."""


def say(log: logging.Logger, line: str) -> None:
    """Tell the logger at INFO, and stderr where there is no such logger."""
    log.info(line)
    if not log.isEnabledFor(logging.INFO):
        with suppress(AttributeError, OSError, ValueError):  # there is no stderr, or it is closed
            sys.stderr.write(f"{line}\n")


class Progress:
    """Tells a person what is being done and how long it has taken.

    A stream that breaks, or has gone, ends the telling and nothing else.

    Args:
        on_interrupt: What Ctrl-C does, in brackets behind a space; "" where it just ends the program.
        limit: Seconds that the work may take.
        patient: Say nothing of work that is done soon.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_interrupt: str = " (Ctrl-C keeps what is known)",
        limit: float | None = None,
        *,
        patient: bool = False,
    ) -> None:
        self._on_interrupt = on_interrupt
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._limit = "" if limit is None else f" of at most {limit:.0f} s"
        self._patience = 0.0
        if patient:
            self._patience = _PATIENCE if self.is_terminal() else _PATIENCE_OF_A_LOG
        self._begun = self._call = self._ended = clock()
        self._latest = _NEVER
        self._text = ""
        self._doing: list[str] = []
        self._quick: set[str] = set()
        self._over: Event | None = None

    def __call__(self, text: str) -> None:
        """Tell what is being done from now on."""
        self._text = text
        self._tell(_OFTEN)
        self._keep_telling()

    def begin(self) -> None:
        """Count the time anew, unless what follows goes on with a long wait: a first call, and its backward pass."""
        now = self._clock()
        if self._ended - self._call < _PATIENCE or now - self._ended > _OFTEN:
            self._begun = now
        self._call = now

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Tell what is done inside of the block. Blocks nest."""
        begun = self._clock()
        self._doing.append(text)
        self._text = text
        self._tell(_OFTEN) if text else self._wipe()
        if text not in self._quick:
            self._keep_telling()
        try:
            yield
        finally:
            self._doing.remove(text)
            self._text = self._doing[-1] if self._doing else ""
            self._ended = self._clock()
            (self._quick.add if self._ended - begun < _QUICK else self._quick.discard)(text)
            if not self._doing:
                self.end()

    def end(self) -> None:
        """Leave the terminal with an empty line, for what is printed next. A forked process may have written on it."""
        self._text = ""
        if self._over is not None:
            self._over.set()
            self._over = None
        self._wipe()

    def _wipe(self) -> None:
        if self.is_terminal() and not (self._patience and self._latest == _NEVER):
            self._write(f"\r{'':<{self._width()}}\r")
            self._latest = _NEVER

    def _tell(self, often: float) -> None:
        now, text = self._clock(), self._text
        if not text or now - self._begun < self._patience:
            return
        line = f"numcheck: {now - self._begun:4.0f} s{self._limit}: {first_line(text)}"
        if self.is_terminal():
            width = self._width()
            remark = self._on_interrupt if width - len(self._on_interrupt) >= _ROOM else ""
            room = width - len(remark)
            shown = line if len(line) <= room else f"{line[: room - 3]}..."
            self._write(f"\r{f'{shown}{remark}':<{width}}")
        elif now - self._latest >= often:
            self._write(f"{line}{self._on_interrupt}\n")
        else:
            return
        self._latest = now

    def _keep_telling(self) -> None:
        """Have a thread tell how the time goes on, until `end`.

        `threading` does not know the thread: it is none of the program's, and who counts those must not see it.
        """
        if self._over is None:
            self._over = Event()
            with suppress(RuntimeError):  # a limit of the system; what comes next is told all the same
                _thread.start_new_thread(self._tick, (self._over,))

    def _tick(self, over: Event) -> None:
        while not over.wait(_TICK):
            self._tell(_SAME_AGAIN)

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


_whole: list[Progress] = []


def current_progress() -> Progress | None:
    """The progress of the whole that this process is at, if any: its parts tell theirs there."""
    return _whole[-1] if _whole else None


def nothing_told() -> AbstractContextManager[None]:
    """A block in which the whole's progress says nothing: it tells by itself what it does."""
    progress = current_progress()
    return nullcontext() if progress is None else progress.doing("")


@contextmanager
def telling_whole(text: str) -> Iterator[None]:
    """Tell of work that has many calls as one piece: their steps are told on its clock."""
    progress = Progress(on_interrupt="", patient=True)
    _whole.append(progress)
    try:
        with progress.doing(text):
            yield
    finally:
        _whole.remove(progress)
