"""Run a program in eager and compiled from the same state, and compare everything that can be seen of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from checked_backend.checking.dynamo_level import with_dynamo_cause
from checked_backend.checking.handwritten import (
    MakeArguments,
    SizedArguments,
    candidate_calls,
    refuse_misuse,
    told_of_candidate,
)
from checked_backend.checking.invariance import Invariance, compare_with_itself
from checked_backend.checking.isolated import run_isolated
from checked_backend.checking.kernel_choices import ONLY_CHOICE, KernelChoice, check_choices
from checked_backend.checking.merge import (
    Shown,
    joined,
    merged,
    showing_calls,
    told,
    told_once,
    with_baked_values,
    with_levels,
)
from checked_backend.checking.own_random import compare_own_random
from checked_backend.checking.program import (
    MakeOptimizer,
    Program,
    ProgramCall,
    Transform,
    eager_function,
    function_name,
    refuse_misfits,
)
from checked_backend.checking.program_run import ProgramRun, fresh_dynamo, run_program
from checked_backend.checking.program_runner import ProgramRunner
from checked_backend.checking.sizes import Shapes, other_sizes, tile_sizes
from checked_backend.checking.variants import fresh_data, other_layouts
from checked_backend.errors import OptionError
from checked_backend.findings import Coverage, EvidenceKey, Finding, Skip, Verdict
from checked_backend.options import CheckOptions, parse_options
from checked_backend.random_state import random_untouched
from checked_backend.regions.compile import Compiler, resolve_compiler
from checked_backend.regions.failure import Keep
from checked_backend.regions.torch_state import RngState
from checked_backend.report import Report
from checked_backend.report.advice import CANDIDATE
from checked_backend.report.environment import environment
from checked_backend.report.file_names import process_rank
from checked_backend.report.ledger import Ledger
from checked_backend.report.progress import telling_whole
from checked_backend.report.write import KeptReport, files_of_one_report, keep_alone

ISOLATED_TIMEOUT = 1800.0
"""Seconds after which an isolated check counts as hung."""

_NOT_YET = "not yet: this was written while the operator was looked for, and the process has not come back to it"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a check does beyond the program's own calls.

    Attributes:
        sizes: How many calls with other sizes of the dynamic dimensions there are at most.
        tiles: How many calls with sizes around powers of two there are at most; None: as many as their time allows.
        levels: Whether to find the level at which a failure arises, with the calls compiled again for each level.
        further: Positional arguments of further calls, each with copies of its own: what goes wrong in a later call, or
            writes to what an earlier one was given or has returned, shows there.
        refilled: Positional arguments of calls after those, with their values in the tensors of the first call: what
            remembers a tensor by its address shows there.
    """

    sizes: int = 32
    tiles: int | None = None
    levels: bool = True
    further: Sequence[Sequence[Any]] = ()
    refilled: Sequence[Sequence[Any]] = ()


THOROUGH = Effort()
"""What a program of a user gets."""


