"""What the checks of a region share; and its backward passes: compare the gradients that have arrived."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from typing import TYPE_CHECKING, Any

from checked_backend._torch.traces import profiled
from checked_backend.errors import CheckedBackendError, is_device_lost, is_out_of_memory
from checked_backend.findings import Finding, Skip
from checked_backend.options import CheckOptions
from checked_backend.random_state import random_untouched
from checked_backend.ranks.tape import CollectiveReplayError
from checked_backend.regions.backward import (
    BackwardObserver,
    BackwardPass,
    BackwardWatch,
    Gradients,
    UnseenError,
)
from checked_backend.regions.call_findings import candidate_crashed, compare_exceptions, memory_written, same_exception
from checked_backend.regions.compare_call import CallComparison
from checked_backend.regions.compile import Candidate
from checked_backend.regions.draw_inputs import DrawInputs
from checked_backend.regions.eager import NOT_CONTINUED
from checked_backend.regions.execution import Call
from checked_backend.regions.gradient_gate import copied_edge
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.health import RegionHealth
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.process_state import check_settings
from checked_backend.regions.reporter import RegionReporter
from checked_backend.regions.returned_tensors import (
    MemoryRange,
    ReturnedTensors,
    Snapshot,
    memory_ranges,
)
from checked_backend.regions.runner import Variants
from checked_backend.regions.schedule import Schedule
from checked_backend.regions.unsupported import MachineLimits
from checked_backend.verdict.classify import NOT_REPRODUCED
from checked_backend.verdict.steps.candidate_again import AGAIN

if TYPE_CHECKING:
    from checked_backend.regions.observers import CallRecord

_DID_NOT_END = (
    "its backward pass began and did not end: the compiled program, or what runs after it in the backward pass, raised"
)

_BY_BASE = (
    "it differs from eager in this call only, which writes to a view of a tensor that is no input: gradients may come "
    "through that tensor, and they are not seen"
)
_HOOKED = (
    "it differs from eager in this call only, whose saved tensors passed through hooks of the program "
    "(torch.autograd.graph.saved_tensors_hooks, checkpointing): if these lose digits, eager's gradients lose others"
)

_CAPTURED = (
    "unsupported: compiled autograd captured its backward pass in one graph (fullgraph=True), in which nothing can be "
    "watched; without fullgraph they are checked"
)


@dataclass(eq=False)
class Checks:
    """What the checks of one region's calls share.

    Attributes:
        thorough: Whether to compile the float64 twin for every difference.
        draws: The region with the parameters of its draws as results; None if its draws have no computed parameters.
        earlier: Results of earlier calls, which a call may write to, and gradients, in whose memory it may send others.
        captured: Whether compiled autograd has captured a backward pass in one graph.
    """

    info: GraphInfo
    variants: Variants
    options: CheckOptions
    schedule: Schedule
    reporter: RegionReporter
    unsupported: MachineLimits
    health: RegionHealth
    thorough: bool
    draws: DrawInputs | None
    captured: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        options, reporter = self.options, self.reporter
        replaceable = options.on_divergence == "fallback" and options.gradients
        self.candidate = Candidate(self.variants.candidate, reporter.note, replaceable=replaceable)
        self.memory = MemoryPressure(reporter, keeps_activations=options.reference == "keep")
        self.comparison = CallComparison(self.info, self.variants, reporter, self.memory, self.thorough, self.draws)
        self.earlier = ReturnedTensors(self.info, reporter)


class BackwardCheck(BackwardObserver):
    """Checks the backward passes of one call, whenever they come.

    Args:
        given: Where the call's arguments lie.
    """

    of_errors = True

    def __init__(self, checks: Checks, call: Call, given: Sequence[MemoryRange]) -> None:
        super().__init__()
        self._checks, self._call, self._given = checks, call, given
        self._reporter, self._memory, self._comparison = checks.reporter, checks.memory, checks.comparison
        self._has_outside_edges = self._writes_to_view = False

    @classmethod
    def watch(cls, record: CallRecord, outputs: Sequence[Any]) -> None:
        """Have a call's backward passes checked."""
        checks, args, call = record.checks, record.args, record.call
        for position in sorted(call.inputs.entangled):
            reason = "a mutated input that shares memory with another input"
            checks.reporter.skip(Skip(call.subjects.gradient(position), reason, matters=True))
        check = cls(checks, call, memory_ranges(args))
        if checks.captured.is_set():
            check.left_out()  # also in a session of its own
        watch = BackwardWatch(
            outputs,
            {position: args[position] for position in call.inputs.mutated},
            record.edges,
            record.since,
            check,
            exchanges=bool(call.exchanges),
        )
        check._has_outside_edges = bool(watch.outside_edges)
        views = [args[place] for place in call.inputs.mutated if args[place].requires_grad and args[place]._is_view()]
        check._writes_to_view = any(
            copied_edge(view, record.since) is None and not any(view._base is arg for arg in args) for view in views
        )
        if watch.outside_edges:
            reason = "a gradient leaves the region to a tensor that is no input of it (a common base of inputs)"
            checks.reporter.skip(Skip("gradients of inputs that are views of one tensor", reason, matters=True))

    def again(self, error: Exception) -> AbstractContextManager[Any] | None:
        """Compile it anew where the compiler's cache may be what failed."""
        return self._checks.candidate.backward_again(error)

    def begins(self, running: ExitStack) -> tuple[Snapshot, Mapping[int, int | None]]:
        """Look at what the program holds of earlier calls, and at the inputs. Note that it has not ended."""
        self._reporter.hear()
        self._reporter.call = self._call.number
        skip = Skip(f"the gradients of call {self._call.number}", _DID_NOT_END, matters=True)
        running.callback(self._reporter.skip_until(skip))
        self._checks.variants.waiting.begin()
        running.enter_context(self._checks.variants.waiting.at("running the compiled backward pass"))
        inputs = self._call.inputs
        # checkpointing runs the forward pass again, when the saved tensors are unpacked: that may write to inputs
        looked_at = self._comparison.will_recheck(self._call) and not self._call.ambient.saved_tensor_hooks
        return self._checks.earlier.look(), inputs.fingerprints(inputs.args) if looked_at else {}

    def left_out(self) -> None:
        """Note that compiled autograd captures it."""
        self._checks.captured.set()
        self._reporter.skip_until_compared(Skip("gradients", _CAPTURED, matters=True), backward=True)

    def not_copied(self, error: Exception) -> None:
        """Note that it is not compared."""
        if isinstance(error, UnseenError):
            skip = Skip("gradients", f"unsupported: {error}; those of other passes are checked", matters=True)
            self._reporter.skip_until_compared(skip, backward=True)
            return
        self._memory.not_compared("copying the gradients that arrive", error, backward=True)

    def passed(self, passed: BackwardPass) -> Gradients | None:
        """Compare the gradients. Return eager's gradients if the program must go on with these."""
        with self._checks.schedule.charged(self._call.check, backward=True, already=passed.seconds):
            return self._checked(passed)

    def _exchange_failed(self, passed: BackwardPass) -> bool:
        """Note the exchanges of a backward pass. Return whether one of them failed."""
        self._call.exchanges.backward_passed(passed.exchanged)
        return self._call.exchanges.failed is not None

    def _checked(self, passed: BackwardPass) -> Gradients | None:
        call, earlier = self._call, self._checks.earlier
        if self._reporter.stopped or not passed.cotangents or self._exchange_failed(passed):
            return None
        left = self._settings_left(passed)
        if changed := [*self._inputs_changed(passed)]:
            reason = "not compared: the compiled backward pass wrote to inputs that eager's reads"
            self._reporter.skip(Skip("gradients", reason, matters=True))
            self._reporter.respond([*left, *changed], call=call, cotangents=passed.cotangents)
            return None
        call.ratios = None  # not those of the results
        held: Snapshot = passed.begun[0]
        left += held.overwritten(earlier.calls, earlier.region, counted=False)
        try:
            comparing = self._checks.variants.waiting.at("comparing the gradients")
            with random_untouched(), comparing, profiled("checked_backend::comparison of gradients"):
                findings, gradients = self._comparison.backward(call, passed) or ([], None)
        except Exception as error:
            self._memory.not_compared("comparing the gradients", error, backward=True)
            return None
        findings = [*filterfalse(self._came_unseen, findings), *left]
        if gradients is not None:
            self._memory.compared()
            sent, reference = (
                {call.subjects.gradient(position): gradient for position, gradient in side.items()}
                for side in (passed.gradients, gradients)
            )
            findings += earlier.sent(call.number, sent, reference, [*self._given, *passed.arrived], held)
            self._checks.health.checked(call.number, call.ratios, findings, call.check.spent, backward=True)
        fell_back = self._reporter.respond(findings, call=call, cotangents=passed.cotangents)
        return gradients if fell_back else None

    def _came_unseen(self, finding: Finding) -> bool:
        """Whether this call alone may have had it from elsewhere: a common base of inputs, or saved-tensor hooks.

        Further runs are made without them.
        """
        if finding.detail != NOT_REPRODUCED.detail:
            return False
        reason = _HOOKED if self._call.ambient.saved_tensor_hooks else _BY_BASE if self._writes_to_view else ""
        if reason:
            self._reporter.skip(Skip(finding.subject, reason, matters=True))
        return self._has_outside_edges or bool(reason)

    def _inputs_changed(self, passed: BackwardPass) -> Iterator[Finding]:
        before, inputs = passed.begun[1], self._call.inputs
        # in a pass that ends later, optimizers may have written to weights
        now = inputs.fingerprints(inputs.args) if before and passed.at_exit else {}
        for place, checksum in now.items():
            if None not in (before[place], checksum) and checksum != before[place]:
                message = "the compiled backward pass changed an input that eager's leaves alone"
                yield memory_written(self._call.subjects.mutated(place), message)

    def raised(self, error: Exception, passed: BackwardPass) -> Gradients | None:
        """Handle an exception of the compiled backward pass. Return eager's gradients, or None to have it raised."""
        call, unsupported = self._call, self._checks.unsupported
        if isinstance(error, CheckedBackendError):  # it comes from a nested region's check
            return None
        if is_device_lost(error):  # by this pass, or by a kernel of the program's own before it
            self._memory.not_compared("the compiled backward pass", error, backward=True)
            return None
        if self._exchange_failed(passed):
            self._reporter.hear(cause=error)
            return None  # it must be raised: a connection broke, or another rank did not come
        left = self._settings_left(passed)
        # asked before eager runs, while memory is as short as it was
        short = unsupported(error) if is_out_of_memory(error) else None
        crowded = self._memory.keeps_activations
        eager = self._comparison.eager_gradients(call, passed)
        if isinstance(eager, Exception) and is_out_of_memory(eager):
            if not same_exception(eager, error):
                self._memory.not_compared("eager's backward pass", eager, backward=True)
            return None
        unfinished = call.exchanges.backward_begun or isinstance(eager, CollectiveReplayError)
        alike = isinstance(eager, Exception) and compare_exceptions(eager, error)[0] is None
        if isinstance(eager, Exception) and (alike or not unfinished):
            differs = self._comparison.backward_exceptions(eager, error)
            self._reporter.respond([*left] if differs is None else [differs, *left], cause=error, raises=False)
            return None
        if short is not None and crowded:
            # the check's own copies may have left too little memory; they are released now
            self._memory.not_compared("the compiled backward pass, beside what the check held,", error, backward=True)
        else:
            short = short or unsupported(error)
            found = [candidate_crashed(error, during="backward") if short is None else short, *left]
            self._reporter.respond(found, cause=error, call=call, cotangents=passed.cotangents)
        if unfinished:
            self._reporter.note(NOT_CONTINUED)
        return None if unfinished or isinstance(eager, Exception) else eager

    def _settings_left(self, passed: BackwardPass) -> list[Finding]:
        again = partial(self._comparison.runner(self._call, passed.cotangents).run, AGAIN[0])
        return check_settings(
            passed.began,
            passed.began,
            passed.ended or passed.began,
            again=again,
            skip=self._reporter.skip,
            others_ran=threading.active_count() > 1,
            backward=True,
        )
