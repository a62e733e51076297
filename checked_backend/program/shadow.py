"""Compare whole compiled calls with eager at sampled calls. An error of Dynamo itself shows in no single region.

Before such a call, the program runs in eager and compiled on copies, as `check` does it. The program's own call
follows, untouched. A copied module runs the very code that Dynamo compiled for the program's module, if its guards
accept it, so that a guard that is missing is found as well.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch

from checked_backend._torch.collectives import distributed_is_on
from checked_backend._torch.dynamo import OptimizedModule, uses_numpy
from checked_backend.checking.compare_runs import compare_runs
from checked_backend.checking.dynamo_level import with_dynamo_cause
from checked_backend.checking.levels import with_levels
from checked_backend.checking.merge import VALUES
from checked_backend.checking.original import eager_function
from checked_backend.checking.program import Program, ProgramCopy
from checked_backend.checking.program_controls import ProgramControls
from checked_backend.checking.undone import reached_by
from checked_backend.checking.unreached import not_differentiated
from checked_backend.errors import CheckedBackendError, DivergenceError, is_out_of_memory
from checked_backend.findings import Coverage, EvidenceKey, Finding, RegionInfo, Severity, Skip
from checked_backend.options import CheckOptions
from checked_backend.program.folder import WHOLE_CALLS
from checked_backend.program.muted import muted
from checked_backend.random_state import random_untouched
from checked_backend.regions.torch_state import RngState
from checked_backend.regions.unobserved import unobserved
from checked_backend.report.kept import KeptReport
from checked_backend.report.ledger import Ledger
from checked_backend.report.reporter import Reporter
from checked_backend.report.session import Session

__all__ = ["CompileAgain", "Shadows"]

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

_STALE = (
    "Dynamo: it ran code here that it had compiled for an earlier call; compiled anew for this call, the program is "
    "right. A guard is missing, or was left out (guard_filter_fn, skip_guard_on_...)"
)


_CHANGED = (
    "the compared runs changed it beside the program's own call, and it was left so, because another thread of the "
    "program may use it"
)


class CompileAgain(Protocol):
    """Compiles a copy in the same way as the program's own function or module."""

    def __call__(self, copy: Callable[..., Any], *, fresh: bool = False) -> Callable[..., Any]:
        """The compiled copy.

        Args:
            copy: The copy.
            fresh: Compile it now, even if Dynamo has compiled the same code before.
        """


_comparing: ContextVar[bool] = ContextVar("checked_backend_comparing_whole_calls", default=False)


@contextmanager
def _outermost() -> Iterator[None]:
    """Mark a block as part of a whole call, so that compiled calls inside of it are not compared by themselves."""
    token = _comparing.set(True)
    try:
        yield
    finally:
        _comparing.reset(token)


class Shadows:
    """The compiled functions and modules of a program, each compared as a whole.

    Args:
        options: The options of the run.
        session: The session that records the findings.
        tell: Receives the name and the number of a call that differs.

    Attributes:
        seconds: The time that the comparisons have taken so far.
    """

    def __init__(self, options: CheckOptions, session: Callable[[], Session], tell: Callable[[str, int], None]) -> None:
        self.seconds = 0.0
        self.options = options
        self.session = session
        self.tell = tell
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._shadows: list[_Shadow] = []

    def over(self, original: Any, compiled: Any, compile_again: CompileAgain) -> Any:
        """Wrap the result of ``torch.compile``, so that sampled calls are compared with eager.

        Args:
            original: The function or module that the program asked torch to compile.
            compiled: The result of ``torch.compile``.
            compile_again: Compiles a copy of the original in the same way.
        """
        if isinstance(compiled, type) or not callable(compiled):
            return compiled
        shadow = _Shadow(self, eager_function(original), compile_again)
        self._shadows.append(shadow)
        if isinstance(compiled, OptimizedModule):
            for name in ("forward", "_forward"):
                if name in vars(compiled) and not _is_lazy_check(compiled, name):
                    setattr(compiled, name, shadow.around(getattr(compiled, name)))
            return compiled
        return shadow.around(compiled)

    def affords(self) -> bool:
        """Whether the option ``budget`` lets one more call be compared."""
        budget = self.options.budget
        return budget is None or self.seconds <= budget * (time.perf_counter() - self._began)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A block that takes time of the program."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - began

    def close(self) -> None:
        """Note the functions and modules of which no call was compared."""
        for shadow in self._shadows:
            shadow.close()


