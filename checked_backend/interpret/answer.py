"""What happens with findings about metadata: raise, warn or record, and the operators' scripts on disk."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from checked_backend.errors import DivergenceWarning
from checked_backend.interpret.findings import metadata_error
from checked_backend.options import InterpreterOptions
from checked_backend.record import Finding, RegionInfo, Skip
from checked_backend.report.write import write_whole

__all__ = ["Answer", "Ledger"]

log = logging.getLogger(__name__)


class Ledger(Protocol):
    """Where findings are gathered."""

    def add_findings(self, findings: Sequence[Finding], ignored: Sequence[Finding] = ()) -> tuple[Finding, ...]:
        """Add findings."""

    def count(self, checked: Mapping[str, int]) -> None:
        """Note comparisons that ran."""

    def region(self, info: RegionInfo) -> None:
        """Note a call of a region."""

    def skip(self, skip: Skip) -> None:
        """Note something that was not checked."""


class Answer:
    """How one region's graphs answer what they find.

    Args:
        options: The user's options.
        region: The region's name and source lines.
        ledgers: The ledgers of the sessions that are active where it is called.
    """

    def __init__(
        self, options: InterpreterOptions, region: RegionInfo, ledgers: Callable[[], Sequence[Ledger]]
    ) -> None:
        self._options = options
        self._region = region
        self._ledgers = ledgers
        self._lock = threading.Lock()
        self._scripts: dict[tuple[str, str | None, str], str | None] = {}

    def ran(self, kind: str, nodes: int, unchecked: int) -> None:
        """Note that a graph ran.

        Args:
            kind: The graph's kind.
            nodes: How many of its nodes were compared.
            unchecked: How many of its nodes have no recorded metadata.
        """
        ledgers = self._ledgers()
        forward = kind != "backward"
        info = replace(self._region, calls=int(forward), checked_calls=int(forward), checked_backwards=int(not forward))
        for ledger in ledgers:
            ledger.region(info)
            ledger.count({f"nodes of the {kind} graph": nodes})
            if unchecked:
                ledger.skip(
                    Skip(f"{unchecked} nodes of the {kind} graph", "no metadata was recorded", region=info.name)
                )

    def to(self, findings: Sequence[Finding]) -> None:
        """Answer the findings of a run as the user asked.

        Raises:
            MetadataError: With ``on_divergence="raise"``.
        """
        reported: list[Finding] = []
        ignored: list[Finding] = []
        for finding in findings:
            named = replace(finding, region=self._region.name)
            hidden = not {named.kind.value, named.detail, named.subject}.isdisjoint(self._options.ignore)
            (ignored if hidden else reported).append(named)
        new = [finding for finding in reported if self._key(finding) not in self._scripts]
        reported = [replace(finding, repro=self._script(finding)) for finding in reported]
        for ledger in self._ledgers():
            ledger.add_findings(reported, ignored)
        if not reported:
            return
        if self._options.on_divergence == "raise":
            raise metadata_error(reported)
        if self._options.on_divergence == "warn" and new:
            fresh = {self._key(finding) for finding in new}
            error = metadata_error([finding for finding in reported if self._key(finding) in fresh])
            warnings.warn(str(error), DivergenceWarning, stacklevel=2)

    @staticmethod
    def _key(finding: Finding) -> tuple[str, str | None, str]:
        return finding.subject, finding.graph, finding.detail

    def _script(self, finding: Finding) -> str | None:
        """Write the script that shows the operator alone, once."""
        with self._lock:
            key = self._key(finding)
            if key not in self._scripts:
                self._scripts[key] = self._write(finding)
            return self._scripts[key]

    def _write(self, finding: Finding) -> str | None:
        script = finding.evidence.get("script")
        if not script:
            return None
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{finding.op}-{finding.graph}-{finding.node}-{finding.detail}")
        path = Path(self._options.report_dir) / "operators" / f"{stem}.py"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(str(script), path)
        except OSError as error:
            log.warning("checked_backend could not write the script of %s: %s", finding.op, error)
            return None
        return str(path)
