"""Find the wrong stage of a failed call of a region, the graph, the operator, and a small case that fails.

The quickest means come first: look at the kernels as they ran, probe, bisect, differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from checked_backend.diagnose.localize.called import aten_name, called_bodies, is_higher_order
from checked_backend.diagnose.localize.cut import CallOracle, Cut, GradientValues, Parts, wrong_producer
from checked_backend.diagnose.localize.flow import error_flow
from checked_backend.diagnose.localize.probe import (
    CLEAR,
    MUCH,
    FaultyOperator,
    faulty_operator,
    is_clear,
    probe_isolated,
    share_of,
)
from checked_backend.diagnose.localize.stages import Capture, GraphKind, Recorded, Stage, stages_of
from checked_backend.diagnose.localize.subgraph import (
    bytes_of,
    called_name,
    calls_of,
    can_be_walked,
    self_contained,
)
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding, Kind, NodeError
from checked_backend.graphs.nodes import origin_of, outputs_of, recorded_value
from checked_backend.graphs.source_line import module_path, source_line
from checked_backend.options import CheckOptions
from checked_backend.regions.compile import Compiler, eager_graph, resolve_compiler, with_mode_spelled_out
from checked_backend.regions.failure import Failure
from checked_backend.regions.graph_case import GraphCase, rerun_failure, run_with, wrong_like
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.operator_check.in_place import CheckedModule
from checked_backend.regions.operator_check.tensor_checks import Wrong
from checked_backend.regions.torch_state import modes_restored

MOST_BYTES = 1 << 31
"""Bytes of what the kernels of a graph write, where these are looked at."""

LEAST_PROBE_BYTES = 1 << 28
"""Bytes that the exposed tensors of one compilation may always take."""

_IN_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION, Kind.STRUCTURE})
"""Kinds of findings that a wrong value inside the graph may cause."""

_LAYOUT = frozenset({"structure.stride", "structure.requires_grad"})
"""Details that neither cause wrong values nor are caused by them: a compiler may choose them inside a graph."""


def is_of_values(finding: Finding) -> bool:
    """Whether a wrong value inside the graph may be the cause of a finding."""
    return finding.kind in _IN_VALUES and finding.detail not in _LAYOUT


@dataclass(frozen=True, slots=True)
class WrongKernel:
    """A kernel that is clearly wrong on the inputs that it really got, the wrong value's node, and what makes it."""

    module: CheckedModule
    wrong: fx.Node
    faulty: FaultyOperator


_Hypothesis: TypeAlias = tuple[Recorded, FaultyOperator]
"""An operator that errs, and the graph that has it."""


@dataclass(frozen=True, slots=True)
class Location:
    """How far a failure could be tracked down.

    Attributes:
        stage: The first stage that is wrong: ``aot``, ``decomposed``, ``partitioned`` or ``compiled``.
        graph: Which graph: ``forward``, ``backward`` or ``inference``; None if it is not known.
        op: Its name in ATen: the operator to which the user's call comes down.
        within: How the node is related to the operator of the user's graph, if a decomposition made the node.
        message: The difference of its result, as text.
        notes: The steps that were tried, and why the search went no further.
        flow: How the error flows through the graph, if the probe saw that.
        recorded: The graph, if a kernel was found to be wrong.
    """

    stage: str
    graph: str | None = None
    node: fx.Node | None = None
    op: str | None = None
    within: str | None = None
    message: str = ""
    cut: Cut | None = None
    notes: tuple[str, ...] = ()
    flow: tuple[NodeError, ...] = ()
    recorded: Recorded | None = None
    kernel: WrongKernel | None = None

    def error_flow(self) -> tuple[NodeError, ...]:
        """How the error flows through the graph, as far as the values are known."""
        if self.kernel is None or self.recorded is None:
            return self.flow
        seen = self.kernel.module.values
        return error_flow(self.recorded.graph, self.recorded.inputs, seen, self.kernel.faulty.node.name)


