"""The search for an operator in the graphs of a region: look at the kernels, probe, bisect, cut out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from checked_backend.diagnose.localize.aten_name import aten_name
from checked_backend.diagnose.localize.bodies import called_bodies, is_higher_order
from checked_backend.diagnose.localize.cut import (
    CallOracle,
    Cut,
    cut_before,
    cut_out,
    shortest_wrong_prefix,
    wrong_prefix,
)
from checked_backend.diagnose.localize.flow import SeenValues
from checked_backend.diagnose.localize.gradients import GradientSearch
from checked_backend.diagnose.localize.probe import (
    CLEAR,
    MUCH,
    FaultyOperator,
    probe_isolated,
    share_of,
)
from checked_backend.diagnose.localize.producers import wrong_producer
from checked_backend.diagnose.localize.stages import GraphKind, Recorded, Stage
from checked_backend.diagnose.localize.subgraph import bytes_of, called_name, calls_of, can_be_walked, is_symbolic
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding, Kind, NodeError
from checked_backend.graphs.nodes import origin_of, outputs_of, recorded_value
from checked_backend.graphs.source_line import module_path, source_line
from checked_backend.options import CheckOptions
from checked_backend.regions.compile import Compiler
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.operator_check.in_place import CheckedModule

LEAST_PROBE_BYTES = 1 << 28
"""Bytes that the exposed tensors of one compilation may always take."""

_IN_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION, Kind.STRUCTURE})
"""Kinds of findings that a wrong value inside the graph may cause."""


LAYOUT = frozenset({"structure.stride", "structure.requires_grad"})
"""Details that neither cause wrong values nor are caused by them: a compiler may choose them inside a graph."""


def is_of_values(finding: Finding) -> bool:
    """Whether a wrong value inside the graph may be the cause of a finding."""
    return finding.kind in _IN_VALUES and finding.detail not in LAYOUT


@dataclass(frozen=True, slots=True)
class WrongKernel:
    """A kernel of the compiled program that is clearly wrong on the inputs that it really got.

    Attributes:
        wrong: The node of the module's graph whose value is wrong.
        faulty: The operator that makes it.
    """

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
        cut: A small case that fails.
        notes: The steps that were tried, and why the search went no further.
        gross: Whether the cut only fails for the oracle of gross errors.
        flow: How the error flows through the graph, if the probe saw that.
        seen: What was seen of the compiled program, if a kernel was found to be wrong.
        kernel: That kernel.
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
    flow: tuple[NodeError, ...] = ()
    seen: SeenValues | None = None
    kernel: WrongKernel | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """The search for an operator in the graphs of a region.

    Attributes:
        compiler: The first wrong stage, as a compiler.
        killing: Like `oracle`, but a case that kills its process is a finding too.
        gross: Tries a case, and only finds gross differences.
        gradients: Differentiates parts of Dynamo's graph; None if no gradient failed.
        kernel: A kernel that is wrong on the inputs that it really gets; None if none is known.
    """

    graphs: Sequence[Recorded]
    dynamo: Recorded
    options: CheckOptions
    compiler: Compiler
    oracle: CallOracle
    killing: CallOracle
    gross: CallOracle
    tell: Callable[[str], None]
    known: Callable[[Location], None]
    gradients: GradientSearch | None = None
    kernel: WrongKernel | None = None

    def run(self, stage: Stage, failing: Sequence[Finding], notes: list[str]) -> Location:
        """Look for the operator, by the quickest means first."""
        in_values = [one for one in failing if is_of_values(one)]
        if not in_values:
            return self._bisected(stage, notes) or self._whole(stage, notes)
        if self.kernel is not None:
            recorded, faulty = self._recorded(self.kernel, notes)
            seen = SeenValues(recorded.graph, recorded.inputs or (), self.kernel.module.values, faulty.node.name)
            return replace(self._faulty(stage, recorded, faulty, notes), seen=seen, kernel=self.kernel)
        slight = self._probed(self.graphs, notes)
        if slight is not None and _explains(slight[1], in_values):
            return self._faulty(stage, *slight, notes)
        found = self._past(stage, slight, notes) or self._differentiated(stage, notes)
        if found is None and slight is not None:
            return self._faulty(stage, *slight, notes)
        if found is None:
            blunt = replace(self, oracle=self.gross, killing=self.gross)
            found = blunt._bisected(stage, [*notes, "rounding alone would explain what each part does by itself"])
            found = None if found is None else replace(found, gross=True)
        return found or self._whole(stage, notes)

    def _recorded(self, kernel: WrongKernel, notes: list[str]) -> _Hypothesis:
        """The recorded graph that has a node of a lowered one; the lowered one itself if a last pass made the node."""
        module, faulty = kernel.module, kernel.faulty
        for recorded in self.graphs:
            named = [one for one in calls_of(recorded.graph) if one.name == faulty.node.name]
            if recorded.kind == module.module.kind and recorded.inputs is not None and named:
                return recorded, replace(faulty, node=named[0])
        notes.append(f"Inductor's graph passes made {faulty.node.name}; they would not, were its parts exposed")
        return Recorded(module.module.kind, module.module.graph, tuple(module.inputs)), faulty

    def _probed(self, graphs: Sequence[Recorded], notes: list[str]) -> _Hypothesis | None:
        best: _Hypothesis | None = None
        for recorded in graphs:
            if recorded.inputs is None or (recorded.kind == "dynamo" and not can_be_walked(recorded.graph)):
                continue
            self.tell(f"compiling the {recorded.kind} graph with its intermediate tensors exposed")
            try:
                faulty = probe_isolated(recorded.graph, recorded.inputs, self.compiler, limit=probe_limit(recorded))
            except Exception as error:  # bisection does without it
                why = str(error) if isinstance(error, CheckedBackendError) else f"{type(error).__name__}: {error}"
                notes.append(f"the probe of the {recorded.kind} graph failed: {why}".splitlines()[0])
                continue
            if faulty is not None and (best is None or faulty.size > MUCH * best[1].size):
                best = recorded, faulty
            if best is not None and best[1].size >= CLEAR:
                break
        return best

    def _past(self, stage: Stage, slight: _Hypothesis | None, notes: list[str]) -> Location | None:
        """Bisect for an error that hides from the probe, beyond a slight error that does not explain the findings."""
        if slight is None:
            return self._bisected(stage, notes)
        _, faulty = slight
        least = MUCH * faulty.size
        found = replace(self, oracle=partial(_grosser, self.oracle, least))._bisected(stage, notes)
        if found is None or found.cut is None or _has(found.cut.case, faulty.node):
            return None  # an operator that magnifies the slight error is not at fault
        notes.append(f"{faulty.node.name} ({faulty.node.target}) is wrong too, but far too slightly to explain it")
        return replace(found, notes=tuple(notes))

    def _differentiated(self, stage: Stage, notes: list[str]) -> Location | None:
        """Take Dynamo's graph apart with its gradients: forward and backward may only be wrong together."""
        if self.gradients is None:
            return None
        try:
            cut = self.gradients.run(self.oracle, self.tell)
        except Exception as error:  # the graph cannot be differentiated once more
            notes.append(f"Dynamo's graph could not be differentiated: {type(error).__name__}: {error}".splitlines()[0])
            return None
        if cut is None:
            notes.append("the gradients of Dynamo's graph are right when it is compiled by itself")
            return None
        notes.append("its gradient is wrong where forward and backward are compiled together")
        node, message = self._blamed(self.dynamo.graph, cut, cut.finding.message, notes)
        return self._at(stage, self.dynamo, node, message, cut, notes)

    def _blamed(self, whole: fx.GraphModule, cut: Cut, message: str, notes: list[str]) -> tuple[fx.Node, str]:
        """The faulty operator of a cut: its last one, or an earlier one whose error only shows in its readers."""
        found = wrong_producer(cut, self.oracle, _may_explain)
        named = None if found is None else next((node for node in calls_of(whole) if node.name == found[0]), None)
        if found is None or named is None:
            return cut.node, message
        notes.append(
            f"{cut.node.name} ({cut.node.target}) shows it and is right by itself: what {named.name} hands to the "
            "operators that are compiled with it is wrong, whichever they are"
        )
        return named, found[1].message

    def _faulty(self, stage: Stage, recorded: Recorded, faulty: FaultyOperator, notes: list[str]) -> Location:
        inputs = recorded.inputs or ()
        inside = self._inside(stage, recorded, faulty.node, notes)
        if inside is not None:
            return inside
        at = partial(self._at, stage, recorded, flow=faulty.finding.flow)
        self.tell(f"{faulty.node.name} ({called_name(faulty.node)}) is wrong; cutting it out")
        self.known(at(faulty.node, faulty.finding.message, None, notes))
        cut = self._cut(recorded, inputs, faulty.node)
        if cut is not None:
            why: list[str] = []
            node, message = self._blamed(recorded.graph, cut, faulty.finding.message, why)
            alone = None if node is faulty.node else self._cut(recorded, inputs, node)
            if alone is not None:  # a kernel computes several operators
                return at(node, alone.finding.message, alone, notes)
            return at(node, message, cut, [*notes, *why])
        notes.append(f"{faulty.node.name} is wrong in the whole graph; no part of it is that ends there")
        whole = shortest_wrong_prefix(recorded.graph, inputs, self.options, self.oracle)
        return at(faulty.node, faulty.finding.message, whole, notes)

    def _inside(self, stage: Stage, recorded: Recorded, node: fx.Node, notes: list[str]) -> Location | None:
        """Look into the bodies of control flow, with the inputs of their calls."""
        if not is_higher_order(node):
            return None
        self.tell(f"{node.name} ({node.target}) is wrong; looking into what it calls")
        caller = self._at(stage, recorded, node, "", None, notes)
        inner: list[str] = []
        try:
            calls = called_bodies(recorded.graph, recorded.inputs or (), node)
            parts = [Recorded(recorded.kind, body, given) for body, given in calls]
            within = replace(
                self, graphs=parts, known=lambda found: self.known(caller if found.node is None else found)
            )
            hypothesis = within._probed(parts, inner)
            found = within._bisected(stage, inner) if hypothesis is None else within._faulty(stage, *hypothesis, inner)
        except Exception as error:  # the operator itself is known
            notes.append(f"{node.name} could not be looked into: {type(error).__name__}: {error}".splitlines()[0])
            return None
        if found is None:
            notes.append(f"nothing that {node.name} calls is wrong by itself")
            return None
        note = f"{found.node} is in a graph that {node.name} ({called_name(node)}) calls"
        return replace(found, notes=(*notes, note, *inner))

    def _at(
        self,
        stage: Stage,
        recorded: Recorded,
        node: fx.Node,
        message: str,
        cut: Cut | None,
        notes: Sequence[str],
        flow: tuple[NodeError, ...] = (),
    ) -> Location:
        op, within = aten_name(recorded.graph, recorded.inputs or (), node), None
        origin = None if recorded.kind == "dynamo" else origin_of(node, self.dynamo.graph)
        whole = None if origin is None else aten_name(self.dynamo.graph, self.dynamo.inputs or (), origin)
        if whole is not None and whole != op:
            within = f"{op} is in the decomposition of {whole}"
            if whole.startswith("aten.") and (stage.name == "partitioned" or op.startswith("prims.")):
                op = whole  # passes and lowerings work on decomposed operators, not on those that the user called
        return Location(stage.name, recorded.kind, node, op, within, message, cut, tuple(notes), flow=flow)

    def _cut(self, recorded: Recorded, inputs: Sequence[Any], node: fx.Node) -> Cut | None:
        cut = None
        if recorded.kind != "dynamo" or can_be_walked(recorded.graph):
            cut = cut_out(recorded.graph, inputs, node, self.options, self.killing, self._is_sure)
        elif isinstance(recorded_value(node), torch.Tensor):
            cut = self._alone(recorded, inputs, node)
        if cut is not None and self._is_sure(cut.finding):
            return cut
        return wrong_prefix(recorded.graph, inputs, node, self.options, self.oracle) or cut

    def _alone(self, recorded: Recorded, inputs: Sequence[Any], node: fx.Node) -> Cut | None:
        """A node alone, on eager's values. A graph that writes is not taken apart in any other way."""
        found = Finding(Kind.LOGIC, "output[0]", "")
        cut = cut_before(recorded.graph, copy_values(inputs), node, self.options, found)
        findings = self.oracle(cut.case)
        return replace(cut, finding=findings[0]) if findings else None

    def _is_sure(self, finding: Finding) -> bool:
        """Whether a finding surely has the region's cause. A crash may come from a compiler that cannot take parts."""
        return finding.kind is not Kind.CRASH or self.oracle is self.killing

    def _bisected(self, stage: Stage, notes: list[str]) -> Location | None:
        for recorded in self.graphs:
            if recorded.inputs is None:
                continue
            self.tell(f"bisecting the {recorded.kind} graph")
            self.known(Location(stage.name, notes=(*notes, f"it ended in bisecting the {recorded.kind} graph")))
            prefix = shortest_wrong_prefix(
                recorded.graph,
                recorded.inputs,
                self.options,
                self.oracle,
                self.killing,
                partial(self._narrowed, stage, recorded.kind, notes),
            )
            if prefix is None:
                continue
            inside = self._inside(stage, recorded, prefix.node, notes)
            if inside is not None:
                return inside
            self.known(self._at(stage, recorded, prefix.node, prefix.finding.message, None, notes))
            cut = self._cut(recorded, recorded.inputs, prefix.node) or prefix
            node, message = self._blamed(recorded.graph, cut, prefix.finding.message, notes)
            notes.append("found by bisection over prefixes of the graph")
            return self._at(stage, recorded, node, message, cut, notes)
        return None

    def _narrowed(self, stage: Stage, kind: GraphKind, notes: Sequence[str], wrong: Cut, right: fx.Node | None) -> None:
        note = f"the {kind} graph is wrong up to {place_of(wrong.node)}"
        note += "" if right is None else f", and right up to {place_of(right)}"
        self.known(Location(stage.name, kind, message=wrong.finding.message, notes=(*notes, note)))

    def _whole(self, stage: Stage, notes: list[str]) -> Location:
        """The last resort: a whole graph, if it fails by itself."""
        for recorded in self.graphs:
            if recorded.inputs is None:
                continue
            case = GraphCase(recorded.graph, recorded.inputs, self.options, is_symbolic(recorded.graph))
            findings = self.oracle(case)
            if findings:
                node = _output_node(recorded.graph, findings[0].subject)
                cut = None if node is None else Cut(case, node, findings[0])
                return Location(stage.name, recorded.kind, None, None, None, findings[0].message, cut, tuple(notes))
        kinds = " and ".join(recorded.kind for recorded in self.graphs)
        notes.append(f"no graph of the region ({kinds}) is wrong when it is compiled by itself")
        return Location(stage.name, notes=tuple(notes))


