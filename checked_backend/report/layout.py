"""Findings about layout alone: the values agree, and what is told of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from checked_backend.record import Finding

__all__ = ["layout_sentence", "layout_warning"]

_SHOWN = 3

# for one result, for more, and what may come of it
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

    Args:
        findings: At least one, all about layout alone.
    """
    return f"values agree; {', '.join(_told(findings))}"


def _told(findings: Sequence[Finding]) -> Iterator[str]:
    for detail, (one, more, _) in _WORDS.items():
        subjects = {(finding.region, finding.subject) for finding in findings if finding.detail == detail}
        if subjects:
            noun = "output" if all(subject.startswith("output") for _, subject in subjects) else "result"
            yield f"1 {noun} {one}" if len(subjects) == 1 else f"{len(subjects)} {noun}s {more}"


def layout_warning(findings: Sequence[Finding]) -> str:
    """The text of a warning, the same for each time that a program is compiled.

    Args:
        findings: At least one, all about layout alone.
    """
    lines = [f"{layout_sentence(findings)}."]
    for finding in findings[:_SHOWN]:
        where = f", at {finding.source}" if finding.source else ""
        lines.append(f"  {finding.subject}: {_difference(finding)}{where}")
    if len(findings) > _SHOWN:
        lines.append(f"  and {len(findings) - _SHOWN} more")
    details = {finding.detail for finding in findings}
    lines += [breaks for detail, (_, _, breaks) in _WORDS.items() if detail in details]
    lines.append(
        'The check goes on, and this is not said again. options={"layout": "raise"} treats it as an error, '
        '"ignore" keeps it in the coverage.'
    )
    return "\n".join(lines)


def _difference(finding: Finding) -> str:
    if finding.expected is None or finding.actual is None:
        return finding.message
    return f"{finding.expected} in eager, {finding.actual} compiled"
