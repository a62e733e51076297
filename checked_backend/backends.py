"""The Dynamo backends: plain functions that parse options and delegate.

``torch.compile(model, backend="nop", options={...})`` finds them through the entry points in group
``torch_dynamo_backends``; as objects they go straight into ``torch.compile(model, backend=nop)``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from checked_backend.random_state import random_untouched

# torch imports this module when a program names a backend, and what is imported here may draw random numbers.
with random_untouched():
    from torch import fx

    from checked_backend import aot_compilers
    from checked_backend._torch.traces import register_logs
    from checked_backend.aot.backend import JointObserver, compile_with
    from checked_backend.aot.boxed import AotCompiler, BoxedCallable, boxed
    from checked_backend.diagnose.investigate import investigate
    from checked_backend.dump import RegionDump
    from checked_backend.errors import CheckedBackendError, OptionError
    from checked_backend.graphs.graph_name import graph_name
    from checked_backend.metadata.dropped_calls import Site, dropped_calls, operators_in
    from checked_backend.metadata.interpreter import MetadataInterpreter
    from checked_backend.metadata.reporter import MetadataReporter
    from checked_backend.metadata.run import History
    from checked_backend.metadata.steps import CheckSettings
    from checked_backend.options import AotOptions, BackendOptions, CheckOptions, InterpreterOptions, parse_options
    from checked_backend.regions.build import build_region
    from checked_backend.regions.graph_info import GraphInfo

register_logs("checked_backend")  # TORCH_LOGS="+checked_backend", as for parts of torch

_P = ParamSpec("_P")


def _typed_errors(backend: Callable[_P, Callable[..., Any]]) -> Callable[_P, Callable[..., Any]]:
    """Let this package's errors reach the user as themselves, at the region's first call.

    Dynamo wraps what a backend raises while it compiles in ``BackendCompilerFailed``, and with
    ``torch._dynamo.config.suppress_errors`` runs eager instead, in silence.
    """

    @functools.wraps(backend)
    def compile_or_defer(*args: _P.args, **kwargs: _P.kwargs) -> Callable[..., Any]:
        try:
            with random_untouched():
                return backend(*args, **kwargs)
        except CheckedBackendError as error:
            return functools.partial(_raise, error)

    return compile_or_defer


def _raise(error: CheckedBackendError, *_inputs: Any) -> NoReturn:
    raise error


@_typed_errors
def nop(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """AOT autograd around graphs that run as they are.

    Args:
        options: ``decompositions``, ``partition``, ``dump``, ``report_dir``.

    Raises:
        OptionError: An unknown option, a bad value, or a mode.
    """
    _refuse_mode("nop", mode)
    parsed = parse_options(AotOptions, "nop", options)
    return _compile(gm, example_inputs, parsed, lambda _kind: aot_compilers.nop, parsed.dump)


@_typed_errors
def debug_interpreter(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """AOT autograd around graphs that compare every node's output with the recorded metadata.

    Compared are number and structure, dtype, shape, significant strides, storage offset, device, layout, lazy bits,
    symbolic values, and, against the operator's schema, shared memory and undeclared writes. The coverage names each
    call of a custom operator that AOT autograd drops, because nothing takes its results.

    Args:
        options: ``on_divergence``, ``layout``, ``checks``, ``graphs``, ``ignore``, ``ignore_ops``, ``nonfinite``, and
            those of `nop`.

    Returns:
        A callable with the signature of ``gm``; it raises `MetadataError` on a mismatch.

    Raises:
        OptionError: An unknown option, a bad value, or a mode.
    """
    _refuse_mode("debug_interpreter", mode)
    parsed = parse_options(InterpreterOptions, "debug_interpreter", options)
    reporter = MetadataReporter(parsed, GraphInfo.of(gm).region)

    history = History()
    compiled_calls: Counter[Site] = Counter()
    immediate = parsed.on_divergence == "raise"
    settings = CheckSettings(parsed.checks, parsed.ignore_ops, parsed.ignore, parsed.nonfinite, immediate)

    def compiler_for(kind: str) -> AotCompiler:
        def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], /) -> BoxedCallable:
            if kind == "inference":
                compiled_calls.update(operators_in(graph))
            if kind not in parsed.graphs:
                return _after(aot_compilers.nop(graph, inputs), lambda: reporter.left_out(kind))
            interpreter = MetadataInterpreter(graph, kind, reporter.report, settings, history)
            counts = (interpreter.checked_nodes, interpreter.asserts, interpreter.unchecked)
            return _after(interpreter, lambda: reporter.ran(kind, *counts))

        return compile_graph

    compiled = _compile(
        gm,
        example_inputs,
        parsed,
        compiler_for,
        parsed.dump,
        on_joint=lambda joint, _inputs: compiled_calls.update(operators_in(joint)),
    )
    dropped = [*dropped_calls(gm, compiled_calls, settings)]

    def run(*args: Any) -> Any:
        for skip in dropped:
            reporter.skip(skip)
        return compiled(*args)

    return run if dropped else compiled


def _after(run: BoxedCallable, then: Callable[[], None]) -> BoxedCallable:
    """Do something after each run of a graph."""

    def both(args: list[Any]) -> Any:
        result = run(args)
        then()
        return result

    return boxed(both)


@_typed_errors
def graph_dumper(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Write each graph to disk, then run it as it is.

    A graph goes to the folder ``DIR/NAME/NAME_{dynamo|joint|forward|backward|inference}_{INDEX}``; DIR is the option
    ``dump``, else ``report_dir``; NAME is the outermost module's class or the function. See `load_dump`.

    Args:
        options: ``dump``, ``dump_values``, ``report_dir``, and those of `nop`.

    Raises:
        OptionError: An unknown option, a bad value, or a mode.
        DumpError: The folder cannot be made. (A disk that fills up later is a warning.)
    """
    _refuse_mode("graph_dumper", mode)
    parsed = parse_options(AotOptions, "graph_dumper", options)
    return _compile(gm, example_inputs, parsed, lambda _kind: aot_compilers.nop, parsed.dump or parsed.report_dir)


