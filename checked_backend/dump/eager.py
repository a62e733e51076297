"""Run a dumped graph in eager, and refuse what would write out of its memory before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from checked_backend._torch.autograd import get_dynamic_layer_stack_depth, transforms_unharmed
from checked_backend._torch.operators import HigherOrderOperator, OpOverload
from checked_backend._torch.pytree import tree_leaves
from checked_backend.dump.load import Dump
from checked_backend.dump.unchecked import block_mask_problem, memory_problem, operator_argument_problem
from checked_backend.errors import DumpError
from checked_backend.graphs.operators import Operator
from checked_backend.modes.base import OperatorMode
from checked_backend.report.clean import clean

__all__ = ["rehearse"]

_SHOWN = 400


class OutOfRange(Exception):
    """Raised if an operator would leave its memory."""


class _Guard(OperatorMode):
    """Checks each operator's arguments before it runs."""

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse(func, args, kwargs, operator_argument_problem(func, args, kwargs))
        return func(*args, **kwargs)

    def _higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse(func, args, kwargs, block_mask_problem(func.name(), args, kwargs))
        return super()._higher_order(func, args, kwargs)


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str | None) -> None:
    leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    why = why or next(filter(None, map(memory_problem, leaves)), None)
    if why is not None:
        raise OutOfRange(f"{func.name().partition('.')[0].replace('::', '.')}: {why}")


class _Refused(Exception):
    """Raised for a node that eager does not run, and for a graph after which later code would run otherwise."""


class _Nodewise(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except _Refused:
            raise
        except Exception as error:
            raise _Refused(f"node {n.name}: {_describe(error)}") from error


def rehearse(dump: Dump, seed: int = 0) -> None:
    """Run a graph in eager, forward and backward, and throw away its results.

    Call this in a process of its own, with limits: the memory and the time that a graph needs are not known before.

    Args:
        dump: The result of `load_dump`. Neither its module nor its constants are touched.
        seed: For input values that were not saved.

    Raises:
        DumpError: The graph or its inputs cannot be built here, eager refuses a node, or a node would leave its memory;
            the message says which and why.
    """
    module = dump.build()
    training = dump.kind == "dynamo"
    with dump.ambient(), torch.set_grad_enabled(training and torch.is_grad_enabled()):
        inputs = dump.inputs(seed)
        if not training:
            inputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
        interpreter = _Nodewise(module)
        interpreter.extra_traceback = False  # else FX writes about a failing node to stderr
        try:
            with _modes_unharmed(), _Guard():
                depth = get_dynamic_layer_stack_depth()
                outputs = interpreter.run(*inputs)
                if get_dynamic_layer_stack_depth() != depth:
                    raise _Refused("the graph enters a transform of torch.func and does not leave it")
                roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        except _Refused as error:
            raise DumpError(f"{dump.path / 'graph.json'}: {error}") from None
        except Exception as error:
            raise DumpError(f"{dump.path / 'graph.json'}: the backward pass in eager: {_describe(error)}") from None


@contextmanager
def _modes_unharmed() -> Iterator[None]:
    """Leave the modes that a graph enters and does not leave: later code must not run under them."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind)]
    casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    with transforms_unharmed():
        try:
            yield
        finally:
            for kind, (enabled, dtype) in casts.items():
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)


def _describe(error: Exception) -> str:
    if isinstance(error, OutOfRange):
        return f"it would leave its memory: {clean(str(error))}"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"eager refuses it: {type(error).__name__}: {clean(first)[:_SHOWN]}"
