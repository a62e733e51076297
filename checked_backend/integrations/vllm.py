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
        for name in {"compile", "load"} & vars(kind).keys():
            setattr(kind, name, _checking(vars(kind)[name], numbers, loads=name == "load"))


def _kinds(interface: type[Any]) -> Iterator[type[Any]]:
    for kind in interface.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _checking(made: Callable[..., Any], numbers: Iterator[int], *, loads: bool) -> Callable[..., Any]:
    """``compile`` of a ``CompilerInterface``, which returns a handle with what it compiled, or ``load``, given one."""

    @functools.wraps(made)
    def checked(self: Any, *args: Any, **more: Any) -> Any:
        handle, (graph, example_inputs, *rest) = args[:loads], args[loads:]
        handles: list[Any] = []

        def compiled(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            found = made(self, *handle, gm, list(inputs), *rest, **more)
            run: Callable[..., Any] | None = found if loads else found[0]
            handles.append(None if loads else found[1])
            if run is None:
                raise RuntimeError("vLLM's compiler returned nothing")
            return run

        region = _checked(graph, example_inputs, compiled, next(numbers))
        return region if loads else (region, (handles or [None])[0])

    return checked


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
