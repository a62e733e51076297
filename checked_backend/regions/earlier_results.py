"""Results of a region's earlier calls, in the region's own memory and in that of the active sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checked_backend.findings import Finding, Skip
from checked_backend.regions.execution import Subjects
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.handed_out import HandedOut, Look, in_cuda_graph, results_of
from checked_backend.regions.reporter import RegionReporter
from checked_backend.report.session import active_sessions

__all__ = ["EarlierResults"]


class EarlierResults:
    """The results that one region handed out, to see whether a later call of any region writes to them.

    Args:
        info: The region's names and source lines.
        reporter: Receives the coverage.

    Attributes:
        calls: How often the region was called.
    """

    def __init__(self, info: GraphInfo, reporter: RegionReporter) -> None:
        self.calls = 0
        self._info = info
        self._reporter = reporter
        self._own = HandedOut()

    def holders(self) -> list[HandedOut]:
        """Where results are remembered: here, and in the active sessions."""
        return [self._own, *(session.part(HandedOut) for session in active_sessions())]

    def unchecked(self) -> None:
        """Note that compiled code is about to run unchecked."""
        for holder in self.holders():
            holder.unchecked = True

    def look(self, args: Sequence[Any] = ()) -> Look:
        """Look at all results that the program holds.

        Args:
            args: The call's arguments, to which it may write.
        """
        look = Look(self.holders(), args)
        self._tell(look)
        return look

    def _tell(self, look: Look) -> None:
        for subject, reason in look.unexplained.items():
            self._reporter.skip(Skip(subject, reason, matters=True))

    def remember(self, args: Sequence[Any], subjects: Subjects, returned: Sequence[Any]) -> None:
        """Remember the results of the latest call.

        Args:
            subjects: Names of its outputs.
            returned: Its outputs.
        """
        names = [subjects.output(index) for index in range(len(returned))]
        for name, output in zip(names, returned, strict=True):
            if in_cuda_graph(output):
                why = "whether a later call overwrites it is not asked: a CUDA graph does, and torch raises at a read"
                self._reporter.skip(Skip(name, why))
        results = results_of(returned, names, self._info.output_sources, args, self._info.name, self.calls)
        for holder in self.holders():
            holder.add(results)

    def overwritten(self, look: Look, returned: Sequence[Any], reference: Sequence[Any]) -> list[Finding]:
        """Findings about results that the latest call wrote to.

        Args:
            look: The results as they were before the call.
            returned: The candidate's outputs.
            reference: Eager's outputs.
        """
        found = look.overwritten(self.calls, self._info.name, returned, reference)
        self._tell(look)
        return found

    def overwritten_in_backward(self, look: object) -> list[Finding]:
        """Findings about results that a backward pass wrote to.

        Args:
            look: The results as they were before it; any other value if nobody looked.
        """
        if not isinstance(look, Look):
            return []
        found = look.overwritten(self.calls, self._info.name, counted=False)
        self._tell(look)
        return found
