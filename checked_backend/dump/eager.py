"""Run a dumped graph in eager. Every size and index is checked against the tensor's memory before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from checked_backend._torch.autograd import get_dynamic_layer_stack_depth, transforms_unharmed
from checked_backend._torch.operators import HigherOrderOperator, OpOverload
from checked_backend._torch.pytree import tree_leaves
from checked_backend.dump.forwards import forward_problem, out_problem
from checked_backend.dump.higher_order import higher_order_problem
from checked_backend.dump.load import Dump
from checked_backend.dump.ranges import argument_problem, memory_problem
from checked_backend.errors import DumpError
from checked_backend.graphs.operators import Operator
from checked_backend.modes.base import OperatorMode
from checked_backend.report.clean import clean

__all__ = ["rehearse"]

_SHOWN = 400


class OutOfRange(Exception):
    """Raised if an operator would leave its memory."""


class _Guard(OperatorMode):
    """Checks each operator's arguments before it runs, and its results before they are used."""

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check_memory(func, (args, kwargs))
        name = func.name().partition(".")[0]
        given = _named(func, args, kwargs)
        why = out_problem(func) or argument_problem(name, given) or forward_problem(name, given)
        if why is not None:
            raise OutOfRange(f"{name.replace('::', '.')}: {why}")
        result = func(*args, **kwargs)
        _check_memory(func, result)
        return result

    def _higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check_memory(func, (args, kwargs))
        why = higher_order_problem(func.name(), args, kwargs)
        if why is not None:
            raise OutOfRange(f"{func.name()}: {why}")
        return super()._higher_order(func, args, kwargs)


def _check_memory(func: OpOverload | HigherOrderOperator, value: Any) -> None:
    for leaf in tree_leaves(value):
        why = memory_problem(leaf) if isinstance(leaf, torch.Tensor) else None
        if why is not None:
            raise OutOfRange(f"{func}: {why}")


def _named(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    declared = func._schema.arguments
    given = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    given |= {argument.name: value for argument, value in zip(declared, args, strict=False)}
    return given | kwargs


class _Refused(Exception):
    """Raised for a node that eager does not run."""

    def __init__(self, node: fx.Node, error: Exception) -> None:
        super().__init__(f"node {node.name}: {_told(error)}")


class _Unclosed(Exception):
    """Raised if the graph leaves a mode on, under which later code would run."""


class _Nodewise(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except _Refused:
            raise
        except Exception as error:
            raise _Refused(n, error) from error


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
                    raise _Unclosed("the graph enters a transform of torch.func and does not leave it")
                roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        except (_Refused, _Unclosed) as error:
            raise DumpError(f"{dump.path / 'graph.json'}: {error}") from None
        except Exception as error:
            raise DumpError(f"{dump.path / 'graph.json'}: the backward pass in eager: {_told(error)}") from None


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


def _told(error: Exception) -> str:
    if isinstance(error, OutOfRange):
        return f"it would leave its memory: {clean(str(error))}"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"eager refuses it: {type(error).__name__}: {clean(first)[:_SHOWN]}"
