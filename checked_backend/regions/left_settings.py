"""Whether a region's candidate left the process's settings as eager does; what it left otherwise is set to eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from checked_backend._torch.dynamo import compile_lock
from checked_backend.findings import Finding, Skip
from checked_backend.regions.process_state import CHANGED_ELSEWHERE, FILTERS, ProcessState, of_process, settings_changed

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
        """Findings about settings; these are set to eager's. What another thread may have changed is left alone.

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
        doubtful = [name for name in of_process(names) if name == FILTERS or self.others_ran]
        repeated = self._repeated(expected, doubtful) if doubtful else ()
        told = [name for name in names if name not in doubtful or name in repeated]
        expected.restore(told)
        for name in doubtful:
            if name not in repeated and name not in CHANGED_ELSEWHERE:
                why = "it was changed once, and not when the compiled region ran again; another thread ran meanwhile"
                self.skip(Skip(f"state[{name}]", why, matters=True))
        return settings_changed(told, before=before, expected=expected, actual=after, during=self.during)

    def _repeated(self, expected: ProcessState, names: Sequence[str]) -> tuple[str, ...]:
        """Which settings the candidate changes when it runs again, from eager's; they are left as they are."""
        with compile_lock:  # no other thread compiles meanwhile, and changes what compiling changes for a while
            now = ProcessState.capture()
            expected.restore(names)
            start = ProcessState.capture()
            try:
                self.again()
            except Exception:  # as it did before, or what this run lacks: the settings say what they say
                pass
            finally:
                changed = start.changed(ProcessState.capture())
                start.restore(changed)
                now.restore(names)
        return changed