def check(
    fn_or_module: Callable[..., Any],
    args: Sequence[Any] | MakeArguments = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    candidate: Callable[..., Any] | None = None,
    sizes: Sequence[int] | None = None,
    compiler: str | Callable[..., Any] = "inductor",
    gradients: bool | str = "auto",
    dynamic: bool | None = None,
    iterations: int = 1,
    optimizer: MakeOptimizer | None = None,
    vary_data: bool = False,
    vary_layout: bool = False,
    localize: bool = False,
    isolate: bool = False,
    timeout: float = ISOLATED_TIMEOUT,
    compiler_options: Mapping[str, Any] | None = None,
    choices: int = 1,
    invariant: str | Sequence[str] = (),
    effort: Effort = THOROUGH,
) -> Report:
    """Compare a program in eager with the same program compiled.

    Both run on copies: the module, its parameters and buffers, the arguments, and values that a function has captured
    are not changed. Copies of parameters have their hooks, attributes and gradients; a gradient that the program only
    reads is none of those that are compared. The check compares results in any containers, arguments (numbers, strings
    and the order of keys in them too), parameters, buffers and what variables of its code hold afterwards, gradients
    (each output gets its own random one), exceptions, and the random state. Every compiled region is checked as well,
    with its float64 twin, so that a finding says in which region the error arose. A program that draws random numbers
    is also compiled with Inductor's own random operators, whose results are compared in structure and distribution.

    Args:
        fn_or_module: The program. If ``torch.compile`` returned it, the original is checked.
        args: Positional arguments. With a ``candidate`` also a function ``make(size) -> args``.
        kwargs: Keyword arguments.
        candidate: A callable of the same signature to hold against ``fn_or_module``, instead of what a compiler makes
            of that: a kernel in Triton, a C++ operator, a function, a module. ``fn_or_module`` is plain PyTorch, and
            its rounding is the measure. Both also run on other data, on the same tensors with other data, in other
            layouts and with junk in memory that the candidate allocates.
        sizes: The sizes to call a candidate with, if ``args`` makes arguments for a size. Without: 0, 1, and those at
            and beside powers of two up to 1,024, as far as a minute allows.
        compiler: The candidate: a Dynamo backend's name or a callable ``(gm, example_inputs) -> callable``.
        gradients: ``True``, ``False`` (the program then runs under ``no_grad``), or ``"auto"``: if grad mode is on. If
            no output requires grad, both sides must refuse to differentiate.
        dynamic: As for ``torch.compile``. With ``True`` the compiled program is also run with other sizes of its
            dynamic dimensions (the neighbours, 0, 1, 2, a prime, where a guard changes; around powers of two, as far
            as time and memory allow), and with aliased inputs.
        iterations: How often to run the program, each time from the state that the last run left, with fresh gradients.
        optimizer: A ``torch.optim`` class, or any function from parameters to an optimizer, which takes a step in each
            iteration. Its loss is the scalar output, or the mean squared distance of an output from random targets.
        vary_data: Run the compiled program on fresh data too, to find values baked into it.
        vary_layout: Run it with each tensor argument transposed, channels last, expanded, with gaps, and at an offset.
        localize: Find the operator after a failure.
        isolate: Run everything in a process of its own, whose death is a finding of kind ``crash``.
        timeout: Seconds after which the isolated process counts as hung.
        compiler_options: Options for the candidate.
        choices: How many sets of kernels to compile with, where Inductor measures kernels and takes the fastest (on a
            GPU, and with ``max_autotune``): the fastest, the slowest, and then any, each with fresh caches. A finding
            names the kernels that show it.
        invariant: Compare the program with itself too, bit by bit: ``"batch"`` takes rows of the arguments alone and in
            the batch (along the dimension that is marked as dynamic, else the first; ``"batch=1"`` names another),
            ``"runs"`` runs the same call again, ``"choices"`` compiles with other kernels, as ``choices`` does. A
            difference is a finding ``precision.batch``, ``.runs`` or ``.choices``. A note has all answers, and
            whether the program is accurate.
        effort: How much to do beyond the program's own calls; less for one of many random programs.

    Returns:
        The report. An exception of the program itself is compared, not raised.

    Raises:
        OptionError: An argument that `check` does not take.
        CheckedBackendError: Something cannot be copied; or ``isolate=True`` and no process can be forked here.
    """
    for name, count in ("iterations", iterations), ("choices", choices):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise OptionError(f"check: {name} got {count!r}; valid: 1, 2, 3, ...")
    for name, chosen, valid in (
        ("gradients", gradients, (True, False, "auto")),
        ("dynamic", dynamic, (True, False, None)),
    ):
        if chosen not in valid:
            raise OptionError(f"check: {name} got {chosen!r}; valid: {', '.join(map(repr, valid))}.")
    if not callable(fn_or_module):
        raise OptionError(f"check: fn_or_module got {type(fn_or_module).__qualname__}, which cannot be called.")
    asked = Invariance.of(invariant)
    if candidate is None and sizes is not None:
        raise OptionError("check: sizes are for a candidate. For a compiled program, dynamic=True tries other sizes.")
    if candidate is not None:
        refuse_misuse(
            fn_or_module,
            candidate,
            compiler=compiler and compiler != "inductor",
            compiler_options=compiler_options,
            dynamic=dynamic,
            choices=choices > 1,
            optimizer=optimizer,
            localize=localize,
        )
    if not (isinstance(args, Sequence) or (candidate is not None and callable(args))):
        raise OptionError(f"check: args got {type(args).__qualname__}; it is a tuple: check(fn, (x,)).")
    sized = SizedArguments.of(args, sizes)
    differentiated = torch.is_grad_enabled() if gradients == "auto" else bool(gradients)
    if optimizer is not None and not differentiated:
        raise OptionError("check: optimizer needs gradients, which are off.")
    given: dict[str, Any] = {"compiler": compiler, "compiler_options": dict(compiler_options or {})}
    options = parse_options(
        CheckOptions, "check", {**given, "on_divergence": "record", "layout": "raise", "localize": localize}
    ).unsampled()
    compile_region = resolve_compiler(options)  # an unknown one is the caller's mistake, not the candidate's
    rng = RngState.of_process()

    def program_of(args: Sequence[Any], label: str = "") -> Program:
        calls = [ProgramCall(args, dict(kwargs or {}), label)]
        return Program(eager_function(fn_or_module), calls, rng, gradients=differentiated, candidate=candidate)

    with random_untouched():
        if len(sized.sizes) > 1:
            sized = sized.beginning_with(lambda args: program_of(args).run().error is None)
    with random_untouched():
        program = program_of(*sized.first())
    varied = (dynamic, iterations, optimizer, vary_data, vary_layout)
    plan = _Plan(program, options, *varied, effort, ONLY_CHOICE, sized)
    tells = options.progress and not process_rank()
    whole = telling_whole(f"checking {plan.title}") if tells else nullcontext()
    with random_untouched(), files_of_one_report() as files, whole:

        def carried_out(make_report: Callable[[Keep], Report], run_alone: Callable[..., object]) -> Report:
            if not isolate:
                return make_report(lambda _findings: None)
            sides = (compiler if candidate is None else None, compile_region)
            return run_isolated(make_report, run_alone, *sides, timeout=timeout, gradients=program.gradients)

        def checked(choice: KernelChoice, fails: bool) -> Report:
            chosen = replace(plan, choice=choice)
            if fails:  # the place of the failure was looked for
                hastened = options.model_copy(update={"localize": False})
                chosen = replace(chosen, options=hastened, effort=replace(effort, levels=False))
            return carried_out(chosen.report, chosen.alone)

        found = check_choices(choices, checked)
        if asked.questions:
            itself = partial(plan.compared_with_itself, asked, compile_region, choices, found.verdict)
            answers = carried_out(itself, plan.alone)  # the first of the notes
            coverage = joined([answers.coverage, found.coverage])
            found = replace(found, findings=(*found.findings, *answers.findings), coverage=coverage)
        found = replace(found, title=plan.title, environment={**plan.facts, **found.environment})
        if found.verdict is Verdict.FAIL and found.path is None:
            found = KeptReport(options.report_dir).save(found)
        keep_alone(found, files)
        return found


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of a check."""

    program: Program
    options: CheckOptions
    dynamic: bool | None
    iterations: int
    optimizer: MakeOptimizer | None
    vary_data: bool
    vary_layout: bool
    effort: Effort
    choice: KernelChoice
    sized: SizedArguments

    @property
    def title(self) -> str:
        """What is checked, for the head of the report."""
        reference, candidate = function_name(self.program.function), self.program.candidate
        return reference if candidate is None else f"{function_name(candidate)} against {reference}"

    @property
    def facts(self) -> Mapping[str, str]:
        """What is checked, for the facts of the report."""
        if self.program.candidate is not None:
            return {CANDIDATE: function_name(self.program.candidate)}
        return {"compiled by": self.options.compiled_by}

    def report(self, keep: Keep) -> Report:
        """Carry out the plan. ``keep`` receives the findings before they are localized."""
        file = KeptReport(self.options.report_dir)
        begun = False
        findings: list[Finding] = []
        coverages: list[Coverage] = []

        def keep_all(known: Sequence[Finding]) -> None:
            nonlocal begun
            keep(known)
            known = [*findings, *known]
            # regions keep reports of their own
            if self.options.localize and any(finding.fails and not finding.region for finding in known):
                begun = True
                unplaced = tuple(
                    replace(one, searched=True, evidence={**one.evidence, EvidenceKey.LOCALIZED: _NOT_YET})
                    for one in known
                )
                file.progress(Report(unplaced, Coverage(checked={"program runs": 1}), self.title, environment()))

        with self.choice.used():
            for number, run in enumerate(self._runs(keep)):
                found, parts = self._examined(run, keep_all, first=self.choice.number == 1 and not number)
                findings += found
                coverages += parts
        facts = {**self.facts, **environment()}
        coverage = joined([*coverages, self.choice.coverage])
        report = Report(tuple(findings), coverage, title=self.title, environment=facts)
        return file.save(report) if begun else report

    def compared_with_itself(
        self, asked: Invariance, compile_region: Compiler, choices: int, accuracy: Verdict, _keep: Keep
    ) -> Report:
        """Ask whether the program's bits stay as they are. Each question ends at its first finding."""
        compiled: Transform = partial(torch.compile, backend=compile_region, dynamic=self.dynamic)
        program = self.program
        if self.sized.sizes:  # a batch has two rows or more
            args, label = self.sized.beginning_with(lambda _args: True, least=2).first()
            program = replace(program, calls=[ProgramCall(args, program.calls[0].kwargs, label)])
        return compare_with_itself(program, asked, compiled, choices=choices, accuracy=accuracy)

    def alone(self, backend: str | Callable[..., Any] | None) -> object:
        """Run the program's own calls without a check: in eager, or compiled with a Dynamo backend."""
        compiled: Transform = partial(torch.compile, backend=backend, dynamic=self.dynamic)
        with self.choice.used():
            return self._repeated().run_all(None if backend is None else compiled)

    def _repeated(self) -> Program:
        first = self.program.calls[0]
        given = [(args, None) for args in self.effort.further] + [(args, first) for args in self.effort.refilled]
        further = [
            ProgramCall(args, first.kwargs, f"in call {number} of {1 + len(given)}", refills=held)
            for number, (args, held) in enumerate(given, 2)
        ]
        return replace(self.program, optimizer=self.optimizer, calls=[*[first] * self.iterations, *further])

    def _runs(self, keep: Keep) -> Iterator[ProgramRun]:
        run = partial(run_program, options=self.options, dynamic=self.dynamic, keep=keep)
        varies = self.vary_data or self.vary_layout or self.dynamic is True or self.program.candidate is not None
        repeated = self._repeated()
        if len(repeated.calls) > 1 or self.optimizer is not None or not varies:
            yield run(repeated, vary_gradients=not varies)
        if varies:
            yield run(replace(self.program, continued=False), variants=self._variants, vary_gradients=True)

    def _variants(self, program: Program, shapes: Shapes, ledger: Ledger) -> Iterable[ProgramCall]:
        if program.candidate is not None:
            yield from candidate_calls(program, self.sized, ledger)
            return
        if self.vary_data:
            yield from fresh_data(program, ledger)
        if self.dynamic is True:
            yield from other_sizes(program, shapes, ledger, self.effort.sizes)
            yield from tile_sizes(program, shapes, ledger, self.effort.tiles)
        if self.vary_layout:
            yield from other_layouts(program, ledger)

    def _examined(self, run: ProgramRun, keep: Keep, *, first: bool) -> tuple[Sequence[Finding], Sequence[Coverage]]:
        """The findings of a run, and its coverage of the regions and of the whole program."""
        refuse_misfits(self.program, run.references[0].error)
        shown = merged(run)
        if any(entry.finding.fails for entry in shown):
            keep([told(entry, run) for entry in shown])
        findings = self._explained(shown, run)
        if self.program.candidate is None:
            what, compiled = "the compiled program", bool(run.regions.regions)
            for skip in run.dynamo.in_eager(what) if compiled else [run.dynamo.no_region(what)]:
                run.own.skip(skip)
        for note in run.dynamo.notes() if run.regions.regions else ():
            run.own.note(note)
        reference = run.references[0]
        if self.program.gradients and not (reference.error or reference.backward_error or reference.gradients):
            run.own.skip(Skip("gradients", "nothing was differentiated: no argument or parameter requires grad"))
        first = first and self.program.candidate is None
        if first and reference.rng is not None and not reference.rng.same_as(self.program.rng):
            findings += self._with_own_random(run.own, fails=any(finding.kind.fails for finding in findings))
        run.own.add_findings(findings)
        return run.own.findings(), told_once(run.regions, run.own.coverage(), run.results.names)

    def _with_own_random(self, ledger: Ledger, *, fails: bool) -> list[Finding]:
        """Compile once more so that Inductor draws random numbers of its own, as it does for users."""
        settings = self.options.compiler_options
        if self.options.compiler != "inductor" or "fallback_random" in settings:
            return []
        if fails:
            ledger.skip(Skip("the compiler's own random operators", "not compared: the program fails with eager's"))
            return []
        options = {**settings, "fallback_random": False}
        with fresh_dynamo():
            transform = partial(torch.compile, backend="inductor", options=options, dynamic=self.dynamic)
            return compare_own_random(self.program, transform, ledger)

    def _explained(self, shown: Sequence[Shown], run: ProgramRun) -> list[Finding]:
        """Explain failures: is a value baked in, and at which level does it arise? Regions localize by themselves."""
        if self.program.candidate is not None:
            own = [told_of_candidate(entry.finding, run.program.calls, entry.calls) for entry in shown]
            return [told(replace(entry, finding=one), run) for entry, one in zip(shown, own, strict=True)]

        def alone(call: ProgramCall) -> Sequence[Finding]:
            return self._again(replace(run.program, calls=[call], continued=True), self.options)

        def with_compiler(name: str) -> Sequence[Finding]:
            options = self.options.model_copy(update={"compiler": name, "compiler_options": {}})
            return self._again(replace(run.program, calls=showing_calls(shown, run)), options)

        shown = with_baked_values(shown, run, alone)
        findings = [told(entry, run) for entry in shown]
        if not self.effort.levels:
            return findings
        controls = ProgramRunner(run.program)

        def same_in_float64(place: int) -> bool | None:
            return controls.same_in_float64(shown[place].calls[0], shown[place].finding.subject)

        findings = with_levels(
            findings, self.options.compiler, with_compiler, numpy=run.program.numpy, same_in_float64=same_in_float64
        )
        if not self.options.localize:
            return findings
        return with_dynamo_cause(findings, self.program, self.options, self.dynamic)

    def _again(self, program: Program, options: CheckOptions) -> Sequence[Finding]:
        options = options.model_copy(update={"localize": False})
        return [entry.finding for entry in merged(run_program(program, options, dynamic=self.dynamic))]
