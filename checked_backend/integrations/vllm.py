"""vLLM: a plugin that checks each graph of its piecewise compilation against eager.

vLLM loads `register` by its entry point group ``vllm.general_plugins``. Without ``CHECKED_BACKEND=1`` it does nothing.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import lookup_backend
from checked_backend.autostart import ON
from checked_backend.options import CheckOptions, environment_variable, parse_options
from checked_backend.regions.build import build_region
from checked_backend.regions.graph_info import GraphInfo

_CHECKED = "_checked_by_checked_backend"

_NO_CACHE = "VLLM_DISABLE_COMPILE_CACHE"
"""With it vLLM compiles at each start: what it takes from its cache of whole models goes through none of its compilers,
and what it would save there is a compiled piece without a check."""


def register() -> None:
    """Check what vLLM's compilers compile or load from now on, if the environment asks for it."""
    if os.environ.get(ON, "").lower() not in ("1", "true", "yes", "on"):
        return
    os.environ[_NO_CACHE] = "1"
    interface = importlib.import_module("vllm.compilation.compiler_interface")
    numbers = itertools.count(1)
    for kind in _kinds(interface.CompilerInterface):
        if _CHECKED in vars(kind):  # vLLM may load a plugin more than once in a process
            continue
        setattr(kind, _CHECKED, True)
        if "compile" in vars(kind):
            kind.compile = _compile_checked(kind.compile, numbers)
        if "load" in vars(kind):
            kind.load = _load_checked(kind.load, numbers)


def _kinds(interface: type[Any]) -> Iterator[type[Any]]:
    for kind in interface.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _compile_checked(compile_graph: Callable[..., Any], numbers: Iterator[int]) -> Callable[..., Any]:
    """``CompilerInterface.compile``, which returns what it compiled, and a handle to load it with another time."""

    @functools.wraps(compile_graph)
    def compile_checked(
        self: Any, graph: fx.GraphModule, example_inputs: Sequence[Any], *rest: Any, **more: Any
    ) -> tuple[Callable[..., Any], Any]:
        handles: list[Any] = []

        def compiled(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            function, handle = compile_graph(self, gm, list(inputs), *rest, **more)
            handles.append(handle)
            if function is None:
                raise RuntimeError("vLLM's compiler returned nothing")
            run: Callable[..., Any] = function
            return run

        return _checked(graph, example_inputs, compiled, next(numbers)), (handles or [None])[0]

    return compile_checked


def _load_checked(load: Callable[..., Any], numbers: Iterator[int]) -> Callable[..., Any]:
    """``CompilerInterface.load``, which returns what was compiled before."""

    @functools.wraps(load)
    def load_checked(
        self: Any, handle: Any, graph: fx.GraphModule, example_inputs: Sequence[Any], *rest: Any, **more: Any
    ) -> Any:
        def loaded(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            run: Callable[..., Any] = load(self, handle, gm, list(inputs), *rest, **more)
            return run

        return _checked(graph, example_inputs, loaded, next(numbers))

    return load_checked


def _checked(
    graph: fx.GraphModule, example_inputs: Sequence[Any], made: Callable[..., Callable[..., Any]], number: int
) -> Callable[..., Any]:
    """A piece with its check."""
    first = itertools.count()

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # vLLM's compilers keep caches by piece; what the check compiles besides is none of theirs
        if next(first):
            plain: Callable[..., Any] = lookup_backend("inductor")(gm, list(inputs))
            return plain
        piece = made(gm if returns_tuple else graph, inputs)
        return piece if returns_tuple else lambda *args: (piece(*args),)

    (output,) = graph.graph.find_nodes(op="output")
    returns_tuple = isinstance(output.args[0], (tuple, list))
    given: dict[str, Any] = {"compiler": compiler, "gradients": False, "localize": False}
    if environment_variable("on_divergence") not in os.environ:
        given["on_divergence"] = "warn"
    options = parse_options(CheckOptions, "numcheck", given)
    traced = graph if returns_tuple else _returning_tuple(graph)
    info = replace(GraphInfo.of(traced), name=f"vLLM's piece {number}")
    with torch.no_grad():
        region = build_region(traced, example_inputs, options, None, info=info)

    def run(*args: Any) -> Any:
        returned = region(*args)
        return returned if returns_tuple else returned[0]

    return run


def _returning_tuple(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph whose one result is in a tuple, as Dynamo's graphs have it."""
    copied = fx.GraphModule(graph, fx.Graph())
    copied.graph.output((copied.graph.graph_copy(graph.graph, {}),))
    copied.recompile()
    return copied
