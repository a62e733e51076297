"""The operator check: compile a 16-bit region once more with all its inner tensors handed out, and check these.

A whole program's noise at 16 bits is some percent, and hides a kernel that is wrong by some percent in that precision
alone. The noise of one operator on its own inputs is a rounding or two.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checked_backend._torch.caches import compile_cache_folder
from checked_backend._torch.generated_modules import GeneratedModule
from checked_backend._torch.graph_code import graph_digest
from checked_backend._torch.graph_json import NotInJsonError, value_to_json
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding, Skip
from checked_backend.graphs.nodes import outputs_of, recorded_value
from checked_backend.modes.choice_tape import ChoiceTape, RecordChoices, ReplayChoices
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from checked_backend.numerics.bits import unit_roundoff
from checked_backend.process.memory import whole_memory, with_deep_stack
from checked_backend.regions.compile import Compiler, compile_again, eager_graph
from checked_backend.regions.execution import Call, Subjects
from checked_backend.regions.operator_check.findings import Place, findings_of, places_reached
from checked_backend.regions.operator_check.in_place import KernelCheck, NotInPlaceError, of_region
from checked_backend.regions.operator_check.probe import (
    Exposed,
    Probed,
    bare,
    expose,
    out_of_place,
    run_region,
    values_of,
    without_repeats,
)
from checked_backend.regions.operator_check.tensor_checks import TensorChecks, Wrong
from checked_backend.regions.operator_check.walk import Walk, walk_again
from checked_backend.verdict.elements import difference, root_mean_square
from checked_backend.verdict.runner import short

LARGEST = 1 << 31
"""The most bytes of inner tensors that are handed out. In a region with more, operators are not checked."""

SHARE = 1 / 12
"""The most that is handed out, as a share of the memory: taps, gradients and float64 copies take several times it."""

FRONTS = 2
"""The most checks of a region that look at what comes before code generation, too: it is the same in each call.

One is enough if it has numbers to see everywhere. Where it is right, later runs of the program that get the same from
torch's caches do not look at it.
"""

FORMAT = 1
"""Of the files that say that a front is right: raised with what its check looks at."""

FAR = 4.0
"""A probe this many times as far from the region as the region is from eager is another program than the region.

