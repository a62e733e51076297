"""From a failed call of a region to the stage that is wrong, the graph, the operator, and a small trial of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from torch import fx

from checked_backend.localize.cut import Cut, Judge, cut_before, cut_out, shortest_wrong_prefix, wrong_prefix
from checked_backend.localize.fused import fused_graph, is_fused
from checked_backend.localize.naming import aten_name, origin_of
from checked_backend.localize.probe import GROSS, MUCH, Culprit, bytes_of, probe, share_of
from checked_backend.localize.raising import raising_node
from checked_backend.localize.stages import Capture, Recorded, Stage, stages_of
from checked_backend.localize.subgraph import calls_of, can_be_walked, is_symbolic, outputs_of, sets_modes
from checked_backend.options import CheckOptions
from checked_backend.record import Finding, Kind
from checked_backend.regions.ambient import RngState
from checked_backend.regions.candidate import Compiler, inductor_patches, resolve_compiler
from checked_backend.regions.failure import Failure
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.rehearsal import rehearse
from checked_backend.regions.trial import Trial

__all__ = ["Location", "locate"]

LEAST_PROBE_BYTES = 1 << 28
"""What the exposed tensors of one compilation may always take."""

_IN_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION, Kind.STRUCTURE})
"""Kinds of findings that a wrong value inside of the graph may be the cause of."""

_LAYOUT = frozenset({"structure.stride", "structure.requires_grad"})
"""Details that are no cause of wrong values, and that no wrong value is the cause of."""


@dataclass(frozen=True, slots=True)
class Location:
    """How far a failure could be tracked down.

    Attributes:
        stage: The first stage that is wrong: ``aot``, ``decomposed``, ``partitioned`` or ``compiled``.
        graph: Which graph: ``forward``, ``backward`` or ``inference``; None if it is not known.
        node: The operator that errs.
        op: What ATen calls it: the operator that the user's call came down to.
        within: How the node is related to the operator of the user's graph, where a decomposition made it.
        message: What is wrong with its result.
        cut: A small trial that fails.
        notes: What was tried, and why it went no further.
        gross: Whether the cut shows only to a judge of gross differences.
    """

    stage: str
    graph: str | None = None
    node: fx.Node | None = None
    op: str | None = None
    within: str | None = None
    message: str = ""
    cut: Cut | None = None
    notes: tuple[str, ...] = ()
    gross: bool = False


def locate(
    failure: Failure,
    findings: Sequence[Finding],
    judge: Judge,
    tell: Callable[[str], None] = lambda _text: None,
    *,
    gross: Judge = lambda _trial: (),
    known: Callable[[Location], None] = lambda _location: None,
) -> Location:
    """Find out where a failure comes from.

    Args:
        failure: The failed call.
        findings: What its check found.
        judge: Tries a trial, safely: the compiler may crash.
        tell: Told what is being done.
        gross: Tries a trial too, and finds only gross differences, without asking whether rounding explains them: for
            a region of which no part is wrong by itself.
        known: Told what is known already, whenever that is more.

    Raises:
        Exception: The call cannot be run again.
    """
    before = RngState.capture(tuple(failure.rng.cuda))
    try:
        return _located(failure, findings, (judge, gross), tell, known)
    finally:
        before.restore()


def _located(
    failure: Failure,
    findings: Sequence[Finding],
    judges: tuple[Judge, Judge],
    tell: Callable[[str], None],
    known: Callable[[Location], None],
) -> Location:
    failing = [finding for finding in findings if finding.kind.fails]
    if all(finding.kind is Kind.EXCEPTION for finding in failing):
        return _raised(failure)
    ladder = stages_of(failure.options, failure.mode)
    stage, graphs = _first_wrong_stage(failure, failing, ladder, tell)
    known(Location(stage.name))
    inputs, _ = failure.inputs.fresh()
    dynamo = Recorded("dynamo", failure.graph, tuple(copy_values(inputs)))
    if not sets_modes(failure.graph):
        # the compiler, or a pass of it, may know operators only by the names that Dynamo's graph has for them
        graphs = [*graphs, dynamo]
    if not graphs:
        return Location(
            stage.name, notes=(f"{stage.what} is wrong already: there is no graph of operators to look into",)
        )
    candidate = _candidate(failure)
    compiler = resolve_compiler(candidate) if stage.compiler is None else stage.compiler(Capture())
    judge, gross = (partial(_tried, failing, one) for one in judges)
    return _Search(graphs, dynamo, candidate, compiler, judge, gross, tell, known).run(stage, failing)


def _tried(failing: Sequence[Finding], judge: Judge, trial: Trial) -> Sequence[Finding]:
    return _alike(failing, judge(trial))


def _raised(failure: Failure) -> Location:
    """Eager raises and the compiled program does not: the operator that raises is the one that was compiled wrongly."""
    inputs, _ = failure.inputs.fresh()
    raised = raising_node(failure.graph, inputs)
    if raised is None:
        return Location("compiled", notes=("eager does not raise when the region is run again",))
    node, error = raised
    inputs, _ = failure.inputs.fresh()  # it may have written to those
    op = aten_name(failure.graph, inputs, node)
    message = f"eager raises {type(error).__name__}: {error}"
    finding = Finding(Kind.EXCEPTION, "output[0]", message, "exception.missing")
    inputs, _ = failure.inputs.fresh()
    cut = None if sets_modes(failure.graph) else cut_before(failure.graph, inputs, node, _candidate(failure), finding)
    return Location("compiled", "dynamo", node, op, None, message, cut)


def _alike(failing: Sequence[Finding], findings: Sequence[Finding]) -> Sequence[Finding]:
    """The findings about a trial that may be what was found about the whole.

    A part is held to more than the whole: strides and aliasing of values that are no results there.
    """
    kinds = {finding.kind for finding in failing}
    values = any(finding.kind in _IN_VALUES and finding.detail not in _LAYOUT for finding in failing)
    layouts = {finding.detail for finding in failing} & _LAYOUT

    def fits(finding: Finding) -> bool:
        if finding.kind in _IN_VALUES and finding.detail not in _LAYOUT:
            return values
        if finding.kind is Kind.CRASH:  # memory that is written wrongly may kill a smaller program
            return Kind.CRASH in kinds or finding.detail == "crash.signal"
        return finding.detail in layouts or (finding.kind in kinds and finding.kind is not Kind.STRUCTURE)

    return [finding for finding in findings if fits(finding)]


def _candidate(failure: Failure) -> CheckOptions:
    """The options with the user's mode spelled out."""
    if failure.options.compiler != "inductor":
        return failure.options
    return failure.options.model_copy(update={"compiler_options": inductor_patches(failure.options, failure.mode)})