def locate(
    failure: Failure,
    findings: Sequence[Finding],
    oracle: CallOracle,
    tell: Callable[[str], None] = lambda _text: None,
    *,
    known: Callable[[Location], None] = lambda _location: None,
) -> Location:
    """Find out where a failure comes from.

    Raises:
        Exception: The call cannot be run again.
    """
    failing = [finding for finding in findings if finding.kind.fails]
    with failure.call.undisturbed():
        if all(finding.kind is Kind.EXCEPTION for finding in failing):
            return _raised(failure, failing, tell)
        notes: list[str] = []
        kernel = wrong_kernel(failure, failing, tell, notes)
        stage, capture = None, Capture()
        if kernel is not None:  # the graphs of the stage below it
            *_, highest = stages_of(failure.options, failure.mode)
            try:
                run_with(failure, highest.compiler(capture))
            except Exception as error:  # the stages are tried one by one
                notes.append(_first_line(f"{highest.what} failed alone", error))
        graphs = capture.recorded
        if not graphs:
            stage, graphs = _first_wrong_stage(failure, failing, tell)
        known(Location("compiled" if stage is None else stage.name))
        dynamo = Recorded("dynamo", self_contained(failure.graph, failure.call.ambient), _fresh_inputs(failure))
        candidate = with_mode_spelled_out(failure.options, failure.mode)
        crashes = any(finding.kind is Kind.CRASH for finding in failing)
        fitting = partial(_tried, failing, oracle)
        search = Search(
            stage="compiled" if stage is None else stage.name,
            # a compiler, or one of its passes, may know operators only by their names in Dynamo's graph
            graphs=[*graphs, dynamo],
            dynamo=dynamo,
            options=candidate,
            compiler=resolve_compiler(candidate) if stage is None else stage.compiler(Capture()),
            oracle=fitting,
            killing=fitting if crashes else partial(_tried, failing, oracle, or_killed=True),
            tell=tell,
            known=known,
            notes=notes,
            gradients=_gradients(failure, failing),
        )
        return search.run([one for one in failing if is_of_values(one)], kernel if stage is None else None)


def wrong_kernel(
    failure: Failure,
    failing: Sequence[Finding],
    tell: Callable[[str], None],
    notes: list[str],
    enough: Callable[[Wrong], bool] = is_clear,
) -> WrongKernel | None:
    """The first kernel that is clearly wrong in the program as it was compiled: nothing is compiled for that."""
    if failure.kernels is None or not any(map(is_of_values, failing)):
        return None
    tell("looking at the kernels as they run")
    sent = {} if failure.cotangents is None else failure.cotangents.outputs
    call = failure.call
    try:
        with call.ambient.entered():
            checked = failure.kernels.run(call, lambda _results: sent, MOST_BYTES, enough)
    except Exception as error:  # the probe does without them
        notes.append(_first_line("the kernels could not be looked at", error))
        return None
    for module in checked:
        for wrong in filter(enough, module.checks.wrong):
            kernel = WrongKernel(module, wrong.node, faulty_operator(wrong))
            tell(f"found {_place_of(kernel.faulty.node)}")
            return kernel
    return None


def _gradients(failure: Failure, failing: Sequence[Finding]) -> Callable[[CallOracle], Parts] | None:
    """Makes the parts of Dynamo's graph that are differentiated; None if no gradient failed."""
    cotangents, wanted = failure.cotangents, failure.call.inputs.requires_grad - failure.call.inputs.entangled
    if cotangents is None or not wanted or not any(finding.about.is_gradient for finding in failing):
        return None
    arrived = cotangents.outputs

    def parts(oracle: CallOracle) -> Parts:
        graph, inputs = self_contained(failure.graph, failure.call.ambient, gradients=True), _fresh_inputs(failure)
        values = GradientValues.of(graph, inputs, wanted, arrived)
        return Parts(graph, inputs, with_mode_spelled_out(failure.options, failure.mode), oracle, values)

    return parts


