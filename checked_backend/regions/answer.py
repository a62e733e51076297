"""How one region goes on after findings: with the candidate, with eager, or with an exception."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from checked_backend.findings import EvidenceKey, Finding
from checked_backend.random_state import random_untouched
from checked_backend.regions.call import Call
from checked_backend.regions.execution import Cotangents
from checked_backend.regions.failure import Keep
from checked_backend.regions.reporter import RegionReporter

__all__ = ["Investigate", "RegionAnswer"]

Investigate = Callable[[Call, "Cotangents | None", Sequence[Finding], Keep], Sequence[Finding]]
"""Gets a failed call, the gradients that had arrived if its backward pass failed, the findings, and a function that
keeps the findings so far. Gives back the findings with their origin."""

_NOT_ANEW = "not anew: an earlier finding in this region was"

_OUT_OF_STEP = (
    "eager's results were not handed out: the compiled program exchanges tensors in another order than eager, so other "
    "ranks would wait for what this one does not send"
)


class RegionAnswer:
    """Reports the findings of one region's calls, and remembers whether its candidate is still used.

    Args:
        reporter: Receives the findings.
        investigate: Finds out where they come from; None if the user does not want that.

    Attributes:
        stopped: Whether the candidate is no longer used, because the user asked to fall back to eager.
    """

    def __init__(self, reporter: RegionReporter, investigate: Investigate | None) -> None:
        self.stopped = False
        self._reporter = reporter
        self._investigate = investigate
        self._investigated = False

    def to(
        self,
        findings: Sequence[Finding],
        cause: BaseException | None = None,
        call: Call | None = None,
        cotangents: Cotangents | None = None,
        *,
        raises: bool = True,
    ) -> bool:
        """Report findings as the user asked.

        Args:
            cause: The exception that a finding stands for.
            call: The call, if it can be run again to find out where the findings come from.
            cotangents: The gradients that had arrived, if its backward pass failed.
            raises: Whether to raise if the user asked for that.

        Returns:
            Whether to fall back to eager, now and for good.
        """
        if call is not None and call.exchanges is not None:
            findings, doubts = call.exchanges.proven(findings)
            for skip in doubts:
                self._reporter.skip(skip)
        asked = self._investigate if call is not None else None

        def investigate(reported: Sequence[Finding], keep: Keep) -> Sequence[Finding]:
            if asked is None or call is None:
                return reported
            if all(finding.node is not None for finding in reported if finding.kind.fails):
                return reported  # the operator is known
            if self._investigated:  # this takes long, and later findings mostly follow from the first
                known: dict[str, object] = {EvidenceKey.LOCALIZED: _NOT_ANEW}
                return [replace(f, searched=True, evidence={**f.evidence, **known}) for f in reported]
            self._investigated = True
            return asked(call, cotangents, reported, keep)

        # localize=False: skip the investigation, and say nothing about it
        with random_untouched() if findings else nullcontext():
            fall_back = self._reporter.report(
                findings, cause=cause, raises=raises, investigate=None if asked is None else investigate
            )
        if fall_back and call is not None and call.exchanges is not None and not call.exchanges.in_step:
            self._reporter.note(_OUT_OF_STEP)
        elif fall_back:
            self.stopped = True
        return self.stopped