@dataclass(slots=True)
class _Found:
    """The result of comparing one call."""

    findings: Sequence[Finding] = ()
    coverage: Coverage = field(default_factory=Coverage)
    skip: Skip | None = None


class _Shadow:
    """One compiled function or module."""

    def __init__(self, shadows: Shadows, original: Callable[..., Any], compile_again: CompileAgain) -> None:
        self._shadows = shadows
        self._original = original
        self._compile = compile_again
        self._name = _name(original)
        self._reporter = _Reporter(self._name, shadows.options)
        self._lock = threading.Lock()
        self._calls = 0
        self._compared = 0
        self._why_not = ""
        self._explained: set[tuple[str, str]] = set()

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
        if self._calls and not self._compared:
            why = self._why_not or "no call was due"
            self._shadows.session().ledger.skip(
                Skip("whole calls", f"not compared with eager: {why}", matters=True, region=self._name)
            )

    def _called(self, compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._lock:
            self._calls += 1
            number = self._calls
        with _outermost():
            found = self._look(args, kwargs) if self._due(number) else None
            try:
                returned = compiled(*args, **kwargs)
            except BaseException:
                if found is not None:
                    self._report(found, number, raises=False)
                raise
            if found is not None:
                self._report(found, number)
            return returned

    def _due(self, number: int) -> bool:
        """Calls 1, 2, 4, 8, ... of those that the option ``every`` leaves."""
        nth, rest = divmod(number - 1, self._shadows.options.every)
        if rest or (nth + 1) & nth:
            return False
        if self._shadows.affords():
            return True
        self._why_not = self._why_not or "the budget did not allow for it"
        return False

    def _look(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Found:
        if distributed_is_on():
            return self._not_compared("running a program twice that exchanges tensors with other ranks would stop them")
        try:
            with self._shadows.timed(), random_untouched(), muted(), unobserved():
                return self._compared_with_eager(args, kwargs)
        except CheckedBackendError as error:
            return self._not_compared(str(error))
        except Exception as error:  # the program goes on; the coverage says that this was not compared
            what = "memory ran out" if is_out_of_memory(error) else "the comparison failed"
            return self._not_compared(f"{what}: {type(error).__name__}: {error}".partition("\n")[0])

    def _not_compared(self, why: str) -> _Found:
        self._why_not = self._why_not or why
        return _Found(skip=Skip("a whole call", f"not compared with eager: {why}", region=self._name))

    def _compared_with_eager(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Found:
        cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        ledger = Ledger()
        changed: list[str] = []
        program = Program(
            self._original,
            tuple(args),
            dict(kwargs),
            RngState.capture(cuda),
            gradients=torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
            own_code=True,
            undone=partial(reached_by(self._original).undone, changed.append),
        )
        reference = ProgramCopy(program)
        expected = reference.step(0, program.calls[0])
        call = _ReferenceCall(program, expected, ledger)
        findings: Sequence[Finding] = call.findings(self._compile)
        for skip in not_differentiated(expected.unreached, reference.is_copy, lambda: program.run().unreached):
            ledger.skip(skip)
        if any(finding.fails for finding in findings):
            findings = self._explained_once(findings, call)
        for name in dict.fromkeys(changed):
            ledger.skip(Skip(name, _CHANGED, matters=True))
        return _Found(findings, ledger.coverage())

    def _explained_once(self, findings: Sequence[Finding], call: _ReferenceCall) -> Sequence[Finding]:
        """Tell at which level findings arise, and look for the operator where it is Dynamo's, once for each."""
        places = {(finding.subject, finding.detail) for finding in findings if finding.fails}
        if places <= self._explained:
            return [replace(finding, stage="eager") for finding in findings]
        options = self._shadows.options

        def with_compiler(name: str) -> Sequence[Finding]:
            return replace(call, ledger=Ledger()).findings(partial(torch.compile, backend=name))

        explained = with_levels(findings, options.compiler, with_compiler, numpy=call.numpy())
        stale = False
        if not any(finding.stage == "eager" for finding in explained):
            anew = replace(call, ledger=Ledger()).findings(partial(self._compile, fresh=True))
            stale = not any(finding.fails for finding in anew)
            explained = [_stale(one) for one in explained] if stale else explained
        self._explained |= {
            (finding.subject, finding.detail) for finding in explained if finding.fails and finding.stage == "eager"
        }
        if stale or not options.localize:
            return explained
        return with_dynamo_cause(explained, call.program, options, None)

    def _report(self, found: _Found, number: int, *, raises: bool = True) -> None:
        session = self._shadows.session()
        if found.skip is not None:
            session.ledger.skip(found.skip)
            return
        with self._lock:
            self._compared += 1
        findings = [finding for finding in found.findings if not _is_told(finding, session.ledger.findings())]
        limits = {f"{subject} of {self._name}": limit for subject, limit in found.coverage.detection_limit.items()}
        session.ledger.count({WHOLE_CALLS: 1})
        session.ledger.limits(limits, {})
        for skip in found.coverage.skipped:
            session.ledger.skip(replace(skip, region=self._name))
        for note in found.coverage.notes:
            session.ledger.note(f"{self._name}: {note}")
        if any(finding.fails for finding in findings):
            self._shadows.tell(f"{self._name} as a whole", number)
        self._reporter.answer(findings, number, session, raises=raises)


@dataclass(frozen=True, slots=True)
class _ReferenceCall:
    """One call that ran in eager. Compiled runs of it are compared with that run."""

    program: Program
    expected: Any
    ledger: Ledger

    def findings(self, compile_copy: Compile) -> list[Finding]:
        """Compile a copy, run it, and return the findings about its differences from eager."""
        actual = ProgramCopy(self.program, compile_copy).step(0, self.program.calls[0])
        compared = compare_runs(
            [self.expected],
            [actual],
            lambda: ProgramControls(self.program, numpy=self.numpy()),
            self.ledger,
            again=self.program.run_all,
        )
        self.ledger.limits(compared.limits, compared.own_precision_limits)
        return [finding for _, finding in compared.found]

    def numpy(self) -> bool:
        """Whether Dynamo traces NumPy's functions into the program's graphs."""
        seen = []

        def note(gm: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            seen.append(uses_numpy(gm))
            return gm.forward

        self.program.run(partial(torch.compile, backend=note))
        return any(seen)


class _Reporter(Reporter):
    """Answers findings about whole calls as the user asked."""

    def __init__(self, name: str, options: CheckOptions) -> None:
        super().__init__(RegionInfo(name), options)
        self._options = options

    def answer(self, findings: Sequence[Finding], number: int, session: Session, *, raises: bool) -> None:
        """Record findings, and raise or warn.

        Raises:
            DivergenceError: With ``on_divergence="raise"``, if a finding fails.
        """
        which = f"call {number} of {self._region.name}"
        seen: Mapping[str, Any] = {EvidenceKey.COMPARED: f"the whole call, in eager and compiled on copies ({which})"}
        named = [
            replace(finding, region=self._region.name, evidence={**finding.evidence, **seen}) for finding in findings
        ]
        with session.entered(alone=True):
            reported, ignored = self._graded(named)
            new = self._add(reported, ignored)
            self._warn_of_layout([finding for finding in new if finding.severity is Severity.WARNING])
        failing = [finding for finding in new if finding.fails]
        if not failing:
            return
        report = KeptReport(self._options.report_dir).save(self._own.report(self._region.name, only=reported))
        if raises and self._options.on_divergence == "raise":
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
    return replace(finding, stage="eager", evidence={**finding.evidence, EvidenceKey.LEVEL: _STALE})


def _is_lazy_check(compiled: Any, name: str) -> bool:
    """Whether ``forward`` only fills in what a lazy module lacks, before it calls ``_forward``."""
    return name == "forward" and "_forward" in vars(compiled)


def _name(original: Any) -> str:
    owner = original.__self__ if isinstance(original, MethodType) else original
    if isinstance(owner, torch.nn.Module):
        return type(owner).__qualname__
    return str(getattr(original, "__qualname__", type(original).__qualname__))