@_typed_errors
def numcheck(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile each region with the candidate compiler and check every call of it against eager.

    Args:
        options: See ``docs/options.md``: ``compiler``, ``compiler_options``, ``on_divergence``, ``gradients``, ...
        mode: Inductor's mode, for example ``"max-autotune"``.

    Returns:
        A callable with the signature of ``gm``; it returns what the candidate returns.

    Raises:
        OptionError: An unknown option, a bad value, or an unknown compiler.
    """
    parsed = parse_options(CheckOptions, "numcheck", options)
    dump = _dump_of(gm, parsed, parsed.dump)
    with nullcontext() if dump is None else dump.compiling():
        return _watched(dump, build_region(gm, example_inputs, parsed, mode, investigator=investigate))


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: AotOptions,
    compiler_for: Callable[[str], AotCompiler],
    dump_to: Path | None,
    on_joint: JointObserver | None = None,
) -> Callable[..., Any]:
    dump = _dump_of(gm, options, dump_to)

    def observe(joint: fx.GraphModule, inputs: Sequence[Any]) -> None:
        if on_joint is not None:
            on_joint(joint, inputs)
        if dump is not None:
            dump.write("joint", joint)

    def compiler(kind: str) -> AotCompiler:
        inner = compiler_for(kind)

        def run(graph: fx.GraphModule, inputs: Sequence[Any], /) -> BoxedCallable:
            if dump is None:
                return inner(graph, inputs)
            dump.write(kind, graph)
            return boxed(dump.watched(kind, inner(graph, inputs)))

        return run

    with nullcontext() if dump is None else dump.compiling():
        compiled = compile_with(
            gm,
            example_inputs,
            options=options,
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            on_joint=None if dump is None and on_joint is None else observe,
        )
    return _watched(dump, compiled)


def _dump_of(gm: fx.GraphModule, options: BackendOptions, dump_to: Path | None) -> RegionDump | None:
    """Dump a Dynamo graph, if dumping is on. Before it is compiled: a compiler may change the graph."""
    if dump_to is None:
        return None
    dump = RegionDump.claim(dump_to, graph_name(gm), values=options.dump_values)
    if dump is not None:
        dump.write("dynamo", gm)
    return dump


def _watched(dump: RegionDump | None, compiled: Callable[..., Any]) -> Callable[..., Any]:
    if dump is None:
        return compiled

    def run(*args: Any) -> Any:
        dump.observe("dynamo", args)
        return compiled(*args)

    return run


def _refuse_mode(backend: str, mode: str | None) -> None:
    if mode is not None:
        raise OptionError(
            f"backend {backend!r} takes no mode, got mode={mode!r}: modes are Inductor's. Drop mode=; to check "
            "Inductor in that mode use backend='numcheck'."
        )
