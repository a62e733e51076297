"""Find the wrong stage of a failed call of a region, the graph, the operator, and a small case that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from checked_backend.diagnose.localize.aten_name import aten_name
from checked_backend.diagnose.localize.cut import CallOracle, cut_before
from checked_backend.diagnose.localize.gradients import GradientSearch
from checked_backend.diagnose.localize.graph_modes import self_contained
from checked_backend.diagnose.localize.probe import faulty_operator, is_clear
from checked_backend.diagnose.localize.search import LAYOUT, Location, Search, WrongKernel, is_of_values, place_of
from checked_backend.diagnose.localize.stages import Capture, Recorded, Stage, stages_of
from checked_backend.diagnose.localize.subgraph import is_symbolic
from checked_backend.findings import Finding, Kind
from checked_backend.options import CheckOptions
from checked_backend.regions.compile import Compiler, eager_graph, resolve_compiler, with_mode_spelled_out
from checked_backend.regions.failure import Failure
from checked_backend.regions.graph_case import GraphCase, rerun_failure, run_with, wrong_like
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.operator_check.tensor_checks import Wrong
from checked_backend.regions.torch_state import modes_restored

MOST_BYTES = 1 << 31
"""Bytes of what the kernels of a graph write, where these are looked at."""


def locate(
    failure: Failure,
    findings: Sequence[Finding],
    oracle: CallOracle,
    tell: Callable[[str], None] = lambda _text: None,
    *,
    gross: CallOracle = lambda _case: (),
    known: Callable[[Location], None] = lambda _location: None,
) -> Location:
    """Find out where a failure comes from.

    Args:
        gross: Tries a case too, but finds only gross differences, without asking whether rounding explains them. It
            is for a region without a part that is wrong by itself.

    Raises:
        Exception: The call cannot be run again.
    """
    with failure.call.undisturbed():
        return _located(failure, findings, (oracle, gross), tell, known)


def _located(
    failure: Failure,
    findings: Sequence[Finding],
    oracles: tuple[CallOracle, CallOracle],
    tell: Callable[[str], None],
    known: Callable[[Location], None],
) -> Location:
    failing = [finding for finding in findings if finding.kind.fails]
    if all(finding.kind is Kind.EXCEPTION for finding in failing):
        return _raised(failure, failing, tell)
    ladder = stages_of(failure.options, failure.mode)
    notes: list[str] = []
    kernel = wrong_kernel(failure, failing, tell, notes)
    stage, graphs = ladder[-1], [] if kernel is None else _graphs_below(failure, ladder, notes)
    if not graphs:
        stage, graphs = _first_wrong_stage(failure, failing, ladder, tell)
    known(Location(stage.name))
    inputs, _ = failure.call.inputs.fresh()
    dynamo = Recorded("dynamo", self_contained(failure.graph, failure.call.ambient), tuple(copy_values(inputs)))
    # a compiler, or one of its passes, may know operators only by their names in Dynamo's graph
    graphs = [*graphs, dynamo]
    candidate = with_mode_spelled_out(failure.options, failure.mode)
    compiler = resolve_compiler(candidate) if stage.compiler is None else stage.compiler(Capture())
    oracle, gross = (partial(_tried, failing, one) for one in oracles)
    crashes = any(finding.kind is Kind.CRASH for finding in failing)
    killing = oracle if crashes else partial(_tried, failing, oracles[0], or_killed=True)
    gradients = _gradient_search(failure, failing, candidate)
    if stage.compiler is not None:
        kernel = None
    search = Search(graphs, dynamo, candidate, compiler, oracle, killing, gross, tell, known, gradients, kernel)
    return search.run(stage, failing, notes)


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
            checked = failure.kernels.run(call.inputs, call.rng, lambda _results: sent, MOST_BYTES, enough)
    except Exception as error:  # the probe does without them
        notes.append(f"the kernels could not be looked at: {type(error).__name__}: {error}".splitlines()[0])
        return None
    wrong = next(((module, one) for module in checked for one in module.checks.wrong if enough(one)), None)
    if wrong is None:
        return None
    kernel = WrongKernel(wrong[0], wrong[1].node, faulty_operator(wrong[1]))
    tell(f"found {place_of(kernel.faulty.node)}")
    return kernel


def _graphs_below(failure: Failure, ladder: Sequence[Stage], notes: list[str]) -> list[Recorded]:
    """The graphs of the stage below a kernel that is wrong by itself; empty if they cannot be had."""
    capture = Capture()
    try:
        run_with(failure, _made(ladder[-2], capture))
    except Exception as error:  # the stages are tried one by one
        notes.append(f"{ladder[-2].what} failed alone: {type(error).__name__}: {error}".splitlines()[0])
    return capture.recorded


def _gradient_search(failure: Failure, failing: Sequence[Finding], candidate: CheckOptions) -> GradientSearch | None:
    """The search with gradients; None if no gradient failed."""
    cotangents, wanted = failure.cotangents, failure.call.inputs.requires_grad - failure.call.inputs.entangled
    if cotangents is None or not wanted or not any(finding.about.is_gradient for finding in failing):
        return None
    inputs, _ = failure.call.inputs.fresh()
    graph = self_contained(failure.graph, failure.call.ambient, gradients=True)
    given = tuple(copy_values(inputs))
    return GradientSearch(graph, given, wanted, cotangents.outputs, candidate, is_symbolic(failure.graph))


def _raised(failure: Failure, failing: Sequence[Finding], tell: Callable[[str], None]) -> Location:
    """Locate a missing exception: the operator that raises in eager is the one that was compiled wrongly."""
    inputs, _ = failure.call.inputs.fresh()
    graph = self_contained(failure.graph, failure.call.ambient)
    raised = _raising_node(graph, inputs)
    if raised is None:
        return Location("compiled", notes=("eager does not raise when the region is run again",))
    node, error = raised
    stage, _ = _first_wrong_stage(failure, failing, stages_of(failure.options, failure.mode), tell)
    inputs, _ = failure.call.inputs.fresh()  # the graph may have written to the first ones
    op = aten_name(graph, inputs, node)
    message = f"eager raises {type(error).__name__}: {error}"
    finding = Finding(Kind.EXCEPTION, "output[0]", message, "exception.missing")
    inputs, _ = failure.call.inputs.fresh()
    cut = cut_before(graph, inputs, node, with_mode_spelled_out(failure.options, failure.mode), finding)
    return Location(stage.name, "dynamo", node, op, None, message, cut)


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
    layouts = {finding.detail for finding in failing} & LAYOUT

    def fits(finding: Finding) -> bool:
        if is_of_values(finding):
            return values
        return finding.detail in layouts or (finding.kind in kinds and finding.kind is not Kind.STRUCTURE)

    alike = [finding for finding in findings if fits(finding)]
    return alike or [finding for finding in findings if or_killed and finding.detail == "crash.signal"]


def _first_wrong_stage(
    failure: Failure, failing: Sequence[Finding], ladder: Sequence[Stage], tell: Callable[[str], None]
) -> tuple[Stage, list[Recorded]]:
    """The lowest wrong stage, and the graphs of the stage below it, which is right."""
    *lower, top = ladder
    # Mostly code generation is at fault: if the rung below it is right, all lower rungs are right too.
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
    wanted = {finding.subject for finding in wrong_like(failing, failing)}
    raises = all(finding.kind is Kind.EXCEPTION for finding in failing)
    again = rerun_failure(failure, _made(stage, capture), raises=raises)
    return any(found.subject in wanted for found in wrong_like(failing, again))


def _made(stage: Stage, capture: Capture) -> Compiler:
    if stage.compiler is None:
        raise ValueError("the candidate itself need not be tried: it is known to be wrong")
    return stage.compiler(capture)


def _raising_node(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.Node, Exception] | None:
    """Run a graph in eager until a node raises.

    Returns:
        The node and what it raised; None if none does.
    """
    own = eager_graph(gm)
    follower, given = fx.Interpreter(own), iter(inputs)
    with modes_restored():
        for one in own.graph.nodes:
            try:
                follower.env[one] = next(given) if one.op == "placeholder" else follower.run_node(one)
            except Exception as error:  # what is looked for
                return next(node for node in gm.graph.nodes if node.name == one.name), error
            for used in follower.user_to_last_uses.get(one, ()):
                del follower.env[used]
    return None
