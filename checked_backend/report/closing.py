"""What is said at the end of a run in which nothing was found: that it was checked, and how sharply."""

from __future__ import annotations

import logging
import sys

from checked_backend.findings import Coverage
from checked_backend.report.clean import plural
from checked_backend.report.ledger import Ledger

__all__ = ["closing_line", "say_closing_line"]

log = logging.getLogger(__name__)


def closing_line(coverage: Coverage) -> str:
    """``numcheck: 3 regions, 18 calls, 189 tensors agree with eager``, and the error that would have been caught.

    Empty if nothing was compared, or if something was skipped in which an error could hide.
    """
    calls = sum(region.checked_calls for region in coverage.regions)
    if not calls or any(skip.matters for skip in coverage.skipped):
        return ""
    tensors = coverage.checked.get("tensors", 0)
    parts = [plural(len(coverage.regions), "region"), plural(calls, "call")]
    parts += [plural(tensors, "tensor")] if tensors else []
    limits = coverage.detection_limit.values()
    sharp = f" (smallest relative error that would have been caught everywhere: {max(limits):.2g})" if limits else ""
    return f"numcheck: {', '.join(parts)} agree with eager{sharp}"


def say_closing_line(ledger: Ledger) -> None:
    """Tell the logger at INFO, and a person who sits at a terminal and has no such logger."""
    line = "" if ledger.findings() else closing_line(ledger.coverage())
    if not line:
        return
    log.info(line)
    if not log.isEnabledFor(logging.INFO) and sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")
