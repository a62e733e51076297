"""One trial of a program: eager and one compiler, call by call, on independent copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from checked_backend._torch import dynamo_many_recompilations, dynamo_reset, uses_numpy
from checked_backend.checking.breaks import Tracing
from checked_backend.checking.compare import compare_runs
from checked_backend.checking.controls import ProgramControls
from checked_backend.checking.program import Call, Outcome, Program, Run
from checked_backend.checking.results import RegionResults
from checked_backend.checking.sizes import Shapes
from checked_backend.investigate import investigate
from checked_backend.options import CheckOptions
from checked_backend.record import Coverage, Finding, Skip
from checked_backend.regions.backend import build_region
from checked_backend.regions.failure import Failure, Keep
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.ledger import Ledger
from checked_backend.regions.session import collect

__all__ = ["Trial", "Variants", "run_trial"]

Variants = Callable[[Program, Shapes, Ledger], Iterable[Call]]
"""Makes further calls, once the program's own have run: sizes vary by what the compiler was told of them."""


@dataclass(slots=True)
class Trial:
    """What came of a trial.

    Attributes:
        program: What was run: its calls are those that eager accepted.
        regions: What the checks of the compiled regions covered.
        references: What each call left in eager.
        tracing: What Dynamo made of the program's code.
        own: What the whole program's comparison covered.
        found: The whole program's findings, each with the number of its call.
        in_regions: The regions' findings, each with the number of the first call that showed it, by call.
    """

    program: Program
    regions: Coverage
    references: list[Outcome]
    tracing: Tracing
    own: Ledger = field(default_factory=Ledger)
    found: list[tuple[int, Finding]] = field(default_factory=list)
    in_regions: list[tuple[int, Finding]] = field(default_factory=list)

    def label(self, index: int) -> str:
        """What is special about a call; "" for the user's own."""
        return self.program.calls[index].label


def run_trial(
    program: Program,
    options: CheckOptions,
    *,
    dynamic: bool | None,
    variants: Variants | None = None,
    keep: Keep = lambda _findings: None,
) -> Trial:
    """Run a program in eager and compiled, and compare every call.

    Args:
        program: What to run.
        options: Of the check; they name the compiler.
        dynamic: As for ``torch.compile``.
        variants: Makes further calls. Those that eager refuses are skipped, in the coverage.
        keep: Given what a region shows before that is localized.
    """
    ledger, shapes, results, tracing = Ledger(), Shapes(), RegionResults(), Tracing()
    backend = partial(_region_backend, options=options, shapes=shapes, results=results, tracing=tracing, keep=keep)
    with _fresh_dynamo():
        compiled = Run(program, partial(torch.compile, backend=backend, dynamic=dynamic))
        pair = _Pair(Run(program), compiled, results, tracing)
        with collect() as session:
            for call in program.calls:
                if not pair.step(call) and program.continued:
                    break
            if variants is not None and pair.going_on:
                shapes.locate(compiled.leaves(program.calls[0]))
                for call in variants(program, shapes, ledger):
                    _vary(pair, call, shapes, ledger)
        if pair.anew:
            ledger.note(f"compiled anew {'; '.join(pair.anew)}")
        made = replace(program, calls=pair.calls)
        controls = partial(ProgramControls, made, numpy=tracing.numpy)
        trained = program.optimizer is not None
        found = compare_runs(pair.references, pair.candidates, controls, ledger, again=made.run_all, trained=trained)
    return Trial(made, session.ledger.coverage(), pair.references, pair.tracing, ledger, found, pair.in_regions)


class _Pair:
    """Eager's run and the compiled one, in step."""

    def __init__(self, reference: Run, candidate: Run, results: RegionResults, tracing: Tracing) -> None:
        self.reference = reference
        self.candidate = candidate
        self.calls: list[Call] = []
        self.references: list[Outcome] = []
        self.candidates: list[Outcome] = []
        self.in_regions: list[tuple[int, Finding]] = []
        self.results = results
        self.anew: list[str] = []
        self.tracing = tracing

    @property
    def going_on(self) -> bool:
        """Whether the last call ran on both sides."""
        return self.references[-1].error is None and self.candidates[-1].error is None

    def step(self, call: Call) -> bool:
        """Run a call on both sides. Returns whether neither raised."""
        self.compiled(call, self.reference.step(len(self.calls), call))
        last = (self.references[-1], self.candidates[-1])
        return all(outcome.error is None and outcome.backward_error is None for outcome in last)

    def compiled(self, call: Call, reference: Outcome) -> int:
        """Run a call that eager has run. Returns how many calls of compiled regions were checked."""
        index = len(self.calls)
        self.results.forget()
        with collect() as session, self.tracing.watch():
            candidate = self.candidate.step(index, call)
        self.calls.append(call)
        self.references.append(reference)
        self.candidates.append(candidate)
        found = self.results.named(session.ledger.findings(), candidate.outputs)
        self.in_regions += [(index, finding) for finding in found]
        return sum(region.checked_calls for region in session.ledger.coverage().regions)


def _vary(pair: _Pair, call: Call, shapes: Shapes, ledger: Ledger) -> None:
    """Run a variant, if eager accepts it."""
    reference = pair.reference.step(len(pair.calls), call)  # a refused one has no number
    refusal = reference.error or (None if pair.references[0].backward_error else reference.backward_error)
    if refusal is not None:
        why = f"{type(refusal).__name__}: {refusal}".partition("\n")[0]
        ledger.skip(Skip(call.label, f"eager refuses it: {why}"))
        return
    before = shapes.compilations
    checked = pair.compiled(call, reference)
    if shapes.compilations > before:
        pair.anew.append(call.label)
    elif not checked and shapes.compilations and pair.candidates[-1].error is None:
        ledger.skip(Skip(call.label, "Dynamo ran it in eager, so nothing compiled was checked", matters=True))


def _region_backend(
    gm: Any,
    example_inputs: Sequence[Any],
    *,
    options: CheckOptions,
    shapes: Shapes,
    results: RegionResults,
    tracing: Tracing,
    keep: Keep,
) -> Callable[..., Any]:

    def investigator(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        keep(findings)
        return investigate(failure, findings)

    shapes.note(gm)
    tracing.numpy |= uses_numpy(gm)
    name = GraphInfo.of(gm).name
    # no report of each region on disk: the check returns one
    region = build_region(gm, example_inputs, options, None, thorough=True, silent=True, investigator=investigator)
    return results.watched(name, shapes.watched(region))


@contextmanager
def _fresh_dynamo() -> Iterator[None]:
    """Compile anew: what an earlier call compiled for this code must not be run instead."""
    dynamo_reset()
    try:
        with dynamo_many_recompilations():
            yield
    finally:
        dynamo_reset()
