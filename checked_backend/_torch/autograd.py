"""Autograd: its engine, what it saves, and the transforms of ``torch.func``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, TypeVar

import torch
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _will_engine_execute_node as will_engine_execute_node
from torch._C._autograd import _get_current_graph_task_keep_graph as graph_task_keeps_graph
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch.autograd import _get_sequence_nr as autograd_sequence_number  # type: ignore[attr-defined]
from torch.autograd import forward_ad
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputationError

__all__ = [
    "CallersContext",
    "StopRecomputationError",
    "autograd_sequence_number",
    "call_after_backward",
    "carry_tangents",
    "current_graph_task_id",
    "get_dynamic_layer_stack_depth",
    "graph_task_keeps_graph",
    "has_saved_tensor_hooks",
    "is_accumulate_grad",
    "saved_tensor_hooks_lifted",
    "transforms_unharmed",
    "will_engine_execute_node",
]

_ResultT = TypeVar("_ResultT")


class CallersContext:
    """Runs a part of a backward pass in the context (``contextvars``) of the forward call that it belongs to.

    Gradients on a GPU are computed in threads of the autograd engine, one for each device, which Python knows nothing
    of (``torch/csrc/autograd/engine.cpp``): no session of the calling thread is active in them.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._context = Context()
        self.called()

    def called(self) -> None:
        """Note that this thread calls forward now."""
        self._thread, self._context = threading.get_ident(), copy_context()

    def run(self, function: Callable[..., _ResultT], *args: Any) -> _ResultT:
        """Run a function, in the context of the latest call unless this thread is the one that called."""
        if threading.get_ident() == self._thread:
            return function(*args)
        return self._context.copy().run(function, *args)  # a copy, because no context can be entered twice


def has_saved_tensor_hooks() -> bool:
    """Whether saved-tensor hooks are in force in this thread."""
    return _top_saved_tensors_default_hooks(False) is not None


@contextmanager
def saved_tensor_hooks_lifted() -> Iterator[None]:
    """Run a block without the user's saved-tensor hooks, which must not see the tensors that a checker saves."""
    lifted = []
    while True:
        top: Any = _top_saved_tensors_default_hooks(False)
        if top is None:
            break
        lifted.append(top)
        _pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(lifted):
            _push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def transforms_unharmed() -> Iterator[None]:
    """Leave every function transform (``vmap``, ``grad``, forward-mode AD) that a block entered and did not leave."""
    depth, dual, level = get_dynamic_layer_stack_depth(), _in_dual_level(), forward_ad._current_level
    try:
        yield
    finally:
        while get_dynamic_layer_stack_depth() > depth:
            _left(torch._C._functorch.peek_interpreter_stack().key())
        if _in_dual_level() and not dual:
            torch._C._exit_dual_level(level=0)
        forward_ad._current_level = level


def _left(transform: Any) -> None:
    """Leave the innermost function transform, of this kind. Torch 2.11's own function for that lacks some kinds."""
    functorch: Any = torch._C._functorch
    kinds = functorch.TransformType
    leave = {
        kinds.Vmap: functorch._vmap_decrement_nesting,
        kinds.Grad: functorch._grad_decrement_nesting,
        kinds.Jvp: functorch._jvp_decrement_nesting,
        kinds.Functionalize: functorch._func_decrement_nesting,
    }
    leave[transform]()


def _in_dual_level() -> bool:
    """Whether forward-mode AD is on. Torch has no getter, but it refuses to enter a second level."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


def is_accumulate_grad(target: object) -> bool:
    """Whether a node's target is compiled autograd's operator that adds to a parameter's ``grad``.

    Its arguments are the gradients, the parameter, the parameter's ``grad`` or None, and whether there are hooks.
    """
    module = "torch._dynamo.compiled_autograd.ops"
    return getattr(target, "__name__", "") == "AccumulateGrad" and getattr(target, "__module__", "") == module


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass has finished. Its exceptions reach the user's call."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def carry_tangents(values: Iterable[Any]) -> bool:
    """Whether forward-mode AD goes through some of the values."""
    tensors = [one for one in values if isinstance(one, torch.Tensor)] if forward_ad._current_level >= 0 else []
    return any(forward_ad.unpack_dual(one).tangent is not None for one in tensors)
