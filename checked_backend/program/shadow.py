"""Compare whole compiled calls with eager at sampled calls. An error of Dynamo itself shows in no single region.

A program's own call cannot be run twice. So what it begins with is copied, and every other run is of copies of that.
Before such a call the program runs in eager, on copies. The program's own call follows, untouched: its results, what it
changed and later its gradients are compared with eager's. So a checked program compiles what it compiles unchecked.
Only where the two differ, copies are compiled, to tell who makes the difference: what is right where it is compiled
anew was compiled for an earlier call, and a guard is missing.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from checked_backend._torch.autograd import StopRecomputationError, autograd_sequence_number
from checked_backend._torch.collectives import distributed_is_on
from checked_backend._torch.dynamo import OptimizedModule, uses_numpy
from checked_backend.checking.backward import not_differentiated
from checked_backend.checking.code_search import CodeSearch, other_threads, put_in_place
from checked_backend.checking.compare_runs import compare_runs
from checked_backend.checking.copies import Copier
from checked_backend.checking.dynamo_level import with_dynamo_cause
from checked_backend.checking.merge import VALUES, with_levels
from checked_backend.checking.program import Outcome, Program, ProgramCall, ProgramCopy, eager_function, function_name
from checked_backend.checking.program_runner import ProgramRunner
from checked_backend.checking.state import State
from checked_backend.checking.tree import argument_containers, argument_leaves, containers, output_leaves
from checked_backend.errors import CheckedBackendError, DivergenceError, is_out_of_memory
from checked_backend.findings import Coverage, EvidenceKey, Finding, RegionInfo, Severity, Skip
from checked_backend.options import CheckOptions
from checked_backend.program.folder import WHOLE_CALLS
from checked_backend.random_state import random_untouched
from checked_backend.regions.backward import BackwardObserver, BackwardPass, BackwardWatch
from checked_backend.regions.gradient_gate import Edge, input_edges
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.torch_state import RngState, TorchState
from checked_backend.regions.unchecked_calls import unobserved
from checked_backend.report.ledger import Ledger
from checked_backend.report.reporter import Reporter
from checked_backend.report.session import Session, during
from checked_backend.report.write import KeptReport

_NEED_DYNAMO = frozenset({"associative_scan", "cond", "flex_attention", "scan", "while_loop"})
"""The names of torch's functions that need Dynamo, also in eager, to trace their bodies."""


