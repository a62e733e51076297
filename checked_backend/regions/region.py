"""One checked region: a callable that replaces the compiled graph for Dynamo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from checked_backend._torch.autograd import StopRecomputationError
from checked_backend._torch.collectives import wait_for_result
from checked_backend._torch.traces import profiled
from checked_backend.errors import is_device_lost, is_out_of_memory
from checked_backend.findings import Finding, Skip
from checked_backend.options import CheckOptions
from checked_backend.random_state import random_untouched
from checked_backend.regions.answer import Investigate, RegionAnswer
from checked_backend.regions.backward_check import BackwardCheck
from checked_backend.regions.budget import Due, Meter, Schedule
from checked_backend.regions.call import Call
from checked_backend.regions.call_findings import (
    candidate_crashed,
    exception_missing,
    same_exception,
    wrong_outputs,
)
from checked_backend.regions.call_record import CallRecord
from checked_backend.regions.candidate import Candidate
from checked_backend.regions.compare_call import CallComparison
from checked_backend.regions.control_runs import Variants
from checked_backend.regions.draw_inputs import DrawInputs
from checked_backend.regions.eager_run import eager_instead, run_eager
from checked_backend.regions.execution import Execution, Subjects
from checked_backend.regions.graph_info import GraphInfo, qualified_names
from checked_backend.regions.health import HEALTH, Health, RegionHealth
from checked_backend.regions.inputs import Effects, find_effects
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.observers import OBSERVERS, Observer, confirmed
from checked_backend.regions.reporter import RegionReporter
from checked_backend.regions.returned_tensors import ReturnedTensors
from checked_backend.regions.torch_state import RngState
from checked_backend.regions.unchecked_calls import UncheckedCalls
from checked_backend.regions.unobserved import is_traced, is_unobserved
from checked_backend.regions.unsupported import MachineLimits

__all__ = ["CheckedRegion"]

EAGER_FORWARD = "eager's forward pass"


class CheckedRegion:
    """Runs a region's candidate, checks it against eager, and returns what the candidate returned.

    Args:
        info: The region's names and source lines.
        variants: The region in eager, compiled, and in other variants.
        schedule: Says which calls are checked.
        thorough: Compile the float64 twin for every difference.
        silent: Write no report to disk.
        remark: A remark about how the candidate was compiled.
        needed: Says how many bytes all of eager's tensors need together.
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
        )
        self._remark = remark
        self._memory = MemoryPressure(self._reporter, keeps_activations=options.reference == "keep")
        self._comparison = CallComparison(
            info, variants, self._reporter, thorough=thorough, memory=self._memory, draws=draws
        )
        self._answer = RegionAnswer(self._reporter, investigate)
        self._earlier = ReturnedTensors(info, self._reporter)
        self._limits = MachineLimits(needed, inductor=options.compiler == "inductor")
        self._health = RegionHealth(info.name, self._reporter.note, Health() if silent else HEALTH)
        self._backward = BackwardCheck(
            schedule,
            self._reporter,
            self._answer,
            self._candidate,
            self._memory,
            self._comparison,
            self._earlier,
            self._limits,
            self._health,
        )
        self._lock = threading.Lock()
        self._known: tuple[Effects, Subjects] | None = None
        self._unsupported: Finding | None = None
        self._left_compiling = list(left_compiling)
        self._unchecked_calls = UncheckedCalls(schedule, self._earlier, self._reporter)

    def __call__(self, *args: Any) -> Any:
        """Run the region; Dynamo's compiled code calls this."""
        if not self._answer.stopped and self._unchecked_calls.skip():
            self._earlier.calls += 1
            return self._unchecked(*args)
        if is_unobserved() or self._unchecked_calls.captured() or (not self._earlier.calls and is_traced(args)):
            return (self._reference if self._answer.stopped or self._candidate.missing else self._candidate)(*args)
        self._earlier.calls += 1
        if self._unsupported is not None:
            self._unchecked_calls.count()
            self._reporter.report([self._unsupported])
            return self._reference(*args)
        due = None if self._answer.stopped else self._schedule.due()
        if due is None and self._earlier.calls == 1 and (self._candidate.missing or self._left_compiling):
            due = Due()  # findings of compiling are reported at once
        if due is not None and self._memory.due():
            with self._schedule.charged(due, self._reporter.compared) as meter:
                return self._checked_call(args, due, meter)
        if self._answer.stopped or self._candidate.missing:
            return self._reference(*args)
        self._unchecked_calls.count()
        return self._schedule.unchecked(self._unchecked, args)

    def _unchecked(self, *args: Any) -> Any:
        try:
            return self._candidate(*args)
        except Exception as error:
            if self._info.collectives is not None:
                self._reporter.hear(cause=error)  # another rank may have ended
            raise

    def _checked_call(self, args: Sequence[Any], due: Due, meter: Meter) -> Any:
        self._reporter.hear()
        self._wait_for_inputs(args)
        effects, subjects = self._first_look(args)
        self._reporter.begin_call(self._earlier.calls)
        if self._remark:
            self._reporter.note(self._remark)
        self._reporter.devices = frozenset(str(arg.device) for arg in args if isinstance(arg, torch.Tensor))
        random = RngState.for_inputs(args)
        try:
            controls = partial(self._comparison.controls, cotangents=None)
            before = CallRecord.begin(args, self._info, effects, subjects, random, due, meter, self._earlier, controls)
            observers = [observer(before) for observer in OBSERVERS]
            if before.call.exchanges is None:  # else eager is given what the candidate receives, so it runs after it
                self._run_reference(before)
        except Exception as error:
            self._memory.not_compared("copying what the check needs", error)
            before = None
        if before is None:
            random.restore()
            self._earlier.unchecked()
            with meter.program():
                return self._reference(*args) if self._candidate.missing else self._unchecked(*args)
        call = before.call
        call.rng.restore()
        try:
            exchanged = nullcontext() if call.exchanges is None else call.exchanges.recorded()
            with meter.program(), exchanged, profiled("checked_backend::candidate"):
                returned = self._candidate.results(args, call)
        except StopRecomputationError:
            self._reporter.not_checked()
            raise  # a checkpoint around the region has all it needs
        except Exception as error:
            return self._candidate_raised(before, observers, error)
        before.returned, before.after_candidate = returned, RngState.capture(tuple(random.cuda))
        if call.exchanges is not None:
            before.candidate_ended()
            self._run_reference(before)
            before.after_candidate.restore()  # the program goes on as if eager had not run after it
            if before.not_replayed:
                self._answer.to(self._comparison.exchanged_otherwise(call, before.reference), call=call)
                return returned
        if isinstance(before.reference, Exception) and is_out_of_memory(before.reference):
            self._memory.not_compared(EAGER_FORWARD, before.reference)
            return returned
        try:
            call.final_rng_states = before.final_rng_states()
            good = self._after_candidate(before, observers)
        except Exception as error:
            if error is before.reference:
                raise
            self._memory.not_compared("comparing the results", error)
            before.after_candidate.restore()
            good = True
        return returned if good else self._eager_instead(args, call)

    def _wait_for_inputs(self, args: Sequence[Any]) -> None:
        """Wait where the region will: the values of what has not arrived yet cannot be copied."""
        try:
            for position in self._info.awaited:
                wait_for_result(args[position])
        except Exception as error:
            self._reporter.hear(cause=error)
            raise

    def _run_reference(self, before: CallRecord) -> None:
        call = before.call
        region = self._reference if call.exchanges is None else call.exchanges.paired_region(self._reference)
        reference, before.eager_settings = run_eager(region, call, self._memory)
        before.after_reference = RngState.capture(tuple(call.rng.cuda))
        if isinstance(reference, Execution) and not self._keeps_graph(call):
            reference = reference.without_graph()
        before.reference = reference
        call.rng.restore()

    def _after_candidate(self, before: CallRecord, observers: Sequence[Observer]) -> bool:
        """Compare the candidate's results. Return whether the program goes on with them."""
        call, reference, args, returned = before.call, before.reference, before.args, before.returned
        left = self._seen_always(before, observers)
        if isinstance(reference, Exception):
            self._answer.to([exception_missing(reference), *left], cause=reference, call=call)
            if self._answer.stopped:
                raise reference
            return True
        if reference is None:
            raise RuntimeError("eager's results are gone before they were compared")
        if not isinstance(returned, (tuple, list)) or len(returned) != len(reference.outputs):
            self._answer.to([wrong_outputs(len(reference.outputs), returned), *left])
            self._reporter.note("eager's outputs were handed out: the program cannot go on with the candidate's")
            return False
        skip = self._reporter.skip
        suspicions = [
            suspicion
            for observer in observers
            if not observer.of_exceptions
            for suspicion in observer.after(before, skip)
        ]
        with profiled("checked_backend::comparison"):
            findings = self._comparison.forward(call, reference, returned, args)
        findings += [*confirmed(suspicions, findings, skip), *left]
        before.after_candidate.restore()
        self._health.checked(call.number, call.ratios, findings, before.meter.spent)
        if self._answer.to(findings, call=call):
            return False
        arrived = returned if call.exchanges is None else call.exchanges.arrived(returned)
        self._earlier.remember(args, call.subjects, arrived)
        if call.exchanges is not None and call.exchanges.doubtful:
            why = "eager did not receive what the compiled program received, so its gradients are others"
            self._reporter.skip(Skip("gradients", why, matters=True))
            return True
        if call.inputs.requires_grad and self._options.gradients:
            if self._schedule.limited:
                self._reporter.gradients_wanted()
            if self._keeps_graph(call):
                call.graph = reference.graph(call.inputs.mutated)
                self._memory.holds(call)
            self._backward.watch(args, call, returned, before.edges, before.since)
        else:
            self._memory.compared()
        return True

    def _keeps_graph(self, call: Call) -> bool:
        """Whether eager's activations are kept for its backward pass."""
        return bool(call.inputs.requires_grad) and self._options.gradients and self._memory.keeps_activations

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

    def _seen_always(self, before: CallRecord, observers: Sequence[Observer]) -> list[Finding]:
        """What is looked at also where a side raises; at the first call with what compiling has left."""
        compiled, self._left_compiling = self._left_compiling, []
        skip = self._reporter.skip
        always = [observer for observer in observers if observer.of_exceptions]
        return [*compiled, *confirmed((s for observer in always for s in observer.after(before, skip)), (), skip)]

    def _candidate_raised(self, before: CallRecord, observers: Sequence[Observer], error: Exception) -> Any:
        call, args = before.call, before.args
        if is_device_lost(error):
            if before.reference is None or is_device_lost(before.reference):  # by eager, or by an earlier call
                self._memory.not_compared("running eager", error)
            else:
                self._answer.to([candidate_crashed(error, during="running")], cause=error)
            raise error
        if call.exchanges is not None:
            if call.exchanges.failed is not None:
                self._reporter.hear(cause=error)
                raise error  # a connection broke, or another rank did not come: no fault of the program's
            before.candidate_ended()
            self._run_reference(before)
            if before.not_replayed:
                before.reference = None  # eager does not raise before the candidate does
        eager_ran_out = is_out_of_memory(before.reference)
        crowded = isinstance(before.reference, Execution) or (eager_ran_out and bool(call.inputs.pristine))
        crowded = crowded and (call.exchanges is None or not call.exchanges.begun)
        if is_out_of_memory(error) and crowded and not self._candidate.missing:
            if not eager_ran_out:
                before.reference = None
            try:
                return self._candidate_alone(before, error.with_traceback(None))
            except StopRecomputationError:
                raise
            except Exception as again:
                error = again
        reference = before.reference
        if isinstance(reference, Exception) and eager_ran_out:
            if not same_exception(reference, error):
                self._memory.not_compared(EAGER_FORWARD, reference)
            raise error
        left = self._seen_always(before, observers)
        alike = isinstance(reference, Exception) and same_exception(reference, error)
        short = None if alike else self._limits(error)
        if short is not None:
            if self._candidate.missing:
                self._unsupported = short  # for good: other calls may find more memory, but no compiler
                self._unchecked_calls.look_at_all = True
            self._answer.to([short, *left], cause=error)
            return self._eager_instead(args, call, error)
        if isinstance(reference, Exception):
            finding, returns = self._comparison.exceptions(call, reference, error)
            found = [*left] if finding is None else [finding, *left]
            if found:
                self._answer.to(found, cause=reference, raises=returns)
            raise reference
        during = "compiling" if self._candidate.missing else "running"
        self._answer.to([candidate_crashed(error, during=during), *left], cause=error, call=call)
        return self._eager_instead(args, call, error)

    def _candidate_alone(self, before: CallRecord, error: Exception) -> Any:
        """Run a candidate that ran out of memory once more, without what the check holds. It may raise again."""
        before.call.inputs.undo(before.args)
        before.call.rng.restore()
        self._memory.release()
        returned = self._candidate(*before.args)
        self._memory.not_compared("the compiled program, beside what the check held,", error)
        return returned

    def _eager_instead(self, args: Sequence[Any], call: Call, error: Exception | None = None) -> Any:
        return eager_instead(self._reference, args, call, self._reporter.note, error)
