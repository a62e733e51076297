"""Look for a workaround: a setting that makes the region right, else the user's line outside of the compiler."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from checked_backend._torch.inductor import inductor_mode_options
from checked_backend.diagnose.localize import called_name
from checked_backend.diagnose.oracle import Oracle
from checked_backend.diagnose.workaround import (
    COSTLY,
    EAGER,
    Setting,
    Workaround,
    find_workaround,
    keep_line_out,
    keep_out,
    taken_back,
    without_line,
)
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import EvidenceKey, Finding, Kind
from checked_backend.graphs.nodes import graph_fetched
from checked_backend.graphs.source_line import source_line
from checked_backend.options import CheckOptions
from checked_backend.process.worker import Death, cannot_differentiate_in_worker, cannot_fork, run_in_worker
from checked_backend.regions.compile import Compiler, resolve_compiler, with_mode_spelled_out
from checked_backend.regions.failure import Failure
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.rerun import rerun_failure, wrong_like

__all__ = ["NamedOperator", "WorkaroundSearch"]

SEARCH_LIMIT = 75.0
"""Seconds that trying settings may take."""

LEAST_REGION_LIMIT = 30.0
"""Seconds that compiling and running the region once more may always take."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The result of one attempt: whether the region could be tried, and what was wrong ("" if nothing was)."""

    tried: bool
    why: str


@dataclass(frozen=True, slots=True)
class NamedOperator:
    """The operator that errs.

    Attributes:
        op: Its name in the report.
        source: The user's line.
    """

    op: str
    source: str | None