class OwnCall:
    """One call of a program's own; what it begins with is copied.

    Attributes:
        program: The call as it was before it ran, to be run in eager or compiled on copies.
        changed: What other runs changed beside the program's own call, and was left so.
        expected: Eager's outcome, as far as it is compared.
        ledger: Receives the coverage of the comparison.

    Raises:
        CheckedBackendError: Something cannot be copied.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        copier = Copier(hooks=False)
        copied = copier.function(function)
        copied_args, copied_kwargs = copier.arguments(function, args, kwargs)
        copier.find_variables((copied, *copied_args, *copied_kwargs.values()))
        copier.give_grads()
        self._copier = copier  # what copies know by weak references lives as long
        gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        reached = CodeSearch([function], holdings=False)
        self.program = Program(
            copied,
            [ProgramCall(copied_args, copied_kwargs, entering={})],
            RngState.of_process(),
            gradients,
            untraced=_NEED_DYNAMO.isdisjoint(reached.names),
            undone=self._as_before,
        )
        self.changed: list[str] = []
        self.expected = Outcome()
        self.ledger = Ledger()
        self._function, self._arguments = function, (args, kwargs)
        self._remembered = reached.now()
        self._settings = ProcessState.capture()
        self._ambient = TorchState.capture()
        self._tensors = [(own, copy, own._version) for own, copy in copier.tensors() if not own.is_inference()]
        self._wanted: Sequence[str] = ()
        self._edges: Mapping[Edge, int] = {}
        if gradients:
            state = self._state()
            tensors = {name: leaf for name, leaf in state.inputs.items() if isinstance(leaf, torch.Tensor)}
            wanted = {name: leaf for name, leaf in tensors.items() if leaf.requires_grad} | state.differentiable
            self._wanted = tuple(wanted)
            self._edges = input_edges(list(wanted.values()), frozenset(range(len(wanted))))
        self._since = autograd_sequence_number() if gradients else 0

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        variables = self._copier.variables
        if variables and other_threads():
            raise CheckedBackendError("another thread of the program may use what its code holds")
        with (
            self._ambient.entered(),
            self._remembered.in_place(self.changed.append),
            put_in_place(self._copier.variables),
        ):
            yield

    def refuse_harm(self) -> None:
        """Take back what a run of copies wrote to the program's own tensors. Call it before the program's own call.

        Raises:
            CheckedBackendError: It wrote to some: the copies are not the whole program.
        """
        written = [(own, copy) for own, copy, version in self._tensors if own._version != version]
        with torch.no_grad():
            for own, copy in written:
                own.copy_(copy)
        if written:
            raise CheckedBackendError(
                "a copy of it writes to the program's own tensors, because something in it holds the original (as "
                "optimizer.step does that a learning rate scheduler has wrapped)"
            )

    def _state(self) -> State:
        named = argument_leaves(self._function, *self._arguments)
        return State.of(self._function, self._copier.held(own=True), named, {})

    def returned(self, result: Any) -> Outcome:
        """The outcome of the call, whose result the program is about to get. It holds the program's own tensors."""
        outcome = self.ended()
        outcome.outputs = dict(output_leaves(result))
        outcome.containers = dict(containers(result, "output")) | argument_containers(self._function, *self._arguments)
        outcome.subjects = {**outcome.outputs, **self._state().subjects()}
        outcome.evaluations = 1
        outcome.note_values(copies=False)
        return outcome

    def ended(self, error: Exception | None = None) -> Outcome:
        """The outcome of the call as far as it is known without its result, or if it has raised."""
        settings = self._settings, ProcessState.capture()
        return Outcome(rng=self.program.rng.now(), settings=settings, error=error)

    def watch(self, outcome: Outcome, then: Callable[[OwnCall, Outcome], None], fails: Callable[[str], None]) -> None:
        """Have the call's first backward pass compared, whenever it comes.

        Args:
            then: Receives the call with the gradients that entered at what it made, and the gradients that it sent to
                inputs and parameters as an outcome.
            fails: Receives the reason if these cannot be compared.
        """
        made = {name: value for name, value in outcome.subjects.items() if self._has_made(value)}
        if not self._edges or not made:
            return
        names, passes = tuple(made), 0

        def passed(one: BackwardPass) -> None:
            nonlocal passes
            passes += 1
            if passes > 1:
                return
            if one.elsewhere:
                fails("a gradient enters at something that it made and that nobody finds in its results and its state")
                return
            entered = {names[place]: gradient for place, gradient in one.cotangents.outputs.items()}
            sent = {f"grad[{self._wanted[place]}]": gradient for place, gradient in one.gradients.items()}
            if entered and sent:
                backward = copy(self)
                call = replace(self.program.calls[0], entering=entered)
                backward.program = replace(self.program, calls=[call])
                backward.ledger = Ledger()
                then(backward, _of_gradients(sent))

        BackwardWatch(list(made.values()), {}, self._edges, self._since, BackwardObserver(passed))

    def _has_made(self, value: Any) -> bool:
        """Whether the call has made a tensor, with a history; it may also have changed an input in place."""
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        return node is not None and node._sequence_nr() >= self._since

    def findings(self, actual: Outcome, ledger: Ledger) -> list[Finding]:
        """The differences of a run from eager."""
        compared = compare_runs([self.expected], [actual], self.program, ledger)
        ledger.limits(compared.limits, compared.own_precision_limits)
        return [finding for _, finding in compared.found]

    def on_copies(self, compile_copy: Compile) -> list[Finding]:
        """Compile a copy, run it, and return its differences from eager."""
        actual = ProgramCopy(self.program, compile_copy).step(0, self.program.calls[0])
        if not self.expected.outputs:  # it is about gradients alone
            sent = {name: actual.gradients.get(name) for name in self.expected.subjects}
            actual = _of_gradients(sent, error=actual.error, backward_error=actual.backward_error)
        return self.findings(actual, Ledger())


def _of_gradients(subjects: Mapping[str, Any], **errors: Any) -> Outcome:
    """The outcome of a backward pass."""
    outcome = Outcome(subjects=dict(subjects), evaluations=1, **errors)
    outcome.note_values(copies=False)
    return outcome


Compile = Callable[..., Callable[..., Any]]

