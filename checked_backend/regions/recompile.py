"""Compile a region once more, outside of Dynamo: under other conditions than the user's, and only if needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import TracingContext, compiling, tracing
from checked_backend._torch.fake_tensors import FakeTensor, detect_fake_mode, fakes_of_fixed_sizes
from checked_backend._torch.operators import HigherOrderOperator
from checked_backend.regions.compile import Compiler, copy_graph
from checked_backend.regions.unsupported import compile_with_any_cache

__all__ = ["CompiledOnce", "compile_again"]

Region = Callable[..., Any]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, int, float, bool)


def compile_again(
    compiler: Compiler,
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: Sequence[Any],
    change: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> Region:
    """Compile a copy of a region's graph.

    Args:
        graph: The graph, which stays as it is.
        example_inputs: The fake values of the region's placeholders as Dynamo traced them. With symbolic sizes the
            graph is compiled for the same symbols.
        inputs: Real inputs, which a graph without symbolic sizes is compiled for.

    Raises:
        Exception: Whatever the compiler raises, also with an empty cache if its own one may be what failed.
    """
    return compile_with_any_cache(lambda: _compiled(compiler, copy_graph(graph), example_inputs, inputs, change))


def _compiled(
    compiler: Compiler,
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: Sequence[Any],
    change: Callable[[torch.dtype], torch.dtype],
) -> Region:
    fake_mode = detect_fake_mode(example_inputs)
    symbolic = fake_mode is not None and (
        any(isinstance(value, torch.SymInt) for value in example_inputs)
        # a loop has shapes of its own to solve for, whatever its inputs are
        or any(isinstance(node.target, HigherOrderOperator) for node in graph.graph.nodes)
    )
    if not symbolic or fake_mode is None:
        if not all(type(value) in _PLAIN for value in inputs):
            with compiling(), tracing(None):
                return compiler(graph, list(inputs))
        # for real tensors torch's caches of graphs have no entry: these have no ShapeEnv
        fake_mode, fixed = fakes_of_fixed_sizes(inputs)
        with compiling(), tracing(TracingContext(fake_mode)):
            return compiler(graph, fixed)
    with compiling(), tracing(TracingContext(fake_mode)):
        with fake_mode:
            fakes = [
                torch.empty_strided(
                    value.size(), value.stride(), dtype=change(value.dtype), device=value.device
                ).requires_grad_(value.requires_grad)
                if isinstance(value, FakeTensor)
                else value
                for value in example_inputs
            ]
        for node, fake in zip((node for node in graph.graph.nodes if node.op == "placeholder"), fakes, strict=True):
            node.meta["example_value"] = fake
        return compiler(graph, fakes)


class CompiledOnce:
    """Compiles a region for given inputs, and returns the same result for inputs of the same kind.

    A region's forward and backward passes are compared separately, and both need its float64 twin.

    Args:
        compile_for: Compiles it for real inputs.
    """

    def __init__(self, compile_for: Callable[[Sequence[Any]], Region]) -> None:
        self._compile_for = compile_for
        self._lock = threading.Lock()
        self._last: tuple[Hashable, Region] | None = None

    def is_ready(self, inputs: Sequence[Any]) -> bool:
        """Whether it is compiled for inputs of this kind."""
        return self._last is not None and self._last[0] == _key(inputs)

    def __call__(self, inputs: Sequence[Any]) -> Region:
        """The compiled region."""
        key = _key(inputs)
        with self._lock:
            if self._last is None or self._last[0] != key:
                self._last = key, self._compile_for(inputs)
            return self._last[1]


def _key(inputs: Sequence[Any]) -> Hashable:
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *(_kind(value) for value in inputs))


def _kind(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return type(value), value if isinstance(value, (bool, int, float, str)) else id(value)
    strides = tuple(value.stride()) if value.layout is torch.strided and not value.is_nested else ()
    return type(value), value.dtype, value.device, value.layout, tuple(value.shape), strides, value.requires_grad
