"""Compare the results and the effects of eager and of the compiled program, call by call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from checked_backend.checking.program import Outcome, Program, as_tensor, in_step
from checked_backend.checking.program_runner import ProgramRunner
from checked_backend.checking.tree import Container, comparable
from checked_backend.errors import is_out_of_memory
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.regions.call_findings import compare_exceptions, described_exception, rng_state_differs
from checked_backend.regions.compare_call import COMPARABLE, FREE_IN_GRADIENTS, settle_none
from checked_backend.regions.compare_parts import Part, compare_aliasing, compare_parts, value_pairs
from checked_backend.regions.process_state import settings_changed
from checked_backend.regions.unsupported import MachineLimits
from checked_backend.report.advice import PROGRAM_RUNS
from checked_backend.report.environment import here_and_now
from checked_backend.report.ledger import Ledger
from checked_backend.subjects import Subject, SubjectKind
from checked_backend.verdict.classify import NOT_REPRODUCED
from checked_backend.verdict.decide import decide, tolerate_flipped_shapes
from checked_backend.verdict.decisions import TensorPair
from checked_backend.verdict.envelope import NoiseBaseline

_CALLED = {
    SubjectKind.MUTATED: "input",
    SubjectKind.ATTRIBUTE: "attribute",
    SubjectKind.PARAMETER: "parameter",
    SubjectKind.BUFFER: "buffer",
}
_NUMBER = re.compile(r"-?\d+\.\d*(e[-+]?\d+)?")
_LEFT = (SubjectKind.MUTATED, SubjectKind.ATTRIBUTE)
_PYTHON_VALUES = ("structure.container", "structure.outputs", "structure.value")
_MEND = "mend that first, or give arguments that the program takes"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two runs.

    Attributes:
        found: The findings, each with the number of its call.
        scales: The noise of each tensor that was not equal bit for bit, named by `in_step`.
        limits: The smallest error of each subject that would have been seen in all calls.
        own_precision_limits: The smallest error of each subject that would have been seen where float64 cannot show it.
    """

    found: list[tuple[int, Finding]]
    scales: Mapping[str, NoiseBaseline]
    limits: Mapping[str, float]
    own_precision_limits: Mapping[str, float]

    def scales_at(self, index: int) -> dict[str, NoiseBaseline]:
        """The scale of each tensor from the last call that has one, under the names of another call."""
        return {in_step(index, _plain(name)): scale for name, scale in self.scales.items()}


def compare_runs(
    references: Sequence[Outcome],
    candidates: Sequence[Outcome],
    program: Program,
    ledger: Ledger,
    *,
    first: int = 0,
    known: Mapping[str, NoiseBaseline] | None = None,
) -> Comparison:
    """Compare two runs, call by call.

    Args:
        program: Makes the control runs.
        first: The number of the first of these calls among those of the control runs.
        known: Scales of noise from earlier calls, for tensors named by `in_step`.
    """
    runner = partial(ProgramRunner, program)
    found: list[tuple[int, Finding]] = []
    pairs: list[TensorPair] = []
    for index, (reference, candidate) in enumerate(zip(references, candidates, strict=False), first):
        ledger.count({PROGRAM_RUNS: 1})
        found += [(index, finding) for finding in _compare_settings(reference, candidate)]
        if reference.error is not None or candidate.error is not None:
            ledger.count({"exceptions": 1})
            differing = list(compare_errors(reference, candidate, ledger))
            found += [(index, finding) for finding in differing]
            if not differing:  # if both raise alike, there is no result to compare
                raised = described_exception(reference.error)
                why = f"eager itself raises {raised}, so there are none to compare; {_MEND}"
                ledger.skip(Skip("results", why, matters=True))
            continue
        if reference.backward_error is not None or candidate.backward_error is not None:
            ledger.count({"exceptions": 1})
            found += [(index, f) for f in compare_errors(reference, candidate, ledger, backward=True)]
            if reference.backward_error is not None:
                why = f"eager has none: {described_exception(reference.backward_error)}"
                ledger.skip(Skip("gradients", why, matters=reference.is_differentiable))
        structure, mine = compare_structure(reference, candidate, ledger, trained=program.optimizer is not None)
        structure = _repeatable(structure, reference, index, program, ledger)
        structure, flipped = tolerate_flipped_shapes(structure, runner, partial(in_step, index))
        for skip in flipped:
            ledger.skip(skip)
        if any(skip.matters for skip in flipped) and any(Subject(pair.name).is_gradient for pair in mine):
            mine = [pair for pair in mine if not Subject(pair.name).is_gradient]
            ledger.skip(Skip("gradients", "they begin at outputs of another shape than eager's", matters=True))
        found += [(index, finding) for finding in structure]
        pairs += [replace(p, subject=in_step(index, p.subject), name=in_step(index, p.name)) for p in mine]
        # an optimizer that asks for its loss until it is content has drawn more often
        if reference.evaluations == candidate.evaluations and _leaves_the_same(reference, candidate) is False:
            if any(_leaves_the_same(reference, again) for again in program.run_all()[index : index + 1]):
                found.append((index, rng_state_differs()))
            else:
                why = "eager leaves another one each time (torch.seed, or another thread draws)"
                ledger.skip(Skip("rng state", why))
    decisions = decide(pairs, runner, dict(known or {}))
    devices = {str(pair.candidate.device) for pair in pairs}
    ledger.count({"tensors": decisions.compared})
    for skip in decisions.skips:
        ledger.skip(replace(skip, subject=_plain(skip.subject)))
    for finding in decisions.findings:
        subject = Subject.of(finding.subject)
        step = first if subject.step is None else subject.step
        is_number = isinstance(references[step - first].subjects.get(subject.text), (int, float))
        if finding.kind is Kind.NONDETERMINISTIC and is_number and subject.kind in _LEFT:
            ledger.skip(Skip(subject.text, "eager leaves another number each time, as a clock does"))
            continue
        seen = here_and_now(devices) if finding.detail == NOT_REPRODUCED.detail else {}
        named = replace(finding, subject=subject.text, evidence={**finding.evidence, **seen})
        found.append((step, named))
    found.sort(key=lambda entry: entry[0])
    limits, own = _by_subject(decisions.limits), _by_subject(decisions.own_precision_limits)
    return Comparison(found, decisions.scales, limits, own)