@dataclass(slots=True)
class WorkaroundSearch:
    """The search for a workaround.

    Attributes:
        failure: The failed call, in which the workaround must help.
        findings: The findings of its check.
        oracle: Checks one case of the small program.
        deadline: A `time.monotonic` moment.
        tell: Called with each step as it begins.
        evidence: Receives the steps that were tried, for people.
        in_vain: Whether even the user's line outside of the compiler was seen not to help.
    """

    failure: Failure
    findings: Sequence[Finding]
    oracle: Oracle
    deadline: float
    tell: Callable[[str], None]
    evidence: dict[str, str]
    in_vain: bool = False

    def first(self, case: GraphCase | None, operator: NamedOperator | None) -> Workaround | None:
        """Find a workaround: cheap settings, the user's line in eager, costly settings, everything in eager.

        Args:
            case: The small program; None if eager raises, so that there are no results to compare.
            operator: The operator that errs, if it is known.

        Returns:
            The first that was seen to make the region right.
        """
        attempts: list[Callable[[], Workaround | None]] = []
        if case is not None:
            attempts.append(lambda: self.setting(case, costly=()))
        if operator is not None:
            attempts.append(lambda: self.line(operator.op, operator.source))
        if case is not None:
            attempts.append(lambda: self.setting(case, costly=COSTLY, cheap=False))
            attempts.append(lambda: self.setting(case, costly=EAGER, cheap=False))
        for attempt in attempts:
            workaround = attempt()
            if workaround is not None:
                setting = workaround.setting
                return workaround if setting is None else replace(workaround, code=setting.code_with(self._own))
        return None

    @property
    def _own(self) -> dict[str, Any]:
        """The options that the user gives to Inductor, those of the mode included."""
        by_mode = inductor_mode_options(self.failure.mode) if self.failure.mode else {}
        return {**by_mode, **self.failure.options.compiler_options}

    def setting(self, case: GraphCase, *, costly: Sequence[Setting], cheap: bool = True) -> Workaround | None:
        """Find a setting that helps the small program, and the region too.

        Args:
            costly: Settings that slow the whole model down.
            cheap: Whether cheap settings are tried before these.
        """
        if time.monotonic() >= self.deadline:
            self.evidence.setdefault(EvidenceKey.SETTINGS, "not tried: the time was over")
            return None
        self.tell("trying settings")
        refused: list[str] = []

        def confirmed(setting: Setting) -> bool:
            self.tell(f"trying {setting.name} on the whole region")
            answer = self._again(resolve_compiler(setting.on(self.options)), setting)
            if answer.why:
                refused.append(f"{setting.name} ({answer.why})")
            return not answer.why

        limit = min(time.monotonic() + SEARCH_LIMIT, self.deadline)
        search = partial(find_workaround, case, deadline=limit, confirm=confirmed, costly=costly, oracle=self._wrong_in)
        found = search() if cheap else search(settings=(), process=(), fallbacks=False)
        if refused:
            helped = "helps" if len(refused) == 1 else "help"
            self.evidence[EvidenceKey.SETTINGS] = f"{', '.join(refused)} {helped} the small program, but not the region"
        elif found is None and time.monotonic() >= limit:
            self.evidence[EvidenceKey.SETTINGS] = "none found in the time there was"
        return found

    def line(self, op: str, source: str | None) -> Workaround | None:
        """Leave the user's line to eager, if that helps.

        Args:
            op: The name of the operator that errs, in the report.
            source: The user's line.

        Returns:
            The workaround; None if it does not help, or could not be tried.
        """
        if source is None:
            self.evidence[EvidenceKey.WORKAROUND] = f"none found: the user's line that calls {op} is not known"
            return None
        calls = _calls_from(self.failure.graph, source)
        if not calls:
            self.evidence[EvidenceKey.WORKAROUND] = "none found: no call of the region is from that line"
            return None
        outer = source_line(calls[0]) or source  # of cond, checkpoint, an autograd.Function, if the line is in a body
        self.tell("trying it with that line outside of the compiler")
        answer = self._again(without_line(resolve_compiler(self.options), outer))
        if not answer.tried:
            self.evidence[EvidenceKey.WORKAROUND] = (
                f"that line outside of the compiler could not be tried: {answer.why}"
            )
            return None
        if answer.why:
            self.in_vain = True
            self.evidence[EvidenceKey.WORKAROUND] = (
                f"none found: with that line outside of the compiler too, {answer.why}"
            )
            return None
        single = outer == source and len(calls) == 1
        found = keep_out(called_name(calls[0]), source) if single else keep_line_out(outer)
        return replace(found, source=outer)

    @property
    def options(self) -> CheckOptions:
        """The user's options with the user's mode spelled out."""
        return with_mode_spelled_out(self.failure.options, self.failure.mode)

    def _again(self, compiler: Compiler, setting: Setting | None = None) -> _Attempt:
        """Try the region with another compiler."""

        def produce() -> str:
            return json.dumps(asdict(self._region_rerun(compiler)))

        try:
            answer = self._apart(produce, setting)
        except CheckedBackendError as error:
            return _Attempt(False, str(error).splitlines()[0])
        except Exception as error:  # the region cannot be run like that
            return _Attempt(False, f"{type(error).__name__}: {error}".splitlines()[0])
        if isinstance(answer, str):
            return _Attempt(**json.loads(answer))
        return _Attempt(False, f"the process that tried it died: {answer.words}")

    def _apart(self, produce: Callable[[], str], setting: Setting | None) -> str | Death:
        """Run a function in a worker, if one can be forked: a compiler that dies must not lose what is known."""
        if cannot_fork() is None and cannot_differentiate_in_worker() is None:
            return run_in_worker(produce, timeout=max(LEAST_REGION_LIMIT, self.deadline - time.monotonic()))
        with taken_back(setting or Setting("")):
            return produce()

    def _wrong_in(self, case: GraphCase, timeout: float) -> tuple[Finding, ...] | None:
        findings = self.oracle(case, timeout)
        return None if findings is None else tuple(wrong_like(self.findings, findings))

    def _region_rerun(self, compiler: Compiler) -> _Attempt:
        subjects = {finding.subject for finding in wrong_like(self.findings, self.findings)}
        findings = rerun_failure(self.failure, compiler)
        wrong = wrong_like(self.findings, findings)
        for finding in findings:
            about = finding.message.splitlines()[0] if finding.message else str(finding.kind)
            if finding in wrong and finding.subject in subjects:
                return _Attempt(True, f"{finding.subject} is wrong: {about}")
            if finding.kind is Kind.CRASH:
                return _Attempt(False, f"it fails: {about}")
        return _Attempt(True, "")


def _calls_from(gm: fx.GraphModule, source: str) -> list[fx.Node]:
    """The calls of a Dynamo graph from a line; if there are none, the calls with a body that has such calls."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    own = [node for node in calls if source_line(node) == source]
    return own or [node for node in calls if any(_calls_from(body, source) for body in _bodies(gm, node))]


def _bodies(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    return [body for one in node.all_input_nodes if (body := graph_fetched(gm, one)) is not None]
