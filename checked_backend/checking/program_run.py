"""Run a program in eager and compiled by one compiler, call by call, on independent copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from checked_backend._torch.dynamo import (
    dynamo_leaves_draws_to_numpy,
    dynamo_many_recompilations,
    dynamo_reset,
    uses_numpy,
)
from checked_backend.checking.breaks import Tracing
from checked_backend.checking.compare_runs import Comparison, compare_runs
from checked_backend.checking.late_writes import late_writes
from checked_backend.checking.program import Outcome, Program, ProgramCall, ProgramCopy
from checked_backend.checking.program_controls import ProgramControls
from checked_backend.checking.relaid import Allowance, ContiguousGradients, note_relaid, of_relaid, relaid_calls
from checked_backend.checking.results import RegionResults
from checked_backend.checking.sizes import Shapes
from checked_backend.checking.stopwatch import Stopwatch
from checked_backend.checking.unreached import not_differentiated
from checked_backend.diagnose.investigate import investigate
from checked_backend.findings import Coverage, Finding, Skip
from checked_backend.options import CheckOptions
from checked_backend.regions.build import build_region
from checked_backend.regions.failure import Failure, Keep
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.report.ledger import Ledger
from checked_backend.report.session import Session, collect

__all__ = ["FurtherCalls", "ProgramRun", "fresh_dynamo", "run_program"]

_NUMPY_DRAWS = (
    "the program draws from numpy.random: the check has NumPy draw these numbers in both runs "
    "(torch._dynamo.config.use_numpy_random_stream=True); by default torch draws them when the program is compiled"
)

FurtherCalls = Callable[[Program, Shapes, Ledger], Iterable[ProgramCall]]
"""Makes further calls, once the program's own calls have run. Sizes vary as the compiler was told they may."""


@dataclass(slots=True)
class ProgramRun:
    """The result of running a program in eager and compiled.

    Attributes:
        program: The program that ran. Its calls are those that eager accepted.
        regions: The coverage of the compiled regions' checks.
        references: The outcome of each call in eager.
        tracing: How Dynamo traced the program's code.
        own: The ledger of the whole program's comparison.
        found: The whole program's findings, each with the number of its call.
        in_regions: The regions' findings, each with the number of the first call that showed it, by call.
        names: The program's names of the regions' results, as `RegionResults` has them.
    """

    program: Program
    regions: Coverage
    references: list[Outcome]
    tracing: Tracing
    own: Ledger = field(default_factory=Ledger)
    found: list[tuple[int, Finding]] = field(default_factory=list)
    in_regions: list[tuple[int, Finding]] = field(default_factory=list)
    names: Mapping[tuple[str, str], str | None] = field(default_factory=dict)

    def label(self, index: int) -> str:
        """How a call differs from the user's own; "" for that one."""
        return self.program.calls[index].label


def run_program(
    program: Program,
    options: CheckOptions,
    *,
    dynamic: bool | None,
    variants: FurtherCalls | None = None,
    keep: Keep = lambda _findings: None,
    relay: bool = False,
) -> ProgramRun:
    """Run a program in eager and compiled, and compare every call.

    Args:
        options: The options of the check; they name the compiler.
        dynamic: As for ``torch.compile``.
        variants: Makes further calls. Those that eager refuses are skipped, in the coverage.
        keep: Receives a region's findings before they are localized.
        relay: Run the first call again with other incoming gradients (`relaid_calls`), if nothing has failed.
    """
    ledger, shapes, results, tracing = Ledger(), Shapes(), RegionResults(), Tracing()
    backend = _backend(options, shapes, results, tracing, keep)
    watch = Stopwatch()
    with fresh_dynamo():
        compiled = ProgramCopy(program, partial(torch.compile, backend=backend, dynamic=dynamic))
        pair = _Pair(program, compiled, results, tracing, ledger)
        with collect(closing=False) as session:
            for call in program.calls:
                if not call.relaid and not pair.step(call) and program.continued:
                    break
            pair.compare()
            others = list(relaid_calls(program.calls[0], pair.references[0].outputs)) if relay else []
            pair.release()
            if variants is not None and pair.going_on:
                shapes.locate(compiled.leaves(program.calls[0]))
                for call in variants(program, shapes, ledger):
                    _vary(pair, call, shapes)
            if pair.differentiated and not pair.fails:
                _relay(pair, others, session, shapes, Allowance(watch.seconds()))
            if pair.going_on:
                _relay(pair, [call for call in program.calls if call.relaid], session, shapes)
        if pair.recompiled:
            ledger.note(f"compiled anew {'; '.join(pair.recompiled)}")
    made = replace(program, calls=pair.calls)
    regions = session.ledger.coverage()
    return ProgramRun(made, regions, pair.references, pair.tracing, ledger, pair.found, pair.in_regions, results.names)


