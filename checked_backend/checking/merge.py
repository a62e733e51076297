"""Merge the findings of the compiled regions and of the whole program into one list, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from checked_backend.checking.outcome import Outcome
from checked_backend.checking.program import ProgramCall
from checked_backend.checking.program_run import ProgramRun
from checked_backend.findings import EvidenceKey, Finding, Kind
from checked_backend.regions.process_state import is_setting

__all__ = ["VALUES", "Shown", "merged", "showing_calls", "told", "with_baked_values"]

VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION, Kind.RNG})
"""Kinds of findings about wrong values."""

MOST_LABELS = 8
"""The most calls that are named in one finding."""

MOST_COMPILED = 3
"""Calls that are compiled once more, each alone."""

_USERS_OWN = "the arguments as given"


@dataclass(frozen=True, slots=True)
class Shown:
    """A finding, and the numbers of the calls that show it, in order."""

    finding: Finding
    calls: tuple[int, ...]


def merged(run: ProgramRun) -> list[Shown]:
    """Report each error once, where it shows first.

    A region's finding says where an error is. The whole program's findings add errors that no region shows. In
    training, an error in one step makes all later steps wrong, so only the program's findings in the first wrong step
    count. A region is compared on the candidate's own inputs, so each of its findings counts by itself.
    """
    own = run.found
    regions = [(at, finding) for at, finding in run.in_regions if not _is_eagers_own(finding, run.references[at])]
    if run.program.continued:
        failing = [index for index, finding in (*own, *regions) if finding.kind.fails]
        first = min(failing, default=len(run.program.calls))
        calls = run.program.calls  # those with gradients of other layouts do not follow from each other
        alike = first < len(calls) and calls[first].varies_gradients
        own = [(index, finding) for index, finding in own if index <= first or alike]
    extra = []
    for index, finding in own:
        beside = [other for at, other in regions if at == index]
        mine = [other for at, other in own if at == index]
        searched = run.references[index].evaluations > 1
        if not _is_told(finding, beside) and not _follows(finding, [*beside, *mine], searched):
            extra.append((index, finding))
    return [*_once(regions), *_once(extra)]


def _is_eagers_own(finding: Finding, reference: Outcome) -> bool:
    """Whether compiling raised an exception that eager raises too, but later, because compilers trace backward early.

    The coverage says that eager has no gradients, and the check is then inconclusive.
    """
    if finding.detail not in ("crash.compiling", "crash.fake") or reference.backward_error is None:
        return False
    said = str(reference.backward_error).partition("\n")[0].partition(":")[0]
    return bool(said) and said in finding.message


def _is_told(finding: Finding, regions: Sequence[Finding]) -> bool:
    """Whether a region's finding explains a finding of the program: wrong values there make wrong values here."""
    if is_setting(finding):
        return any(other.subject == finding.subject for other in regions)
    if finding.kind in VALUES and any(
        other.kind is Kind.NONDETERMINISTIC and other.subject == finding.subject for other in regions
    ):
        return True  # eager's values there change by themselves, even if they did not while the program was repeated
    known = {other.kind for other in regions if not is_setting(other)}
    return finding.kind in known or (finding.kind in VALUES and bool(known & VALUES))


def _follows(finding: Finding, beside: Sequence[Finding], searched: bool) -> bool:
    """Whether a parameter, or an optimizer's state, is wrong because a gradient is, among the findings beside it.

    Where an optimizer has searched, as LBFGS does, it evaluated the loss several times in the step. After the first
    evaluation the parameters differ, so one wrong gradient makes everything wrong. Otherwise each parameter only
    depends on its own gradient.
    """
    what, _, name = finding.subject.removesuffix("]").partition("[")
    if what not in ("param", "optimizer"):
        return False
    gradients = [other.about.name for other in beside if other.about.is_gradient]
    return any(searched or name == gradient or name.startswith(f"{gradient}.") for gradient in gradients)


def _once(found: Iterable[tuple[int, Finding]]) -> list[Shown]:
    grouped: dict[tuple[str, str], tuple[Finding, dict[int, None]]] = {}
    for index, finding in found:
        # by its size, the same wrong value may look like wrong logic in one call and like low precision in another
        what = "values" if finding.kind in VALUES - {Kind.RNG} else finding.detail or str(finding.kind)
        key = (finding.subject, what)
        grouped.setdefault(key, (finding, {}))[1].setdefault(index)
    return [Shown(finding, tuple(indices)) for finding, indices in grouped.values()]


def showing_calls(shown: Sequence[Shown], run: ProgramRun) -> list[ProgramCall]:
    """The fewest of a run's calls that show each failing finding once."""
    first = {entry.calls[0] for entry in shown if entry.finding.kind.fails}
    if run.program.continued:
        calls = run.program.calls
        return [
            call
            for at, call in enumerate(calls[: max(first, default=0) + 1])
            if not call.varies_gradients or at in first
        ]
    return [run.program.calls[index] for index in sorted({0, *first})]


def with_baked_values(
    shown: Sequence[Shown], run: ProgramRun, alone: Callable[[ProgramCall], Sequence[Finding]]
) -> list[Shown]:
    """Compile again for single calls that go wrong in a program that was compiled for another call.

    If a call is right when the program is compiled for it, its finding says so.

    Args:
        alone: Compiles and runs a single call; returns its findings.
    """
    doubtful = [
        entry
        for entry in shown
        if entry.calls[0] > 0
        and entry.finding.kind in VALUES
        and not (run.program.continued or run.program.calls[entry.calls[0]].varies_gradients)
    ]
    wrong: dict[int, set[str]] = {}
    for index in list(dict.fromkeys(entry.calls[0] for entry in doubtful))[:MOST_COMPILED]:
        found = alone(replace(run.program.calls[index], label=""))
        wrong[index] = {finding.subject for finding in found if finding.kind.fails}
    return [
        _baked(entry)
        if entry in doubtful and entry.finding.subject not in wrong.get(entry.calls[0], {entry.finding.subject})
        else entry
        for entry in shown
    ]


def _baked(entry: Shown) -> Shown:
    message = (
        "it is right when the program is compiled for this call: something of the call that it was compiled for is "
        "baked into the compiled program"
    )
    return replace(entry, finding=replace(entry.finding, kind=Kind.LOGIC, detail="logic.baked", message=message))


def _listed(labels: Sequence[str]) -> str:
    more = f"; and {len(labels) - MOST_LABELS} more" if len(labels) > MOST_LABELS else ""
    return "; ".join(labels[:MOST_LABELS]) + more


def told(shown: Shown, run: ProgramRun) -> Finding:
    """A finding that says in words which calls show it."""
    finding, calls = shown.finding, run.program.calls
    if len(calls) == 1:
        return finding
    training = run.program.continued and not any(call.label for call in calls if not call.varies_gradients)
    if training and not calls[shown.calls[0]].varies_gradients:
        steps = sum(not call.varies_gradients for call in calls)
        if steps == 1:
            return finding
        step = f"{shown.calls[0] + 1} of {steps}"
        return replace(
            finding,
            message=f"{finding.message}; first in step {step}",
            evidence={**finding.evidence, EvidenceKey.STEP: step},
        )
    labels = [calls[index].label or _USERS_OWN for index in shown.calls]
    if labels == [_USERS_OWN]:
        return finding
    message = finding.message if labels[0] == _USERS_OWN else f"{finding.message}; {labels[0]}"
    return replace(finding, message=message, evidence={**finding.evidence, EvidenceKey.FAILING_CALLS: _listed(labels)})