_STALE = (
    "Dynamo: it ran code here that it had compiled for an earlier call; compiled anew for this call, the program is "
    "right. A guard is missing, or was left out (guard_filter_fn, skip_guard_on_...)"
)
_STALE_MESSAGE = (
    "the program ran code that Dynamo had compiled for an earlier call; compiled anew for this call it is right. "
    "Something that the code depends on has changed since and has no guard: call torch.compiler.reset() after such a "
    "change (for hooks of modules torch._dynamo.config.skip_nnmodule_hook_guards = False is enough)"
)

_UNLIKE_ITS_COPIES = (
    "it differs from eager on copies, and compiled on copies it does not, though nothing was compiled for an earlier "
    "call: the copies are not the whole program"
)

_WHOLE = "a whole call"
_GRADIENTS = "gradients of whole calls"

_CHANGED = (
    "the compared runs changed it beside the program's own call, and it was left so, because another thread of the "
    "program may use it"
)


_comparing: ContextVar[bool] = ContextVar("checked_backend_comparing_whole_calls", default=False)
"""Whether a block is part of a whole call: compiled calls inside of it are not compared by themselves."""


@dataclass(slots=True, eq=False)
class Shadows:
    """The compiled functions and modules of a program, each compared as a whole.

    Attributes:
        began: When the program began, by `time.perf_counter`.
        seconds: The time that the comparisons have taken so far.
        numpy: Whether Dynamo has traced NumPy's functions into a graph of the program's.
    """

    options: CheckOptions
    session: Callable[[], Session]
    tell: Callable[[str, int], None]
    seconds: float = 0.0
    numpy: bool = False
    began: float = field(default_factory=time.perf_counter)
    _shadows: list[_Shadow] = field(default_factory=list)

    def over(self, original: Any, compiled: Any, compile_again: Compile) -> Any:
        """Wrap the result of ``torch.compile``, so that sampled calls are compared with eager.

        The last compiles a copy of the original alike; with ``fresh=True`` also what Dynamo has compiled before.
        """
        if isinstance(compiled, type) or not callable(compiled):
            return compiled
        shadow = _Shadow(self, eager_function(original), compile_again)
        self._shadows.append(shadow)
        if isinstance(compiled, OptimizedModule):
            # where there is a _forward, forward only fills in what a lazy module lacks, before it calls that
            name = "_forward" if "_forward" in vars(compiled) else "forward"
            if name in vars(compiled):
                setattr(compiled, name, shadow.around(getattr(compiled, name)))
            return compiled
        return shadow.around(compiled)

    def traced(self, gm: torch.fx.GraphModule) -> None:
        """Note a graph that Dynamo has made of the program's code."""
        self.numpy = self.numpy or uses_numpy(gm)

    def close(self) -> None:
        """Note the functions and modules of which no call was compared."""
        for shadow in self._shadows:
            shadow.close()