Returning inner tensors changes how a compiler fuses and schedules. Errors of such a probe alone do not count.
"""

SAMPLES = 2
"""Runs in eager with other roundings: two that are near each other by chance are not taken for exact."""

SUBJECT = "operators by themselves"

_OTHER = (
    "returning inner tensors makes the compiler produce a different program; that one is wrong here, the original is "
    "not: {}"
)

_BEFORE_CODE = (
    "run operator by operator, what comes before code generation is wrong here, the compiled program is not: {}"
)


@dataclass(slots=True)
class OperatorDecisions:
    """The result of one operator check.

    Attributes:
        forward: Operators that compute something wrong.
        backward: Gradients that operators pass on wrongly, at nodes of `graph`.
        skips: The parts that were not checked.
        checked: Number of tensors that were checked.
        limits: By subject, the smallest relative error of an operator that would have been found; empty if not all
            operators were checked, None if none was.
        reason: Why no operator, or no operator's gradient, was checked; "" if they were.
    """

    forward: list[Finding] = field(default_factory=list)
    backward: list[Wrong] = field(default_factory=list)
    graph: fx.GraphModule | None = None
    skips: list[Skip] = field(default_factory=list)
    checked: int = 0
    limits: Mapping[str, float] | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Probe:
    """A compiled probe.

    Attributes:
        graph: The graph that it was made of.
        examples: The values that tracing recorded for the inputs of that.
        whole: The region's graph, if `graph` is without what that repeats.
        read: The nodes that were left out and are read: their values are inputs, too.
    """

    graph: fx.GraphModule
    examples: Sequence[Any]
    exposed: Exposed
    compiled: Callable[..., Any]
    whole: fx.GraphModule | None = None
    read: Sequence[fx.Node] = ()


class ProbeError(CheckedBackendError):
    """Raised if the probe of a region cannot be made, or does not run."""


class OperatorCheck:
    """Checks the operators of one region, each by itself.

    The kernels of a region that Inductor compiled are checked as they run. What comes before code generation is checked
    at first by a probe that is not compiled. For another compiler, the region is compiled once more as a probe.

    Args:
        gradients: Whether to check the operators' backward passes too.
        candidate: The compiled region, whose results say whether the probe is the same program.
        kernels: Checks the kernels; None if the compiler is not Inductor.
        front: The compiler up to code generation, if there are ``kernels``.
        remembers: Whether the front is not checked where earlier runs of the program found it right.
    """

    def __init__(
        self,
        compiler: Compiler,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        gradients: bool = True,
        candidate: Callable[..., Any],
        kernels: KernelCheck | None = None,
        front: Compiler | None = None,
        remembers: bool = False,
    ) -> None:
        self._compiler = compiler
        self._graph = gm
        self._example_inputs = list(example_inputs)
        self._gradients = gradients
        self._candidate = candidate
        self._kernels = kernels
        self._front = front
        self._remembers = remembers
        self._lock = threading.Lock()
        self._compiled: _Probe | None = None
        self._earlier: TensorChecks | None = None
        self._fronts = 0
        self._front_file: Path | None = None  # it exists where an earlier run found the front right
        self._doubts = False
        self._shown = False
        self._each = False  # whether the probe has the operators that the region repeats, too
        self._failed: str | None = None

    @with_deep_stack
    def run(self, call: Call) -> OperatorDecisions:
        """Check the operators of one call."""
        decisions = OperatorDecisions()
        try:
            with call.undisturbed(), call.ambient.entered():
                self._check_operators(call, decisions)
        except Exception as error:  # the region as a whole is compared all the same
            decisions.reason, decisions.limits = short(error), {}
            decisions.skips.append(Skip(SUBJECT, f"not checked: {short(error)}"))
        return decisions

    def _check_operators(self, call: Call, decisions: OperatorDecisions) -> None:
        if self._kernels is not None:
            try:
                modules = self._check_kernels(self._kernels, call, decisions)
                if self._remembers and self._fronts < FRONTS:
                    self._front_file = _front_file(self._graph, self._example_inputs, modules)
                    with suppress(OSError):
                        if self._front_file is not None and self._front_file.exists():
                            self._fronts = FRONTS
            except NotInPlaceError:
                self._kernels = None
                self._forget()
        if decisions.forward or decisions.backward or (self._kernels is not None and self._fronts == FRONTS):
            return
        doubtful = self._check_probe(call, decisions)
        if doubtful:
            why = _OTHER if self._kernels is None else _BEFORE_CODE
            raise ProbeError(why.format(_names(one.node.name for one in doubtful)))
        if self._kernels is None:
            return
        front = self._earlier
        self._doubts |= front is None or bool(front.wrong or front.unchecked or decisions.reason)
        self._fronts = FRONTS if self._shown and not self._doubts else self._fronts + 1
        if self._fronts == FRONTS:
            if self._front_file is not None and self._shown and not self._doubts:
                with suppress(OSError):  # a folder that cannot be written to keeps nothing
                    self._front_file.parent.mkdir(exist_ok=True)
                    self._front_file.touch()
            self._forget()

    def _check_kernels(
        self, kernels: KernelCheck, call: Call, decisions: OperatorDecisions
    ) -> Sequence[GeneratedModule]:
        """Check the kernels of the compiled region as they run.

        Returns:
            The modules that they are in.

        Raises:
            NotInPlaceError: They cannot be seen.
        """
        sent = _cotangents if self._gradients else lambda _results: {}
        with self._lock:
            checked = kernels.run(call, sent, _room(call))
        left_out = (item for one in checked if one.is_short for item in one.checks.unchecked.items())
        decisions.reason = next((f"{name}: {why}" for name, why in left_out), "")
        gm = eager_graph(self._graph) if any(one.checks.wrong for one in checked) else self._graph
        self._conclude(gm, of_region(gm, checked), call.subjects, decisions)
        return [*{id(one.module): one.module for one in checked}.values()]

    def _conclude(
        self,
        gm: fx.GraphModule,
        checks: TensorChecks,
        subjects: Subjects,
        decisions: OperatorDecisions,
        doubtful: Sequence[Wrong] = (),
        *,
        of_each: bool = False,
    ) -> None:
        """Note what was found.

        Args:
            doubtful: Errors that do not count.
            of_each: Whether the graph is without what the region repeats.
        """
        wrong = [one for one in checks.wrong if not any(one is other for other in doubtful)]
        decisions.checked += sum(map(len, checks.limits))
        decisions.forward += findings_of(gm, [one for one in wrong if not one.gradient], subjects)
        decisions.backward += [one for one in wrong if one.gradient]
        decisions.graph = gm
        limits: Mapping[str, float] = {}
        if checks.unchecked:
            why = f"not checked: {_names(checks.unchecked)} ({next(iter(checks.unchecked.values()))})"
            decisions.skips.append(Skip(SUBJECT, why))
        elif of_each:
            limits = dict.fromkeys(decisions.limits or (), _greatest(*checks.limits))
        elif not doubtful:
            limits = _limits(gm, subjects, *checks.limits)
        known = decisions.limits
        decisions.limits = (
            limits if known is None else {name: max(limits[name], known[name]) for name in limits.keys() & known.keys()}
        )

    def _check_probe(self, call: Call, decisions: OperatorDecisions) -> Sequence[Wrong]:
        """Compile the probe, unless that is done, and check the tensors that it hands out.

        Returns:
            The errors that may be the probe's alone. If there are any, there are no findings.
        """
        with self._lock:
            probe = self._probe(call)
        extended = _with_values(probe.whole, probe.read, call)
        probed = self._run(probe, extended)
        self._shown = probed.shows_values()
        outputs = probed.results[: probe.exposed.outputs]
        gm = eager_graph(probe.graph)
        given, _ = extended.fresh()
        probed.inputs = [bare(value) for value in given]

        def walk(checks: TensorChecks) -> None:
            call.rng.restore()
            kept = replace(probed, results=[*probed.results]) if checks.quick else probed  # a walk forgets them
            Walk(gm, probe.exposed, kept, checks=checks).run()

        checks = self._earlier = walk_again(walk, self._earlier)
        if checks.wrong and probe.whole is not None:
            self._each, self._compiled, self._earlier = True, None, None
            return self._check_probe(call, decisions)
        doubtful: Sequence[Wrong] = ()
        if checks.wrong:
            probed.results = outputs  # the walk has forgotten the others
            places = other_places(probed, self._candidate, eager_graph(self._graph).forward, extended)
            doubtful = errors_of_probe(gm, checks.wrong, places)
            if len(doubtful) == len(checks.wrong):
                return doubtful
        self._conclude(gm, checks, call.subjects, decisions, doubtful, of_each=probe.whole is not None)
        return ()

    def _taps(self, call: Call) -> bool:
        return self._gradients and bool(call.inputs.requires_grad)

    def _forget(self) -> None:
        """Have another probe compiled when it is next needed."""
        with self._lock:
            self._compiled = self._failed = self._earlier = None

    def _probe(self, call: Call) -> _Probe:
        if self._failed is not None:
            raise ProbeError(self._failed)
        if self._compiled is None:
            try:
                self._compiled = self._new_probe(call)
            except Exception as error:
                own = isinstance(error, ProbeError)
                self._failed = str(error) if own else f"{type(error).__name__}: {error}".splitlines()[0]
                raise
        return self._compiled

    def _new_probe(self, call: Call) -> _Probe:
        graph, whole, read = out_of_place(self._graph), None, list[fx.Node]()
        left = None if self._kernels is None or self._each else without_repeats(graph)
        if left is not None:  # each kernel is checked
            whole, (graph, read) = graph, left
        exposed = expose(graph, gradients=self._taps(call))
        room = _room(call)
        if exposed.size > room:
            raise ProbeError(
                f"the tensors inside of the region take {exposed.size / 2**30:.2g} GiB; with the memory there "
                f"is, at most {room / 2**30:.2g} GiB are returned"
            )
        examples = [*self._example_inputs, *map(recorded_value, read)]
        given, _ = _with_values(whole, read, call).fresh()
        taps = exposed.make_taps(examples, given)
        compiler = self._compiler if self._kernels is None else self._front or self._compiler
        arguments = [*examples, *exposed.taps.values()], [*given, *taps.values()]
        return _Probe(graph, examples, exposed, compile_again(compiler, exposed.graph, *arguments), whole, read)

    def _run(self, probe: _Probe, call: Call) -> Probed:
        exposed = probe.exposed
        expected = exposed.outputs + len(exposed.values) + len(exposed.versions)

        def run(*args: Any) -> Sequence[Any]:
            returned = probe.compiled(*args)
            if not isinstance(returned, (tuple, list)) or len(returned) != expected:
                raise ProbeError(f"compiled to hand out {expected} tensors, the region returns something else")
            return returned

        def sent(results: Sequence[Any]) -> Mapping[int, torch.Tensor]:
            return _cotangents(results[: exposed.outputs]) if self._gradients else {}

        return run_region(run, call, sent, lambda given: exposed.make_taps(probe.examples, given))


def _with_values(whole: fx.GraphModule | None, read: Sequence[fx.Node], call: Call) -> Call:
    """The call of a probe: behind the region's own inputs, it has the values of what was left out."""
    if whole is None or not read:
        return call
    given, _ = call.fresh()
    call.rng.restore()
    with torch.no_grad():
        values = values_of(eager_graph(whole), read, given)
    inputs = call.inputs
    places = range(len(inputs.args), len(inputs.args) + len(values))
    wanted = {place for place, node in zip(places, read, strict=True) if recorded_value(node).requires_grad}
    wanted = wanted if inputs.requires_grad else set()
    more = replace(inputs, args=(*inputs.args, *values), requires_grad=inputs.requires_grad | wanted)
    return replace(call, inputs=more)