def _first_wrong_stage(
    failure: Failure, failing: Sequence[Finding], ladder: Sequence[Stage], tell: Callable[[str], None]
) -> tuple[Stage, list[Recorded]]:
    """The lowest stage that is wrong, and the graphs that the one below it, which is right, works on."""
    *lower, top = ladder
    # Mostly code generation is at fault: if the rung below it is right, so are all the others.
    highest = lower[-1]
    tell(f"trying {highest.what} alone")
    capture = Capture()
    if not _wrong(failure, failing, highest, capture):
        return top, capture.recorded
    below: list[Recorded] = []
    for stage in lower[:-1]:
        tell(f"trying {stage.what} alone")
        capture = Capture()
        if _wrong(failure, failing, stage, capture):
            return stage, below
        below = capture.recorded
    return highest, below


def _wrong(failure: Failure, failing: Sequence[Finding], stage: Stage, capture: Capture) -> bool:
    if stage.compiler is None:
        raise ValueError("the candidate itself need not be tried: it is known to be wrong")
    wanted = {finding.subject for finding in failing}
    return any(found.kind.fails and found.subject in wanted for found in rehearse(failure, stage.compiler(capture)))


_Suspect: TypeAlias = tuple[Recorded, Culprit]
"""An operator that errs, and the graph that has it."""


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for an operator in the graphs of a region.

    Attributes:
        graphs: The graphs with their inputs, in the order in which they run.
        dynamo: Dynamo's graph, which has what the user called.
        options: Name the candidate.
        compiler: The first wrong stage, as a compiler.
        judge: Tries a trial.
        gross: Tries a trial, and finds gross differences alone.
        tell: Told what is being done.
        known: Told what is known already.
    """

    graphs: Sequence[Recorded]
    dynamo: Recorded
    options: CheckOptions
    compiler: Compiler
    judge: Judge
    gross: Judge
    tell: Callable[[str], None]
    known: Callable[[Location], None]

    def run(self, stage: Stage, failing: Sequence[Finding]) -> Location:
        """Look for the operator, by the quickest means first."""
        notes: list[str] = []
        in_values = [one for one in failing if one.kind in _IN_VALUES and one.detail not in _LAYOUT]
        if not in_values:
            return self._bisected(stage, notes) or self._whole(stage, notes)
        slight = self._probed(self.graphs, notes)
        if slight is not None and _explains(slight[1], in_values):
            return self._culprit(stage, *slight, notes)
        found = self._fused(stage, slight, notes) or self._past(stage, slight, notes)
        if found is None and slight is not None:
            return self._culprit(stage, *slight, notes)
        if found is None:
            blunt = replace(self, judge=self.gross)
            found = blunt._bisected(stage, [*notes, "rounding alone would explain what each part does by itself"])
            found = None if found is None else replace(found, gross=True)
        return found or self._whole(stage, notes)

    def _probed(self, graphs: Sequence[Recorded], notes: list[str]) -> _Suspect | None:
        best: _Suspect | None = None
        for recorded in graphs:
            if recorded.inputs is None or (recorded.kind == "dynamo" and not can_be_walked(recorded.graph)):
                continue
            self.tell(f"compiling the {recorded.kind} graph with its intermediate tensors exposed")
            try:
                culprit = probe(recorded.graph, recorded.inputs, self.compiler, limit=_probe_limit(recorded))
            except Exception as error:  # bisection does without it
                notes.append(
                    f"the probe of the {recorded.kind} graph failed: {type(error).__name__}: {error}".splitlines()[0]
                )
                continue
            if culprit is not None and (best is None or culprit.size > MUCH * best[1].size):
                best = recorded, culprit
            if best is not None and best[1].size >= GROSS:
                break
        return best

    def _fused(self, stage: Stage, slight: _Suspect | None, notes: list[str]) -> Location | None:
        """Probe the graphs with their patterns fused already: exposed tensors would keep them apart."""
        if stage.compiler is not None:
            return None
        graphs: list[Recorded] = []
        for recorded in self.graphs:
            try:
                fused = fused_graph(recorded, self.options)
            except Exception as error:  # bisection does without it
                notes.append(f"the {recorded.kind} graph could not be fused: {type(error).__name__}".splitlines()[0])
                continue
            graphs += [] if fused is None else [fused]
        found = self._probed(graphs, notes)
        if found is None or (slight is not None and found[1].size <= MUCH * slight[1].size):
            return None
        recorded, culprit = found
        [before] = [one.graph for one in self.graphs if one.kind == recorded.kind]
        if is_fused(culprit.node, before):
            notes.append(f"Inductor's graph passes made {culprit.node.name}; they would not, were its parts exposed")
        return self._culprit(stage, recorded, culprit, notes)

    def _past(self, stage: Stage, slight: _Suspect | None, notes: list[str]) -> Location | None:
        """Bisect for what hides from the probe, past a slight error that does not explain what was found."""
        if slight is None:
            return self._bisected(stage, notes)
        _, culprit = slight
        least = MUCH * culprit.size
        found = replace(self, judge=partial(_grosser, self.judge, least))._bisected(stage, notes)
        if found is None or found.cut is None or _has(found.cut.trial, culprit.node):
            return None  # what magnifies the slight error is not to blame
        notes.append(f"{culprit.node.name} ({culprit.node.target}) is wrong too, but far too slightly to explain it")
        return replace(found, notes=tuple(notes))

    def _culprit(self, stage: Stage, recorded: Recorded, culprit: Culprit, notes: list[str]) -> Location:
        inputs = recorded.inputs or ()
        self.tell(f"{culprit.node.name} ({culprit.node.target}) is wrong; cutting it out")
        self.known(self._at(stage, recorded, culprit.node, culprit.finding.message, None, notes))
        cut = self._cut(recorded, inputs, culprit.node)
        if cut is None:
            notes.append(f"{culprit.node.name} is wrong in the whole graph; no part of it is")
        node = culprit.node if cut is None else cut.node
        return self._at(stage, recorded, node, culprit.finding.message, cut, notes)

    def _at(
        self, stage: Stage, recorded: Recorded, node: fx.Node, message: str, cut: Cut | None, notes: Sequence[str]
    ) -> Location:
        op, within = aten_name(recorded.graph, recorded.inputs or (), node), None
        origin = None if recorded.kind == "dynamo" else origin_of(node, self.dynamo.graph)
        whole = None if origin is None else aten_name(self.dynamo.graph, self.dynamo.inputs or (), origin)
        if whole is not None and whole != op:
            within = f"{op} is in the decomposition of {whole}"
            if stage.name == "partitioned" and whole.startswith("aten."):
                op = whole  # what passes work on is what decompositions made, not what was called
        return Location(stage.name, recorded.kind, node, op, within, message, cut, tuple(notes))

    def _cut(self, recorded: Recorded, inputs: Sequence[Any], node: fx.Node) -> Cut | None:
        cut = None
        if recorded.kind != "dynamo" or can_be_walked(recorded.graph):
            cut = cut_out(recorded.graph, inputs, node, self.options, self.judge)
        return cut or wrong_prefix(recorded.graph, inputs, node, self.options, self.judge)

    def _bisected(self, stage: Stage, notes: list[str]) -> Location | None:
        for recorded in self.graphs:
            if recorded.inputs is None:
                continue
            self.tell(f"bisecting the {recorded.kind} graph")
            prefix = shortest_wrong_prefix(recorded.graph, recorded.inputs, self.options, self.judge)
            if prefix is None:
                continue
            self.known(self._at(stage, recorded, prefix.node, prefix.finding.message, None, notes))
            cut = self._cut(recorded, recorded.inputs, prefix.node) or prefix
            notes.append("found by bisection over prefixes of the graph")
            return self._at(stage, recorded, prefix.node, prefix.finding.message, cut, notes)
        return None

    def _whole(self, stage: Stage, notes: list[str]) -> Location:
        """The last resort: a whole graph, where it fails by itself."""
        for recorded in self.graphs:
            if recorded.inputs is None:
                continue
            trial = Trial(recorded.graph, recorded.inputs, self.options, is_symbolic(recorded.graph))
            findings = self.judge(trial)
            if findings:
                node = _output_node(recorded.graph, findings[0].subject)
                cut = None if node is None else Cut(trial, node, findings[0])
                return Location(stage.name, recorded.kind, None, None, None, findings[0].message, cut, tuple(notes))
        kinds = " and ".join(recorded.kind for recorded in self.graphs)
        notes.append(f"no graph of the region ({kinds}) is wrong when it is compiled by itself")
        return Location(stage.name, notes=tuple(notes))


def _explains(culprit: Culprit, failing: Sequence[Finding]) -> bool:
    """Whether an operator's error may be all that is wrong with a region."""
    return culprit.size >= GROSS or max(map(share_of, failing)) <= MUCH * culprit.size


def _grosser(judge: Judge, least: float, trial: Trial) -> Sequence[Finding]:
    return [finding for finding in judge(trial) if share_of(finding) > least]


def _has(trial: Trial, node: fx.Node) -> bool:
    return any(one.name == node.name and one.target == node.target for one in calls_of(trial.graph))


def _output_node(gm: fx.GraphModule, subject: str) -> fx.Node | None:
    for place, node in enumerate(outputs_of(gm)):
        if subject == f"output[{place}]" and isinstance(node, fx.Node):
            return node
    return None


def _probe_limit(recorded: Recorded) -> int:
    """The region's own activations: what its forward graph makes and keeps, and its backward graph takes."""
    made = [node for node in outputs_of(recorded.graph) if isinstance(node, fx.Node) and node.op != "placeholder"]
    kept = recorded.graph.graph.find_nodes(op="placeholder") if recorded.kind == "backward" else made
    return max(LEAST_PROBE_BYTES, sum(map(bytes_of, kept)))
