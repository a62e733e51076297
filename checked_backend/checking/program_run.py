"""Run a program in eager and compiled by one compiler, call by call, on independent copies."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import (
    dynamo_leaves_draws_to_numpy,
    dynamo_many_recompilations,
    dynamo_reset,
    uses_numpy,
)
from checked_backend.checking.backward import not_differentiated
from checked_backend.checking.compare_runs import Comparison, compare_runs
from checked_backend.checking.handwritten import refuses_layout
from checked_backend.checking.program import Outcome, Program, ProgramCall, ProgramCopy, Stopwatch, Transform
from checked_backend.checking.sizes import Shapes
from checked_backend.checking.variants import coverage_of, gradient_variants, roundings, without_rounding
from checked_backend.checking.whole_numbers import beyond_rounding
from checked_backend.diagnose.investigate import investigate
from checked_backend.findings import Coverage, Finding, Kind, Skip
from checked_backend.numerics.bits import same_bits
from checked_backend.options import CheckOptions
from checked_backend.regions.build import build_region
from checked_backend.regions.failure import Failure, Keep
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.returned_tensors import Results, Returned, Snapshot, memory_range
from checked_backend.report.dynamo_log import DynamoLog
from checked_backend.report.ledger import Ledger
from checked_backend.report.session import Session, collect

_NUMPY_DRAWS = (
    "the program draws from numpy.random: the check has NumPy draw these numbers in both runs "
    "(torch._dynamo.config.use_numpy_random_stream=True); by default torch draws them when the program is compiled"
)

LEAST_SECONDS = 5.0
"""Seconds that calls with other incoming gradients may take in any case, together."""

SHARE = 0.5
"""The share of the check's time so far that these calls may take, if that is more."""

FurtherCalls = Callable[[Program, Shapes, Ledger], Iterable[ProgramCall]]
"""Makes further calls, once the program's own calls have run. Sizes vary as the compiler was told they may."""

_HANDWRITTEN = "a handwritten candidate"


