"""Make a checked region out of the graph that Dynamo hands to the backend."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.cpp_kernels import cpp_kernels_together
from checked_backend._torch.dynamo import dynamo_control_flow
from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.generated_modules import GeneratedModule, generated_modules_noted
from checked_backend._torch.graph_code import graph_digest
from checked_backend._torch.symbols import size_hint
from checked_backend.findings import Finding
from checked_backend.graphs.lift import lift_written_attributes, spread_lists
from checked_backend.options import CheckOptions
from checked_backend.process.memory import with_deep_stack
from checked_backend.ranks.collectives import (
    collective_lines,
    communicates,
    pending_inputs,
    returns_pending_collectives,
)
from checked_backend.regions import schedule
from checked_backend.regions.backward_check import Checks
from checked_backend.regions.compile import (
    CompiledOnce,
    Compiler,
    NotCompiled,
    compile_again,
    compile_candidate,
    copy_graph,
    draws_numbers,
    eager_graph,
    inductor_front_compiler,
    inductor_with,
    keep_accumulating,
    resolve_compiler,
)
from checked_backend.regions.draw_inputs import DrawInputs
from checked_backend.regions.execution import Call, Cotangents
from checked_backend.regions.failure import Failure, Investigator, Keep, not_localized
from checked_backend.regions.float64_twin import (
    compile_twin,
    computes_in_low_precision,
    needs_default_dtype,
)
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.health import HEALTH, Health, RegionHealth
from checked_backend.regions.local_region import LocalRegion, time_to_search
from checked_backend.regions.operator_check.check import OperatorCheck
from checked_backend.regions.operator_check.in_place import KernelCheck
from checked_backend.regions.operator_check.step import OperatorStep
from checked_backend.regions.process_state import SET_BACK_BY_DYNAMO, ProcessState, settings_changed
from checked_backend.regions.region import CheckedRegion
from checked_backend.regions.reporter import Investigate, RegionReporter
from checked_backend.regions.runner import Variants
from checked_backend.regions.schedule import schedule_of
from checked_backend.regions.unsupported import MachineLimits, compile_with_any_cache
from checked_backend.regions.waiting import Waiting
from checked_backend.verdict.runner import Build

log = logging.getLogger(__name__)


@with_deep_stack
def build_region(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: CheckOptions,
    mode: str | None,
    *,
    thorough: bool = False,
    silent: bool = False,
    can_compile: bool = False,
    info: GraphInfo | None = None,
    investigator: Investigator | None = None,
) -> Callable[..., Any]:
    """Compile a region with the candidate compiler and wrap it in its check.

    A compiler that raises does not raise here: Dynamo would wrap the exception, and with
    ``torch._dynamo.config.suppress_errors`` run eager in silence. The region's first call reports it.

    Args:
        gm: The Dynamo graph; or an AOT graph, for a compiler of such graphs.
        mode: What the user passed as ``torch.compile(mode=...)``.
        thorough: Compile the float64 twin for every difference, not only for suspicious ones and low precision; and
            look again at what earlier runs of the program found right.
        can_compile: Whether it is known that this machine compiles something, so that a crash is the candidate's.
        info: Names, if they are not those that the graph has from Dynamo.
        investigator: Finds out where a failure comes from, if the options say ``localize``.

    Raises:
        OptionError: The compiler is unknown.
    """
    began = schedule.clock()
    compiler = resolve_compiler(options, mode)
    gm, example_inputs, spread = spread_lists(gm, example_inputs)
    gm, example_inputs, held = lift_written_attributes(gm, example_inputs)
    info = info or GraphInfo.of(gm)
    if info.collectives is None and communicates(gm):
        info = replace(
            info,
            collectives=collective_lines(gm),
            pending_inputs=pending_inputs(gm),
            returns_pending_collectives=returns_pending_collectives(gm),
        )
    pristine = copy_graph(gm)
    keep_accumulating(pristine)
    tells = options.progress and not (silent and investigator is None)
    waiting = Waiting(info.name, tells=tells)
    source = _Source(compiler, pristine, _traced(gm, example_inputs), waiting, options, mode, thorough)
    settings = ProcessState.capture()
    before_compiling = schedule.clock()
    modules: list[GeneratedModule] | None = None
    with ExitStack() as stack:
        stack.enter_context(waiting.at("compiling it"))
        if options.compiler == "inductor":
            modules = []
            stack.enter_context(generated_modules_noted(modules, graph_digest(pristine)))
        candidate, remark = _compiled(compiler, gm, pristine, example_inputs)
    compiling = schedule.clock() - before_compiling
    log.info("%s: %d nodes, compiled in %.2g s, to be checked", info.name, info.nodes, compiling)
    left = _left_by_compiler(settings)
    local = None if info.collectives is None else LocalRegion.of(pristine, source.traced)
    kernels = operators = None
    if not isinstance(local, str):
        alone, without_exchanges = _alone(source, candidate, local)
        kernels = None if modules is None else _kernels(alone, without_exchanges, modules if local is None else ())
        if computes_in_low_precision(pristine) and not isinstance(candidate, NotCompiled):
            check = _operator_check(alone, without_exchanges, kernels)
            operators = OperatorStep(check) if local is None else OperatorStep(check, local.call)
    entangled = local if isinstance(local, str) else ""
    variants = _variants(source, candidate, operators, entangled, compiling)
    investigate = _investigation(source, local, kernels, investigator) if investigator and options.localize else None
    reporter = RegionReporter(info, options, silent=silent, investigate=investigate)
    checks = Checks(
        info,
        variants,
        options,
        schedule_of(
            options,
            compiling=compiling,
            building=schedule.clock() - began,
            nodes=info.nodes,
            low_precision=variants.low_precision,
        ),
        reporter,
        MachineLimits(lambda: _bytes_of(pristine), options.compiler == "inductor", can_compile),
        RegionHealth(info.name, reporter.note, Health() if silent else HEALTH),
        thorough,
        DrawInputs(compiler, pristine, source.traced) or None,
    )
    region = CheckedRegion(checks, remark=remark, left_compiling=left)
    if spread is not None:
        return lambda *args: region(*spread(args), *held)
    return (lambda *args: region(*args, *held)) if held else region


@dataclass(frozen=True, slots=True)
class _Source:
    """The source from which a region is compiled once more, outside of the user's program.

    Attributes:
        graph: A pristine copy of the Dynamo graph.
        traced: The fake values of its placeholders as Dynamo traced them.
        mode: What the user passed as ``torch.compile(mode=...)``.
        thorough: Whether to look again at what earlier runs found right.
    """

    compiler: Compiler
    graph: fx.GraphModule
    traced: Sequence[Any]
    waiting: Waiting
    options: CheckOptions
    mode: str | None
    thorough: bool

    def compiled_by(self, compiler: Compiler, words: str) -> CompiledOnce:
        """The region compiled by a compiler, when it is first needed."""

        def compile_for(inputs: Sequence[Any]) -> Callable[..., Any]:
            return compile_again(compiler, self.graph, self.traced, inputs)

        return CompiledOnce(self.waiting.compiling(words, compile_for))


def _traced(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [node.meta.get("example_value", value) for node, value in zip(placeholders, example_inputs, strict=True)]


def _variants(
    source: _Source, candidate: Callable[..., Any], operators: OperatorStep | None, entangled: str, compiling: float
) -> Variants:
    """The region in eager, compiled, and in what control runs need."""
    compiler, pristine, traced = source.compiler, source.graph, source.traced
    options, mode = source.options, source.mode
    builds: dict[Build, CompiledOnce] = {
        Build.TWIN: CompiledOnce(
            source.waiting.compiling("in float64", lambda inputs64: compile_twin(compiler, pristine, traced, inputs64))
        ),
        Build.RECOMPILED: source.compiled_by(compiler, "once more"),
    }
    own_random = None
    if options.compiler == "inductor":
        unfused = inductor_with(options, mode, emulate_precision_casts=True)  # it rounds wherever eager does
        builds[Build.UNFUSED] = source.compiled_by(unfused, "without fusion")
        if "fallback_random" not in options.compiler_options and draws_numbers(pristine):
            users = inductor_with(options, mode, fallback_random=False)  # as the program has it without a check
            own_random = source.compiled_by(users, "with its own random numbers")
    return Variants(
        reference=eager_graph(pristine).forward,  # the module's own call prints a traceback when the program raises
        candidate=candidate,
        compilers=builds,
        make_own_random=own_random,
        default_dtype=needs_default_dtype(pristine),
        low_precision=computes_in_low_precision(pristine),
        operators=operators,
        compiling_twin=cpp_kernels_together if options.compiler == "inductor" else nullcontext,
        entangled=entangled,
        compiling=compiling,
        waiting=source.waiting,
    )


def _operator_check(source: _Source, candidate: Callable[..., Any], kernels: KernelCheck | None) -> OperatorCheck:
    return OperatorCheck(
        source.compiler,
        source.graph,
        source.traced,
        gradients=source.options.gradients,
        candidate=candidate,
        kernels=kernels,
        front=None if kernels is None else inductor_front_compiler(source.options, source.mode),
        remembers=not source.thorough,
    )


def _kernels(source: _Source, candidate: Callable[..., Any], modules: Sequence[GeneratedModule]) -> KernelCheck:
    lower = source.compiled_by(source.compiler, "once more, past the caches of graphs")
    return KernelCheck(candidate, graph_digest(source.graph), modules, lower)


def _alone(
    source: _Source, candidate: Callable[..., Any], local: LocalRegion | None
) -> tuple[_Source, Callable[..., Any]]:
    """A region and its compiled form; without exchanges with other ranks, if it has some."""
    if local is None:
        return source, candidate
    source = replace(source, graph=local.graph, traced=local.traced)
    compiled = source.compiled_by(source.compiler, "without its collectives")
    return source, lambda *args: compiled(args)(*args)


def _investigation(
    source: _Source,
    local: LocalRegion | str | None,
    kernels: KernelCheck | None,
    investigator: Investigator,
) -> Investigate:
    """Hand an investigator each failed call together with the region's graph and options."""

    def investigate(
        call: Call, cotangents: Cotangents | None, findings: Sequence[Finding], keep: Keep
    ) -> Sequence[Finding]:
        if isinstance(local, str):
            return not_localized(findings, f"no: the region exchanges tensors with other ranks, and {local}")
        failure = Failure(
            source.graph,
            tuple(source.traced),
            call,
            cotangents,
            source.options,
            source.mode,
            keep,
            kernels,
            time_to_search(),
        )
        return investigator(failure, findings) if local is None else local.investigate(failure, findings, investigator)

    return investigate