class _Pair:
    """Eager's run and the compiled one, in step."""

    def __init__(
        self, program: Program, candidate: ProgramCopy, results: RegionResults, tracing: Tracing, ledger: Ledger
    ) -> None:
        self.program = program
        self.reference = ProgramCopy(program)
        self.candidate = candidate
        self.calls: list[ProgramCall] = []
        self.references: list[Outcome] = []
        self.candidates: list[Outcome] = []
        self.found: list[tuple[int, Finding]] = []
        self.in_regions: list[tuple[int, Finding]] = []
        self.results = results
        self.recompiled: list[str] = []
        self.tracing = tracing
        self.ledger = ledger
        self.coverage = Coverage()  # coverage of the regions in the latest call
        self._main = 0
        self._learned: Comparison | None = None
        self._rounding = ContiguousGradients({})

    @property
    def going_on(self) -> bool:
        """Whether the last call ran on both sides."""
        return self.references[-1].error is None and self.candidates[-1].error is None

    @property
    def differentiated(self) -> bool:
        """Whether both sides have gradients of the first call."""
        first = (self.references[0], self.candidates[0])
        return self.going_on and all(outcome.gradients and not outcome.backward_error for outcome in first)

    @property
    def fails(self) -> bool:
        """Whether anything found so far fails."""
        return any(finding.kind.fails for _, finding in (*self.found, *self.in_regions))

    def step(self, call: ProgramCall) -> bool:
        """Run a call on both sides. Returns whether neither raised."""
        self.compiled(call, self.reference.step(len(self.calls), call))
        last = (self.references[-1], self.candidates[-1])
        return all(outcome.error is None and outcome.backward_error is None for outcome in last)

    def compiled(self, call: ProgramCall, reference: Outcome) -> int:
        """Run a call that eager has run. Returns how many calls of compiled regions were checked."""
        index = len(self.calls)
        self.results.forget()
        with collect(closing=False) as session, self.tracing.watch(), self._numpy_draws(reference):
            candidate = self.candidate.step(index, call)
        self.calls.append(call)
        self.references.append(reference)
        self.candidates.append(candidate)
        found = self.results.named(session.ledger.findings(), candidate.outputs)
        self.coverage = session.ledger.coverage()
        if call.relaid:
            found = self._rounding.left(found, call, self.ledger)
        self.in_regions += [(index, finding) for finding in found]
        return sum(region.checked_calls for region in self.coverage.regions)

    def follow(self, call: ProgramCall) -> None:
        """Let the compiled program do what eager did in a call that it refused, so that both go on from the same."""
        with collect(closing=False), self.tracing.watch():
            self.candidate.step(len(self.calls), call).release()
        self.results.forget()
        self.candidate.forget(call)

    @contextmanager
    def _numpy_draws(self, reference: Outcome) -> Iterator[None]:
        """Have NumPy draw a program's random numbers when it is compiled, too, if it draws them in eager."""
        if reference.rng is None or not self.program.rng.host.numpy_has_drawn(reference.rng.host):
            yield
            return
        self.ledger.note(_NUMPY_DRAWS)
        with dynamo_leaves_draws_to_numpy():
            yield

    def compare(self) -> None:
        """Compare the program's own calls, once they have run."""
        self._main = len(self.calls)
        made = replace(self.program, calls=list(self.calls))
        self._rounding = ContiguousGradients(self.references[0].gradients if self.references else {})
        self._learned = compare_runs(
            self.references,
            self.candidates,
            partial(ProgramControls, made, numpy=self.tracing.numpy),
            self.ledger,
            again=made.run_all,
            trained=self.program.optimizer is not None,
        )
        self.found += self._learned.found
        if self.going_on:
            sides = (self.reference, self.references), (self.candidate, self.candidates)
            self.found += late_writes(self.calls, *sides)
        if self.references:
            unreached, is_copy = self.references[0].unreached, self.reference.is_copy
            for skip in not_differentiated(unreached, is_copy, lambda: made.run().unreached):
                self.ledger.skip(skip)
        self.ledger.limits(self._learned.limits, self._learned.own_precision_limits)

    def compare_last(self) -> None:
        """Compare the latest call, a variant and not one of the program's own, and forget its tensors."""
        index, call = len(self.calls) - 1, self.calls[-1]
        before = self.calls[: self._main] if self.program.continued else []
        made = replace(self.program, calls=[*before, call])
        known = self._learned.scales_at(len(before)) if self._learned is not None and call.relaid else {}
        ledger = Ledger() if call.relaid else self.ledger
        compared = compare_runs(
            self.references[-1:],
            self.candidates[-1:],
            partial(ProgramControls, made, numpy=self.tracing.numpy),
            ledger,
            again=made.run_all,
            first=len(before),
            known=known,
        )
        found = [finding for _, finding in compared.found]
        if call.relaid:
            found = self._rounding.left(found, call, self.ledger)
            self.coverage = replace(self.coverage, detection_limit={**self.coverage.detection_limit, **compared.limits})
            self.ledger.add_coverage(of_relaid(call, ledger.coverage()))
            self.ledger.count({"kinds of incoming gradients": 1})
        else:
            self.ledger.limits(compared.limits, compared.own_precision_limits)
        self.found += [(index, finding) for finding in found]

    def release(self) -> None:
        """Forget the tensors of the calls that are compared."""
        for outcome in (*self.references, *self.candidates):
            outcome.release()
        for run, call in product((self.reference, self.candidate), self.calls[self._main :]):
            run.forget(call)


