"""The operator check: compile a 16-bit region once more with all that is inside of it handed out, and judge that.

A whole program's noise at 16 bits is percents, and hides a kernel that is wrong by percents in that precision alone.
The noise of one operator on its own inputs is a rounding or two.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding, Skip
from checked_backend.numerics.bits import unit_roundoff
from checked_backend.regions.compile import Compiler, eager_graph
from checked_backend.regions.execution import Subjects
from checked_backend.regions.inputs import Inputs
from checked_backend.regions.operator_check.findings import findings_of
from checked_backend.regions.operator_check.out_of_place import out_of_place
from checked_backend.regions.operator_check.probe import Exposed, expose
from checked_backend.regions.operator_check.walk import Probed, Walk
from checked_backend.regions.recompile import compile_again
from checked_backend.regions.torch_state import RngState, TorchState
from checked_backend.verdict.control_runner import short
from checked_backend.verdict.envelope import difference, root_mean_square

__all__ = ["OperatorCheck", "OperatorDecisions"]

LARGEST = 1 << 31
"""Bytes of tensors inside of a region that are handed out at most; with more, operators are not judged."""

SHARE = 1 / 12
"""And at most this share of the memory: taps, gradients and float64 copies take several times as much."""

FAR = 4.0
"""A probe this many times as far from the region as the region is from eager is another program than the region."""

SUBJECT = "operators by themselves"


@dataclass(slots=True)
class OperatorDecisions:
    """What came of one operator check.

    Attributes:
        forward: Operators that compute something wrong.
        backward: Operators that pass on a wrong gradient.
        skips: What was not judged.
        judged: Number of tensors that were.
        limits: By subject, the smallest relative error of an operator that would have been found; empty if not all
            operators were judged.
        outputs: The region's own results, as the probe computed them.
    """

    forward: list[Finding] = field(default_factory=list)
    backward: list[Finding] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    judged: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)
    outputs: Sequence[Any] = ()


class ProbeError(CheckedBackendError):
    """The probe of a region cannot be made, or does not run."""


class OperatorCheck:
    """Judges the operators of one region, each by itself. The region is compiled once more for that.

    Args:
        compiler: The candidate compiler.
        gm: The region's Dynamo graph; it is not changed.
        example_inputs: The fake values of its placeholders as Dynamo traced them.
        gradients: Whether to judge the operators' backward passes too.
        candidate: The compiled region, whose results say whether the probe is the same program.
    """

    def __init__(
        self,
        compiler: Compiler,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        gradients: bool = True,
        candidate: Callable[..., Any],
    ) -> None:
        self._compiler = compiler
        self._graph = gm
        self._example_inputs = list(example_inputs)
        self._gradients = gradients
        self._candidate = candidate
        self._lock = threading.Lock()
        self._compiled: tuple[fx.GraphModule, Exposed, Callable[..., Any]] | None = None
        self._failed: str | None = None

    def run(self, inputs: Inputs, ambient: TorchState, rng: RngState, subjects: Subjects) -> OperatorDecisions:
        """Judge one call.

        Args:
            inputs: What the region was called with.
            ambient: Modes at the call.
            rng: Random state before it.
            subjects: Names.
        """
        decisions = OperatorDecisions()
        try:
            with _undisturbed(rng), ambient.entered():
                self._judge(inputs, rng, subjects, decisions)
        except Exception as error:  # the region is judged as a whole all the same
            decisions.skips.append(Skip(SUBJECT, f"not judged: {short(error)}"))
        return decisions

    def _judge(self, inputs: Inputs, rng: RngState, subjects: Subjects, decisions: OperatorDecisions) -> None:
        with self._lock:
            graph, exposed, compiled = self._probe(inputs)
        probed = self._run(exposed, compiled, inputs, rng)
        decisions.outputs = probed.results[: exposed.outputs]
        given, _ = inputs.fresh()
        probed.inputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in given]
        gm = eager_graph(graph)
        walk = Walk(gm, exposed, probed)
        rng.restore()
        walk.run()
        judged = walk.judged
        decisions.judged = sum(map(len, judged.limits))
        decisions.forward = findings_of(gm, [one for one in judged.wrong if not one.gradient], subjects)
        decisions.backward = findings_of(gm, [one for one in judged.wrong if one.gradient], subjects)
        if judged.wrong and (other := self._other_program(probed, decisions.outputs, inputs, rng, subjects)):
            decisions.forward, decisions.backward = [], []
            decisions.judged = 0  # of the region nothing was
            decisions.skips.append(Skip(SUBJECT, f"not judged: {other}"))
        elif not judged.unjudged:
            decisions.limits = _limits(gm, subjects, exposed.outputs, *judged.limits)
        if judged.unjudged:
            decisions.skips.append(Skip(SUBJECT, _told(judged.unjudged)))

    def _other_program(
        self, probed: Probed, outputs: Sequence[Any], inputs: Inputs, rng: RngState, subjects: Subjects
    ) -> str:
        """Why the probe is not the program that the user runs; "" if it is, so that what it gets wrong counts.

        To hand out what is inside changes how a compiler fuses and schedules. Where the probe's results and gradients
        are far from those of the region as it was compiled, and these near eager's, the error is the probe's alone.
        """
        own, eager = (self._ran(region, probed, inputs, rng) for region in (self._candidate, self._graph_in_eager()))
        names = [subjects.output(place) for place in range(len(outputs))]
        names += [subjects.gradient(place) for place in probed.gradients]
        results = [*outputs, *probed.gradients.values()]
        for name, found, region, right in zip(names, results, own, eager, strict=False):
            if _is_elsewhere(found, region, right):
                return (
                    "with the tensors inside handed out the compiler makes another program, which is wrong where the "
                    f"region as it was compiled is not: {name}"
                )
        return ""

    def _graph_in_eager(self) -> Callable[..., Any]:
        return eager_graph(self._graph).forward

    def _ran(self, region: Callable[..., Any], probed: Probed, inputs: Inputs, rng: RngState) -> list[Any]:
        """A region's results, and its gradients for the cotangents that the probe was given."""
        arguments, leaves = inputs.fresh()
        rng.restore()
        results = list(region(*arguments))
        gradients: Sequence[Any] = [None] * len(leaves)
        if probed.cotangents and leaves:
            gradients = torch.autograd.grad(
                [results[place] for place in probed.cotangents],
                list(leaves.values()),
                list(probed.cotangents.values()),
                allow_unused=True,
            )
        return [*(value.detach() if isinstance(value, torch.Tensor) else value for value in results), *gradients]

    def _probe(self, inputs: Inputs) -> tuple[fx.GraphModule, Exposed, Callable[..., Any]]:
        if self._failed is not None:
            raise ProbeError(self._failed)
        if self._compiled is None:
            try:
                graph = out_of_place(self._graph)
                exposed = expose(graph, gradients=self._gradients and bool(inputs.requires_grad))
                given, _ = inputs.fresh()
                room = min(LARGEST, SHARE * _memory(given))
                if exposed.size > room:
                    raise ProbeError(
                        f"the tensors inside of the region take {exposed.size / 2**30:.2g} GiB; with the memory there "
                        f"is, at most {room / 2**30:.2g} GiB are handed out"
                    )
                taps = exposed.make_taps(self._example_inputs, given)
                examples = [*self._example_inputs, *exposed.taps.values()]
                compiled = compile_again(self._compiler, exposed.graph, examples, [*given, *taps])
            except Exception as error:
                self._failed = f"{type(error).__name__}: {error}".splitlines()[0]
                raise
            self._compiled = graph, exposed, compiled
        return self._compiled

    def _run(self, exposed: Exposed, compiled: Callable[..., Any], inputs: Inputs, rng: RngState) -> Probed:
        arguments, leaves = inputs.fresh()
        taps = exposed.make_taps(self._example_inputs, arguments)
        rng.restore()
        returned = compiled(*arguments, *taps)
        expected = exposed.outputs + len(exposed.values) + sum(map(len, exposed.versions.values()))
        if not isinstance(returned, (tuple, list)) or len(returned) != expected:
            raise ProbeError(f"compiled to hand out {expected} tensors, the region returns something else")
        results = list(returned)
        cotangents = _cotangents(results[: exposed.outputs]) if exposed.taps or leaves else {}
        names: list[str | int] = [*exposed.taps, *leaves]
        wanted = dict(zip(names, [*taps, *leaves.values()], strict=True))
        found: Mapping[Any, torch.Tensor | None] = {}
        if cotangents and wanted:
            gradients = torch.autograd.grad(
                [results[place] for place in cotangents],
                list(wanted.values()),
                list(cotangents.values()),
                allow_unused=True,
            )
            found = dict(zip(wanted, gradients, strict=True))
        return Probed(
            inputs=(),
            wanted=frozenset(leaves) if cotangents else frozenset(),
            results=[value.detach() if isinstance(value, torch.Tensor) else value for value in results],
            cotangents=cotangents,
            gradients={place: found.get(place) for place in leaves},
            taps={name: found.get(name) for name in exposed.taps},
        )