def place_of(node: fx.Node) -> str:
    """A node with its operator, its line and its module, for people."""
    about = (called_name(node), source_line(node), module_path(node))
    return f"{node.name} ({', '.join(one for one in about if one)})"


def _explains(faulty: FaultyOperator, failing: Sequence[Finding]) -> bool:
    """Whether an operator's error may explain all that is wrong with a region."""
    return faulty.size >= CLEAR or max(map(share_of, failing)) <= MUCH * faulty.size


def _may_explain(found: Finding, wanted: Finding) -> bool:
    """Whether the error that one operator hands on may explain that of another: it is not far smaller."""
    return share_of(wanted) <= MUCH * share_of(found)


def _grosser(oracle: CallOracle, least: float, case: GraphCase) -> Sequence[Finding]:
    return [finding for finding in oracle(case) if share_of(finding) > least]


def _has(case: GraphCase, node: fx.Node) -> bool:
    return any(one.name == node.name and one.target == node.target for one in calls_of(case.graph))


def _output_node(gm: fx.GraphModule, subject: str) -> fx.Node | None:
    for place, node in enumerate(outputs_of(gm.graph)):
        if subject == f"output[{place}]" and isinstance(node, fx.Node):
            return node
    return None


def probe_limit(recorded: Recorded) -> int:
    """The bytes of the region's own activations: those that its forward graph returns, or its backward graph takes."""
    made = [node for node in outputs_of(recorded.graph.graph) if isinstance(node, fx.Node) and node.op != "placeholder"]
    kept = recorded.graph.graph.find_nodes(op="placeholder") if recorded.kind == "backward" else made
    return max(LEAST_PROBE_BYTES, sum(map(bytes_of, kept)))