def _vary(pair: _Pair, call: ProgramCall, shapes: Shapes) -> bool:
    """Run a variant, if eager accepts it. Returns whether it did."""
    reference = pair.reference.step(len(pair.calls), call)  # a refused one has no number
    refusal = reference.error or (None if pair.references[0].backward_error else reference.backward_error)
    if refusal is not None:
        why = f"{type(refusal).__name__}: {refusal}".partition("\n")[0]
        pair.ledger.skip(Skip(call.label, f"eager refuses it: {why}"))
        pair.reference.forget(call)
        if call.relaid:  # the next ones have the same arguments and buffers, to which it may have written
            pair.follow(call)
        return False
    before = shapes.compilations
    checked = pair.compiled(call, reference)
    if shapes.compilations > before and not call.relaid:
        pair.recompiled.append(call.label)
    elif not checked and shapes.compilations and pair.candidates[-1].error is None:
        ledger_skip = Skip(
            call.label, "Dynamo ran it in eager, so nothing compiled was checked", matters=not call.relaid
        )
        pair.ledger.skip(ledger_skip)
    if not (call.relaid and pair.program.optimizer is not None):  # its steps have made the parameters differ
        pair.compare_last()
    pair.release()
    return True


def _relay(
    pair: _Pair, calls: Sequence[ProgramCall], session: Session, shapes: Shapes, allowance: Allowance | None = None
) -> None:
    """Run calls with other incoming gradients. Their detection limits are not those of the user's calls."""
    tried: list[tuple[ProgramCall, Coverage]] = []
    for call in calls:
        left_out = None if allowance is None else allowance.left_out(call)
        if left_out is not None:
            pair.ledger.skip(left_out)
            continue
        with session.paused():
            ran = _vary(pair, call, shapes)
        if ran:
            tried.append((call, pair.coverage))
            session.ledger.add_coverage(of_relaid(call, pair.coverage))
    note_relaid(pair.ledger, tried)


def _backend(
    options: CheckOptions, shapes: Shapes, results: RegionResults, tracing: Tracing, keep: Keep
) -> Callable[..., Any]:
    """A backend of Dynamo's that checks each region."""

    def investigator(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        keep(findings)
        return investigate(failure, findings)

    def checked(gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        shapes.note(gm)
        tracing.numpy |= uses_numpy(gm)
        name = GraphInfo.of(gm).name
        # no report of each region on disk: the check returns one
        region = build_region(gm, example_inputs, options, None, thorough=True, silent=True, investigator=investigator)
        return results.watched(name, shapes.watched(region))

    checked.__name__ = options.compiler_name  # Dynamo tells it where it goes on without a region
    return checked


@contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Compile anew: what an earlier call compiled for this code must not be run instead."""
    dynamo_reset()
    try:
        with dynamo_many_recompilations():
            yield
    finally:
        dynamo_reset()
