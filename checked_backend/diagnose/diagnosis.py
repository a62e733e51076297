"""The results of investigating a failure, and a file that keeps them while the search goes on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from checked_backend.diagnose.localize import Location
from checked_backend.diagnose.localize.kernel import kernel_of_json
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import EvidenceKey, Finding, Kind, NodeError
from checked_backend.graphs.source_line import source_line
from checked_backend.process.worker import Death
from checked_backend.report.write import write_whole

__all__ = ["DIAGNOSED", "Checkpoint", "Diagnosis"]

DIAGNOSED = frozenset(Kind) - {Kind.NONDETERMINISTIC, Kind.UNSUPPORTED}
"""Kinds of findings that are investigated."""


@dataclass(slots=True)
class Diagnosis:
    """The origin of a failure, as plain data, because it crosses a process boundary.

    Attributes:
        stage: As in `Finding`; the same holds for the attributes up to ``repro``.
        repro_confirmed: Whether a fresh process that ran the script showed the finding.
        workaround_confirmed: As in `Finding`, and so is ``at_fault``.
        evidence: The steps that were tried, for people.
    """

    stage: str | None = None
    graph: str | None = None
    node: str | None = None
    op: str | None = None
    source: str | None = None
    workaround: str | None = None
    repro: str | None = None
    output: str = ""
    repro_confirmed: bool = True
    workaround_confirmed: bool = True
    flow: list[dict[str, Any]] = field(default_factory=list)
    kernel: dict[str, Any] | None = None
    at_fault: str = ""
    evidence: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, location: Location) -> Diagnosis:
        """The diagnosis that localization gives."""
        found = cls(location.stage, location.graph)
        if location.message:
            first, *_ = location.message.splitlines()  # a compiler's message may have pages
            found.evidence[EvidenceKey.AT_OPERATOR] = first
        if location.within:
            found.evidence[EvidenceKey.DECOMPOSITION] = location.within
        if location.notes:
            found.evidence[EvidenceKey.LOCALIZATION] = "; ".join(location.notes)
        node = location.node
        if node is not None:
            found.node, found.op, found.source = node.name, location.op, source_line(node)
        return found

    @classmethod
    def of_traced(cls, finding: Finding) -> Diagnosis:
        """The diagnosis of a crash that one wrong piece of traced metadata explains."""
        evidence: dict[str, str] = {
            EvidenceKey.AT_OPERATOR: finding.message.splitlines()[0],
            EvidenceKey.AT_FAULT: finding.at_fault,
            EvidenceKey.REPRO: "none: run it with backend='debug_interpreter', which writes a script of the operator",
        }
        return cls(
            graph=finding.graph,
            node=finding.node,
            op=finding.op,
            source=finding.source,
            at_fault=finding.at_fault,
            evidence=evidence,
        )

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        """Read the text that `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """The diagnosis as text, for another process."""
        return json.dumps(asdict(self))

    def added_to(self, finding: Finding) -> Finding:
        """A finding with its origin added, if its kind is investigated."""
        if finding.kind not in DIAGNOSED:
            return finding
        return replace(
            finding,
            stage=self.stage,
            graph=self.graph,
            node=self.node,
            op=self.op,
            source=self.source or finding.source,
            workaround=self.workaround,
            repro=self.repro,
            repro_confirmed=self.repro_confirmed,
            workaround_confirmed=self.workaround_confirmed,
            searched=True,
            at_fault=self.at_fault or finding.at_fault,
            flow=tuple(NodeError(**{**one, "inputs": tuple(one["inputs"])}) for one in self.flow),
            kernel=None if self.kernel is None else kernel_of_json(self.kernel),
            evidence={**finding.evidence, **self.evidence},
        )

    def added_to_all(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings, each with its origin added. Flow and kernel are those of all, and told with the first."""
        added = [self.added_to(finding) for finding in findings]
        first = next((place for place, one in enumerate(added) if one.flow or one.kernel), None)
        return [one if place == first else replace(one, flow=(), kernel=None) for place, one in enumerate(added)]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Keeps the diagnosis so far on disk, so that it outlives the worker and the process that waits for the worker.

    Attributes:
        keep: Puts a diagnosis into the report on disk.
    """

    path: Path
    keep: Callable[[Diagnosis], None]

    def note(self, found: Diagnosis) -> None:
        """Write a diagnosis, whole or not at all. A full disk does not end the search."""
        with contextlib.suppress(OSError):
            write_whole(found.to_json(), self.path)
        self.keep(found)

    def after(self, death: Death) -> Diagnosis:
        """The diagnosis that was known when the worker died.

        Raises:
            CheckedBackendError: Nothing was known.
        """
        if not self.path.exists():
            raise CheckedBackendError(f"the process that looked for the operator died: {death.words}")
        found = Diagnosis.from_json(self.path.read_text("utf-8"))
        words = death.words if death.hung else f"the process that looked further died: {death.words}"
        found.evidence[EvidenceKey.STOPPED] = words
        return found