def other_places(probed: Probed, region: Callable[..., Any], eager: Callable[..., Any], call: Call) -> set[Place]:
    """The results and gradients in which a probe is another program than the region as it was compiled.

    Args:
        probed: A run of the probe, with no results but the region's own.
    """

    def ran(program: Callable[..., Any], *modes: AbstractContextManager[Any]) -> dict[Place, Any]:
        return _by_place(run_region(program, call, lambda _results: probed.cotangents, modes=modes))

    tape, choices = RandomTape(), ChoiceTape()
    own, right = ran(region), ran(eager, RecordRandom(tape), RecordChoices(choices))
    rounded = [
        ran(eager, ReplayRandom(tape), MonteCarloMode(1 + seed, 1.0), ReplayChoices(choices)) for seed in range(SAMPLES)
    ]
    return {
        place
        for place, found in _by_place(probed).items()
        if _is_far(found, own.get(place), right.get(place), [sample.get(place) for sample in rounded])
    }


def _by_place(probed: Probed) -> dict[Place, Any]:
    results: dict[Place, Any] = {(False, place): value for place, value in enumerate(probed.results)}
    return results | {(True, place): value for place, value in probed.gradients.items()}


def errors_of_probe(gm: fx.GraphModule, wrong: Sequence[Wrong], elsewhere: set[Place]) -> list[Wrong]:
    """The errors that may be the probe's alone, because they reach a place where the probe is another program.

    An error that reaches no such place is also the region's, whatever else is wrong with the probe: each operator was
    checked on its own inputs.
    """
    reached_by = [(one, set(places_reached(gm, one))) for one in wrong]
    explained = set().union(*(places for one, places in reached_by if one.gradient))
    # these gradients may be wrong because a value is; a loss hardly shows that value's error
    gradients = {place for place in elsewhere - explained if place[0]}
    return [one for one, places in reached_by if not elsewhere.isdisjoint(places) or (gradients and not one.gradient)]


