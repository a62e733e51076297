"""Make a checked region out of the graph that Dynamo hands to the backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import dynamo_control_flow, dynamo_disable
from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.symbols import size_hint
from checked_backend.findings import Finding
from checked_backend.graphs.collectives import collective_lines, communicates
from checked_backend.graphs.lift import lift_written_attributes
from checked_backend.graphs.list_inputs import spread_lists
from checked_backend.options import CheckOptions
from checked_backend.regions.call import Call
from checked_backend.regions.candidate import NotCompiled
from checked_backend.regions.compile import (
    Compiler,
    compile_candidate,
    copy_graph,
    eager_graph,
    keep_accumulating,
    own_random_compiler,
    resolve_compiler,
    unfused_compiler,
)
from checked_backend.regions.control_runs import Variants
from checked_backend.regions.draw_inputs import DrawInputs
from checked_backend.regions.execution import Cotangents
from checked_backend.regions.failure import Failure, Investigator, Keep
from checked_backend.regions.fixed_choices import FixedChoices
from checked_backend.regions.float64_twin import compile_twin, computes_in_low_precision, needs_default_dtype
from checked_backend.regions.fresh_cache import FreshCache
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.operator_check.check import OperatorCheck
from checked_backend.regions.operator_check.step import OperatorStep
from checked_backend.regions.process_state import FILTERS, ProcessState, outlast_compiling, settings_changed
from checked_backend.regions.recompile import CompiledOnce, compile_again
from checked_backend.regions.region import CheckedRegion
from checked_backend.regions.schedule import clock_of_run, schedule_of
from checked_backend.regions.unsupported import cache_remark, may_be_the_cache

__all__ = ["build_region"]


def build_region(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: CheckOptions,
    mode: str | None,
    *,
    thorough: bool = False,
    silent: bool = False,
    info: GraphInfo | None = None,
    investigator: Investigator | None = None,
) -> Callable[..., Any]:
    """Compile a region with the candidate compiler and wrap it in its check.

    A compiler that raises does not raise here: Dynamo would wrap the exception, and with
    ``torch._dynamo.config.suppress_errors`` run eager in silence. The region's first call reports it.

    Args:
        gm: The Dynamo graph; or an AOT graph, for a compiler of such graphs.
        example_inputs: As Dynamo gave them.
        options: The user's options.
        mode: What the user passed as ``torch.compile(mode=...)``.
        thorough: Compile the float64 twin for every difference, not only for suspicious ones and low precision.
        silent: Write no report to disk.
        info: Names, if they are not those that the graph has from Dynamo.
        investigator: Finds out where a failure comes from, if the options say ``localize``.

    Raises:
        OptionError: The compiler is unknown.
    """
    clock = clock_of_run()
    began = clock()
    compiler = resolve_compiler(options, mode)
    gm, example_inputs, spread = spread_lists(gm, example_inputs)
    gm, example_inputs, held = lift_written_attributes(gm, example_inputs)
    info = info or GraphInfo.of(gm)
    if info.collectives is None and communicates(gm):
        info = replace(info, collectives=collective_lines(gm))
    pristine = copy_graph(gm)
    keep_accumulating(pristine)
    traced = [
        node.meta.get("example_value", value)
        for node, value in zip(
            (node for node in gm.graph.nodes if node.op == "placeholder"), example_inputs, strict=True
        )
    ]
    candidate: Callable[..., Any]
    remark = ""
    settings = ProcessState.capture()
    before_compiling = clock()
    try:
        candidate = compile_candidate(compiler, gm, example_inputs)
    except dynamo_control_flow():
        raise
    except Exception as error:  # this becomes a finding at the first call
        candidate, remark = _compiled_anew(compiler, pristine, example_inputs, error)
    compiling = clock() - before_compiling
    left = _left_by_compiler(settings)

    unfused = unfused_compiler(options, mode)
    own_random = own_random_compiler(options, pristine, mode)

    def investigate(
        call: Call, cotangents: Cotangents | None, findings: Sequence[Finding], keep: Keep
    ) -> Sequence[Finding]:
        failure = Failure(
            pristine, tuple(traced), call.inputs, call.ambient, call.rng, call.subjects, cotangents, options, mode, keep
        )
        return findings if investigator is None else investigator(failure, findings)

    def recompile(inputs: Sequence[Any]) -> Callable[..., Any]:
        cache = FreshCache()
        with cache.used():
            compiled = compile_again(compiler, copy_graph(pristine), traced, inputs)
        return cache.kept_by(dynamo_disable(compiled))

    # a graph that is compiled outside of Dynamo can add no guards for sizes
    symbolic = any(isinstance(value, torch.SymInt) for value in traced)

    def compile_unfused(inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_again(unfused or compiler, copy_graph(pristine), traced, inputs)

    def compile_anew(inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_again(compiler, copy_graph(pristine), traced, inputs)

    def compile_own_random(inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_again(own_random or compiler, copy_graph(pristine), traced, inputs)

    low_precision = computes_in_low_precision(pristine)
    operators = None
    # the check of single operators knows nothing about exchanges with other ranks
    if low_precision and info.collectives is None and not isinstance(candidate, NotCompiled):
        operators = OperatorStep(
            OperatorCheck(compiler, pristine, traced, gradients=options.gradients, candidate=candidate)
        )
    # reference: calling the module would print a traceback when the user's program raises
    variants = Variants(
        reference=eager_graph(pristine).forward,
        candidate=candidate,
        make_twin=CompiledOnce(lambda inputs64: compile_twin(compiler, pristine, traced, inputs64)),
        given=FixedChoices(compiler, pristine, traced),
        make_unfused=None if unfused is None else CompiledOnce(compile_unfused),
        make_again=CompiledOnce(compile_anew),
        make_own_random=None if own_random is None else CompiledOnce(compile_own_random),
        default_dtype=needs_default_dtype(pristine),
        low_precision=low_precision,
        operators=operators,
    )
    building = clock() - began - compiling
    region = CheckedRegion(
        info,
        variants,
        options,
        schedule_of(options, compiling=compiling, building=building, nodes=info.nodes, low_precision=low_precision),
        thorough=thorough,
        silent=silent,
        remark=remark,
        needed=lambda: _bytes_of(pristine),
        recompile=None if symbolic else recompile,
        # looking for the operator runs parts of the region in other processes, which are no ranks
        investigate=investigate if options.localize and investigator is not None and info.collectives is None else None,
        draws=DrawInputs(compiler, pristine, traced) or None,
        left_compiling=left,
    )
    if spread is not None:
        return lambda *args: region(*spread(args), *held)
    return (lambda *args: region(*args, *held)) if held else region


def _compiled_anew(
    compiler: Compiler, pristine: fx.GraphModule, example_inputs: Sequence[Any], error: Exception
) -> tuple[Callable[..., Any], str]:
    """Compile a region with an empty cache, if the compiler's own one may be what failed.

    Returns:
        The candidate, which raises if it cannot be compiled; and a remark about it.
    """
    if not may_be_the_cache(error):
        return NotCompiled(error), ""
    try:
        cache = FreshCache()
        with cache.used():
            compiled = compile_candidate(compiler, copy_graph(pristine), example_inputs)
    except dynamo_control_flow():
        raise
    except Exception as second:
        return NotCompiled(second if isinstance(second, type(error)) else error), ""
    return cache.kept_by(compiled), cache_remark(error)


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
    before.restore([name for name in changed if name != FILTERS])  # imported modules may have changed the filters
    names = outlast_compiling(changed)
    return settings_changed(names, before=before, expected=before, actual=after, during="while it is compiled")
