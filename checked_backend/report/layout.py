"""Words for findings about layout alone, where the values agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from checked_backend.findings import Finding
from checked_backend.report.advice import ADVICE
from checked_backend.report.clean import plural
from checked_backend.report.words import for_several
from checked_backend.subjects import SubjectKind

__all__ = ["layout_sentence", "layout_warning"]

_SHOWN = 3

_OF_RESULTS: Mapping[str, str] = MappingProxyType(
    {
        "structure.stride": "has other strides than in eager",
        "structure.requires_grad": "differs from eager in requires_grad",
        "logic.sign_of_zero": "has zeros of another sign than in eager",
    }
)
_OF_NODES: Mapping[str, str] = MappingProxyType(
    {
        "structure.stride": "has other strides than were traced",
        "structure.offset": "begins elsewhere in memory than was traced",
    }
)


def layout_sentence(findings: Sequence[Finding]) -> str:
    """``values agree; 8 outputs have other strides than in eager``.

    No values are known of nodes whose metadata was compared. They are told as ``1 node has other strides than were
    traced, on which nothing depends``.

    Args:
        findings: At least one, all about layout alone.
    """
    of_results = ", ".join(_told([finding for finding in findings if not finding.of_node], _OF_RESULTS))
    of_nodes = ", ".join(_told([finding for finding in findings if finding.of_node], _OF_NODES))
    parts = [f"values agree; {of_results}"] if of_results else []
    return "; ".join([*parts, f"{of_nodes}, on which nothing depends"] if of_nodes else parts)


def _told(findings: Sequence[Finding], words: Mapping[str, str]) -> Iterator[str]:
    for detail, phrase in words.items():
        alike = [finding for finding in findings if finding.detail == detail]
        count = len({(finding.region, finding.of_node and finding.graph, finding.subject) for finding in alike})
        kinds = {finding.about.kind for finding in alike}
        noun = "node" if words is _OF_NODES else "output" if kinds == {SubjectKind.OUTPUT} else "result"
        if alike:
            yield f"{plural(count, noun)} {for_several(phrase, count)}"


def layout_warning(findings: Sequence[Finding]) -> str:
    """The text of a warning, the same for each time that a program is compiled.

    Args:
        findings: At least one, all about layout alone.
    """
    lines = [f"{layout_sentence(findings)}."]
    for finding in findings[:_SHOWN]:
        operator = f" ({finding.op})" if finding.of_node else ""
        where = f"; your line: {finding.source}" if finding.source else ""
        lines.append(f"  {finding.subject}{operator}: {_difference(finding)}{where}")
        if finding.of_node and finding.at_fault:
            lines.append(f"    likely at fault: {finding.at_fault}")
    if len(findings) > _SHOWN:
        lines.append(f"  and {len(findings) - _SHOWN} more")
    lines += dict.fromkeys(ADVICE["node.layout" if finding.of_node else finding.detail] for finding in findings)
    lines.append('The check goes on, and this is not said again; options={"layout": "raise"} makes it an error.')
    return "\n".join(lines)


def _difference(finding: Finding) -> str:
    if finding.expected is None or finding.actual is None:
        return finding.message
    if finding.of_node:
        what = finding.detail.removeprefix("structure.")
        return f"{what} {finding.expected} traced, {finding.actual} ran"
    return f"{finding.expected} in eager, {finding.actual} compiled"
