"""Run a program in eager and compiled from the same state, and compare everything that can be seen of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from checked_backend._torch import dynamo_reset, inner_exception
from checked_backend.checking.controls import ProgramControls
from checked_backend.checking.isolated import run_isolated
from checked_backend.checking.program import Outcome, Program
from checked_backend.errors import OptionError
from checked_backend.options import CheckOptions, parse_options
from checked_backend.record import Finding, Kind, Skip
from checked_backend.regions.adjudicate import Pair, adjudicate
from checked_backend.regions.ambient import RngState
from checked_backend.regions.backend import build_region
from checked_backend.regions.compare import Part, compare_aliasing, compare_parts, value_pairs
from checked_backend.regions.ledger import Ledger
from checked_backend.regions.session import Session, collect
from checked_backend.report import Report

__all__ = ["check"]

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]

ISOLATED_TIMEOUT = 1800.0
"""Seconds after which an isolated check counts as hung."""


def check(
    fn_or_module: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compiler: str | Callable[..., Any] = "inductor",
    gradients: bool | str = "auto",
    dynamic: bool | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    isolate: bool = False,
) -> Report:
    """Compare a program in eager with the same program compiled.

    Both run on copies: neither the module, its parameters and buffers, nor the arguments are changed. Each output
    gets its own random cotangent for the backward pass. Every compiled region is checked too, float64 twin included,
    so that a finding says in which region the error arose.

    Args:
        fn_or_module: What to check.
        args: Positional arguments.
        kwargs: Keyword arguments.
        compiler: The candidate: a Dynamo backend's name or a callable.
        gradients: ``True``, ``False``, or ``"auto"``: if grad mode is on and something requires grad.
        dynamic: As for ``torch.compile``.
        compiler_options: Handed to the candidate.
        isolate: Run everything in a process of its own, whose death is a finding of kind ``crash``.

    Returns:
        The report. An exception of the program itself is compared, not raised.

    Raises:
        OptionError: An argument that `check` does not take.
        CheckedBackendError: ``isolate=True`` where no process can be forked.
    """
    if gradients not in (True, False, "auto"):
        raise OptionError(f"check: gradients got {gradients!r}; valid: True, False, 'auto'.")
    given: dict[str, Any] = {"compiler": compiler, "compiler_options": dict(compiler_options or {})}
    options = parse_options(CheckOptions, "check", {**given, "on_divergence": "record", "localize": False})
    program = Program(
        fn_or_module,
        args,
        dict(kwargs or {}),
        RngState.capture(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()),
        gradients=torch.is_grad_enabled() if gradients == "auto" else bool(gradients),
    )
    compiled = partial(torch.compile, backend=partial(_region_backend, options=options), dynamic=dynamic)
    if isolate:
        return run_isolated(partial(_run, program, compiled), program.run, timeout=ISOLATED_TIMEOUT)
    return _run(program, compiled)


def _run(program: Program, compiled: Transform) -> Report:
    reference = program.run()
    with _fresh_dynamo(), collect() as session:
        candidate = program.run(compiled)
    own = Ledger()
    findings = _compare(program, compiled, reference, candidate, own)
    return _merged(session, own, findings)


def _region_backend(gm: Any, example_inputs: Sequence[Any], *, options: CheckOptions) -> Callable[..., Any]:
    return build_region(gm, example_inputs, options, None, thorough=True)


@contextmanager
def _fresh_dynamo() -> Iterator[None]:
    """Compile anew: what an earlier call compiled for this code must not be run instead."""
    dynamo_reset()
    try:
        yield
    finally:
        dynamo_reset()


def _compare(
    program: Program,
    compiled: Transform,
    reference: Outcome,
    candidate: Outcome,
    ledger: Ledger,
) -> list[Finding]:
    if reference.error is not None or candidate.error is not None:
        ledger.count({"exceptions": 1})
        return list(_compare_errors(reference.error, candidate.error))
    mine, theirs = reference.subjects(), candidate.subjects()
    findings = [
        Finding(
            kind=Kind.STRUCTURE,
            detail="structure.outputs",
            subject=name,
            message="only one of eager and the compiled program has it",
            expected="present" if name in mine else "absent",
            actual="present" if name in theirs else "absent",
        )
        for name in sorted(mine.keys() ^ theirs.keys())
    ]
    parts = [Part(name, mine[name], theirs[name]) for name in mine if name in theirs]
    parts = [_settled(part) for part in parts]
    structure = [finding for finding in compare_parts(parts) if not _free(finding)]
    findings += structure
    findings += compare_aliasing(reference.outputs, _memory(reference), candidate.outputs, _memory(candidate))
    incomparable = frozenset(f.subject for f in structure if f.detail not in _COMPARABLE)
    pairs = [
        Pair(part.subject, name, one, other, Kind.MUTATION if part.subject.startswith(_MUTABLE) else None)
        for part, name, one, other in value_pairs(parts, incomparable)
    ]
    rulings = adjudicate(pairs, lambda: ProgramControls(program, compiled), {})
    ledger.count({"tensors": rulings.compared, "program runs": 1})
    ledger.power({name: scale.detection_power for name, scale in rulings.scales.items()})
    for skip in rulings.skips:
        if "made for each region instead" not in skip.reason:
            ledger.skip(skip)
    findings += rulings.findings
    if reference.rng is not None and candidate.rng is not None and not reference.rng.same_as(candidate.rng):
        findings.append(
            Finding(
                kind=Kind.RNG,
                detail="rng.state",
                subject="rng state",
                message="the compiled program leaves torch's random state other than eager does",
                expected="the state eager leaves",
                actual="another state",
            )
        )
    return findings


_COMPARABLE = frozenset({"structure.stride", "structure.requires_grad", "structure.device"})
_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION, Kind.RNG})
_MUTABLE = ("mutated[", "param[", "buffer[")


def _free(finding: Finding) -> bool:
    """Strides of gradients are the compiler's to choose."""
    return finding.subject.startswith("grad[") and finding.detail in ("structure.stride", "structure.requires_grad")


