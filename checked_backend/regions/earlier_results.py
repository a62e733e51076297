"""Results of a region's earlier calls, in the region's own memory and in that of the active sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checked_backend.findings import Finding, Skip
from checked_backend.regions.execution import Subjects
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.handed_out import HandedOut, Look, results_of
from checked_backend.regions.reporter import RegionReporter
from checked_backend.report.session import active_sessions

__all__ = ["EarlierResults"]


class EarlierResults:
    """What one region handed out, to see whether a later call of it or of another region writes to that.

    Args:
        info: The region's names and source lines.
        reporter: Where the coverage goes.

    Attributes:
        calls: How often the region was called.
    """

    def __init__(self, info: GraphInfo, reporter: RegionReporter) -> None:
        self.calls = 0
        self._info = info
        self._reporter = reporter
        self._own = HandedOut()

    def _holders(self) -> list[HandedOut]:
        return [self._own, *(session.part(HandedOut) for session in active_sessions())]

    def unchecked(self) -> None:
        """Note that compiled code is about to run unchecked."""
        for holder in self._holders():
            holder.unchecked = True

    def look(self, args: Sequence[Any] = ()) -> Look:
        """Look at all results that the program holds.

        Args:
            args: What the call is given: it may write to these.
        """
        look = Look(self._holders(), args)
        for subject, reason in look.unexplained.items():
            self._reporter.skip(Skip(subject, reason, matters=True))
        return look

    def remember(self, args: Sequence[Any], subjects: Subjects, returned: Sequence[Any]) -> None:
        """Remember what the latest call returned.

        Args:
            args: What it was given.
            subjects: Names of its outputs.
            returned: Its outputs.
        """
        names = [subjects.output(index) for index in range(len(returned))]
        results = results_of(returned, names, self._info.output_sources, args, self._info.name, self.calls)
        for holder in self._holders():
            holder.add(results)

    def overwritten(self, look: Look, returned: Sequence[Any], reference: Sequence[Any]) -> list[Finding]:
        """Results that the latest call wrote to.

        Args:
            look: What they were before it.
            returned: What it returned.
            reference: What eager returned.
        """
        return look.overwritten(self.calls, self._info.name, returned, reference)

    def overwritten_in_backward(self, look: object) -> list[Finding]:
        """Results that a backward pass wrote to.

        Args:
            look: What they were before it; anything else if nobody looked.
        """
        return look.overwritten(self.calls, self._info.name, counted=False) if isinstance(look, Look) else []
