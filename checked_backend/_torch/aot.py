"""AOT autograd: how it traces and partitions, and the backward graphs that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, aot_module
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from checked_backend._torch.dynamo import TracingContext, dynamo_disable

__all__ = [
    "aot_autograd",
    "aot_function",
    "aot_module",
    "catch_backward_error",
    "default_partition",
    "min_cut_rematerialization_partition",
    "no_donated_buffers",
]


def catch_backward_error(
    node: Any,
    handler: Callable[[Exception, Sequence[Any]], Mapping[int, torch.Tensor | None] | None],
    again: Callable[[Exception], AbstractContextManager[Any] | None] = lambda _error: None,
) -> None:
    """Call a handler when the backward of AOT autograd's node raises, before the exception goes on.

    AOT autograd compiles a backward graph when it is first needed. If that fails, ``again`` gets the exception. If it
    returns a context manager, the graph is compiled once more inside of it.

    The handler gets the exception and the gradients that arrived at the node. If it returns gradients, by their place
    in the node's ``next_functions``, these are used and nothing is raised.

    AOT autograd makes a class of nodes for each compiled graph
    (``torch/_functorch/_aot_autograd/runtime_wrappers.py``). Nodes of other classes are left alone.
    """
    function = getattr(type(node), "_forward_cls", None)
    if function is None or function.__name__ != "CompiledFunction":
        return
    node.checked_backend_on_error = handler
    node.checked_backend_again = again
    original = function.backward
    if getattr(original, "checked_backend", False):
        return

    boxed = bool(getattr(function, "boxed_grads_call", False))  # since torch 2.13: one list, emptied as it is used

    @dynamo_disable
    def backward(ctx: Any, *gradients: Any) -> Any:
        arrived = tuple(gradients[0] if boxed else gradients)
        try:
            return original(ctx, *gradients)
        except Exception as error:
            on_error = getattr(ctx, "checked_backend_on_error", None)
            instead = None if on_error is None else on_error(error, arrived)
            if instead is None:
                raise
            return _in_places(ctx, instead)

    backward.checked_backend = True  # type: ignore[attr-defined]
    function.backward = staticmethod(backward)
    function._backward_impl = staticmethod(_compiling_again(function, function._backward_impl))


def _compiling_again(function: Any, original: Callable[[Any, list[Any]], Any]) -> Callable[[Any, list[Any]], Any]:
    """The backward of AOT autograd's class of nodes, whose compilation is tried once more."""

    def run(ctx: Any, args: list[Any]) -> Any:
        count = len(args)
        try:
            return original(ctx, args)
        except Exception as error:
            # the list is emptied as soon as the compiled graph runs
            uncompiled = function.compiled_bw is None and len(args) == count
            again = getattr(ctx, "checked_backend_again", None)
            under = again(error) if uncompiled and again is not None else None
            if under is None:
                raise
            try:
                with under:
                    return original(ctx, args)
            except Exception:  # the first exception is the one that the user would see without a check
                raise error from None

    return run


def _in_places(ctx: Any, gradients: Mapping[int, torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Gradients for all arguments of a node, tensors or not."""
    wanted = iter([number for number, (target, _) in enumerate(ctx.next_functions) if target is not None])
    return tuple(gradients.get(next(wanted)) if needed else None for needed in ctx.needs_input_grad)


@contextmanager
def no_donated_buffers() -> Iterator[None]:
    """Compile a backward graph so that it does not write to what the forward graph saved.

    Inductor reuses the memory of saved activations that no other code can see
    (``torch._functorch.config.donated_buffer``).
    """
    context = TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    if metadata is None:
        yield
        return
    donated, metadata.bw_donated_idxs = metadata.bw_donated_idxs, None
    # the key of Inductor's cache leaves out donated buffers, so the cache would return code that was compiled with them
    tag = f"{torch.compiler.config.cache_key_tag} no donated buffers"
    try:
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            yield
    finally:
        metadata.bw_donated_idxs = donated
