"""Merge the findings and coverages of regions and of the whole program; find the level at which a failure arises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from checked_backend.checking.program import Outcome, ProgramCall
from checked_backend.checking.program_run import ProgramRun
from checked_backend.findings import Coverage, EvidenceKey, Finding, Kind
from checked_backend.report.ledger import Ledger
from checked_backend.subjects import Subject, SubjectKind

VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION, Kind.RNG})
"""Kinds of findings about wrong values."""

MOST_LABELS = 8
"""The most calls that are named in one finding."""

MOST_COMPILED = 3
"""Calls that are compiled once more, each alone."""

_USERS_OWN = "the arguments as given"
_BAKED = (
    "it is right when the program is compiled for this call: something of the call that it was compiled for is baked "
    "into the compiled program"
)


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
    if finding.about.kind is SubjectKind.STATE:  # a setting, and so no tensor
        return any(other.subject == finding.subject for other in regions)
    if finding.kind in VALUES and any(
        other.kind is Kind.NONDETERMINISTIC and other.subject == finding.subject for other in regions
    ):
        return True  # eager's values there change by themselves, even if they did not while the program was repeated
    known = {other.kind for other in regions if other.about.kind is not SubjectKind.STATE}
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
    """Compile again for single calls that go wrong in a program that was compiled for another call (``alone``).

    If a call is right when the program is compiled for it, its finding says so.
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
    baked = [one for one in doubtful if one.finding.subject not in wrong.get(one.calls[0], {one.finding.subject})]
    return [
        replace(entry, finding=replace(entry.finding, kind=Kind.LOGIC, detail="logic.baked", message=_BAKED))
        if entry in baked
        else entry
        for entry in shown
    ]


def told(shown: Shown, run: ProgramRun) -> Finding:
    """A finding that says in words which calls show it."""
    finding, calls = shown.finding, run.program.calls
    if len(calls) == 1 and not calls[0].label:
        return finding
    training = run.program.continued and not any(call.label for call in calls if not call.varies_gradients)
    if training and not calls[shown.calls[0]].varies_gradients:
        steps = sum(not call.varies_gradients for call in calls)
        if steps == 1:
            return finding
        step = f"{shown.calls[0] + 1} of {steps}"
        message, evidence = f"{finding.message}; first in step {step}", {**finding.evidence, EvidenceKey.STEP: step}
        return replace(finding, message=message, evidence=evidence)
    labels = [calls[index].label or _USERS_OWN for index in shown.calls]
    if labels == [_USERS_OWN]:
        return finding
    message = finding.message if labels[0] == _USERS_OWN else f"{finding.message}; {labels[0]}"
    more = [f"and {len(labels) - MOST_LABELS} more"] if len(labels) > MOST_LABELS else []
    listed = "; ".join([*labels[:MOST_LABELS], *more])
    return replace(finding, message=message, evidence={**finding.evidence, EvidenceKey.FAILING_CALLS: listed})


def told_once(
    regions: Coverage, program: Coverage, names: Mapping[tuple[str, str], str | None]
) -> tuple[Coverage, Coverage]:
    """Both coverages of a run, with the better detection limit for tensors that both compared.

    In a program of one region, the region's gradients are the program's, and so are the results that the program
    returns. The region's float64 twin says nothing about Dynamo's translation of the program: such an error only shows
    in the program's own comparison. A region's results may have other ``names``, and another order, in the program.
    """
    if len(regions.regions) != 1:
        return regions, program
    region = regions.regions[0].name

    def named(subject: str) -> str:
        """The program's name of a result; a result that the program does not return gets a name of its own."""
        known = names.get((region, subject))
        return known or (f"{subject} of {region}" if Subject(subject).kind is SubjectKind.OUTPUT else subject)

    limits = {named(subject): limit for subject, limit in regions.detection_limit.items()}
    own = {named(subject): limit for subject, limit in regions.own_precision_limit.items()}
    whole = dict(program.detection_limit)
    for name in limits.keys() & whole.keys():
        if Subject(name).kind in (SubjectKind.GRADIENT, SubjectKind.OUTPUT):
            own[name] = max(own.get(name, 0.0), whole[name])
            limits[name] = whole[name] = min(limits[name], whole[name])
    regions = replace(regions, detection_limit=limits, own_precision_limit=own)
    return regions, replace(program, detection_limit=whole)


def joined(coverages: Sequence[Coverage]) -> Coverage:
    """The coverage of several runs of one program, as one: what was checked in all, and the bluntest limits."""
    ledger = Ledger()
    for coverage in coverages:
        ledger.add_coverage(replace(coverage, regions=()))
    return replace(
        ledger.coverage(),
        regions=tuple(region for coverage in coverages for region in coverage.regions),
        ignored=tuple(finding for coverage in coverages for finding in coverage.ignored),
    )


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