def _repeatable(
    findings: list[Finding], reference: Outcome, index: int, program: Program, ledger: Ledger
) -> list[Finding]:
    """The findings without those about values that are no tensors and that eager itself does not repeat."""
    if not any(finding.detail in _PYTHON_VALUES for finding in findings):
        return findings
    again = program.run_all()[index : index + 1]
    changing = {f.subject for one in again for f in compare_structure(reference, one, Ledger())[0]}
    unstable = [f for f in findings if f.detail in _PYTHON_VALUES and f.subject in changing]
    for finding in unstable:
        why = "eager has another value each time, so there is nothing to compare with"
        ledger.skip(Skip(finding.subject, why, matters=True))
    return [finding for finding in findings if finding not in unstable]


def _by_subject(limits: Mapping[str, float]) -> dict[str, float]:
    """For each subject, the weakest limit of all calls."""
    weakest: dict[str, float] = {}
    for name, limit in limits.items():
        subject = _plain(name)
        weakest[subject] = max(limit, weakest.get(subject, 0.0))
    return weakest


def _plain(subject: str) -> str:
    return Subject.of(subject).text


def compare_structure(
    reference: Outcome, candidate: Outcome, ledger: Ledger, *, trained: bool = False
) -> tuple[list[Finding], list[TensorPair]]:
    """Compare everything but values. Returns the findings, and the tensors whose values can be compared.

    Where an optimizer has ``trained`` the parameters, they follow from the gradients.
    """
    with_gradients = reference.backward_error is None and candidate.backward_error is None
    same = _unchanged_values(reference.subjects, candidate.subjects)
    for name in sorted(candidate.subjects.keys() - same):
        # OptimizerVariable._set_capturable in torch/_dynamo/variables/optimizer.py
        if re.search(r"\.param_groups\[\d+]\[capturable]]$", name) and candidate.subjects[name] is True:
            ledger.note(f"{name}: Dynamo sets it in the groups of an optimizer that it traces")
            same.add(name)
        one, other = reference.subjects.get(name), candidate.subjects[name]
        if (
            Subject(name).kind in _LEFT
            and isinstance(one, str)
            and isinstance(other, str)
            and _NUMBER.sub("", one) == _NUMBER.sub("", other)
        ):
            ledger.skip(Skip(name, "a text that differs from eager's in a number alone, as a printed loss may"))
            same.add(name)
    mine, theirs = (
        {
            name: value
            for name, value in side.subjects.items()
            if (with_gradients or not Subject(name).is_gradient) and name not in same
        }
        for side in (reference, candidate)
    )
    there, message = ("absent", "present"), "only one of eager and the compiled program has it"
    findings = [
        Part(name, None, None).differs("outputs", message, there[name in mine], there[name in theirs])
        for name in sorted(mine.keys() ^ theirs.keys())
    ]
    findings += _compare_containers(reference.containers, candidate.containers)
    parts = [_part(name, value, theirs[name], ledger) for name, value in mine.items() if name in theirs]
    structure = [f for f in compare_parts(parts) if not (f.about.is_gradient and f.detail in FREE_IN_GRADIENTS)]
    findings += structure
    findings += compare_aliasing(reference.outputs, _memory(reference), candidate.outputs, _memory(candidate))
    incomparable = frozenset(f.subject for f in structure if f.detail not in COMPARABLE)
    pairs = []
    for part, name, one, other in value_pairs(parts, incomparable):
        kind = Subject(part.subject).kind
        changed = kind.is_changed_in_place and not (trained and kind is SubjectKind.PARAMETER)
        # the values as they were when the call was over
        one, other = reference.values.get(name, one), candidate.values.get(name, other)
        pairs.append(TensorPair(part.subject, name, one, other, Kind.MUTATION if changed else None))
    return findings, pairs


