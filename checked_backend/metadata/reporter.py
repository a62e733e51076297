"""What happens with findings about metadata: raise, warn or record, and the operators' scripts on disk."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from checked_backend.errors import DivergenceWarning
from checked_backend.findings import Finding, RegionInfo, Severity, Skip
from checked_backend.metadata.findings import metadata_error
from checked_backend.metadata.unused_ignores import Unmatched
from checked_backend.options import InterpreterOptions
from checked_backend.random_state import random_untouched
from checked_backend.report.file_names import claimed_path, this_moment
from checked_backend.report.layout import layout_warning
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

    def note(self, note: str) -> None:
        """Note a remark that changes no verdict."""

    def ignoring(self, entries: Mapping[str, str]) -> None:
        """Note what the user asked to ignore, and what is to be said of it if it never occurs ("": it did)."""


class Answer:
    """How one region's graphs answer what they find.

    Args:
        options: The user's options.
        region: The region's name and source lines.
        ledgers: The ledgers of the sessions that are active where it is called.
        told: What the user was warned of in the session that is active where it is called.
    """

    def __init__(
        self,
        options: InterpreterOptions,
        region: RegionInfo,
        ledgers: Callable[[], Sequence[Ledger]],
        told: Callable[[], set[tuple[object, ...]]],
    ) -> None:
        self._options = options
        self._region = region
        self._ledgers = ledgers
        self._told = told
        self._lock = threading.Lock()
        self._scripts: dict[tuple[str, str | None, str], str | None] = {}
        self._unmatched = Unmatched(options)

    def compiled(self, kind: str, ignoring: Collection[str]) -> None:
        """Note that a graph was compiled.

        Args:
            kind: The graph's kind.
            ignoring: The entries of ``ignore_ops`` and ``ignore`` that are in it.
        """
        self._unmatched.compiled(kind, ignoring)

    def left_out(self, kind: str) -> None:
        """Note that a graph ran that the user does not want checked."""
        skip = Skip(f"the {kind} graph", "it is not among the option graphs", region=self._region.name)
        for ledger in self._ledgers():
            ledger.skip(skip)

    def dropped(self, checked: int, notes: Sequence[str], skips: Sequence[Skip]) -> None:
        """Note calls that compilation dropped.

        Args:
            checked: How many were made alone and checked.
            notes: What to say of them.
            skips: Those that could not be checked.
        """
        for ledger in self._ledgers():
            if checked:
                ledger.count({"calls that compilation dropped": checked})
            for note in notes:
                ledger.note(note)
            for skip in skips:
                ledger.skip(replace(skip, region=self._region.name))

    def ran(self, kind: str, nodes: int, asserts: int, unchecked: Mapping[str, int]) -> None:
        """Note that a graph ran.

        Args:
            kind: The graph's kind.
            nodes: How many of its nodes were compared.
            asserts: How many assumptions about sizes that depend on data were checked.
            unchecked: Why nodes were not compared, or not wholly, and how many.
        """
        ledgers = self._ledgers()
        forward = kind != "backward"
        info = replace(self._region, calls=int(forward), checked_calls=int(forward), checked_backwards=int(not forward))
        for ledger in ledgers:
            ledger.region(info)
            ledger.count({f"nodes of the {kind} graph": nodes})
            if asserts:
                ledger.count({f"assumptions about sizes in the {kind} graph": asserts})
            for reason, count in unchecked.items():
                ledger.skip(Skip(f"{count} nodes of the {kind} graph", reason, region=info.name))
            ledger.ignoring(self._unmatched.entries())

    def to(self, findings: Sequence[Finding]) -> None:
        """Answer the findings of a run as the user asked.

        Raises:
            MetadataError: With ``on_divergence="raise"``, if a finding fails.
        """
        if not findings:
            return
        with random_untouched():
            self._answered(findings)

    def _answered(self, findings: Sequence[Finding]) -> None:
        reported: list[Finding] = []
        ignored: list[Finding] = []
        for finding in findings:
            named = self._graded(finding)
            hidden = "ignored" in named.evidence or (named.is_layout and self._options.layout == "ignore")
            (ignored if hidden else reported).append(named)
        new = [finding for finding in reported if self._key(finding) not in self._scripts]
        reported = [replace(finding, repro=self._script(finding)) for finding in reported]
        for ledger in self._ledgers():
            ledger.add_findings(reported, ignored)
        fresh = {self._key(finding) for finding in new}
        failing = [finding for finding in reported if finding.fails]
        if failing and self._options.on_divergence == "raise":
            raise metadata_error(failing, self._unmatched.remarks())
        news = [finding for finding in reported if self._key(finding) in fresh]
        self._warn_of_layout([finding for finding in news if not finding.fails])
        if self._options.on_divergence == "warn" and any(finding.fails for finding in news):
            error = metadata_error([finding for finding in news if finding.fails], self._unmatched.remarks())
            warnings.warn(str(error), DivergenceWarning, stacklevel=2)

    def _graded(self, finding: Finding) -> Finding:
        """What no later node depends on fails nothing, unless the user asked for that."""
        warns = finding.is_layout and self._options.layout != "raise"
        severity = Severity.WARNING if warns else finding.severity
        return replace(finding, region=self._region.name, severity=severity)

    def _warn_of_layout(self, new: Sequence[Finding]) -> None:
        """Warn once of each: what is compiled anew for other sizes is told no second time in one session."""
        told = self._told()
        names = {(self._region.sources, *self._key(finding)): finding for finding in new}
        fresh = [finding for name, finding in names.items() if name not in told]
        told.update(names)
        if fresh and self._options.on_divergence != "record":
            warnings.warn(layout_warning(fresh), DivergenceWarning, stacklevel=2)

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
        folder = Path(self._options.report_dir) / "operators"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with claimed_path(folder, f"{stem}-{this_moment()}", ".py") as path:
                write_whole(str(script), path)
        except OSError as error:
            log.warning("checked_backend could not write the script of %s: %s", finding.op, error)
            return None
        return str(path)