class _Shadow(Reporter):
    """One compiled function or module."""

    def __init__(self, shadows: Shadows, original: Callable[..., Any], compile_again: Compile) -> None:
        super().__init__(RegionInfo(function_name(original)), shadows.options)
        self._shadows = shadows
        self._original = original
        self._compile = compile_again
        self._lock = threading.Lock()
        self._calls = 0
        self._compared_calls = 0
        self._why_not = ""
        self._explained: set[tuple[str, str]] = set()
        self._unlike_copies: set[tuple[str, str]] = set()  # wrong at the first call, which no copy shows

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled function with the comparison around it."""

        @functools.wraps(compiled)
        def compared(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or _comparing.get():
                return compiled(*args, **kwargs)
            return self._called(compiled, args, kwargs)

        return compared

    def close(self) -> None:
        """Note it if no call was compared."""
        if self._calls and not self._compared_calls:
            self._skip("whole calls", self._why_not or "no call was due", matters=True)

    def _called(self, compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._lock:
            self._calls += 1
            number = self._calls
        with during(_comparing, True):
            call = None
            if self._due(number):
                with self._aside():
                    call = self._in_eager(args, kwargs)
            try:
                returned = compiled(*args, **kwargs)
            except StopRecomputationError:  # activation checkpointing has what it needs
                raise
            except Exception as error:
                if call is not None and not isinstance(error, CheckedBackendError):
                    self._compare(call, call.ended(error), number, raises=False)
                raise
            if call is None:
                return returned
            if isinstance(returned, (Iterator, Coroutine)):
                self._not_compared("it returns an iterator, which can be read only once")
                return returned
            actual = call.returned(returned)
            self._compare(call, actual, number)
            with self._aside():
                not_compared = partial(self._not_compared, what=_GRADIENTS)
                call.watch(actual, partial(self._differentiated, number), not_compared)
            return returned

    def _differentiated(self, number: int, call: OwnCall, actual: Outcome) -> None:
        """Compare the gradients of a call, which its backward pass has sent just now."""
        is_known = False
        with during(_comparing, True):
            with self._aside(_GRADIENTS):
                call.expected = self._eager_gradients(call, actual)
                call.ledger.count({_GRADIENTS: len(actual.subjects)})
                is_known = True
            if is_known:
                self._compare(call, actual, number, what=_GRADIENTS)

    def _due(self, number: int) -> bool:
        """Calls 1, 2, 4, 8, ... of those that the option ``every`` leaves."""
        nth, rest = divmod(number - 1, self._shadows.options.every)
        if rest or (nth + 1) & nth:
            return False
        budget = self._shadows.options.budget
        if budget is None or self._shadows.seconds <= budget * (time.perf_counter() - self._shadows.began):
            return True
        self._why_not = self._why_not or "the budget did not allow for it"
        return False

    @contextmanager
    def _aside(self, what: str = _WHOLE) -> Iterator[None]:
        """A block that is no part of the program. If it fails, the program goes on, and the coverage says why."""
        began = time.perf_counter()
        try:
            with random_untouched(), _muted(), unobserved():
                yield
        except CheckedBackendError as error:
            self._not_compared(str(error), what)
        except Exception as error:
            why = "memory ran out" if is_out_of_memory(error) else "the comparison failed"
            self._not_compared(f"{why}: {type(error).__name__}: {error}".partition("\n")[0], what)
        finally:
            self._shadows.seconds += time.perf_counter() - began

    def _not_compared(self, why: str, what: str = _WHOLE) -> None:
        if what == _WHOLE:
            self._why_not = self._why_not or why
        self._skip(what, why, matters=what != _WHOLE)

    def _skip(self, what: str, why: str, *, matters: bool) -> None:
        skip = Skip(what, f"not compared with eager: {why}", matters, self._region.name)
        self._shadows.session().ledger.skip(skip)

    def _in_eager(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OwnCall:
        """Run a call in eager, before it runs compiled."""
        if distributed_is_on():
            raise CheckedBackendError("running a program twice that exchanges tensors with other ranks would stop them")
        call = OwnCall(self._original, args, kwargs)
        reference = ProgramCopy(call.program)
        call.expected = reference.step(0, call.program.calls[0])
        call.refuse_harm()
        for skip in not_differentiated(
            call.expected.unreached, reference.is_copy, lambda: call.program.run().unreached
        ):
            call.ledger.skip(skip)
        return call

    def _eager_gradients(self, call: OwnCall, actual: Outcome) -> Outcome:
        """Run a call in eager, forward and backward, from the gradients that entered at what it made."""
        outcome = ProgramCopy(call.program).step(0, call.program.calls[0])
        if (error := outcome.error or outcome.backward_error) is not None:
            raise CheckedBackendError(f"eager has none: {type(error).__name__}: {error}".partition("\n")[0])
        if unknown := sorted(actual.subjects.keys() - outcome.gradients.keys()):
            raise CheckedBackendError(f"eager's {unknown[0]} is not known")
        return _of_gradients({name: outcome.gradients[name] for name in actual.subjects})

    def _compare(self, call: OwnCall, actual: Outcome, number: int, *, raises: bool = True, what: str = _WHOLE) -> None:
        """Compare the program's own call with eager's, and report."""
        findings: Sequence[Finding] | None = None
        with self._aside(what):
            call.program.numpy = self._shadows.numpy
            differences: Sequence[Finding] = call.findings(actual, call.ledger)
            if any(finding.fails for finding in differences):
                differences = self._explained_once(differences, call, number)
            for name in dict.fromkeys(call.changed):
                call.ledger.skip(Skip(name, _CHANGED, matters=True))
            findings = differences
        if findings is not None:
            self._report(findings, call.ledger.coverage(), number, raises=raises, what=what)

    def _explained_once(self, findings: Sequence[Finding], call: OwnCall, number: int) -> Sequence[Finding]:
        """Tell at which level findings arise, and look for the operator where it is Dynamo's, once for each."""
        places = {(finding.subject, finding.detail) for finding in findings if finding.fails}
        if places <= self._unlike_copies:
            return _without_failing(findings, call.ledger)
        if places <= self._explained:
            return [replace(finding, stage="eager") for finding in findings]
        stale = not any(finding.fails for finding in call.on_copies(partial(self._compile, fresh=True)))
        if stale and number == 1:  # there was no earlier call
            self._unlike_copies |= places
            return _without_failing(findings, call.ledger)
        if stale:
            explained = [_stale(finding) for finding in findings]
        else:

            def with_compiler(name: str) -> Sequence[Finding]:
                return call.on_copies(partial(torch.compile, backend=name))

            controls = ProgramRunner(call.program)
            explained = with_levels(
                findings,
                self._shadows.options.compiler,
                with_compiler,
                numpy=call.program.numpy,
                same_in_float64=lambda place: controls.same_in_float64(0, findings[place].subject),
            )
        self._explained |= {
            (finding.subject, finding.detail) for finding in explained if finding.fails and finding.stage == "eager"
        }
        if stale or not self._shadows.options.localize:
            return explained
        return with_dynamo_cause(explained, call.program, self._shadows.options, None)

    def _report(
        self, differences: Sequence[Finding], coverage: Coverage, number: int, *, raises: bool, what: str
    ) -> None:
        """Record findings and coverage, and raise or warn as the user asked."""
        session, name, options = self._shadows.session(), self._region.name, self._shadows.options
        if what == _WHOLE:
            with self._lock:
                self._compared_calls += 1
            session.ledger.count({WHOLE_CALLS: 1})
        findings = [finding for finding in differences if not _is_told(finding, session.ledger.findings())]
        session.ledger.count({kind: count for kind, count in coverage.checked.items() if kind == _GRADIENTS})
        session.ledger.limits({f"{subject} of {name}": one for subject, one in coverage.detection_limit.items()}, {})
        for skip in coverage.skipped:
            session.ledger.skip(replace(skip, region=name))
        for note in coverage.notes:
            session.ledger.note(f"{name}: {note}")
        if any(finding.fails for finding in findings):
            self._shadows.tell(f"{name} as a whole", number)
        where = f"the program's own call, and eager on copies of what it began with (call {number} of {name})"
        named = [replace(one, region=name, evidence={**one.evidence, EvidenceKey.COMPARED: where}) for one in findings]
        with session.entered(alone=True):
            reported, ignored = self._graded(named)
            new = self._add(reported, ignored)
            self._warn_of_layout([finding for finding in new if finding.severity is Severity.WARNING])
        if any(finding.fails for finding in new):
            report = KeptReport(options.report_dir).save(self._own.report(name, only=reported))
            if raises and options.on_divergence == "raise":
                raise DivergenceError(report)