def _is_far(found: Any, region: Any, right: Any, rounded: Sequence[Any]) -> bool:
    """Whether the probe's tensor is further from the region's than rounding or the region's own error explains."""
    tensors = (found, region, right, *rounded)
    if not all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in tensors):
        return False
    if any(value.shape != found.shape for value in tensors) or not found.numel():
        return False
    near = [unit_roundoff(right.dtype) * root_mean_square(right)]
    near += [root_mean_square(difference(right, value)) for value in (region, *rounded)]
    return root_mean_square(difference(region, found)) > FAR * max(near)


def _limits(
    gm: fx.GraphModule, subjects: Subjects, forward: Mapping[str, float], backward: Mapping[str, float]
) -> dict[str, float]:
    """The error that hides in each result: that of the operator with the greatest noise relative to its own result.

    A tensor that is zero but for rounding (a limit of 1 and more) cannot be told from noise. It only reaches results
    that are zero but for rounding themselves.
    """
    common = _greatest(forward)
    limits = {subjects.output(place): common for place in range(len(outputs_of(gm.graph)))} if forward else {}
    if backward:
        common = _greatest(forward, backward)
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            if node.name in backward:
                limits[subjects.gradient(place)] = max(common, backward[node.name])
    return limits


def _greatest(*limits: Mapping[str, float]) -> float:
    return max((limit for one in limits for limit in one.values() if limit < 1), default=0.0)


