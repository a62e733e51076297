"""What the checks of a region share; and its backward passes: compare the gradients that have arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from checked_backend._torch.traces import profiled
from checked_backend.errors import CheckedBackendError, is_device_lost, is_out_of_memory
from checked_backend.findings import Finding, Skip
from checked_backend.options import CheckOptions
from checked_backend.random_state import random_untouched
from checked_backend.ranks.tape import CollectiveReplayError
from checked_backend.regions.backward import BackwardPass, BackwardWatch
from checked_backend.regions.budget import Meter, Schedule
from checked_backend.regions.call_findings import candidate_crashed, compare_exceptions, same_exception
from checked_backend.regions.candidate import Candidate
from checked_backend.regions.compare_call import CallComparison
from checked_backend.regions.draw_inputs import DrawInputs
from checked_backend.regions.eager import NOT_CONTINUED
from checked_backend.regions.execution import Call
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.health import HEALTH, Health, RegionHealth
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.process_state import check_settings
from checked_backend.regions.reporter import Investigate, RegionReporter
from checked_backend.regions.returned_tensors import (
    MemoryRange,
    Returned,
    ReturnedTensors,
    Snapshot,
    memory_ranges,
)
from checked_backend.regions.runner import Variants
from checked_backend.regions.unsupported import MachineLimits
from checked_backend.verdict.steps.candidate_again import AGAIN

__all__ = ["BackwardCheck", "Checks"]

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
        over: To be called when the pass is over.
    """

    results: Snapshot | None = None
    gradients: tuple[Returned, ...] = ()
    over: Callable[[], None] = lambda: None