def _is_told(finding: Finding, known: Sequence[Finding]) -> bool:
    """Whether regions have shown what makes a whole call wrong; what Dynamo does wrong shows in none."""
    if not finding.fails or finding.stage == "eager":
        return False
    kinds = {other.kind for other in known if other.fails}
    return finding.kind in kinds or (finding.kind in VALUES and bool(kinds & VALUES))


def _stale(finding: Finding) -> Finding:
    if not finding.fails:
        return finding
    evidence = {**finding.evidence, EvidenceKey.LEVEL: _STALE}
    return replace(finding, stage="eager", message=_STALE_MESSAGE, evidence=evidence)


def _without_failing(findings: Sequence[Finding], ledger: Ledger) -> Sequence[Finding]:
    """Name what the copies cannot explain as not compared."""
    subjects = ", ".join(finding.subject for finding in findings if finding.fails)
    ledger.skip(Skip(subjects, _UNLIKE_ITS_COPIES, matters=True))
    return [finding for finding in findings if not finding.fails]


class _MutedStream:
    """A stream that drops what one thread writes. Other threads write to the stream behind it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop."""
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """Write, or drop."""
        self.write("".join(lines))


def _muted() -> AbstractContextManager[Any]:
    """Drop what this thread prints to stdout inside of a block, in which a call runs once more."""
    muted: Any = _MutedStream(sys.stdout)
    return nullcontext() if sys.stdout is None else redirect_stdout(muted)
