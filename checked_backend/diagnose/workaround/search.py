"""Look for a workaround: a setting that makes the region right, else the user's line outside of the compiler."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import fx

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.inductor import heeds_annotations, inductor_graph_passes, inductor_mode_options, is_lowered
from checked_backend.diagnose.localize.subgraph import called_name
from checked_backend.diagnose.oracle import Oracle, find_apart, verdict_oracle, warm_up
from checked_backend.diagnose.workaround.line import keep_line_out, keep_out, keep_unfused, unfused, without_line
from checked_backend.diagnose.workaround.settings import (
    COSTLY,
    EAGER,
    PASSES,
    PROCESS,
    SETTINGS,
    STRICT,
    Setting,
    applicable,
    operator_fallbacks,
    pass_settings,
    taken_back,
    together,
)
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import EvidenceKey, Finding, Kind
from checked_backend.graphs.nodes import graph_fetched
from checked_backend.graphs.source_line import source_line
from checked_backend.options import CheckOptions
from checked_backend.process.job import JobEnd
from checked_backend.process.worker import cannot_differentiate_in_worker, cannot_fork, run_in_worker
from checked_backend.regions.compile import Compiler, resolve_compiler, with_mode_spelled_out
from checked_backend.regions.failure import Failure
from checked_backend.regions.graph_case import GraphCase, rerun_failure, wrong_like

SEARCH_LIMIT = 75.0
"""Seconds that trying the settings of one step may take."""

CODE_LIMIT = 20.0
"""Seconds that may be taken to find out what is wrong with the code of an operator."""

LEAST_REGION_LIMIT = 30.0
"""Seconds that compiling and running the region once more may always take."""


Step: TypeAlias = Callable[["SettingSearch"], Setting | None]
"""A step of the search for a setting."""


@dataclass(slots=True)
class WorkaroundSearch:
    """The search for a workaround.

    Attributes:
        oracle: Checks one case of the small program.
        evidence: Receives the steps that were tried, for people.
        helpful: The setting that was found to help the region.
        in_vain: Whether even the user's line outside of the compiler was seen not to help.
        no_line: Why that line is not left to eager.
    """

    failure: Failure
    findings: Sequence[Finding]
    oracle: Oracle
    deadline: float
    tell: Callable[[str], None]
    evidence: dict[str, str]
    stage: str = "compiled"
    helpful: Setting | None = None
    in_vain: bool = False
    no_line: str = ""

    def first(self, case: GraphCase | None, op: str | None, source: str | None) -> str | None:
        """Find a workaround, as code.

        In this order: a cheap setting, the user's line out of fusion, a graph pass skipped or an operator left to
        eager, the line outside of the compiler, a costly setting, everything in eager.

        Args:
            case: The small program; None if no part of the region is wrong by itself.
            op: The name of the operator that errs, in the report; None if it is not known.
            source: The user's line.
        """
        code = None
        found = None if case is None else self.setting(case, cheap)
        if found is None and case is not None and op is not None:
            code = self.unfused_line(case, source)
        if found is None and code is None and case is not None:
            found = self.setting(case, pass_or_operator)
        if found is None and code is None and op is not None:
            code = self.line(op, source)
        if found is None and code is None and case is not None:
            found = self.setting(case, costly) or self.setting(case, in_eager)
        if found is not None and self.no_line:
            self.evidence[EvidenceKey.WORKAROUND] = self.no_line
        self.helpful = found
        by_mode = inductor_mode_options(self.failure.mode) if self.failure.mode else {}
        return code if found is None else found.code_with({**by_mode, **self.failure.options.compiler_options})

    def broken_by(self, case: GraphCase, op: str | None) -> str:
        """The part of Inductor without which the program is right, in words; "" if none is known.

        If the setting that helps leaves a whole operator to eager, what Inductor does with the operator's code is left
        out of the small program too, to see whether that alone is wrong.
        """
        helpful = self.helpful
        if helpful in EAGER:
            return ""
        if helpful is not None and helpful.fallback is None:
            return f"{helpful.part}: the region is right with {helpful.short}"
        limit = min(time.monotonic() + CODE_LIMIT, self.deadline)
        if self.stage == "compiled":
            code = find_workaround(case, costly, deadline=limit, oracle=self._wrong_in)
            op = op if helpful is None else str(helpful.fallback)
            if code is not None:
                return f"{code.part}{f' of {op}' if op else ''}: the small program is right with {code.short}"
        what = "the small program" if helpful is None else "the region"
        helpful = helpful or find_workaround(case, operator, deadline=limit, oracle=self._wrong_in)
        if helpful is None or helpful.fallback is None:
            return ""
        made = "what is made"
        if self.stage == "decomposed":
            made = "decomposition"
        elif self.stage == "compiled" and is_lowered(helpful.fallback):
            made = "lowering"
        return f"{made} of {helpful.fallback}: {what} is right with {helpful.short}"

    def setting(self, case: GraphCase, step: Step) -> Setting | None:
        """Find a setting of a step of the search that helps the small program, and the region too."""
        if time.monotonic() >= self.deadline:
            self.evidence.setdefault(EvidenceKey.SETTINGS, "not tried: the time was over")
            return None
        self.tell("trying settings")
        refused: list[str] = []

        def confirmed(setting: Setting) -> bool:
            self.tell(f"trying {setting.name} on the whole region")
            _, why = self._again(resolve_compiler(setting.on(self.options)), setting)
            if why:
                refused.append(f"{setting.name} ({why})")
            return not why

        limit = min(time.monotonic() + SEARCH_LIMIT, self.deadline)
        found = find_workaround(case, step, deadline=limit, confirm=confirmed, oracle=self._wrong_in)
        if refused:
            helped = "helps" if len(refused) == 1 else "help"
            self.evidence[EvidenceKey.SETTINGS] = f"{', '.join(refused)} {helped} the small program, but not the region"
        elif found is None and time.monotonic() >= limit:
            self.evidence[EvidenceKey.SETTINGS] = "none found in the time there was"
        return found

    def unfused_line(self, case: GraphCase, source: str | None) -> str | None:
        """Code that leaves the user's line to eager's kernels, inside of the compiler; None if that does not help."""
        if self.stage != "compiled" or source is None or self.options.compiler != "inductor" or not heeds_annotations():
            return None
        compiler = resolve_compiler(self.options)
        whole = case.options.model_copy(update={"compiler": unfused(compiler), "compiler_options": {}})
        seconds = min(SEARCH_LIMIT, self.deadline - time.monotonic())
        findings = None if seconds <= 0 else self._wrong_in(replace(case, options=whole), seconds)
        if findings is None or findings:
            return None
        self.tell("trying it with that line out of fusion")
        _, why = self._again(unfused(compiler, source))
        return None if why else keep_unfused(source)

    def line(self, op: str, source: str | None) -> str | None:
        """Code that leaves the user's line to eager; None if that does not help, or could not be tried."""
        calls = [] if source is None else _calls_from(self.failure.graph, source)
        if source is None or not calls:
            self.no_line = (
                "no call of the region is from that line" if source else f"the user's line that calls {op} is not known"
            )
            self.evidence[EvidenceKey.WORKAROUND] = f"none found: {self.no_line}"
            return None
        outer = source_line(calls[0]) or source  # of cond, checkpoint, an autograd.Function, if the line is in a body
        self.tell("trying it with that line outside of the compiler")
        tried, why = self._again(without_line(resolve_compiler(self.options), outer))
        if why:
            self.in_vain = tried
            line = "that line outside of the compiler"
            self.no_line = f"with {line} too, {why}" if tried else f"{line} could not be tried: {why}"
            self.evidence[EvidenceKey.WORKAROUND] = f"none found: {self.no_line}"
            return None
        single = outer == source and len(calls) == 1
        return keep_out(called_name(calls[0]), source) if single else keep_line_out(outer)

    @property
    def options(self) -> CheckOptions:
        """The user's options with the user's mode spelled out."""
        return with_mode_spelled_out(self.failure.options, self.failure.mode)

    def _again(self, compiler: Compiler, setting: Setting | None = None) -> tuple[bool, str]:
        """Try the region with another compiler, in a worker if one can be forked: a compiler that dies loses nothing.

        Returns:
            Whether it could be tried, and what was wrong; "" if nothing was.
        """
        raises = all(finding.kind is Kind.EXCEPTION for finding in self.findings if finding.kind.fails)

        def find() -> Iterator[Finding]:
            with taken_back(setting or Setting("")):
                yield from rerun_failure(self.failure, compiler, raises=raises)

        limit = max(LEAST_REGION_LIMIT, self.deadline - time.monotonic())
        try:
            findings = find_apart(find, limit, here=cannot_differentiate_in_worker() is not None)
        except Exception as error:  # the region cannot be run like that
            said = str(error) if isinstance(error, CheckedBackendError) else f"{type(error).__name__}: {error}"
            return False, said.splitlines()[0]
        if isinstance(findings, JobEnd):
            return False, f"the process that tried it died: {findings.cause}"
        subjects = {finding.subject for finding in wrong_like(self.findings, self.findings)}
        wrong = wrong_like(self.findings, findings)
        for finding in findings:
            about = finding.message.splitlines()[0] if finding.message else str(finding.kind)
            if finding in wrong and finding.subject in subjects:
                return True, f"{finding.subject} is wrong: {about}"
            if finding.kind is Kind.CRASH:
                return False, f"it fails: {about}"
        return True, ""

    def _wrong_in(self, case: GraphCase, timeout: float) -> tuple[Finding, ...] | None:
        findings = self.oracle(case, timeout)
        return None if findings is None else tuple(wrong_like(self.findings, findings))


