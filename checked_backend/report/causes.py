"""Root causes: one wrong operator makes many results wrong, and is one thing to read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from checked_backend.findings import Finding, Kind, Severity

_COMPILE_ID = re.compile(r" \[[^\[\]]*\]$")
_TIMES_COMPILED = re.compile(r"/[^/\[\]]*\]$")
OF_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION})


@dataclass(frozen=True, slots=True)
class Cause:
    """Findings that have the same origin as far as is known, as they were found; at least one."""

    findings: tuple[Finding, ...]

    @property
    def main(self) -> Finding:
        """The finding that the others are told with: one that fails, and for which most is known."""
        known = [finding for finding in self.findings if finding.fails] or list(self.findings)
        return max(known, key=lambda one: [p is not None for p in (one.op, one.repro, one.workaround, one.metrics)])

    @property
    def subjects(self) -> tuple[str, ...]:
        """The results that it explains, each once."""
        return tuple(dict.fromkeys(finding.subject for finding in self.findings))

    @property
    def is_named(self) -> bool:
        """Whether it is known to be one cause. Wrong values without an operator may have several."""
        return self.main.op is not None or not _is_vague(self.main)

    @property
    def assumed(self) -> int:
        """How many of its findings are told with it although their own operator is not known."""
        return sum(finding.op is None for finding in self.findings) if self.main.op is not None else 0

    @property
    def regions(self) -> int:
        """In how many regions it shows."""
        return len({finding.region for finding in self.findings if finding.region})

    @property
    def is_warning(self) -> bool:
        """Whether it fails nothing."""
        return all(finding.severity is Severity.WARNING for finding in self.findings)


def causes_of(findings: Sequence[Finding]) -> tuple[Cause, ...]:
    """Group findings by where they come from; those that fail come first.

    The same operator on the same line, wrong at the same stage, is one cause in however many regions. Where no
    operator is known, wrong values of one piece of code are told together, however often it was compiled: one error
    spreads to all that follows. That it is one cause is not known (`Cause.is_named`). What is about more than
    values is told by its finer kind. Findings of the same kind in the same code, whose own operator is not known,
    are told with the operator that was found (`Cause.assumed`).
    """
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        if not _is_left_to_another(finding):
            groups.setdefault(_origin(finding), []).append(finding)
    found = [group for group in groups.values() if group[0].op is not None and not group[0].of_node]
    for finding in filter(_is_left_to_another, findings):
        known = next((group for group in found if _may_explain(group, finding)), None)
        (groups.setdefault(_origin(finding), []) if known is None else known).append(finding)
    causes = [Cause(tuple(group)) for group in groups.values()]
    return tuple(sorted(causes, key=lambda one: (not one.main.fails, one.is_warning)))


def short_region(name: str) -> str:
    """A region's name without Dynamo's compile id."""
    return _COMPILE_ID.sub("", name)


def place_of(finding: Finding) -> str:
    """The region of a finding, with the module in it: ``blocks.1.mlp.act of Net``."""
    region = short_region(finding.region)
    return " of ".join(part for part in (finding.module, region) if part)


def _code_of(name: str) -> str:
    """A region's name without how often its code was compiled: other code of the same name is another region."""
    return _TIMES_COMPILED.sub("]", name)


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


def _origin(finding: Finding) -> tuple[object, ...]:
    region = short_region(finding.region)
    grade = finding.severity, finding.kind.fails
    if finding.of_node:
        return grade, region, finding.graph, finding.subject, finding.op
    if finding.op is not None:
        where = finding.source or (region, finding.node)
        return grade, finding.graph, finding.stage, finding.op, where
    if _is_vague(finding):
        return grade, _code_of(finding.region), finding.graph, finding.stage, "values"
    # the same words about several results; another message is another thing
    return grade, region, finding.graph, finding.stage, finding.detail or finding.kind, finding.message


def _is_left_to_another(finding: Finding) -> bool:
    """Whether the operator was looked for and is not known here: it may be that of another finding."""
    return finding.searched and finding.op is None and _is_vague(finding)


def _may_explain(group: Sequence[Finding], finding: Finding) -> bool:
    """Whether an operator that was found is in the same code, at the same stage as far as both are known."""
    code = _code_of(finding.region)
    return any(
        (_code_of(one.region), one.severity, one.kind) == (code, finding.severity, finding.kind)
        and finding.stage in (None, one.stage)
        for one in group
    )


def _is_vague(finding: Finding) -> bool:
    """Whether a finding is of wrong values that any operator before them may have made."""
    of_values = finding.kind in OF_VALUES and not finding.of_node and not finding.is_layout
    return of_values and finding.detail != "logic.this_call"