def _fresh_inputs(failure: Failure) -> tuple[Any, ...]:
    return tuple(copy_values(failure.call.inputs.fresh()[0]))


def _raised(failure: Failure, failing: Sequence[Finding], tell: Callable[[str], None]) -> Location:
    """Locate a missing exception: the operator that raises in eager is the one that was compiled wrongly."""
    graph = self_contained(failure.graph, failure.call.ambient)
    raised = _raising_node(graph, _fresh_inputs(failure))
    if raised is None:
        return Location("compiled", notes=("eager does not raise when the region is run again",))
    node, error = raised
    stage, _ = _first_wrong_stage(failure, failing, tell)
    op = aten_name(graph, _fresh_inputs(failure), node)
    message = f"eager raises {type(error).__name__}: {error}"
    finding = Finding(Kind.EXCEPTION, "output[0]", message, "exception.missing")
    candidate = with_mode_spelled_out(failure.options, failure.mode)
    case = Parts(graph, _fresh_inputs(failure), candidate, lambda _case: ()).alone(node)
    name = "compiled" if stage is None else stage.name
    return Location(name, "dynamo", node, op, None, message, Cut(case, node, finding))


def _tried(
    failing: Sequence[Finding], oracle: CallOracle, case: GraphCase, *, or_killed: bool = False
) -> Sequence[Finding]:
    """The findings about a case that may be the cause of the findings about the whole region.

    More is compared of a part than of the whole: strides and aliasing of values that are not results of the whole.

    Args:
        or_killed: If there are none, take that the case killed its process.
    """
    findings = oracle(case)
    kinds = {finding.kind for finding in failing}
    values = any(map(is_of_values, failing))
    layouts = {finding.detail for finding in failing} & _LAYOUT

    def fits(finding: Finding) -> bool:
        if is_of_values(finding):
            return values
        return finding.detail in layouts or (finding.kind in kinds and finding.kind is not Kind.STRUCTURE)

    alike = [finding for finding in findings if fits(finding)]
    return alike or [finding for finding in findings if or_killed and finding.detail == "crash.signal"]


def _first_wrong_stage(
    failure: Failure, failing: Sequence[Finding], tell: Callable[[str], None]
) -> tuple[Stage | None, list[Recorded]]:
    """The lowest wrong stage, None for the compiler itself; and the graphs of the stage below it, which is right."""
    wanted = {finding.subject for finding in wrong_like(failing, failing)}
    raises = all(finding.kind is Kind.EXCEPTION for finding in failing)

    def is_wrong(stage: Stage, capture: Capture) -> bool:
        tell(f"trying {stage.what} alone")
        again = rerun_failure(failure, stage.compiler(capture), raises=raises)
        return any(found.subject in wanted for found in wrong_like(failing, again))

    # Mostly code generation is at fault: if the rung below it is right, all lower rungs are right too.
    *lower, highest = stages_of(failure.options, failure.mode)
    capture = Capture()
    if not is_wrong(highest, capture):
        return None, capture.recorded
    below: list[Recorded] = []
    for stage in lower:
        capture = Capture()
        if is_wrong(stage, capture):
            return stage, below
        below = capture.recorded
    return highest, below


def _raising_node(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.Node, Exception] | None:
    """The first node of a graph that raises in eager, and what it raises; None if none does."""
    own = eager_graph(gm)
    follower = fx.Interpreter(own)
    follower.args_iter = iter(inputs)
    with modes_restored():
        for one in own.graph.nodes:
            try:
                follower.env[one] = follower.run_node(one)
            except Exception as error:  # what is looked for
                return next(node for node in gm.graph.nodes if node.name == one.name), error
            for used in follower.user_to_last_uses.get(one, ()):
                del follower.env[used]
    return None