def _settled(part: Part) -> Part:
    """Eager leaves None where AOT autograd leaves zeros: both say that there is no influence."""
    one, other = part.reference, part.candidate
    if part.subject.startswith("grad["):
        if one is None and isinstance(other, torch.Tensor) and not bool(other.count_nonzero()):
            return Part(part.subject, other, other)
        if other is None and isinstance(one, torch.Tensor) and not bool(one.count_nonzero()):
            return Part(part.subject, one, one)
    return part


def _compare_errors(reference: Exception | None, candidate: Exception | None) -> Iterator[Finding]:
    if reference is not None and candidate is not None:
        causes = (candidate, candidate.__cause__, inner_exception(candidate))
        if any(isinstance(cause, type(reference)) for cause in causes):
            return
    told = [
        None if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
        for error in (reference, candidate)
    ]
    yield Finding(
        kind=Kind.CRASH if reference is None else Kind.EXCEPTION,
        detail="crash.running" if reference is None else "exception.type" if candidate else "exception.missing",
        subject="exception",
        message=(
            "only the compiled program raises"
            if reference is None
            else "eager raises and the compiled program returns"
            if candidate is None
            else "eager and the compiled program raise different exceptions"
        ),
        expected=told[0] or "no exception",
        actual=told[1] or "no exception",
    )


def _memory(outcome: Outcome) -> dict[str, Any]:
    named = {f"input {name}": value for name, value in outcome.inputs.items()}
    named |= {f"parameter {name}": value for name, value in outcome.parameters.items()}
    return named | {f"buffer {name}": value for name, value in outcome.buffers.items()}


def _merged(session: Session, own: Ledger, findings: list[Finding]) -> Report:
    """One report of the regions' findings and the whole program's."""
    regions = session.report
    known = {finding.kind for finding in regions.findings}
    # A region's finding says where; the whole program's adds only what no region shows. Wrong values in a region make
    # wrong values in the program, of whatever kind.
    values_known = bool(known & _VALUES)
    extra = [
        finding for finding in findings if finding.kind not in known and not (values_known and finding.kind in _VALUES)
    ]
    if not regions.coverage.regions:
        own.skip(Skip("the compiled program", "Dynamo compiled no region of it", matters=not extra))
    own.add_findings(extra)
    mine = own.report("check")
    return _join(regions, mine)


def _join(first: Report, second: Report) -> Report:
    counts = dict(first.coverage.checked)
    for name, number in second.coverage.checked.items():
        counts[name] = counts.get(name, 0) + number
    coverage = replace(
        first.coverage,
        checked=counts,
        skipped=(*first.coverage.skipped, *second.coverage.skipped),
        notes=(*first.coverage.notes, *second.coverage.notes),
        detection_power={**first.coverage.detection_power, **second.coverage.detection_power},
    )
    return replace(second, findings=(*first.findings, *second.findings), coverage=coverage)
