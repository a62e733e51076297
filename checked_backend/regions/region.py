"""One checked region: a callable that replaces the compiled graph for Dynamo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from checked_backend._torch.autograd import StopRecomputationError
from checked_backend._torch.traces import profiled
from checked_backend.errors import is_device_lost, is_out_of_memory
from checked_backend.findings import Finding, Skip
from checked_backend.regions.backward_check import BackwardCheck, Checks
from checked_backend.regions.call_findings import (
    candidate_crashed,
    exception_missing,
    same_exception,
    wrong_outputs,
)
from checked_backend.regions.eager import eager_instead, run_eager
from checked_backend.regions.execution import Call, Execution
from checked_backend.regions.observers import IF_BOTH_RETURN, IF_ONE_RAISES, CallRecord, CallRecorder, confirmed
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.schedule import TimedCheck, is_recheck
from checked_backend.regions.unchecked_calls import UncheckedCalls, is_traced, is_unobserved

EAGER_FORWARD = "eager's forward pass"


class CheckedRegion:
    """Runs a region's candidate, checks it against eager, and returns what the candidate returned.

    Args:
        remark: A remark about how the candidate was compiled.
        left_compiling: Findings about settings that the compiler left changed; told at the first checked call.
    """

    def __init__(self, checks: Checks, *, remark: str = "", left_compiling: Sequence[Finding] = ()) -> None:
        self._checks = checks
        self._reporter, self._memory, self._earlier = checks.reporter, checks.memory, checks.earlier
        self._reference, self._candidate = checks.variants.reference, checks.candidate
        self._waiting = checks.variants.waiting
        self._recorder = CallRecorder(checks)
        self._remark = remark
        self._unsupported: Finding | None = None
        self._left_compiling = list(left_compiling)
        self._unchecked_calls = UncheckedCalls(checks.schedule, self._earlier, self._reporter)

    def __call__(self, *args: Any) -> Any:
        """Run the region; Dynamo's compiled code calls this."""
        if self._unsupported is None and not self._reporter.stopped and self._unchecked_calls.skip():
            self._earlier.calls += 1
            return self._unchecked(*args)
        if is_unobserved() or self._unchecked_calls.captured() or (not self._earlier.calls and is_traced(args)):
            return (self._reference if self._reporter.stopped or self._candidate.missing else self._candidate)(*args)
        self._earlier.calls += 1
        if self._unsupported is not None:
            self._unchecked_calls.count()
            self._reporter.respond([self._unsupported])
            return self._reference(*args)
        check = None if self._reporter.stopped else self._checks.schedule.due()
        if check is None and self._earlier.calls == 1 and (self._candidate.missing or self._left_compiling):
            check = TimedCheck()  # findings of compiling are reported at once
        if check is not None and self._memory.due():
            with self._checks.schedule.charged(check):
                return self._checked_call(args, check)
        if self._reporter.stopped or self._candidate.missing:
            return self._reference(*args)
        self._unchecked_calls.count()
        return self._checks.schedule.unchecked(self._unchecked, args)

    def _unchecked(self, *args: Any) -> Any:
        try:
            return self._candidate(*args)
        except Exception as error:
            if self._checks.info.collectives is not None:
                self._reporter.hear(cause=error)  # another rank may have ended
            raise

    def _checked_call(self, args: Sequence[Any], check: TimedCheck) -> Any:
        self._reporter.hear()
        self._waiting.begin()
        random = self._recorder.prepare(args)
        self._reporter.begin_call(self._earlier.calls, drawn=not is_recheck(check.number))
        if self._remark:
            self._reporter.note(self._remark)
        self._reporter.devices = frozenset(str(arg.device) for arg in args if isinstance(arg, torch.Tensor))
        try:
            record = self._recorder.begin(args, random, check)
            if not record.call.exchanges:  # else eager is given what the candidate receives, so it runs after it
                self._run_reference(record)
        except Exception as error:
            self._memory.not_compared("copying what the check needs", error)
            record = None
        if record is None:
            random.restore()
            self._earlier.unchecked()
            with check.program():
                return self._reference(*args) if self._candidate.missing else self._unchecked(*args)
        call = record.call
        call.rng.restore()
        try:
            compiled = self._waiting.at("running the compiled program")
            with check.program(), call.exchanges.recorded(), compiled, profiled("checked_backend::candidate"):
                returned = self._candidate.results(args, call)
        except StopRecomputationError:
            self._reporter.not_checked()
            raise  # a checkpoint around the region has all it needs
        except Exception as error:
            return self._candidate_raised(record, error)
        record.returned, record.after_candidate = returned, call.rng.now()
        call.ignores_warnings = isinstance(record.reference, Warning)
        if call.exchanges or call.ignores_warnings:
            self._run_reference(record)
            record.after_candidate.restore()  # the program goes on as if eager had not run after it
            if (missing := record.not_replayed) is not None:
                self._reporter.respond(self._checks.comparison.exchanged_otherwise(call, missing), call=call)
                return returned
        if isinstance(record.reference, Exception) and is_out_of_memory(record.reference):
            self._memory.not_compared(EAGER_FORWARD, record.reference)
            return returned
        try:
            call.final_rng_states = record.final_rng_states()
            good = self._after_candidate(record)
        except Exception as error:
            if error is record.reference:
                raise
            self._memory.not_compared("comparing the results", error)
            record.after_candidate.restore()
            good = True
        return returned if good else self._eager_instead(args, call)

    def _run_reference(self, record: CallRecord) -> None:
        call, region = record.call, self._reference
        if call.exchanges:  # the candidate has run
            record.settings, region = ProcessState.capture(), call.exchanges.paired_region(region)
        with self._waiting.at("running eager"):
            reference, record.eager_settings = run_eager(region, call, self._memory)
        record.after_reference = call.rng.now()
        if isinstance(reference, Execution) and not self._keeps_graph(call):
            reference = reference.without_graph()
        record.reference = reference
        call.rng.restore()

    def _after_candidate(self, record: CallRecord) -> bool:
        """Compare the candidate's results. Return whether the program goes on with them."""
        call, reference, args, returned = record.call, record.reference, record.args, record.returned
        left = self._settings_left(record)
        if isinstance(reference, Exception):
            self._reporter.respond([exception_missing(reference), *left], cause=reference, call=call)
            if self._reporter.stopped:
                raise reference
            return True
        if reference is None:
            raise RuntimeError("eager's results are gone before they were compared")
        if not isinstance(returned, (tuple, list)) or len(returned) != len(reference.outputs):
            self._reporter.respond([wrong_outputs(len(reference.outputs), returned), *left])
            self._reporter.note("the program got eager's outputs: it cannot go on with the candidate's")
            return False
        skip = self._reporter.skip
        suspicions = [*record.suspicions(IF_BOTH_RETURN)]
        with profiled("checked_backend::comparison"), self._waiting.at("comparing the results"):
            findings = self._checks.comparison.forward(call, reference, returned, args)
        findings += [*confirmed(suspicions, findings, skip), *left]
        record.after_candidate.restore()
        self._checks.health.checked(call.number, call.ratios, findings, call.check.spent)
        if self._reporter.respond(findings, call=call):
            return False
        self._earlier.remember(args, call.subjects, call.exchanges.arrived(returned))
        if call.exchanges.doubtful:
            why = "eager did not receive what the compiled program received, so its gradients are others"
            self._reporter.skip(Skip("gradients", why, matters=True))
            return True
        if call.inputs.requires_grad and self._checks.options.gradients:
            self._reporter.gradients_wanted()
            if self._keeps_graph(call):
                call.graph = reference.graph(call.inputs.mutated)
                self._memory.holds(call)
            BackwardCheck.watch(record, returned)
        else:
            self._memory.compared()
        return True

    def _keeps_graph(self, call: Call) -> bool:
        """Whether eager's activations are kept for its backward pass."""
        return bool(call.inputs.requires_grad) and self._checks.options.gradients and self._memory.keeps_activations

    def _settings_left(self, record: CallRecord) -> list[Finding]:
        """Findings about settings, also where a side raises; at the first call with what compiling has left."""
        compiled, self._left_compiling = self._left_compiling, []
        return [*compiled, *confirmed(record.suspicions(IF_ONE_RAISES), (), self._reporter.skip)]

    def _candidate_raised(self, record: CallRecord, error: Exception) -> Any:
        call, args = record.call, record.args
        if is_device_lost(error):
            if record.reference is None or is_device_lost(record.reference):  # by eager, or by an earlier call
                self._memory.not_compared("running eager", error)
            else:
                self._reporter.respond([candidate_crashed(error, during="running")], cause=error)
            raise error
        if call.exchanges.failed is not None:
            self._reporter.hear(cause=error)
            raise error  # a connection broke, or another rank did not come: no fault of the program's
        if call.exchanges:
            self._run_reference(record)
            if record.not_replayed is not None:
                record.reference = None  # eager does not raise before the candidate does
        eager_ran_out = is_out_of_memory(record.reference)
        crowded = isinstance(record.reference, Execution) or (eager_ran_out and bool(call.inputs.pristine))
        if is_out_of_memory(error) and crowded and not call.exchanges.begun and not self._candidate.missing:
            if not eager_ran_out:
                record.reference = None
            try:
                return self._candidate_alone(record, error.with_traceback(None))
            except StopRecomputationError:
                raise
            except Exception as again:
                error = again
        reference = record.reference
        if isinstance(reference, Exception) and eager_ran_out:
            if not same_exception(reference, error):
                self._memory.not_compared(EAGER_FORWARD, reference)
            raise error
        left = self._settings_left(record)
        alike = isinstance(reference, Exception) and same_exception(reference, error)
        short = None if alike else self._checks.unsupported(error)
        if short is not None:
            if self._candidate.missing:
                self._unsupported = short  # for good: other calls may find more memory, but no compiler
            self._reporter.respond([short, *left], cause=error)
            return self._eager_instead(args, call, error)
        if isinstance(reference, Exception):
            finding, returns = self._checks.comparison.exceptions(call, reference, error)
            found = [*left] if finding is None else [finding, *left]
            if found:
                self._reporter.respond(found, cause=reference, raises=returns)
            raise reference
        during = "compiling" if self._candidate.missing else "running"
        self._reporter.respond([candidate_crashed(error, during=during), *left], cause=error, call=call)
        return self._eager_instead(args, call, error)

    def _candidate_alone(self, record: CallRecord, error: Exception) -> Any:
        """Run a candidate that ran out of memory once more, without what the check holds. It may raise again."""
        record.call.inputs.undo(record.args)
        record.call.rng.restore()
        self._memory.release()
        returned = self._candidate(*record.args)
        self._memory.not_compared("the compiled program, beside what the check held,", error)
        return returned

    def _eager_instead(self, args: Sequence[Any], call: Call, error: Exception | None = None) -> Any:
        return eager_instead(self._reference, args, call, self._reporter.note, error)