@dataclass(slots=True)
class RegionResults:
    """The values that compiled regions returned during one call of a program.

    A region's results are a flat list: ``output[1]`` of a region may be ``output[loss]`` of the program.

    Attributes:
        names: The program's name of a region's result, by region and result; None if calls do not agree on it.
    """

    names: dict[tuple[str, str], str | None] = field(default_factory=dict)
    _returned: dict[str, list[list[weakref.ref[torch.Tensor] | None]]] = field(default_factory=dict)

    def forget(self) -> None:
        """Begin anew with the next call."""
        self._returned.clear()

    def watched(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a compiled region, to see what it returns."""

        def run(*args: Any) -> Any:
            returned = function(*args)
            values: Sequence[Any] = returned if isinstance(returned, (tuple, list)) else (returned,)
            references = [weakref.ref(value) if isinstance(value, torch.Tensor) else None for value in values]
            self._returned.setdefault(region, []).append(references)
            return returned

        return run

    def named(self, findings: Sequence[Finding], outputs: Mapping[str, Any]) -> list[Finding]:
        """Give findings about regions' results the program's names for them.

        A region that ran several times in the call keeps its own names. So do results that the program did not return.
        """
        names = {id(value): name for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        renamed: dict[tuple[str, str], str] = {}
        for region, calls in self._returned.items():
            for index, reference in enumerate(calls[0] if len(calls) == 1 else ()):
                tensor = None if reference is None else reference()
                if tensor is not None and id(tensor) in names:
                    renamed[region, f"output[{index}]"] = names[id(tensor)]
        for place, name in renamed.items():
            self.names[place] = name if self.names.get(place, name) == name else None
        return [
            replace(finding, subject=renamed.get((finding.region, finding.subject), finding.subject))
            for finding in findings
        ]


@dataclass(slots=True)
class ProgramRun:
    """The result of running a program in eager and compiled.

    Attributes:
        program: The program that ran. Its calls are those that eager accepted; ``references`` has their outcomes.
        dynamo: What Dynamo did while it ran.
        own: The ledger of the whole program's comparison.
        found: The whole program's findings, each with the number of its call.
        in_regions: The regions' findings, each with the number of the first call that showed it, by call.
    """

    program: Program
    references: list[Outcome] = field(default_factory=list)
    dynamo: DynamoLog = field(default_factory=DynamoLog)
    own: Ledger = field(default_factory=Ledger)
    found: list[tuple[int, Finding]] = field(default_factory=list)
    in_regions: list[tuple[int, Finding]] = field(default_factory=list)
    regions: Coverage = field(default_factory=Coverage)
    results: RegionResults = field(default_factory=RegionResults)

    @property
    def failing(self) -> list[tuple[int, Finding]]:
        """What was found so far and fails."""
        return [(at, finding) for at, finding in (*self.found, *self.in_regions) if finding.kind.fails]


def run_program(
    program: Program,
    options: CheckOptions,
    *,
    dynamic: bool | None,
    variants: FurtherCalls | None = None,
    keep: Keep = lambda _findings: None,
    vary_gradients: bool = False,
) -> ProgramRun:
    """Run a program in eager and compiled, and compare every call.

    Args:
        variants: Makes further calls. Those that eager refuses are skipped, in the coverage.
        keep: Receives a region's findings before they are localized.
        vary_gradients: Run the first call again with other incoming gradients, if nothing has failed.
    """
    run = ProgramRun(replace(program))
    run.program.calls = []
    watch = Stopwatch()
    with fresh_dynamo():
        pair = _Pair(program, run, options, dynamic, keep)
        with collect(threads=False, closing=False) as session:
            for call in program.calls:
                if not call.varies_gradients and not pair.step(call) and program.continued:
                    break
            pair.compare()
            others = list(gradient_variants(program.calls[0], run.references[0].outputs)) if vary_gradients else []
            pair.release()
            if variants is not None and pair.going_on:
                pair.shapes.locate(pair.candidate.leaves(program.calls[0]))
                for call in variants(program, pair.shapes, run.own):
                    faults = [one for at, one in run.failing if not refuses_layout(one, run.program.calls[at])]
                    if program.candidate is not None and any(not fault.is_layout for fault in faults):
                        run.own.skip(Skip("further calls", "left out: an earlier call shows a fault"))
                        break
                    pair.vary(call)
            if pair.differentiated and not run.failing:
                pair.vary_gradients(others, session, max(LEAST_SECONDS, SHARE * watch.seconds()))
            if pair.going_on:
                pair.vary_gradients([call for call in program.calls if call.varies_gradients], session)
        if pair.recompiled:
            run.own.note(f"compiled anew {'; '.join(pair.recompiled)}")
    run.regions = session.ledger.coverage()
    return run


class _Pair:
    """Eager's run and the compiled one, in step."""

    def __init__(
        self, program: Program, run: ProgramRun, options: CheckOptions, dynamic: bool | None, keep: Keep
    ) -> None:
        self.run = run
        self.calls = run.program.calls
        self.shapes = Shapes()
        self.candidates: list[Outcome] = []
        self.recompiled: list[str] = []
        self._options, self._keep = options, keep
        self._coverage = Coverage()  # coverage of the regions in the latest call
        self._main = 0
        self._running = program.calls[0]
        self._learned: Comparison | None = None
        self._rounding: Mapping[str, float] = {}
        self._results = Results()
        self._holding: list[list[torch.Tensor]] = []

        # a function, because Lightning copies the arguments of torch.compile, and what is no function as a whole
        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return self._checked_region(gm, example_inputs)

        backend.__name__ = options.compiler_name  # Dynamo tells it where it goes on without a region
        compiled: Transform = partial(torch.compile, backend=backend, dynamic=dynamic)
        self.candidate = ProgramCopy(program, compiled)
        self.reference = ProgramCopy(program)

    def _checked_region(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def investigator(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
            call = self._running
            if call.varies_gradients and not without_rounding(findings, call, self._rounding, Ledger()):
                return findings  # none of them counts
            self._keep(findings)
            return investigate(failure, findings)

        self.shapes.note(gm)
        self.run.program.numpy |= uses_numpy(gm)
        name = GraphInfo.of(gm).name
        # no report of each region on disk: the check returns one
        region = build_region(
            gm, example_inputs, self._options, None, thorough=True, silent=True, investigator=investigator
        )
        return self.run.results.watched(name, self.shapes.watched(region))

    @property
    def going_on(self) -> bool:
        """Whether the last call ran on both sides."""
        return self.run.references[-1].error is None and self.candidates[-1].error is None

    @property
    def differentiated(self) -> bool:
        """Whether both sides have gradients of the first call."""
        first = (self.run.references[0], self.candidates[0])
        return self.going_on and all(outcome.gradients and not outcome.backward_error for outcome in first)

    def step(self, call: ProgramCall) -> bool:
        """Run a call on both sides. Returns whether another one may follow."""
        self._compiled(call, self.reference.step(len(self.calls), call))
        return not (self.run.references[-1].is_last or self.candidates[-1].is_last)

    def _compiled(self, call: ProgramCall, reference: Outcome) -> int:
        """Run a call that eager has run. Returns how many calls of compiled regions were checked."""
        index, run = len(self.calls), self.run
        self._running = call
        run.results.forget()
        held = None
        if run.program.candidate is not None:  # its caller still holds results
            held = Snapshot((self._results,), self.candidate.memory(call), run.own.skip)
        draws: AbstractContextManager[None] = nullcontext()
        if reference.rng is not None and run.program.rng.host.numpy_has_drawn(reference.rng.host):
            run.own.note(_NUMPY_DRAWS)
            draws = dynamo_leaves_draws_to_numpy()
        with collect(threads=False, closing=False) as session, run.dynamo.watch(), draws:
            candidate = self.candidate.step(index, call)
        if held is not None:
            sides = [candidate.outputs.values(), map(reference.outputs.get, candidate.outputs)]
            run.found += [(index, one) for one in held.overwritten(index + 1, _HANDWRITTEN, *map(list, sides))]
            tensors = {name: value for name, value in candidate.outputs.items() if isinstance(value, torch.Tensor)}
            self._holding[1:] = [[*tensors.values()]]  # the results of the first call, and of the latest
            ranges = {name: memory for name, value in tensors.items() if (memory := memory_range(value)) is not None}
            self._results.add(
                [Returned(tensors[name], memory, name, _HANDWRITTEN, index + 1) for name, memory in ranges.items()]
            )
        self.calls.append(call)
        run.references.append(reference)
        self.candidates.append(candidate)
        found = run.results.named(session.ledger.findings(), candidate.outputs)
        self._coverage = session.ledger.coverage()
        if call.varies_gradients:
            found = without_rounding(found, call, self._rounding, run.own)
        run.in_regions += [(index, finding) for finding in found]
        return sum(region.checked_calls for region in self._coverage.regions)

    def compare(self) -> None:
        """Compare the program's own calls, once they have run."""
        run = self.run
        self._main = len(self.calls)
        made = replace(run.program, calls=list(self.calls))
        self._rounding = roundings(run.references[0].gradients) if run.references else {}
        self._learned = compare_runs(run.references, self.candidates, made, run.own)
        run.found += self._learned.found
        if self.going_on:
            run.found += self._late_writes()
        if run.references:
            unreached, is_copy = run.references[0].unreached, self.reference.is_copy
            for skip in not_differentiated(unreached, is_copy, lambda: made.run().unreached):
                run.own.skip(skip)
        run.own.limits(self._learned.limits, self._learned.own_precision_limits)

    def _late_writes(self) -> Iterator[tuple[int, Finding]]:
        """The arguments of calls that later calls of the compiled program have changed, and those of eager have not."""
        for index, call in enumerate(self.calls[:-1]):
            given_again = any(later is call or later.refills is call for later in self.calls[index + 1 :])
            if given_again or call.varies_gradients:
                continue
            eagers = _changed(self.reference, call, self.run.references[index].values)
            for name in sorted(_changed(self.candidate, call, self.candidates[index].values) - eagers):
                message = (
                    f"a later call of the compiled program writes to this argument of call {index + 1}; eager does not"
                )
                yield index, Finding(Kind.MUTATION, name, message, "mutation.unexpected")

    def _compare_last(self) -> None:
        """Compare the latest call, a variant and not one of the program's own."""
        run, index, call = self.run, len(self.calls) - 1, self.calls[-1]
        before = self.calls[: self._main] if run.program.continued else []
        known = self._learned.scales_at(len(before)) if self._learned is not None and call.varies_gradients else {}
        ledger = Ledger() if call.varies_gradients else run.own
        compared = compare_runs(
            run.references[-1:],
            self.candidates[-1:],
            replace(run.program, calls=[*before, call]),
            ledger,
            first=len(before),
            known=known,
        )
        found = [finding for _, finding in compared.found]
        if call.is_exact:
            run.own.count({"calls on whole numbers": 1})
            found = beyond_rounding(found, run.references[-1], self.candidates[-1])
        if call.varies_gradients:
            found = without_rounding(found, call, self._rounding, run.own)
            run.own.add_coverage(coverage_of(call, ledger.coverage()))
            run.own.count({"kinds of incoming gradients": 1})
        else:
            run.own.limits(compared.limits, compared.own_precision_limits)
        run.found += [(index, finding) for finding in found]

    def release(self) -> None:
        """Forget the tensors of the calls that are compared."""
        for outcome in (*self.run.references, *self.candidates):
            outcome.release()
        for side, call in product((self.reference, self.candidate), self.calls[self._main :]):
            side.forget(call)

    def vary(self, call: ProgramCall) -> bool:
        """Run a variant, if eager accepts it. Returns whether it did."""
        run = self.run
        reference = self.reference.step(len(self.calls), call)  # a refused one has no number
        refusal = reference.error or (None if run.references[0].backward_error else reference.backward_error)
        if refusal is not None:
            why = f"{type(refusal).__name__}: {refusal}".partition("\n")[0]
            run.own.skip(Skip(call.label, f"eager refuses it: {why}"))
            self.reference.forget(call)
            if call.varies_gradients:  # the next ones have the same buffers, to which it may have written
                with collect(threads=False, closing=False), run.dynamo.watch():
                    self.candidate.step(len(self.calls), call).release()
                run.results.forget()
                self.candidate.forget(call)
            return False
        before = self.shapes.compilations
        checked = self._compiled(call, reference)
        if self.shapes.compilations > before and not call.varies_gradients:
            self.recompiled.append(call.label)
        elif not checked and self.shapes.compilations and self.candidates[-1].error is None:
            why = "Dynamo ran it in eager, so nothing compiled was checked"
            run.own.skip(Skip(call.label, why, matters=not call.varies_gradients))
        # an optimizer's steps have made the parameters differ
        if run.program.optimizer is None or not call.varies_gradients:
            self._compare_last()
        self.release()
        return True

    def vary_gradients(self, calls: Sequence[ProgramCall], session: Session, allowed: float = math.inf) -> None:
        """Run calls with other incoming gradients. Their detection limits are not those of the user's calls."""
        tried: list[str] = []
        watch = Stopwatch()
        for call in calls:
            slow = watch.seconds() > allowed
            if slow or any(side.gained_history(call) for side in (self.reference, self.candidate)):
                spent = f"those before it took more than the {allowed:.0f} s that they may"
                why = spent if slow else "the call before it gave what it wrote to a history"
                self.run.own.skip(Skip(call.label, f"left out: {why}"))
                continue
            with session.paused():
                ran = self.vary(call)
            if ran:
                tried.append(call.incoming.value)
                session.ledger.add_coverage(coverage_of(call, self._coverage))
        if tried:
            self.run.own.note(f"gradients were also compared with incoming ones {', '.join(tried)}")


@contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Compile anew: what an earlier call compiled for this code must not be run instead."""
    dynamo_reset()
    try:
        with dynamo_many_recompilations():
            yield
    finally:
        dynamo_reset()


def _changed(run: ProgramCopy, call: ProgramCall, before: Mapping[str, torch.Tensor]) -> set[str]:
    """The arguments of a call that are not as they were at its end, by subject."""
    now = {f"mutated[{name}]": leaf for name, leaf in run.leaves(call) if isinstance(leaf, torch.Tensor)}
    return {
        name
        for name, new in now.items()
        if (old := before.get(name)) is not None
        and all(side.layout is torch.strided and not side.is_quantized for side in (old, new))
        and not same_bits(old, new)
    }
