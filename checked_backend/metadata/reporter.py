"""Raise, warn about or record findings about metadata, and write the operators' scripts to disk."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from checked_backend.errors import DivergenceWarning
from checked_backend.findings import Finding, RegionInfo, Skip
from checked_backend.metadata.findings import metadata_error
from checked_backend.options import InterpreterOptions
from checked_backend.random_state import random_untouched
from checked_backend.report.file_names import free_path, this_moment
from checked_backend.report.reporter import Reporter, users_stacklevel
from checked_backend.report.write import write_whole

log = logging.getLogger(__name__)


class MetadataReporter(Reporter):
    """Responds to the findings of one region's graphs."""

    def __init__(self, options: InterpreterOptions, region: RegionInfo) -> None:
        super().__init__(region, options)
        self._options = options
        self._lock = threading.Lock()
        self._scripts: dict[tuple[str, str | None, str], str | None] = {}

    def left_out(self, kind: str) -> None:
        """Note that a graph ran which the option ``graphs`` excludes."""
        self.skip(Skip(f"the {kind} graph", "it is not among the option graphs"))

    def ran(self, kind: str, nodes: int, asserts: int, unchecked: Mapping[str, int]) -> None:
        """Note that a graph ran.

        Args:
            nodes: How many of its nodes were compared.
            asserts: How many assumptions about sizes that depend on data were checked.
            unchecked: How many nodes were not compared, or not wholly, by reason.
        """
        forward = int(kind != "backward")
        self._add_calls(calls=forward, checked=forward, backwards=1 - forward)
        self.count({f"nodes of the {kind} graph": nodes})
        if asserts:
            self.count({f"assumptions about sizes in the {kind} graph": asserts})
        for reason, count in unchecked.items():
            self.skip(Skip(f"{count} nodes of the {kind} graph", reason))

    def report(self, findings: Sequence[Finding]) -> None:
        """Respond to the findings of a run as the user asked.

        Raises:
            MetadataError: With ``on_divergence="raise"``, if a finding fails.
        """
        if not findings:
            return
        with random_untouched():
            self._answered(findings)

    def _answered(self, findings: Sequence[Finding]) -> None:
        reported, ignored = self._graded(replace(finding, region=self._region.name) for finding in findings)
        reported = [replace(finding, repro=self._script(finding)) for finding in reported]
        new = {self._key(finding) for finding in self._add(reported, ignored)}
        failing = [finding for finding in reported if finding.fails]
        if failing and self._options.on_divergence == "raise":
            nodes = {finding.node for finding in failing}  # whoever mends one wants all that is wrong with it
            raise metadata_error([finding for finding in reported if finding.node in nodes])
        news = [finding for finding in reported if self._key(finding) in new]
        self._warn_of_layout([finding for finding in news if not finding.fails])
        if self._options.on_divergence == "warn" and any(finding.fails for finding in news):
            error = metadata_error([finding for finding in news if finding.fails])
            warnings.warn(str(error), DivergenceWarning, stacklevel=users_stacklevel())

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
        if finding.script is None:
            return None
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{finding.op}-{finding.graph}-{finding.node}-{finding.detail}")
        folder = Path(self._options.report_dir) / "operators"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = free_path(folder, f"{stem}-{this_moment()}", ".py")
            write_whole(finding.script, path)
        except OSError as error:
            log.warning("checked_backend could not write the script of %s: %s", finding.op, error)
            return None
        return str(path)