@dataclass(frozen=True, slots=True)
class Search:
    """The search for an operator in the graphs of a region.

    Attributes:
        stage: The name of the first wrong stage.
        compiler: That stage, as a compiler.
        killing: Like `oracle`, but a case that kills its process is a finding too.
        notes: The steps that were tried; more are added.
        gradients: Makes the parts of Dynamo's graph that are differentiated; None if no gradient failed.
    """

    stage: str
    graphs: Sequence[Recorded]
    dynamo: Recorded
    options: CheckOptions
    compiler: Compiler
    oracle: CallOracle
    killing: CallOracle
    tell: Callable[[str], None]
    known: Callable[[Location], None]
    notes: list[str]
    gradients: Callable[[CallOracle], Parts] | None = None

    def run(self, in_values: Sequence[Finding], kernel: WrongKernel | None) -> Location:
        """Look for the operator, by the quickest means first.

        Args:
            in_values: The findings that a wrong value inside of a graph may cause.
            kernel: A kernel that is wrong on the inputs that it really gets; None if none is known.
        """
        if not in_values:
            return self._bisected() or self._nowhere()
        if kernel is not None:
            recorded, faulty = self._recorded(kernel)
            return replace(self._faulty(recorded, faulty), recorded=recorded, kernel=kernel)
        slight = self._probed()
        if slight is None:
            return self._bisected() or self._differentiated() or self._nowhere()
        # an operator's error may explain all that is wrong with a region
        share = share_of(slight[1].finding)
        if share >= CLEAR or max(map(share_of, in_values)) <= MUCH * share:
            return self._faulty(*slight)
        return self._past(*slight)

    def _recorded(self, kernel: WrongKernel) -> _Hypothesis:
        """The recorded graph that has a node of a lowered one; the lowered one itself if a last pass made the node."""
        module, faulty = kernel.module, kernel.faulty
        for recorded in self.graphs:
            named = [one for one in calls_of(recorded.graph) if one.name == faulty.node.name]
            if recorded.kind == module.module.kind and named:
                return recorded, replace(faulty, node=named[0])
        self.notes.append(f"Inductor's graph passes made {faulty.node.name}; they would not, were its parts exposed")
        return Recorded(module.module.kind, module.module.graph, tuple(module.inputs)), faulty

    def _probed(self) -> _Hypothesis | None:
        best: _Hypothesis | None = None
        for recorded in self.graphs:
            if recorded.kind == "dynamo" and not can_be_walked(recorded.graph):
                continue
            self.tell(f"compiling the {recorded.kind} graph with its intermediate tensors exposed")
            try:
                faulty = probe_isolated(recorded.graph, recorded.inputs, self.compiler, limit=probe_limit(recorded))
            except Exception as error:  # bisection does without it
                self.notes.append(_first_line(f"the probe of the {recorded.kind} graph failed", error))
                continue
            if faulty is not None and (best is None or share_of(faulty.finding) > MUCH * share_of(best[1].finding)):
                best = recorded, faulty
            if best is not None and share_of(best[1].finding) >= CLEAR:
                break
        return best

    def _past(self, recorded: Recorded, faulty: FaultyOperator) -> Location:
        """Look for an error that hides from the probe, beyond a slight error that does not explain the findings."""
        least, node = MUCH * share_of(faulty.finding), faulty.node
        grosser = replace(self, oracle=lambda case: [one for one in self.oracle(case) if share_of(one) > least])
        found = grosser._bisected() or grosser._differentiated()
        parts = () if found is None or found.cut is None else calls_of(found.cut.case.graph)
        if any((one.name, one.target) == (node.name, node.target) for one in parts):
            return self._faulty(recorded, faulty)  # an operator that magnifies the slight error is not at fault
        self.notes.append(f"{node.name} ({node.target}) is wrong too, but far too slightly to explain it")
        return replace(found or grosser._nowhere(), notes=tuple(self.notes))

    def _differentiated(self) -> Location | None:
        """Take Dynamo's graph apart with its gradients: forward and backward may only be wrong together."""
        if self.gradients is None:
            return None
        self.tell("bisecting Dynamo's graph, with its gradients")
        try:
            parts = self.gradients(self.oracle)
            cut = parts.shortest_wrong_prefix()
            if cut is not None:
                self.tell(f"the gradient of {cut.node.name} ({called_name(cut.node)}) is wrong; cutting it out")
                cut = parts.cut_out(cut.node) or cut
        except Exception as error:  # the graph cannot be differentiated once more
            self.notes.append(_first_line("Dynamo's graph could not be differentiated", error))
            return None
        if cut is None:
            self.notes.append("the gradients of Dynamo's graph are right when it is compiled by itself")
            return None
        self.notes.append("its gradient is wrong where forward and backward are compiled together")
        node, message = self._blamed(self.dynamo.graph, cut, cut.finding.message)
        return self._at(self.dynamo, node, message, cut)

    def _blamed(self, whole: fx.GraphModule, cut: Cut, message: str) -> tuple[fx.Node, str]:
        """The faulty operator of a cut: its last one, or an earlier one whose error only shows in its readers."""
        # the error that one operator hands on may explain that of another, if it is not far smaller
        found = wrong_producer(cut, self.oracle, lambda one, wanted: share_of(wanted) <= MUCH * share_of(one))
        named = None if found is None else next((node for node in calls_of(whole) if node.name == found[0]), None)
        if found is None or named is None:
            return cut.node, message
        self.notes.append(
            f"{cut.node.name} ({cut.node.target}) shows it and is right by itself: what {named.name} hands to the "
            "operators that are compiled with it is wrong, whichever they are"
        )
        return named, found[1].message

    def _faulty(self, recorded: Recorded, faulty: FaultyOperator) -> Location:
        inside = self._inside(recorded, faulty.node)
        if inside is not None:
            return inside
        at = partial(self._at, recorded, flow=faulty.finding.flow)
        self.tell(f"{faulty.node.name} ({called_name(faulty.node)}) is wrong; cutting it out")
        self.known(at(faulty.node, faulty.finding.message, None))
        cut = self._cut(recorded, faulty.node)
        if cut is None:
            self.notes.append(f"{faulty.node.name} is wrong in the whole graph; no part of it is that ends there")
            return at(faulty.node, faulty.finding.message, self._parts(recorded).shortest_wrong_prefix())
        why: list[str] = []
        node, message = replace(self, notes=why)._blamed(recorded.graph, cut, faulty.finding.message)
        alone = None if node is faulty.node else self._cut(recorded, node)
        if alone is not None:  # a kernel computes several operators
            return at(node, alone.finding.message, alone)
        self.notes.extend(why)
        return at(node, message, cut)

    def _inside(self, recorded: Recorded, node: fx.Node) -> Location | None:
        """Look into the bodies of control flow, with the inputs of their calls."""
        if not is_higher_order(node):
            return None
        self.tell(f"{node.name} ({node.target}) is wrong; looking into what it calls")
        caller = self._at(recorded, node, "", None)
        try:
            within = replace(
                self,
                graphs=[
                    Recorded(recorded.kind, body, given)
                    for body, given in called_bodies(recorded.graph, recorded.inputs, node)
                ],
                known=lambda found: self.known(caller if found.node is None else found),
                notes=[],
            )
            hypothesis = within._probed()
            found = within._bisected() if hypothesis is None else within._faulty(*hypothesis)
        except Exception as error:  # the operator itself is known
            self.notes.append(_first_line(f"{node.name} could not be looked into", error))
            return None
        if found is None:
            self.notes.append(f"nothing that {node.name} calls is wrong by itself")
            return None
        note = f"{found.node} is in a graph that {node.name} ({called_name(node)}) calls"
        return replace(found, notes=(*self.notes, note, *within.notes))

    def _at(
        self, recorded: Recorded, node: fx.Node, message: str, cut: Cut | None, flow: tuple[NodeError, ...] = ()
    ) -> Location:
        op, within = aten_name(recorded.graph, recorded.inputs, node), None
        origin = None if recorded.kind == "dynamo" else origin_of(node, self.dynamo.graph)
        whole = None if origin is None else aten_name(self.dynamo.graph, self.dynamo.inputs, origin)
        if whole is not None and whole != op:
            within = f"{op} is in the decomposition of {whole}"
            if whole.startswith("aten.") and (self.stage == "partitioned" or op.startswith("prims.")):
                op = whole  # passes and lowerings work on decomposed operators, not on those that the user called
        return Location(self.stage, recorded.kind, node, op, within, message, cut, tuple(self.notes), flow=flow)

    def _parts(self, recorded: Recorded, oracle: CallOracle | None = None) -> Parts:
        return Parts(recorded.graph, recorded.inputs, self.options, oracle or self.oracle)

    def _cut(self, recorded: Recorded, node: fx.Node) -> Cut | None:
        parts, cut = self._parts(recorded), None
        if recorded.kind != "dynamo" or can_be_walked(recorded.graph):
            cut = self._parts(recorded, self.killing).cut_out(node, self._is_sure)
        elif isinstance(recorded_value(node), torch.Tensor):  # a graph that writes is not taken apart in another way
            case = parts.alone(node)
            cut = next((Cut(case, node, finding) for finding in self.oracle(case)), None)
        if cut is not None and self._is_sure(cut.finding):
            return cut
        calls = calls_of(recorded.graph)
        return parts.prefix(calls[: calls.index(node) + 1]) or cut

    def _is_sure(self, finding: Finding) -> bool:
        """Whether a finding surely has the region's cause. A crash may come from a compiler that cannot take parts."""
        return finding.kind is not Kind.CRASH or self.oracle is self.killing

    def _bisected(self) -> Location | None:
        for recorded in self.graphs:
            self.tell(f"bisecting the {recorded.kind} graph")
            self.known(Location(self.stage, notes=(*self.notes, f"it ended in bisecting the {recorded.kind} graph")))
            narrowed = partial(self._narrowed, recorded.kind)
            prefix = self._parts(recorded).shortest_wrong_prefix(self.killing, narrowed)
            if prefix is None:
                continue
            inside = self._inside(recorded, prefix.node)
            if inside is not None:
                return inside
            self.known(self._at(recorded, prefix.node, prefix.finding.message, None))
            cut = self._cut(recorded, prefix.node) or prefix
            node, message = self._blamed(recorded.graph, cut, prefix.finding.message)
            self.notes.append("found by bisection over prefixes of the graph")
            return self._at(recorded, node, message, cut)
        return None

    def _narrowed(self, kind: GraphKind, wrong: Cut, right: fx.Node | None) -> None:
        note = f"the {kind} graph is wrong up to {_place_of(wrong.node)}"
        note += "" if right is None else f", and right up to {_place_of(right)}"
        self.known(Location(self.stage, kind, message=wrong.finding.message, notes=(*self.notes, note)))

    def _nowhere(self) -> Location:
        kinds = " and ".join(recorded.kind for recorded in self.graphs)
        self.notes.append(f"no part of the region ({kinds}) is wrong when it is compiled by itself")
        return Location(self.stage, notes=tuple(self.notes))


def _first_line(what: str, error: Exception) -> str:
    """What failed, and why. An error of this package says all in words."""
    why = error if isinstance(error, CheckedBackendError) else f"{type(error).__name__}: {error}"
    return f"{what}: {why}".splitlines()[0]


def _place_of(node: fx.Node) -> str:
    """A node with its operator, its line and its module, for people."""
    about = (called_name(node), source_line(node), module_path(node))
    return f"{node.name} ({', '.join(one for one in about if one)})"


def probe_limit(recorded: Recorded) -> int:
    """The bytes of the region's own activations: those that its forward graph returns, or its backward graph takes."""
    made = [node for node in outputs_of(recorded.graph.graph) if isinstance(node, fx.Node) and node.op != "placeholder"]
    kept = recorded.graph.graph.find_nodes(op="placeholder") if recorded.kind == "backward" else made
    return max(LEAST_PROBE_BYTES, sum(map(bytes_of, kept)))