def _calls_from(gm: fx.GraphModule, source: str) -> list[fx.Node]:
    """The calls of a Dynamo graph from a line; if there are none, the calls with a body that has such calls."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    own = [node for node in calls if source_line(node) == source]

    def has_body(node: fx.Node) -> bool:
        bodies = (graph_fetched(gm, one) for one in node.all_input_nodes)
        return any(_calls_from(body, source) for body in bodies if body is not None)

    return own or [node for node in calls if has_body(node)]


def find_workaround(
    case: GraphCase,
    step: Step,
    *,
    deadline: float,
    confirm: Callable[[Setting], bool] = lambda _setting: True,
    oracle: Oracle = verdict_oracle,
) -> Setting | None:
    """Find a setting under which a program that goes wrong is right.

    Args:
        confirm: Whether a setting that helps the program also helps the region that it was cut from. If not, the next
            one is tried.

    Returns:
        The first that helps; None if none does, if the time is over, or if the compiler is not Inductor.
    """
    if case.options.compiler != "inductor":
        return None
    warm_up(case)
    return step(SettingSearch(case, confirm, deadline, oracle))


def cheap(search: SettingSearch) -> Setting | None:
    """Find a setting that costs little: Inductor's own strictness, or any other."""
    return search.first_of(STRICT) or search.one_of(SETTINGS)


