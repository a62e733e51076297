"""Whether a region's candidate left the process's settings as eager does; what it left otherwise is set to eager's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from checked_backend.record import Finding, Skip
from checked_backend.regions.process_state import FILTERS, ProcessState, of_process, settings_changed

__all__ = ["LeftSettings"]


@dataclass(slots=True)
class LeftSettings:
    """Compares settings after a candidate ran.

    Dynamo makes the changes of mode that the user's program makes in its own code, around the graph, or has them in the
    graph, which AOT autograd takes out. So what was before the call is right, and what eager left is right.

    Attributes:
        again: Runs the candidate once more, on copies.
        skip: Notes what could not be decided.
        others_ran: Whether another thread ran meanwhile.
        during: When it is, for people; "" for the call itself.
    """

    again: Callable[[], object]
    skip: Callable[[Skip], None]
    others_ran: bool
    during: str = ""

    def findings(
        self, before: ProcessState, expected: ProcessState, after: ProcessState, *, thread: bool = True
    ) -> list[Finding]:
        """Findings about settings; these are set to eager's.

        Args:
            before: The state before the candidate ran.
            expected: What eager left.
            after: What the candidate left.
            thread: Look also at what each thread has for itself.
        """
        names = before.changed(after, expected)
        names = names if thread else of_process(names)
        if not names:
            return []
        expected.restore(names)
        doubtful = [name for name in of_process(names) if name == FILTERS or self.others_ran]
        repeated = self._repeated() if doubtful else ()
        told = [name for name in names if name not in doubtful or name in repeated]
        for name in doubtful:
            if name not in repeated and name != FILTERS:  # modules that are imported once change those
                why = "it was changed once, and not when the compiled region ran again; another thread ran meanwhile"
                self.skip(Skip(f"state[{name}]", why, matters=True))
        return settings_changed(told, before=before, expected=expected, actual=after, during=self.during)

    def _repeated(self) -> tuple[str, ...]:
        start = ProcessState.capture()
        try:
            self.again()
        except Exception:  # as it did before, or what this run lacks: the settings say what they say
            pass
        finally:
            end = ProcessState.capture()
            start.restore()
        return start.changed(end)
