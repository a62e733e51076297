"""Find the level at which a program begins to fail: Dynamo's graph, AOT autograd, or the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from checked_backend.findings import EvidenceKey, Finding, Kind

Failing = Callable[[str], Sequence[Finding]]
"""Runs the same calls with another compiler; gives its findings."""

_LADDER = (
    ("eager", "eager", "Dynamo: its graph, run in eager, is wrong already, whatever compiles it"),
    ("aot_eager", "aot", "AOT autograd: its graphs, run in eager, are wrong already, whatever compiles them"),
)
_NO_ROUNDING = "its values are wrong, and Dynamo's graph, run in eager, rounds as the program does: no rounding error"
_OTHER_ROUNDING = (
    "Dynamo's graph loses precision that the program has in eager: it rounds otherwise; in float64 both agree, so it "
    "is no wrong logic"
)
_OF_VALUES = ("precision", "mutation")
"""Kinds that are classified again for the whole program only: a region's own check has its own float64 twin."""
_LAST = ("compiled", "the compiler: Dynamo's graph and AOT autograd's graphs are right")


def with_levels(
    findings: Sequence[Finding],
    compiler: object,
    failing: Failing,
    *,
    numpy: bool = False,
    same_in_float64: Callable[[int], bool | None] = lambda _: None,
) -> list[Finding]:
    """Tell for each finding that fails at which level it arises first: its stage, and among its evidence in words.

    Args:
        numpy: Whether NumPy computes a part of the program in eager. Dynamo's graph then rounds otherwise.
        same_in_float64: Whether the tensor of the finding at this place agrees if eager and Dynamo's graph run in
            float64; None if that is unknown.
    """
    if not any(finding.kind.fails for finding in findings):
        return list(findings)
    levels: dict[int, tuple[str, str]] = {}
    for name, stage, words in _LADDER:
        open_ones = [place for place, f in enumerate(findings) if f.kind.fails and place not in levels]
        if not open_ones:
            break
        if compiler == name:
            levels |= dict.fromkeys(open_ones, (stage, words))
            break
        lower = failing(name)
        levels |= {place: (stage, words) for place in open_ones if _shown_in(findings[place], lower)}
    told = []
    for place, finding in enumerate(findings):
        if finding.kind.fails:
            stage, words = levels.get(place, _LAST)
            finding = replace(
                finding, stage=finding.stage or stage, evidence={**finding.evidence, EvidenceKey.LEVEL: words}
            )
            if stage == "eager" and not numpy and finding.detail in _OF_VALUES and not finding.region:
                finding = _classified_again(finding, same_in_float64(place))
        told.append(finding)
    return told


def _classified_again(finding: Finding, same_in_float64: bool | None) -> Finding:
    """Classify a difference between eager and Dynamo's graph, run in eager: it may be more than rounding."""
    if same_in_float64:
        return replace(finding, kind=Kind.PRECISION, detail="precision.traced", message=_OTHER_ROUNDING)
    if finding.kind is Kind.PRECISION:
        return replace(finding, kind=Kind.LOGIC, detail=str(Kind.LOGIC), message=_NO_ROUNDING)
    return finding


def _shown_in(finding: Finding, lower: Sequence[Finding]) -> bool:
    """Whether a lower level shows the same, as a region's finding or as the program's."""
    return any(
        other.kind.fails
        and (other.detail == finding.detail or (other.kind, other.subject) == (finding.kind, finding.subject))
        for other in lower
    )