def _memory(outcome: Outcome) -> dict[str, Any]:
    """What outputs may share memory with, by its name for people."""
    subjects = ((Subject(text), value) for text, value in outcome.subjects.items())
    return {f"{_CALLED[one.kind]} {one.name}": value for one, value in subjects if one.kind in _CALLED}


def _unchanged_values(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> set[str]:
    """The numbers and strings that are left the same on both sides: there is nothing to compare."""
    return {
        name
        for name, value in reference.items()
        if name in candidate
        and Subject(name).kind in _LEFT
        and not isinstance(value, (torch.Tensor, np.ndarray))
        and (type(value), value) == (type(candidate[name]), candidate[name])
    }


def _compare_containers(reference: Mapping[str, Container], candidate: Mapping[str, Container]) -> Iterator[Finding]:
    for path, mine in reference.items():
        theirs, part = candidate.get(path, mine), Part(path, None, None)
        if mine.kind != theirs.kind:
            yield part.differs("container", "a container of another type than eager's", mine.kind, theirs.kind)
        elif mine.keys != theirs.keys and sorted(mine.keys) == sorted(theirs.keys):
            first = next(place for place, key in enumerate(mine.keys) if key != theirs.keys[place])
            message = f"its keys are in another order than eager's, from place {first} on"
            yield part.differs("container", message, mine.keys[first], theirs.keys[first])
    kinds = [side["output"].kind if "output" in side else "none" for side in (reference, candidate)]
    if kinds.count("none") == 1:
        message = "one of eager and the compiled program returns a container, and the other one what would be in it"
        yield Part("output", None, None).differs("container", message, *kinds)


def _part(name: str, reference: Any, candidate: Any, ledger: Ledger) -> Part:
    """What is compared: tensors, numbers as tensors, since they may be rounded, and what stands for other values."""
    one, other = (
        value if isinstance(as_tensor(value), torch.Tensor) else comparable(value) for value in (reference, candidate)
    )
    if Subject(name).is_gradient:  # eager leaves None where AOT autograd leaves zeros: there is no influence
        one, other = settle_none(one, other)
    array = isinstance(other, np.ndarray) and other.ndim == 0
    numpys = array and isinstance(one, np.generic) and one.dtype == other.dtype
    if numpys:
        ledger.note(f"{name}: eager's NumPy scalar is an array of no dimensions when compiled, as documented")
    if numpys or type(one) is type(other):
        one, other = as_tensor(one), as_tensor(other)
    return Part(name, one, other)


def _leaves_the_same(one: Outcome, other: Outcome) -> bool | None:
    """Whether two calls leave the same random state; None if that of one is not known."""
    return None if one.rng is None or other.rng is None else one.rng.same_as(other.rng)


def _compare_settings(reference: Outcome, candidate: Outcome) -> list[Finding]:
    """Settings that the program leaves otherwise when it is compiled; what it sets itself, it sets in eager too."""
    if reference.settings is None or candidate.settings is None:
        return []
    start, end = candidate.settings
    expected = start.moved(*reference.settings)
    return settings_changed(expected.changed(end), before=start, expected=expected, actual=end)


def compare_errors(
    reference: Outcome, candidate: Outcome, ledger: Ledger, *, backward: bool = False
) -> Iterator[Finding]:
    """Compare what two runs raised: in the call itself, or in its backward pass."""
    eager, compiled = (side.backward_error if backward else side.error for side in (reference, candidate))
    finding, remark = compare_exceptions(eager, compiled, during="backward" if backward else "running")
    if remark:
        ledger.note(remark)
    if finding is None:
        return
    where = " in the backward pass" if backward else ""
    expected, actual = described_exception(eager), described_exception(compiled)
    if is_out_of_memory(eager):  # eager alone fails for lack of memory, which is no finding
        what = f"unsupported: memory: eager ran out of it{where}: {expected}"
        ledger.skip(Skip("gradients" if backward else "results", what, matters=True))
        return

    def needed() -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in reference.values.values())

    if compiled is not None and (short := MachineLimits(needed)(compiled)) is not None:
        yield short
        return
    message = f"eager and the compiled program raise different exceptions{where}"
    if compiled is None:
        message = f"eager raises{where} and the compiled program does not"
    elif eager is None:
        message = f"only the compiled program raises{where}"
    yield replace(finding, subject="exception", message=message, expected=expected, actual=actual)