def _room(call: Call) -> float:
    """The most bytes that may be handed out, by the memory where the inputs are; on an accelerator by what is free."""
    devices = {value.device for value in call.inputs.args if isinstance(value, torch.Tensor)}
    sizes = [torch.cuda.mem_get_info(device)[0] for device in devices if device.type == "cuda"]
    return min(LARGEST, SHARE * min(sizes, default=whole_memory() or math.inf))


def _cotangents(outputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Random gradients with full significands, for each result that requires grad."""
    found: dict[int, torch.Tensor] = {}
    for place, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor) or not output.requires_grad or not output.is_floating_point():
            continue
        generator = torch.Generator(output.device).manual_seed(place + 1)
        sizes = torch.rand(output.shape, generator=generator, device=output.device, dtype=torch.float32).add_(0.5)
        signs = torch.rand(output.shape, generator=generator, device=output.device).sub_(0.5).sign_()
        found[place] = (sizes * signs).to(output.dtype) if output.numel() > 1 else sizes.to(output.dtype)
    return found


def _names(nodes: Iterable[str]) -> str:
    names = list(dict.fromkeys(nodes))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _front_file(gm: fx.GraphModule, example_inputs: Sequence[Any], modules: Iterable[GeneratedModule]) -> Path | None:
    """The empty file that exists where a graph was found to be rightly rewritten as those that code was generated from.

    Decompositions and passes take no values, so that the same graphs are as right in the next run. The file's name is a
    digest of them.

    Args:
        gm: Dynamo's graph.
        example_inputs: The values that tracing recorded for its inputs.
        modules: What was generated for it.

    Returns:
        Its path; None if torch keeps nothing of the region, or if its graphs cannot be told apart by text.
    """
    folder = compile_cache_folder()
    if folder is None:
        return None
    try:
        graphs = [one.to_json() for one in modules]
        inputs = [(value_to_json(value), getattr(value, "requires_grad", None)) for value in example_inputs]
    except NotInJsonError:
        return None
    text = json.dumps([FORMAT, torch.__version__, graph_digest(gm), inputs, graphs])
    return folder / "checked_backend" / f"front-{hashlib.sha256(text.encode()).hexdigest()}"