def pass_or_operator(search: SettingSearch) -> Setting | None:
    """Find a graph pass to skip, an operator to leave to eager's kernel, or a setting that changes eager too."""
    if cannot_fork() is not None:  # most that follows changes the whole process
        return search.one_of(PASSES)
    if search.helps(together(applicable(PASSES, search.case))):
        passes = pass_settings(_passes_of(search.case, search.deadline))
        if found := search.one_of(passes) or search.one_of(PASSES):
            return found
    return operator(search) or search.first_of(PROCESS)


def operator(search: SettingSearch) -> Setting | None:
    """Find an operator to leave to eager's kernel."""
    return None if cannot_fork() else search.first_of([*operator_fallbacks(search.case)])


def costly(search: SettingSearch) -> Setting | None:
    """Find a setting that makes the whole model slower."""
    return search.first_of(COSTLY)


def in_eager(search: SettingSearch) -> Setting | None:
    """Try eager's kernels for everything."""
    return search.first_of(EAGER)


def _passes_of(case: GraphCase, deadline: float) -> dict[str, list[str]]:
    """The graph passes that Inductor runs on a case, each with the patterns that it replaces."""

    def produce() -> str:
        passes: dict[str, list[str]] = {}
        with without_compile_caches(), inductor_graph_passes(passes):
            case.findings()
        return json.dumps(passes)

    try:
        answer = run_in_worker(produce, timeout=max(1.0, deadline - time.monotonic()))
    except CheckedBackendError:
        return {}
    return dict(json.loads(answer)) if isinstance(answer, str) else {}


@dataclass(frozen=True, slots=True)
class SettingSearch:
    """Tries settings that are applicable until the deadline."""

    case: GraphCase
    confirm: Callable[[Setting], bool]
    deadline: float
    oracle: Oracle

    def first_of(self, settings: Sequence[Setting]) -> Setting | None:
        """The first setting that helps, on the region too."""
        tried = applicable(settings, self.case)
        return next((setting for setting in tried if self.helps(setting) and self._confirmed(setting)), None)

    def one_of(self, settings: Sequence[Setting]) -> Setting | None:
        """The first setting that helps, or the fewest that help together, on the region too.

        They are found by halving: if all of them together do not help, none helps alone.
        """
        pool = applicable(settings, self.case)
        while pool and self.helps(together(pool)):
            needed = self._needed(pool)
            if not needed:
                return None
            found = needed[0] if len(needed) == 1 else together(needed)
            if self._confirmed(found):
                return found
            pool = [setting for setting in pool if setting not in needed]
        return None

    def _needed(self, pool: Sequence[Setting]) -> list[Setting]:
        """The needed ones among settings that help together; empty if the time is over."""
        needed: list[Setting] = []
        while not needed or not self.helps(together(needed)):
            low, high = 0, len(pool)  # the first `high` help together with those needed, the first `low` do not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self.helps(together([*pool[:middle], *needed])) else (middle, high)
            if time.monotonic() >= self.deadline or not high:
                return []
            needed.insert(0, pool[high - 1])
            pool = pool[: high - 1]
        return needed

    def helps(self, setting: Setting) -> bool:
        """Whether the program is right under a setting, as far as that can be told in time."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            return False
        findings = self.oracle(replace(self.case, options=setting.on(self.case.options)), seconds)
        return findings is not None and not any(found.kind.fails for found in findings)

    def _confirmed(self, setting: Setting) -> bool:
        return time.monotonic() < self.deadline and self.confirm(setting)