class Checks:
    """What the checks of one region's calls share.

    Args:
        thorough: Compile the float64 twin for every difference.
        needed: Says how many bytes all of eager's tensors need together.
        investigate: Finds out where findings come from; None if the user does not want that.
        draws: The region with the parameters of its draws as results; None if its draws have no computed parameters.

    Attributes:
        info: The region's names and source lines.
        variants: The region in eager, compiled, and in other variants.
        schedule: Says which calls are checked, and is told the cost of a check.
        reporter: Receives the coverage, and responds to findings.
        memory: Decides what is given up if memory runs out, or the check itself fails.
        comparison: Compares results, gradients and exceptions.
        earlier: Results of earlier calls, which a call may write to, and gradients, in whose memory it may send others.
        unsupported: Says whether an exception is a limit of this machine, and which one.
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
        needed: Callable[[], int] = lambda: 0,
        investigate: Investigate | None = None,
        draws: DrawInputs | None = None,
    ) -> None:
        self.info, self.variants, self.options, self.schedule = info, variants, options, schedule
        self.reporter = RegionReporter(info, options, silent=silent, investigate=investigate)
        self.candidate = Candidate(
            variants.candidate,
            self.reporter.note,
            replaceable=options.on_divergence == "fallback" and options.gradients,
        )
        self.memory = MemoryPressure(self.reporter, keeps_activations=options.reference == "keep")
        self.comparison = CallComparison(
            info, variants, self.reporter, thorough=thorough, memory=self.memory, draws=draws
        )
        self.earlier = ReturnedTensors(info, self.reporter)
        self.unsupported = MachineLimits(needed, inductor=options.compiler == "inductor")
        self.health = RegionHealth(info.name, self.reporter.note, Health() if silent else HEALTH)


class BackwardCheck:
    """Checks the backward passes of one region's calls."""

    def __init__(self, checks: Checks) -> None:
        self._schedule = checks.schedule
        self._reporter = checks.reporter
        self._candidate = checks.candidate
        self._memory = checks.memory
        self._comparison = checks.comparison
        self._earlier = checks.earlier
        self._unsupported = checks.unsupported
        self._health = checks.health
        self._captured = threading.Event()  # compiled autograd has captured a backward pass in one graph

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
            self._reporter.skip(Skip(call.subjects.gradient(position), reason, matters=True))
        mutated = {position: args[position] for position in call.inputs.mutated}
        given = memory_ranges(args)

        # The callbacks must not hold the outputs: they hold the nodes whose hooks hold the callbacks.
        def on_backward(passed: BackwardPass) -> Gradients | None:
            with self._schedule.charged(
                call.due, self._reporter.compared, backward=True, already=passed.seconds
            ) as meter:
                return self._checked(call, passed, given, meter)

        def on_error(error: Exception, passed: BackwardPass) -> Gradients | None:
            return self._raised(call, passed, error)

        def begin() -> _Held:
            self._reporter.hear()
            self._reporter.call = call.number
            over = self._reporter.skip_until(Skip(f"the gradients of call {call.number}", _DID_NOT_END, matters=True))
            return _Held(self._earlier.look(), self._earlier.held_gradients(), over)

        def end(begun: object) -> None:
            if isinstance(begun, _Held):
                begun.over()

        if self._captured.is_set():
            self._left_out()  # also in a session of its own
        again = self._candidate.backward_again
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
            self._schedule.clock,
            exchanges=call.exchanges is not None,
            eager=partial(self._comparison.eager_outputs, call) if call.exchanges is None else None,
        )
        if watch.outside_edges:
            reason = "a gradient leaves the region to a tensor that is no input of it (a common base of inputs)"
            self._reporter.skip(Skip("gradients of inputs that are views of one tensor", reason, matters=True))

    def _left_out(self) -> None:
        self._captured.set()
        self._reporter.skip_until_compared(Skip("gradients", _CAPTURED, matters=True), backward=True)

    def _exchanged(self, call: Call, passed: BackwardPass) -> bool:
        """Note the exchanges of a backward pass. Return whether one of them failed."""
        if call.exchanges is None or passed.exchanged is None:
            return False
        call.exchanges.backward_passed(passed.exchanged)
        return call.exchanges.failed is not None

    def _gradients_not_copied(self, error: Exception) -> None:
        self._memory.not_compared("copying the gradients that arrive", error, backward=True)

    def _checked(
        self, call: Call, passed: BackwardPass, given: Sequence[MemoryRange], meter: Meter
    ) -> Gradients | None:
        """Compare the gradients. Return eager's gradients if the program must go on with these."""
        if self._reporter.stopped or not passed.cotangents:
            return None
        if self._exchanged(call, passed):
            return None
        left = self._settings_left(call, passed)
        call.ratios, call.meter = None, meter  # not those of the results
        held = passed.begun if isinstance(passed.begun, _Held) else _Held()
        overwritten = []
        if held.results is not None:
            overwritten = held.results.overwritten(self._earlier.calls, self._earlier.region, counted=False)
        try:
            with random_untouched(), profiled("checked_backend::comparison of gradients"):
                findings, gradients = self._comparison.backward(call, passed) or ([], None)
        except Exception as error:
            self._memory.not_compared("comparing the gradients", error, backward=True)
            return None
        if gradients is not None:
            self._memory.compared()
            overwritten += self._sent_again(call, passed, gradients, given, held)
        findings += [*overwritten, *left]
        if gradients is not None:
            self._health.checked(call.number, call.ratios, findings, meter.spent, backward=True)
        fell_back = self._reporter.respond(findings, call=call, cotangents=passed.cotangents)
        return gradients if fell_back else None

    def _sent_again(
        self, call: Call, passed: BackwardPass, reference: Gradients, given: Sequence[MemoryRange], held: _Held
    ) -> list[Finding]:
        name = call.subjects.gradient
        return self._earlier.sent_again(
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
            self._memory.not_compared("the compiled backward pass", error, backward=True)
            return None
        if self._exchanged(call, passed):
            self._reporter.hear(cause=error)
            return None  # it must be raised: a connection broke, or another rank did not come
        left = self._settings_left(call, passed)
        # asked before eager runs, while memory is as short as it was
        short = self._unsupported(error) if is_out_of_memory(error) else None
        crowded = self._memory.keeps_activations
        eager = self._comparison.eager_gradients(call, passed)
        if isinstance(eager, Exception) and is_out_of_memory(eager):
            if not same_exception(eager, error):
                self._memory.not_compared("eager's backward pass", eager, backward=True)
            return None
        unfinished = call.exchanges is not None and (
            call.exchanges.backward_begun or isinstance(eager, CollectiveReplayError)
        )
        alike = isinstance(eager, Exception) and compare_exceptions(eager, error)[0] is None
        if isinstance(eager, Exception) and (alike or not unfinished):
            differs = self._comparison.backward_exceptions(eager, error)
            self._reporter.respond([*left] if differs is None else [differs, *left], cause=error, raises=False)
            return None
        if short is not None and crowded:
            # the check's own copies may have left too little memory; they are released now
            self._memory.not_compared("the compiled backward pass, beside what the check held,", error, backward=True)
        else:
            short = short or self._unsupported(error)
            found = [candidate_crashed(error, during="backward") if short is None else short, *left]
            self._reporter.respond(found, cause=error, call=call, cotangents=passed.cotangents)
        if unfinished:
            self._reporter.note(NOT_CONTINUED)
        return None if unfinished or isinstance(eager, Exception) else eager

    def _settings_left(self, call: Call, passed: BackwardPass) -> list[Finding]:
        before, after = passed.settings
        again = partial(self._comparison.runner(call, passed.cotangents).run, AGAIN[0])
        others_ran, skip = threading.active_count() > 1, self._reporter.skip
        return check_settings(before, before, after, again=again, skip=skip, others_ran=others_ran, backward=True)
