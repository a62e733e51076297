"""A graph with inputs on which a compiler may be wrong, or a failed call of a region: tried once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import TracingContext, as_from_dynamo, compiling, tracing
from checked_backend._torch.fake_tensors import detect_fake_mode
from checked_backend.findings import Finding
from checked_backend.graphs.mode_blocks import with_mode_blocks
from checked_backend.options import CheckOptions
from checked_backend.regions.build import build_region
from checked_backend.regions.compile import Compiler, compile_candidate, copy_graph
from checked_backend.regions.failure import Failure
from checked_backend.regions.inputs import copy_values
from checked_backend.report.session import Session, collect


@dataclass(frozen=True, slots=True)
class GraphCase:
    """A graph, its inputs, and the compiler that is tried on it. Localizing narrows it down, and reducing shrinks it.

    The graph runs without gradients, unless these are requested: a backward pass is a graph of its own.

    Attributes:
        graph: Any FX graph that returns a flat tuple.
        inputs: One value for each placeholder: tensors, numbers. They are never changed.
        options: They name the candidate compiler and its options.
        cotangents: The gradient that arrives at each output in a backward pass; None to run no backward pass.
        wanted: Positions of the inputs whose gradients are then compared.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    options: CheckOptions
    dynamic: bool = False
    cotangents: tuple[torch.Tensor | None, ...] | None = None
    wanted: frozenset[int] = frozenset()

    def findings(self) -> tuple[Finding, ...]:
        """Compile and run the graph, and run it in eager.

        Subjects are ``output[0]``, ...: the position in the graph's tuple. A compiler or a compiled program that raises
        is a finding too.

        Raises:
            Exception: Whatever the graph raises in eager.
        """
        backend = partial(_region, options=_recording(self.options, ignore=()))
        graph = with_mode_blocks(copy_graph(self.graph))
        with torch.set_grad_enabled(self.cotangents is not None), collect(alone=True) as session:
            compiled = torch.compile(graph, backend=backend, dynamic=self.dynamic, fullgraph=True)
            inputs = copy_values(self.inputs)
            for place in self.wanted if self.cotangents is not None else ():
                inputs[place].requires_grad_()
            self._differentiate(compiled(*inputs), session)
        return session.report.findings

    def _differentiate(self, results: Sequence[Any], session: Session) -> None:
        pairs = [
            (result, cotangent.clone())
            for result, cotangent in zip(results, self.cotangents or (), strict=False)
            if cotangent is not None and isinstance(result, torch.Tensor) and result.requires_grad
        ]
        if not pairs:
            return
        try:
            torch.autograd.backward([result for result, _ in pairs], [cotangent for _, cotangent in pairs])
        except Exception:
            if not session.report.findings:  # else it is what the candidate raised, which its check reported
                raise


def _recording(options: CheckOptions, **more: Any) -> CheckOptions:
    """The options of a check that only says what it finds."""
    quiet = {"on_divergence": "record", "layout": "raise", "localize": False}
    return options.unsampled().model_copy(update={**quiet, **more})


def _region(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: CheckOptions) -> Any:
    # a failure was found before: this machine compiles
    return build_region(gm, example_inputs, options, None, silent=True, can_compile=True)


def rerun_failure(failure: Failure, compiler: Compiler, *, raises: bool = False) -> tuple[Finding, ...]:
    """Run a failed call again, with its backward pass if that failed, and check it with another compiler.

    Args:
        raises: Whether the region raises in eager. If not, it raises here what it raises there.
    """
    options = _recording(failure.options, compiler=compiler, compiler_options={})
    with failure.call.undisturbed(), collect(alone=True) as session:
        with _as_compiled_first(failure):
            graph = copy_graph(failure.graph)
            region = build_region(graph, failure.example_inputs, options, None, silent=True, can_compile=True)
        try:
            failure.call.run(region, cotangents=failure.cotangents)
        except Exception:
            # else it is what the candidate raised in its backward pass, which its check reported
            if not raises and (failure.cotangents is None or not session.report.findings):
                raise
    return session.report.findings


def run_with(failure: Failure, compiler: Compiler) -> None:
    """Run a failed call again, with its backward pass if that failed, with another compiler; nothing is compared.

    Raises:
        Exception: Whatever the compiler or the compiled region raises.
    """
    with failure.call.undisturbed():
        with _as_compiled_first(failure):
            graph = copy_graph(failure.graph)
            as_from_dynamo(graph)
            region = compile_candidate(compiler, graph, failure.example_inputs)
        failure.call.run(region, cotangents=failure.cotangents)


@contextmanager
def _as_compiled_first(failure: Failure) -> Iterator[None]:
    fake_mode = detect_fake_mode(failure.example_inputs)
    context = None if fake_mode is None else TracingContext(fake_mode)
    with compiling(), failure.call.ambient.entered(), tracing(context):
        yield


def wrong_like(before: Sequence[Finding], findings: Iterable[Finding]) -> list[Finding]:
    """The findings that fail. Where values were wrong before, a different layout is none of them."""
    layout = all(finding.is_layout for finding in before if finding.kind.fails)
    return [finding for finding in findings if finding.kind.fails and (layout or not finding.is_layout)]
