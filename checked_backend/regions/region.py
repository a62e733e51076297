"""One checked region: a callable that stands where Dynamo expects the compiled graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from checked_backend._torch.autograd import StopRecomputationError, autograd_sequence_number
from checked_backend.errors import CheckedBackendError, is_out_of_memory
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.modes.collective_tape import CollectiveReplayError
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.options import CheckOptions
from checked_backend.random_state import random_untouched
from checked_backend.regions.backward import BackwardPass, BackwardWatch, input_edges
from checked_backend.regions.budget import Due
from checked_backend.regions.call_findings import (
    candidate_crashed,
    exception_missing,
    same_exception,
    unexpected_mutation,
    wrong_outputs,
)
from checked_backend.regions.candidate import Candidate
from checked_backend.regions.compare_call import Call, CallComparison
from checked_backend.regions.control_runs import Variants
from checked_backend.regions.draw_inputs import DrawInputs
from checked_backend.regions.eager_run import run_eager
from checked_backend.regions.exchanges import Exchanges
from checked_backend.regions.execution import Cotangents, Execution, Subjects
from checked_backend.regions.failure import Keep
from checked_backend.regions.graph_info import GraphInfo, qualified_names
from checked_backend.regions.handed_out import HandedOut, Look, results_of
from checked_backend.regions.health import Health, RegionHealth, health_of_run
from checked_backend.regions.inputs import Effects, Inputs, find_effects
from checked_backend.regions.left_settings import LeftSettings
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.other_threads import Left, OtherThreads
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.reporter import RegionReporter
from checked_backend.regions.schedule import Meter, Schedule
from checked_backend.regions.torch_state import RngState, TorchState
from checked_backend.regions.unsupported import unsupported_here
from checked_backend.report.session import active_sessions

__all__ = ["CheckedRegion"]

Investigate = Callable[[Call, "Cotangents | None", Sequence[Finding], Keep], Sequence[Finding]]


EAGER_FORWARD = "eager's forward pass"


@dataclass(slots=True)
class _BeforeCandidate:
    """What a check gathers before the candidate runs.

    Attributes:
        call: The call.
        reference: Eager's execution, or what it raised; None after it was freed.
        fingerprints: Checksums of the inputs that must stay as they are.
        settings: The settings of the process before the call, and as eager leaves them.
        threads: The threads that run.
        after_reference: The random state that eager leaves.
        edges: Where in the user's autograd graph the gradients of the inputs arrive.
        earlier: Results of earlier calls that the program holds.
        since: The autograd sequence number.
        meter: What the check takes.
        changed: The settings as the candidate leaves them, if eager runs after it.
    """

    call: Call
    reference: Execution | Exception | None
    fingerprints: Mapping[int, int | None]
    settings: tuple[ProcessState, ProcessState]
    threads: OtherThreads
    after_reference: RngState
    edges: Mapping[Any, int]
    earlier: Look
    since: int
    meter: Meter
    changed: ProcessState | None = None


class CheckedRegion:
    """Runs a region's candidate, checks it against eager, and returns what the candidate returned.

    Args:
        info: The region's names and source lines.
        variants: The region in eager, compiled, and what else can be made of it.
        options: The user's options.
        schedule: Says which calls are checked.
        thorough: Compile the float64 twin for every difference.
        silent: Write no report to disk.
        remark: What to note of how the candidate was compiled.
        needed: Says how many bytes all of eager's tensors need together.
        recompile: Compiles the candidate for given inputs with an empty cache, if that is possible.
        investigate: Gets a failed call, the gradients that had arrived if its backward pass failed, the findings, and
            what keeps them as they become known; gives back the findings with where they come from.
        left_compiling: Findings about settings that the compiler left changed; told at the first checked call.
    """

    def __init__(
        self,
        info: GraphInfo,
        variants: Variants,
        options: CheckOptions,
        schedule: Schedule,
        *,
        thorough: bool = False,
        silent: bool = False,
        remark: str = "",
        needed: Callable[[], int] = lambda: 0,
        recompile: Callable[[Sequence[Any]], Callable[..., Any]] | None = None,
        investigate: Investigate | None = None,
        draws: DrawInputs | None = None,
        left_compiling: Sequence[Finding] = (),
    ) -> None:
        self._info = info
        self._reference = variants.reference
        self._options = options
        self._schedule = schedule
        self._reporter = RegionReporter(info, options, silent=silent)
        self._candidate = Candidate(
            variants.candidate,
            self._reporter.note,
            replaceable=options.on_divergence == "fallback" and options.gradients,
            recompile=recompile,
            remark=remark,
        )
        self._memory = MemoryPressure(self._reporter, keeps_activations=options.reference == "keep")
        self._judge = CallComparison(
            info, variants, self._reporter, thorough=thorough, memory=self._memory, draws=draws
        )
        self._lock = threading.Lock()
        self._known: tuple[Effects, Subjects] | None = None
        self._stopped = False
        self._investigate = investigate
        self._investigated = False
        self._handed_out = HandedOut()
        self._calls = 0
        self._needed = needed
        self._unsupported: Finding | None = None
        self._machine_works = False
        self._left_compiling = list(left_compiling)
        self._health = RegionHealth(info.name, self._reporter.note, Health() if silent else health_of_run())

    def __call__(self, *args: Any) -> Any:
        """Run the region; Dynamo's compiled code calls this."""
        self._calls += 1
        if self._unsupported is not None:
            self._reporter.passed_by()
            self._reporter.report([self._unsupported])
            return self._reference(*args)
        due = None if self._stopped else self._schedule.due()
        if due is None and self._calls == 1 and (self._candidate.missing or self._left_compiling):
            due = Due()  # what compiling has shown is told at once
        if due is not None and self._memory.due():
            with self._schedule.paid(due) as meter:
                return self._checked_call(args, due, meter)
        if not self._stopped and not self._candidate.missing:
            self._reporter.passed_by(unearned=self._schedule.limited and due is None)
        return self._unchecked(args, self._schedule.unchecked)

    def _unchecked(self, args: Sequence[Any], run: Callable[[Callable[..., Any], Sequence[Any]], Any]) -> Any:
        if self._stopped or self._candidate.missing:
            return self._reference(*args)
        for holder in self._holders():
            holder.unchecked = True
        return run(self._candidate, args)

    def _checked_call(self, args: Sequence[Any], due: Due, meter: Meter) -> Any:
        effects, subjects = self._first_look(args)
        self._reporter.begin_call()
        if self._candidate.remark:
            self._reporter.note(self._candidate.remark)
        random = RngState.capture(_cuda(args))
        try:
            before = self._before_candidate(args, effects, subjects, random, due, meter)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._memory.not_compared("copying what the check needs", error)
            before = None
        if before is None:
            random.restore()
            with meter.program():
                return self._unchecked(args, lambda candidate, given: candidate(*given))
        call = before.call
        call.rng.restore()
        try:
            with meter.program(), nullcontext() if call.exchanges is None else call.exchanges.recorded():
                returned = self._candidate.results(args, call)
        except StopRecomputationError:
            raise  # a checkpoint around the region has all it needs
        except Exception as error:
            return self._candidate_raised(args, before, error)
        after_candidate = RngState.capture(tuple(random.cuda))
        if call.exchanges is not None:
            before.changed = ProcessState.capture()
            self._run_reference(before)
            if _not_replayed(before):
                after_candidate.restore()
                self._respond(self._judge.exchanged_otherwise(call, before.reference), call=call)
                return returned
        if isinstance(before.reference, Exception) and is_out_of_memory(before.reference):
            self._memory.not_compared(EAGER_FORWARD, before.reference)
            return returned
        try:
            good = self._after_candidate(args, before, returned, after_candidate)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._memory.not_compared("comparing the results", error)
            after_candidate.restore()
            good = True
        return returned if good else self._eager_instead(args, call)

    def _before_candidate(
        self,
        args: Sequence[Any],
        effects: Effects,
        subjects: Subjects,
        random: RngState,
        due: Due,
        meter: Meter,
    ) -> _BeforeCandidate:
        """Copy what the check needs, and run eager."""
        devices = {"cpu", *(arg.device.type for arg in args if isinstance(arg, torch.Tensor))}
        self._reporter.devices = frozenset(str(arg.device) for arg in args if isinstance(arg, torch.Tensor))
        call = Call(
            Inputs.capture(args, effects.mutated, gradients=torch.is_grad_enabled() or self._info.enables_grad),
            TorchState.capture(sorted(devices)),
            random,
            subjects,
            due=due,
            exchanges=None if self._info.collectives is None else Exchanges(self._info.collectives),
            number=self._calls,
        )
        fingerprints = call.inputs.fingerprints(args)
        threads = OtherThreads.now()
        settings = ProcessState.capture()
        before = _BeforeCandidate(
            call,
            None,
            fingerprints,
            (settings, settings),
            threads,
            random,
            input_edges(args, call.inputs.requires_grad),
            self._look_at_earlier(args),
            autograd_sequence_number(),
            meter,
        )
        if call.exchanges is None:  # else eager is given what the candidate receives, so it runs after it
            self._run_reference(before)
        return before

    def _run_reference(self, before: _BeforeCandidate) -> None:
        call = before.call
        region = self._reference if call.exchanges is None else call.exchanges.paired_region(self._reference)
        reference, expected = run_eager(region, call, before.settings[0], self._memory)
        before.after_reference = RngState.capture(tuple(call.rng.cuda))
        if isinstance(reference, Execution) and not self._keeps_graph(call):
            reference = reference.without_graph()
        before.reference = reference
        before.settings = before.settings[0], expected
        call.rng.restore()

    def _after_candidate(
        self, args: Sequence[Any], before: _BeforeCandidate, returned: Any, after_candidate: RngState
    ) -> bool:
        """Compare what the candidate returned. Returns whether the program goes on with it."""
        call, reference = before.call, before.reference
        left = self._settings_left(before)
        call.left = Left(before.after_reference, after_candidate, before.threads.active_since())
        if isinstance(reference, Exception):
            self._respond([exception_missing(reference), *left], cause=reference, call=call)
            if self._stopped:
                raise reference
            return True
        if reference is None:
            raise RuntimeError("eager's results are gone before they were compared")
        if not isinstance(returned, (tuple, list)) or len(returned) != len(reference.outputs):
            self._respond([wrong_outputs(len(reference.outputs), returned), *left])
            self._reporter.note("eager's outputs were handed out: the program cannot go on with the candidate's")
            return False
        overwritten = before.earlier.overwritten(self._calls, self._info.name, returned, reference.outputs)
        findings = self._judge.forward(call, reference, returned, args)
        changed = [position for position, value in before.fingerprints.items() if fingerprint(args[position]) != value]
        findings += [*unexpected_mutation([call.subjects.mutated(position) for position in changed]), *overwritten]
        if not after_candidate.same_as(before.after_reference) and not any(
            found.kind is Kind.RNG for found in findings
        ):
            findings += self._judge.random_state(call)
        findings += left
        after_candidate.restore()
        self._health.checked(call.number, call.ratios, _failing(findings), before.meter.spent)
        if self._respond(findings, call=call):
            return False
        self._remember(args, call, returned)
        if call.exchanges is not None and call.exchanges.doubtful:
            why = "eager did not receive what the compiled program received, so its gradients are others"
            self._reporter.skip(Skip("gradients", why, matters=True))
            return True
        if call.inputs.requires_grad and self._options.gradients:
            self._schedule.has_gradients()
            if not call.due.backward:
                self._reporter.gradients_unearned()
                self._memory.compared()
                return True
            if self._keeps_graph(call):
                call.graph = reference.graph(call.inputs.mutated)
                self._memory.holds(call)
            self._watch_backward(args, call, returned, before.edges, before.since)
        else:
            self._memory.compared()
        return True

    def _keeps_graph(self, call: Call) -> bool:
        """Whether eager's activations are kept for its backward pass."""
        wanted = bool(call.inputs.requires_grad) and self._options.gradients and call.due.backward
        return wanted and self._memory.keeps_activations

    # results of earlier calls

    def _look_at_earlier(self, args: Sequence[Any]) -> Look:
        look = Look(self._holders(), args)
        for subject, reason in look.unexplained.items():
            self._reporter.skip(Skip(subject, reason, matters=True))
        return look

    def _remember(self, args: Sequence[Any], call: Call, returned: Sequence[Any]) -> None:
        subjects = [call.subjects.output(index) for index in range(len(returned))]
        sources = self._info.output_sources
        results = results_of(returned, subjects, sources, args, self._info.name, self._calls)
        for holder in self._holders():
            holder.add(results)

    def _holders(self) -> list[HandedOut]:
        return [self._handed_out, *(session.part(HandedOut) for session in active_sessions())]

    def _first_look(self, args: Sequence[Any]) -> tuple[Effects, Subjects]:
        with self._lock:
            if self._known is None:
                with random_untouched():
                    effects = find_effects(self._reference, args)
                if self._info.writes_late:
                    effects = replace(effects, mutated=None, reason="its backward pass writes to some")
                    reason = "written to in the backward pass, of which gradients alone are compared"
                    self._reporter.skip(Skip("inputs", reason, matters=True))
                if effects.mutated is None:
                    why = f"which are mutated could not be found out: {effects.reason}"
                    self._reporter.note(f"all inputs are copied, because {why}")
                names = list(self._info.inputs)
                for position, name in qualified_names(args).items():
                    names[position] = name
                self._known = effects, Subjects(tuple(names), self._info.outputs)
            return self._known

    def _settings_left(self, before: _BeforeCandidate) -> list[Finding]:
        """Settings that the candidate left other than eager; those of the first call also while it was compiled."""
        compiled, self._left_compiling = self._left_compiling, []
        after = before.changed or ProcessState.capture()
        again = self._judge.candidate_again(before.call, None)
        left = LeftSettings(again, self._reporter.skip, before.threads.active_since())
        return [*compiled, *left.findings(*before.settings, after)]

    # backward

    def _watch_backward(
        self, args: Sequence[Any], call: Call, outputs: Sequence[Any], edges: Mapping[Any, int], since: int
    ) -> None:
        for position in sorted(call.inputs.entangled):
            reason = "a mutated input that shares memory with another input"
            self._reporter.skip(Skip(call.subjects.gradient(position), reason, matters=True))
        mutated = {position: args[position] for position in call.inputs.mutated}

        # The callback must not hold the outputs: they hold the nodes whose hooks hold the callback.
        def on_backward(passed: BackwardPass) -> Mapping[int, torch.Tensor | None] | None:
            with self._schedule.paid(call.due, backward=True) as meter:
                return self._checked_backward(call, passed, meter)

        def on_error(error: Exception, passed: BackwardPass) -> Mapping[int, torch.Tensor | None] | None:
            if isinstance(error, CheckedBackendError):  # that is a nested region's own
                return None
            if self._exchanged_backward(call, passed):
                return None  # so that it is raised: a connection broke, or another rank did not come
            left = self._backward_settings_left(call, passed)
            # asked before eager runs, while memory is as short as it was
            short = self._unsupported_here(error) if is_out_of_memory(error) else None
            crowded = self._memory.keeps_activations
            eager = self._judge.eager_gradients(call, passed)
            if isinstance(eager, Exception) and is_out_of_memory(eager):
                if not same_exception(eager, error):
                    self._memory.not_compared("eager's backward pass", eager, backward=True)
                return None  # so that it is raised
            if isinstance(eager, Exception):
                differs = self._judge.backward_exceptions(eager, error)
                self._respond([*left] if differs is None else [differs, *left], cause=error, raises=False)
                return None  # so that it is raised
            if short is not None and crowded:
                # it may be what the check keeps that left too little, which it does no more
                self._memory.not_compared(
                    "the compiled backward pass, beside what the check held,", error, backward=True
                )
                return eager
            short = short or self._unsupported_here(error)
            found = [candidate_crashed(error, during="backward") if short is None else short, *left]
            self._respond(found, cause=error, call=call, cotangents=passed.cotangents)
            return None if call.exchanges is not None and call.exchanges.doubtful else eager

        begun = partial(self._look_at_earlier, ())
        again = self._candidate.backward_again
        watch = BackwardWatch(
            outputs,
            mutated,
            edges,
            since,
            on_backward,
            on_error,
            begun,
            again,
            self._gradients_not_copied,
            exchanges=call.exchanges is not None,
        )
        if watch.outside_edges:
            reason = "a gradient leaves the region to a tensor that is no input of it (a common base of inputs)"
            self._reporter.skip(Skip("gradients of inputs that are views of one tensor", reason, matters=True))

    def _exchanged_backward(self, call: Call, passed: BackwardPass) -> bool:
        """Note what a backward pass exchanged. Returns whether that failed."""
        if call.exchanges is None or passed.exchanged is None:
            return False
        call.exchanges.backward_passed(passed.exchanged)
        return call.exchanges.failed is not None

    def _gradients_not_copied(self, error: Exception) -> None:
        self._memory.not_compared("copying the gradients that arrive", error, backward=True)

    def _checked_backward(
        self, call: Call, passed: BackwardPass, meter: Meter
    ) -> Mapping[int, torch.Tensor | None] | None:
        if self._stopped or not passed.cotangents:
            return None
        if self._exchanged_backward(call, passed):
            return None
        left = self._backward_settings_left(call, passed)
        call.ratios = None  # those of the results
        earlier = passed.begun
        overwritten = (
            earlier.overwritten(self._calls, self._info.name, counted=False) if isinstance(earlier, Look) else []
        )
        try:
            with random_untouched():
                findings, gradients = self._judge.backward(call, passed) or ([], None)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._memory.not_compared("comparing the gradients", error, backward=True)
            return None
        if gradients is not None:
            self._memory.compared()
        findings += [*overwritten, *left]
        if gradients is not None:
            self._health.checked(call.number, call.ratios, _failing(findings), meter.spent, backward=True)
        fell_back = self._respond(findings, call=call, cotangents=passed.cotangents)
        return gradients if fell_back else None

    def _backward_settings_left(self, call: Call, passed: BackwardPass) -> list[Finding]:
        before, after = passed.settings
        again = self._judge.candidate_again(call, passed.cotangents)
        others_ran = threading.active_count() > 1
        left = LeftSettings(again, self._reporter.skip, others_ran, during="in its backward pass")
        return left.findings(before, before, after, thread=False)

    # when it cannot go on with the candidate

    def _candidate_raised(self, args: Sequence[Any], before: _BeforeCandidate, error: Exception) -> Any:
        call = before.call
        if call.exchanges is not None:
            if call.exchanges.failed is not None:
                raise error  # a connection broke, or another rank did not come: no fault of the program's
            before.changed = ProcessState.capture()
            self._run_reference(before)
            if _not_replayed(before):
                before.reference = None  # eager does not raise before the candidate does
        eager_ran_out = is_out_of_memory(before.reference)
        crowded = isinstance(before.reference, Execution) or (eager_ran_out and bool(call.inputs.pristine))
        crowded = crowded and (call.exchanges is None or not call.exchanges.begun)
        if is_out_of_memory(error) and crowded and not self._candidate.missing:
            if not eager_ran_out:
                before.reference = None
            try:
                return self._candidate_alone(args, before, error.with_traceback(None))
            except StopRecomputationError:
                raise
            except Exception as again:
                error = again
        reference = before.reference
        if isinstance(reference, Exception) and eager_ran_out:
            if not same_exception(reference, error):
                self._memory.not_compared(EAGER_FORWARD, reference)
            raise error
        left = self._settings_left(before)
        alike = isinstance(reference, Exception) and same_exception(reference, error)
        short = None if alike else self._unsupported_here(error)
        if short is not None:
            if self._candidate.missing:
                self._unsupported = short  # for good: other calls may find more memory, but no compiler
            self._respond([short, *left], cause=error)
            return self._eager_instead(args, call)
        if isinstance(reference, Exception):
            finding, returns = self._judge.exceptions(call, reference, error)
            found = [*left] if finding is None else [finding, *left]
            if found:
                self._respond(found, cause=reference, raises=returns)
            raise reference
        during = "compiling" if self._candidate.missing else "running"
        self._respond([candidate_crashed(error, during=during), *left], cause=error, call=call)
        return self._eager_instead(args, call)

    def _candidate_alone(self, args: Sequence[Any], before: _BeforeCandidate, error: Exception) -> Any:
        """Run a candidate that ran out of memory once more, without what the check holds.

        Raises:
            Exception: What it raises this time too.
        """
        before.call.inputs.undo(args)
        before.call.rng.restore()
        self._memory.release()
        returned = self._candidate(*args)
        self._memory.not_compared("the compiled program, beside what the check held,", error)
        return returned

    def _unsupported_here(self, error: Exception) -> Finding | None:
        inductor = self._options.compiler == "inductor"
        with random_untouched():
            found = unsupported_here(error, needed=self._needed, inductor=inductor, control=not self._machine_works)
        self._machine_works = found is None  # it need not be tried at each call of a candidate that crashes
        return found

    def _eager_instead(self, args: Sequence[Any], call: Call) -> Any:
        """Undo what the candidate did to inputs and random state, and run the region in eager for the user."""
        call.inputs.undo(args)
        call.rng.restore()
        with nullcontext() if call.exchanges is None else call.exchanges.continued():
            return self._reference(*args)

    def _respond(
        self,
        findings: Sequence[Finding],
        cause: BaseException | None = None,
        call: Call | None = None,
        cotangents: Cotangents | None = None,
        *,
        raises: bool = True,
    ) -> bool:
        """Report findings as the user asked. Returns whether to fall back to eager, now and for good."""
        asked = self._investigate if call is not None else None

        def investigate(reported: Sequence[Finding], keep: Keep) -> Sequence[Finding]:
            if asked is None or call is None:
                return reported
            if all(finding.node is not None for finding in reported if finding.kind.fails):
                return reported  # the operator is known
            if self._investigated:  # it takes long, and what is found later mostly follows from what was found first
                known = {"localized": "not anew: an earlier finding in this region was"}
                return [replace(finding, evidence={**finding.evidence, **known}) for finding in reported]
            self._investigated = True
            return asked(call, cotangents, reported, keep)

        # without localization nothing is said of it, and nothing spent on it
        with random_untouched() if findings else nullcontext():
            fall_back = self._reporter.report(
                findings, cause=cause, raises=raises, investigate=None if asked is None else investigate
            )
        if fall_back and call is not None and call.exchanges is not None and not call.exchanges.in_step:
            self._reporter.note(
                "eager's results were not handed out: the compiled program exchanges tensors in another order than "
                "eager, so other ranks would wait for what this one does not send"
            )
        elif fall_back:
            self._stopped = True
        return self._stopped


def _failing(findings: Sequence[Finding]) -> int:
    return sum(finding.fails and not finding.is_layout for finding in findings)


def _not_replayed(before: _BeforeCandidate) -> bool:
    """Whether eager raised because it was not given what it would have received from other ranks."""
    call, raised = before.call, before.reference
    unknown = isinstance(raised, CollectiveReplayError)
    return call.exchanges is not None and (unknown or (isinstance(raised, Exception) and call.exchanges.doubtful))


def _cuda(args: Sequence[Any]) -> list[int]:
    return sorted({arg.device.index or 0 for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda})
