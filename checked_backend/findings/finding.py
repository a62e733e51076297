"""One problem that a check found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from checked_backend.findings.details import DETAILS
from checked_backend.findings.evidence import Evidence
from checked_backend.findings.kinds import Kind, Severity
from checked_backend.findings.metrics import Metrics, NoiseScale
from checked_backend.findings.pictures import MOST_NODES, Distribution, Kernel, NodeError
from checked_backend.findings.values import Flag, Many
from checked_backend.subjects import Subject, SubjectKind

_LAYOUT = frozenset({"structure.stride", "structure.requires_grad", "logic.sign_of_zero"})
_LAYOUT_OF_NODES = frozenset({"structure.stride", "structure.offset"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem. The names of its fields are the package's public interface.

    A finding about layout alone (option ``layout``) may have the severity of a warning: it is told and fails nothing.
    ``evidence`` is for people, by `EvidenceKey`; what code reads is a field.

    Attributes:
        source: The innermost line outside of torch that made the operator; it may be a library's.
        caller: The user's own line that led to ``source``, where that is a library's.
        module: The path of the user's module that the operator is in: ``blocks.1.mlp.act``.
        more_than_layout: Why a difference in layout matters: a later node depends on it, or gradients are lost; or "".
        inherited: Whether it is about a node of a graph, an input of which was wrong already.
        ignored: Which of the user's options hides it, or that it follows from a node that is hidden; or "".
        script: A Python script that shows the operator alone.
        at_fault: Whose fault wrong metadata of a node probably is, in words; or "".
        explains: Other results that differ because this one does.
        ranks: The ranks of a distributed program that saw it.
        searched: Whether the operator was looked for, with whatever success.
        repro_confirmed: Whether ``repro``, if there is one, showed the finding in a fresh process.
        workaround_confirmed: Whether ``workaround`` was seen to help. False where there is none: settings and the line
            outside of the compiler were tried, and do not help.
        distribution: Where in the tensor the differences are, and how large.
        flow: How the error flows through the graph that has the operator, in the graph's order.
        kernel: The code that the compiler generated for the operator; None if it is not known.
    """

    kind: Kind
    subject: str
    message: str
    detail: Annotated[str, Field(examples=sorted(DETAILS))] = ""
    region: str = ""
    expected: str | None = None
    actual: str | None = None
    metrics: Metrics | None = None
    noise: NoiseScale | None = None
    evidence: Evidence = field(default_factory=dict)
    graph: str | None = None
    stage: str | None = None
    node: str | None = None
    op: str | None = None
    source: str | None = None
    caller: str | None = None
    module: str | None = None
    workaround: str | None = None
    repro: str | None = None
    severity: Severity = Severity.ERROR
    more_than_layout: str = ""
    inherited: Flag = False
    ignored: str = ""
    script: str | None = None
    at_fault: str = ""
    explains: Many[str] = ()
    ranks: Many[str] = ()
    searched: Flag = False
    repro_confirmed: Flag = True
    workaround_confirmed: Flag = True
    distribution: Distribution | None = None
    flow: Annotated[tuple[NodeError, ...], Field(max_length=MOST_NODES)] = ()
    kernel: Kernel | None = None

    @property
    def fails(self) -> bool:
        """Whether it makes the verdict *fail*."""
        return self.kind.fails and self.severity is Severity.ERROR

    @property
    def is_layout(self) -> bool:
        """Whether it is about layout alone: the same values with other strides, ``requires_grad`` or signs of zeros.

        A result through which gradients flow in eager and not in the compiled program is more than that. A node of a
        graph has other strides, or begins elsewhere in its storage, than was traced, and nothing depends on that.
        """
        return self.detail in (_LAYOUT_OF_NODES if self.of_node else _LAYOUT) and not self.more_than_layout

    @property
    def about(self) -> Subject:
        """The subject of the finding, as data."""
        return Subject(self.subject)

    @property
    def of_other_run(self) -> bool:
        """Whether two recorded runs differ, and not eager and the compiled program."""
        return self.detail.endswith(".other_run")

    @property
    def of_node(self) -> bool:
        """Whether it is about a node of a traced graph, not about results of a program."""
        return self.about.kind is SubjectKind.NODE

    @property
    def identity(self) -> tuple[str, str, str]:
        """Where it is, of what, and of which kind: two findings that share it are the same one, seen again."""
        # a node's name says something only in its graph; what else is found has no graph until it is localized
        place = f"{self.graph} " if self.of_node else ""
        return self.region, f"{place}{self.subject}", self.detail or self.kind
