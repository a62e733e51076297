"""Check a region's backward passes: compare the gradients that have arrived, and handle exceptions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from checked_backend._torch.traces import profiled
from checked_backend.errors import CheckedBackendError, is_device_lost, is_out_of_memory
from checked_backend.findings import Finding, Skip
from checked_backend.random_state import random_untouched
from checked_backend.ranks.tape import CollectiveReplayError
from checked_backend.regions.answer import RegionAnswer
from checked_backend.regions.backward import BackwardPass, BackwardWatch
from checked_backend.regions.budget import Meter, Schedule
from checked_backend.regions.call import Call
from checked_backend.regions.call_findings import candidate_crashed, same_exception, same_message
from checked_backend.regions.candidate import Candidate
from checked_backend.regions.compare_call import CallComparison
from checked_backend.regions.eager_run import NOT_CONTINUED
from checked_backend.regions.health import RegionHealth
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.process_state import check_settings
from checked_backend.regions.reporter import RegionReporter
from checked_backend.regions.returned_tensors import (
    MemoryRange,
    Returned,
    ReturnedTensors,
    Snapshot,
    memory_ranges,
)

__all__ = ["BackwardCheck"]

Gradients = Mapping[int, "torch.Tensor | None"]

_DID_NOT_END = (
    "its backward pass began and did not end: the compiled program, or what runs after it in the backward pass, raised"
)

_CAPTURED = (
    "unsupported: compiled autograd captured its backward pass in one graph (fullgraph=True), in which nothing can be "
    "watched; without fullgraph they are checked"
)


@dataclass(frozen=True, slots=True)
class _Held:
    """What the program holds of earlier calls when a backward pass begins.

    Attributes:
        results: Results, and what they were then; None if nobody looked.
        gradients: Gradients.
        over: To be called when the pass is over.
    """

    results: Snapshot | None = None
    gradients: tuple[Returned, ...] = ()
    over: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class BackwardCheck:
    """Checks the backward passes of one region's calls.

    Attributes:
        schedule: Is told the cost of a check.
        reporter: Receives the coverage.
        answer: Reports findings.
        candidate: The compiled region.
        memory: Decides what is given up if memory runs out, or the check itself fails.
        comparison: Compares gradients and exceptions.
        earlier: Results of earlier calls, which a backward pass may write to, and gradients, in whose memory it may
            send others.
        unsupported: Says whether an exception is a limit of this machine, and which one.
        health: Receives the numbers of checked calls.
        captured: Set once compiled autograd has captured a backward pass in one graph.
    """

    schedule: Schedule
    reporter: RegionReporter
    answer: RegionAnswer
    candidate: Candidate
    memory: MemoryPressure
    comparison: CallComparison
    earlier: ReturnedTensors
    unsupported: Callable[[Exception], Finding | None]
    health: RegionHealth
    captured: threading.Event = field(default_factory=threading.Event)

    def watch(
        self, args: Sequence[Any], call: Call, outputs: Sequence[Any], edges: Mapping[Any, int], since: int
    ) -> None:
        """Have a call's backward pass checked, whenever it comes.

        Args:
            edges: The places in the user's autograd graph where the gradients of the inputs arrive.
            since: The autograd sequence number before the candidate ran.
        """
        for position in sorted(call.inputs.entangled):
            reason = "a mutated input that shares memory with another input"
            self.reporter.skip(Skip(call.subjects.gradient(position), reason, matters=True))
        mutated = {position: args[position] for position in call.inputs.mutated}
        given = memory_ranges(args)

        # The callbacks must not hold the outputs: they hold the nodes whose hooks hold the callbacks.
        def on_backward(passed: BackwardPass) -> Gradients | None:
            with self.schedule.charged(
                call.due, self.reporter.compared, backward=True, already=passed.seconds
            ) as meter:
                return self._checked(call, passed, given, meter)

        def on_error(error: Exception, passed: BackwardPass) -> Gradients | None:
            return self._raised(call, passed, error)

        def begin() -> _Held:
            self.reporter.hear()
            self.reporter.call = call.number
            over = self.reporter.skip_until(Skip(f"the gradients of call {call.number}", _DID_NOT_END, matters=True))
            return _Held(self.earlier.look(), self.earlier.held_gradients(), over)

        def end(begun: object) -> None:
            if isinstance(begun, _Held):
                begun.over()

        if self.captured.is_set():
            self._left_out()  # also in a session of its own
        again = self.candidate.backward_again
        watch = BackwardWatch(
            outputs,
            mutated,
            edges,
            since,
            on_backward,
            on_error,
            begin,
            end,
            again,
            self._gradients_not_copied,
            self._left_out,
            self.schedule.clock,
            exchanges=call.exchanges is not None,
            eager=partial(self.comparison.eager_outputs, call) if call.exchanges is None else None,
        )
        if watch.outside_edges:
            reason = "a gradient leaves the region to a tensor that is no input of it (a common base of inputs)"
            self.reporter.skip(Skip("gradients of inputs that are views of one tensor", reason, matters=True))

    def _left_out(self) -> None:
        self.captured.set()
        self.reporter.skip_until_compared(Skip("gradients", _CAPTURED, matters=True), backward=True)

    def _exchanged(self, call: Call, passed: BackwardPass) -> bool:
        """Note the exchanges of a backward pass. Return whether one of them failed."""
        if call.exchanges is None or passed.exchanged is None:
            return False
        call.exchanges.backward_passed(passed.exchanged)
        return call.exchanges.failed is not None

    def _gradients_not_copied(self, error: Exception) -> None:
        self.memory.not_compared("copying the gradients that arrive", error, backward=True)

    def _checked(
        self, call: Call, passed: BackwardPass, given: Sequence[MemoryRange], meter: Meter
    ) -> Gradients | None:
        """Compare the gradients. Return eager's gradients if the program must go on with these."""
        if self.answer.stopped or not passed.cotangents:
            return None
        if self._exchanged(call, passed):
            return None
        left = self._settings_left(call, passed)
        call.ratios, call.meter = None, meter  # not those of the results
        held = passed.begun if isinstance(passed.begun, _Held) else _Held()
        overwritten = []
        if held.results is not None:
            overwritten = held.results.overwritten(self.earlier.calls, self.earlier.region, counted=False)
        try:
            with random_untouched(), profiled("checked_backend::comparison of gradients"):
                findings, gradients = self.comparison.backward(call, passed) or ([], None)
        except Exception as error:
            self.memory.not_compared("comparing the gradients", error, backward=True)
            return None
        if gradients is not None:
            self.memory.compared()
            overwritten += self._sent_again(call, passed, gradients, given, held)
        findings += [*overwritten, *left]
        if gradients is not None:
            self.health.checked(call.number, call.ratios, findings, meter.spent, backward=True)
        fell_back = self.answer.to(findings, call=call, cotangents=passed.cotangents)
        return gradients if fell_back else None

    def _sent_again(
        self, call: Call, passed: BackwardPass, reference: Gradients, given: Sequence[MemoryRange], held: _Held
    ) -> list[Finding]:
        name = call.subjects.gradient
        return self.earlier.sent_again(
            call.number,
            {name(position): gradient for position, gradient in passed.gradients.items()},
            {name(position): gradient for position, gradient in reference.items()},
            [*given, *passed.arrived],
            held.gradients,
        )

    def _raised(self, call: Call, passed: BackwardPass, error: Exception) -> Gradients | None:
        """Handle an exception of the compiled backward pass. Return eager's gradients, or None to have it raised."""
        if isinstance(error, CheckedBackendError):  # it comes from a nested region's check
            return None
        if is_device_lost(error):  # by this pass, or by a kernel of the program's own before it
            self.memory.not_compared("the compiled backward pass", error, backward=True)
            return None
        if self._exchanged(call, passed):
            self.reporter.hear(cause=error)
            return None  # it must be raised: a connection broke, or another rank did not come
        left = self._settings_left(call, passed)
        # asked before eager runs, while memory is as short as it was
        short = self.unsupported(error) if is_out_of_memory(error) else None
        crowded = self.memory.keeps_activations
        eager = self.comparison.eager_gradients(call, passed)
        if isinstance(eager, Exception) and is_out_of_memory(eager):
            if not same_exception(eager, error):
                self.memory.not_compared("eager's backward pass", eager, backward=True)
            return None
        unfinished = call.exchanges is not None and (
            call.exchanges.backward_begun or isinstance(eager, CollectiveReplayError)
        )
        alike = isinstance(eager, Exception) and (same_exception(eager, error) or same_message(eager, error))
        if isinstance(eager, Exception) and (alike or not unfinished):
            differs = self.comparison.backward_exceptions(eager, error)
            self.answer.to([*left] if differs is None else [differs, *left], cause=error, raises=False)
            return None
        if short is not None and crowded:
            # the check's own copies may have left too little memory; they are released now
            self.memory.not_compared("the compiled backward pass, beside what the check held,", error, backward=True)
        else:
            short = short or self.unsupported(error)
            found = [candidate_crashed(error, during="backward") if short is None else short, *left]
            self.answer.to(found, cause=error, call=call, cotangents=passed.cotangents)
        if unfinished:
            self.reporter.note(NOT_CONTINUED)
        return None if unfinished or isinstance(eager, Exception) else eager

    def _settings_left(self, call: Call, passed: BackwardPass) -> list[Finding]:
        before, after = passed.settings
        again = self.comparison.controls(call, passed.cotangents).rerun_candidate
        others_ran, skip = threading.active_count() > 1, self.reporter.skip
        return check_settings(before, before, after, again=again, skip=skip, others_ran=others_ran, backward=True)
