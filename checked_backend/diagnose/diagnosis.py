"""The results of investigating a failure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from pydantic import TypeAdapter

from checked_backend.diagnose.localize.locate import Location
from checked_backend.findings import EvidenceKey, Finding, Kernel, Kind, NodeError
from checked_backend.graphs.source_line import callers_line, module_path, source_line

DIAGNOSED = frozenset(Kind) - {Kind.NONDETERMINISTIC, Kind.UNSUPPORTED}
"""Kinds of findings that are investigated."""


@dataclass(slots=True)
class Diagnosis:
    """The origin of a failure, as plain data, because it crosses a process boundary.

    Attributes:
        stage: As in `Finding`; the same holds for the attributes up to ``script``.
        repro_confirmed: Whether a fresh process that ran the script showed the finding.
        workaround_confirmed: As in `Finding`, and so is ``at_fault``.
        evidence: The steps that were tried, for people.
    """

    stage: str | None = None
    graph: str | None = None
    node: str | None = None
    op: str | None = None
    source: str | None = None
    caller: str | None = None
    module: str | None = None
    workaround: str | None = None
    repro: str | None = None
    script: str | None = None
    output: str = ""
    repro_confirmed: bool = True
    workaround_confirmed: bool = True
    flow: tuple[NodeError, ...] = ()
    kernel: Kernel | None = None
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
            found.module, found.caller = module_path(node), callers_line(node)
        return found

    @classmethod
    def of_traced(cls, finding: Finding) -> Diagnosis:
        """The diagnosis of a crash that one wrong piece of traced metadata explains."""
        found = cls.of_known(finding)
        found.evidence[EvidenceKey.AT_OPERATOR] = finding.message.splitlines()[0]
        found.at_fault = found.evidence[EvidenceKey.AT_FAULT] = finding.at_fault
        found.evidence[EvidenceKey.REPRO] = (
            "none: run it with backend='debug_interpreter', which writes a script of the operator"
        )
        return found

    @classmethod
    def of_known(cls, finding: Finding) -> Diagnosis:
        """The diagnosis of a finding that names the operator."""
        found = cls(finding.stage, finding.graph, finding.node, finding.op, finding.source)
        found.module, found.caller, found.workaround = finding.module, finding.caller, finding.workaround
        return found

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        """Read the text that `to_json` wrote."""
        return TypeAdapter(cls).validate_json(text)

    def to_json(self) -> str:
        """The diagnosis as text, for another process."""
        return json.dumps(asdict(self))

    def added_to(self, finding: Finding) -> Finding:
        """A finding with its origin added, if its kind is investigated."""
        if finding.kind not in DIAGNOSED:
            return finding
        members = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "output"}
        members |= {
            name: members[name] or getattr(finding, name) for name in ("source", "caller", "module", "at_fault")
        }
        return replace(finding, **members | {"evidence": {**finding.evidence, **self.evidence}, "searched": True})

    def added_to_all(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings, each with its origin added. Flow and kernel are those of all, and told with the first."""
        added = [self.added_to(finding) for finding in findings]
        first = next((place for place, one in enumerate(added) if one.flow or one.kernel), None)
        return [one if place == first else replace(one, flow=(), kernel=None) for place, one in enumerate(added)]
