"""Root causes: one wrong operator makes many results wrong, and is one thing to read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from checked_backend.findings import Finding, Kind, Severity

__all__ = ["Cause", "causes_of", "several_regions", "short_region", "worst_first"]

_COMPILE_ID = re.compile(r" \[[^\[\]]*\]$")
_OF_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION})


@dataclass(frozen=True, slots=True)
class Cause:
    """Findings that have the same origin as far as is known.

    Attributes:
        findings: All of them, as they were found; at least one.
    """

    findings: tuple[Finding, ...]

    @property
    def main(self) -> Finding:
        """The finding that the others are told with: one that fails, and for which most is known."""
        known = [finding for finding in self.findings if finding.fails] or list(self.findings)
        return max(known, key=lambda one: (one.repro is not None, one.workaround is not None, one.metrics is not None))

    @property
    def subjects(self) -> tuple[str, ...]:
        """The results that it explains, each once."""
        return tuple(dict.fromkeys(finding.subject for finding in self.findings))

    @property
    def is_warning(self) -> bool:
        """Whether it fails nothing."""
        return all(finding.severity is Severity.WARNING for finding in self.findings)

    @property
    def is_layout(self) -> bool:
        """Whether it is about layout alone."""
        return all(finding.is_layout for finding in self.findings)


def causes_of(findings: Sequence[Finding]) -> tuple[Cause, ...]:
    """Group findings by where they come from; those that fail come first.

    The same operator on the same line, wrong at the same stage, is one cause, also where its code was compiled more
    than once. Where no operator is known, wrong values of one region are told together: one error spreads to all that
    follows. What is about more than values is told by its finer kind.
    """
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_origin(finding), []).append(finding)
    causes = [Cause(tuple(group)) for group in groups.values()]
    return tuple(sorted(causes, key=_rank))


def short_region(name: str) -> str:
    """A region's name without Dynamo's compile id."""
    return _COMPILE_ID.sub("", name)


def several_regions(findings: Sequence[Finding]) -> bool:
    """Whether a result is named by its region too: findings of several regions may have the same subjects."""
    return len({finding.region for finding in findings}) > 1


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings by their relative error. What is no matter of numbers, and NaN or infinity on one side, comes first."""
    return tuple(sorted(findings, key=_error, reverse=True))


def _error(finding: Finding) -> float:
    metrics = finding.metrics
    if metrics is None:
        return math.inf if finding.fails and not finding.is_layout else -1.0
    if metrics.nonfinite_mismatched:
        return math.inf
    share = metrics.rmse / metrics.reference_rms if metrics.reference_rms > 0 else metrics.rmse
    return share if share == share else -1.0


def _rank(cause: Cause) -> int:
    if any(finding.fails for finding in cause.findings):
        return 0
    return 2 if cause.is_warning else 1


def _origin(finding: Finding) -> tuple[object, ...]:
    region = short_region(finding.region)
    grade = finding.severity, finding.kind.fails
    if finding.of_node:
        return grade, region, finding.graph, finding.subject, finding.op
    if finding.op is not None:
        return grade, region, finding.graph, finding.stage, finding.node, finding.op, finding.source
    if finding.kind in _OF_VALUES and not finding.is_layout and finding.detail != "logic.this_call":
        return grade, region, finding.graph, finding.stage, "values"
    # the same words about several results; another message is another thing
    return grade, region, finding.graph, finding.stage, finding.detail or finding.kind, finding.message
