"""The boxed calling convention: one list of arguments, emptied by the callee so that inputs can be freed early."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx
from torch.fx.graph import CodeGen

BoxedCallable = Callable[[list[Any]], Any]


class AotCompiler(Protocol):
    """An AOT-level compiler: takes one ATen graph and example inputs, returns a boxed callable."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], /) -> BoxedCallable:
        """Compile ``gm``."""


class _BoxedCodeGen(CodeGen):
    """Generates ``forward(self, args_list)``.

    Calling ``forward(*args)`` would keep every input alive until the graph has finished: the interpreter holds the
    argument tuple. A list that the callee empties has no such owner.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_layout: Any) -> str:
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        head = f"def {self._func_name}(self, args_list){maybe_return_annotation}:"
        unpack = f"\n    {', '.join(names)}, = args_list" if names else ""
        return f"{head}{unpack}\n    args_list.clear()"


def boxed_module(gm: fx.GraphModule) -> BoxedCallable:
    """A boxed callable that runs ``gm``'s generated code. ``gm`` itself is not changed.

    Each input is freed as soon as the graph no longer needs it.
    """
    graph = copy.deepcopy(gm.graph)
    graph.set_codegen(_BoxedCodeGen())
    # forward, not __call__: fx wraps __call__ in a printer of generated code that drops the traceback
    forward = fx.GraphModule(gm, graph).forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    return boxed(run)


def boxed(function: BoxedCallable) -> BoxedCallable:
    """Mark a function of one list of arguments as boxed, so that AOT autograd calls it that way."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