def _compiled(
    compiler: Compiler, gm: fx.GraphModule, pristine: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[Callable[..., Any], str]:
    """Compile the candidate. An exception of the compiler becomes a finding at the first call.

    Returns:
        The candidate, which raises if it cannot be compiled; and a remark about it.
    """
    remarks = [""]
    fresh = [gm]

    def compile_once() -> Callable[..., Any]:
        return compile_candidate(compiler, fresh.pop() if fresh else copy_graph(pristine), example_inputs)

    try:
        compiled = compile_with_any_cache(compile_once, remarks.append)
    except dynamo_control_flow():
        raise
    except Exception as error:
        compiled = NotCompiled(error)
    return compiled, remarks[-1]


def _bytes_of(gm: fx.GraphModule) -> int:
    """How much memory all tensors of a Dynamo graph need, if none is freed."""
    total = 0
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, FakeTensor):
                shape: Sequence[Any] = part.shape
                sizes = [size_hint(size) if isinstance(size, torch.SymInt) else size for size in shape]
                total += math.prod(int(size or 1) for size in sizes) * part.dtype.itemsize
    return total


def _left_by_compiler(before: ProcessState) -> list[Finding]:
    """Findings about settings that compiling changed, which are set back."""
    after = ProcessState.capture()
    changed = before.changed(after)
    before.restore(changed)
    names = [name for name in changed if name not in SET_BACK_BY_DYNAMO]
    return settings_changed(names, before=before, expected=before, actual=after, during=", while it is compiled")
