"""Words for findings about layout alone, where the values agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from checked_backend.findings import Finding
from checked_backend.subjects import Subject, SubjectKind

__all__ = ["layout_sentence", "layout_warning"]

_SHOWN = 3

# words for one node and for several whose real layout is not the traced one
_TRACED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "structure.stride": ("has other strides than were traced", "have other strides than were traced"),
        "structure.offset": (
            "begins elsewhere in its storage than was traced",
            "begin elsewhere in their storages than was traced",
        ),
    }
)
_UNUSED = (
    "A compiler that trusts the traced layout, and runs the operator as it is, may still read at the wrong places. For "
    "a custom operator make its register_fake say what its kernel does; for an operator of torch report it."
)

# words for one result, for several, and for what may come of it
_WORDS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "structure.stride": (
            "has other strides than in eager",
            "have other strides than in eager",
            "Code breaks that calls .view() on such a result, or hands its pointer to a kernel that assumes strides. "
            "The cure is cheap: return x.contiguous() from there.",
        ),
        "structure.requires_grad": (
            "differs from eager's in requires_grad",
            "differ from eager's in requires_grad",
            "Code that asks for .requires_grad takes another way, and autograd may keep what it need not. The cure is "
            "cheap: return x.detach() from there where no gradient is to flow.",
        ),
        "logic.sign_of_zero": (
            "has zeros of another sign than in eager",
            "have zeros of another sign than in eager",
            "Code that divides by such a zero, or asks for its sign (atan2, copysign, signbit), gets another result. "
            "The cure is cheap: return x + 0.0 from there, which has no negative zeros.",
        ),
    }
)


def layout_sentence(findings: Sequence[Finding]) -> str:
    """``values agree; 8 outputs have other strides than in eager``.

    No values are known of nodes whose metadata was compared. They are told as ``1 node has other strides than were
    traced, on which nothing depends``.

    Args:
        findings: At least one, all about layout alone.
    """
    of_results = ", ".join(_told([finding for finding in findings if not finding.of_node]))
    of_nodes = ", ".join(_told_of_nodes([finding for finding in findings if finding.of_node]))
    parts = [f"values agree; {of_results}"] if of_results else []
    return "; ".join([*parts, f"{of_nodes}, on which nothing depends"] if of_nodes else parts)


def _told_of_nodes(findings: Sequence[Finding]) -> Iterator[str]:
    for detail, (one, more) in _TRACED.items():
        nodes = {(finding.region, finding.graph, finding.subject) for finding in findings if finding.detail == detail}
        if nodes:
            yield f"1 node {one}" if len(nodes) == 1 else f"{len(nodes)} nodes {more}"


def _told(findings: Sequence[Finding]) -> Iterator[str]:
    for detail, (one, more, _) in _WORDS.items():
        subjects = {(finding.region, finding.subject) for finding in findings if finding.detail == detail}
        if subjects:
            noun = "output" if all(Subject(subject).kind is SubjectKind.OUTPUT for _, subject in subjects) else "result"
            yield f"1 {noun} {one}" if len(subjects) == 1 else f"{len(subjects)} {noun}s {more}"


def layout_warning(findings: Sequence[Finding]) -> str:
    """The text of a warning, the same for each time that a program is compiled.

    Args:
        findings: At least one, all about layout alone.
    """
    lines = [f"{layout_sentence(findings)}."]
    for finding in findings[:_SHOWN]:
        operator = f" ({finding.op})" if finding.of_node else ""
        where = f", at {finding.source}" if finding.source else ""
        lines.append(f"  {finding.subject}{operator}: {_difference(finding)}{where}")
        if finding.of_node and finding.at_fault:
            lines.append(f"    likely at fault: {finding.at_fault}")
    if len(findings) > _SHOWN:
        lines.append(f"  and {len(findings) - _SHOWN} more")
    lines += [_UNUSED] if any(finding.of_node for finding in findings) else []
    details = {finding.detail for finding in findings if not finding.of_node}
    lines += [breaks for detail, (_, _, breaks) in _WORDS.items() if detail in details]
    lines.append(
        'The check goes on, and this is not said again. options={"layout": "raise"} treats it as an error, '
        '"ignore" keeps it in the coverage.'
    )
    return "\n".join(lines)


def _difference(finding: Finding) -> str:
    if finding.expected is None or finding.actual is None:
        return finding.message
    if finding.of_node:
        what = finding.detail.removeprefix("structure.")
        return f"{what} {finding.expected} traced, {finding.actual} ran"
    return f"{finding.expected} in eager, {finding.actual} compiled"