def _limits(
    gm: fx.GraphModule, subjects: Subjects, outputs: int, forward: Mapping[str, float], backward: Mapping[str, float]
) -> dict[str, float]:
    """What hides in each result: an error of the operator whose own noise is the greatest part of what it computes.

    Of a tensor that is zero but for rounding (a limit of 1 and more), no part is to be told from noise, and none
    reaches anything but a result that is so itself.
    """
    common = max((limit for limit in forward.values() if limit < 1), default=0.0)
    limits = {subjects.output(place): common for place in range(outputs)} if forward else {}
    if backward:
        common = max([common, *(limit for limit in backward.values() if limit < 1)])
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            if node.name in backward:
                limits[subjects.gradient(place)] = max(common, backward[node.name])
    return limits


def _is_elsewhere(found: Any, region: Any, right: Any) -> bool:
    """Whether the probe's tensor is much further from the region's than the region's is from eager's."""
    tensors = (found, region, right)
    if not all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in tensors):
        return False
    if not found.shape == region.shape == right.shape or not found.numel():
        return False
    noise = unit_roundoff(right.dtype) * root_mean_square(right)
    return root_mean_square(difference(region, found)) > FAR * max(root_mean_square(difference(right, region)), noise)


def _memory(values: Sequence[Any]) -> float:
    """Bytes of memory where the values are, on an accelerator those that are free; infinite if that cannot be told."""
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    sizes = [torch.cuda.mem_get_info(device)[0] for device in devices if device.type == "cuda"]
    if not sizes and hasattr(os, "sysconf") and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys():
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return min(sizes, default=math.inf)


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


def _told(unjudged: Mapping[str, str]) -> str:
    names = ", ".join(list(unjudged)[:3]) + (f" and {len(unjudged) - 3} more" if len(unjudged) > 3 else "")
    return f"not judged: {names} ({next(iter(unjudged.values()))})"


@contextmanager
def _undisturbed(rng: RngState) -> Iterator[None]:
    before = RngState.capture(tuple(rng.cuda))
    try:
        yield
    finally:
        before.restore()
