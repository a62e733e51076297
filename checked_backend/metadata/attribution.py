"""Attribute a mismatch to one side: the caller, the trace, the fake kernel, or the real kernel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, get_args

import sympy
import torch
from torch import fx

from checked_backend._torch.fake_tensors import FakeTensorMode, disable_fake_tensor_cache
from checked_backend._torch.modes import OperatorWatch, disable_current_modes
from checked_backend._torch.operators import HigherOrderOperator, OpOverload, fake_kernel, higher_order_kernel
from checked_backend._torch.pytree import tree_leaves, tree_map
from checked_backend.findings.paths import shown_path
from checked_backend.graphs.schema import effectful, is_custom, operator_name, wrapped_operator
from checked_backend.metadata.expected import Inputs, Mismatch, Size, compare, expected_leaves
from checked_backend.options import MetadataCheck

_CHECKS = get_args(MetadataCheck)


def attribute(node: fx.Node, mismatch: Mismatch, inputs: Inputs | None) -> str:
    """The part that is likely at fault, as text for people."""
    if mismatch.what == "nonfinite":
        return "the values: this operator is the first that leaves the finite numbers"
    if mismatch.what == "assert":
        return "the data: the program was traced for sizes that fulfil this condition"
    if node.op == "placeholder":
        return "the caller: this input is not what the graph was traced for"
    if isinstance(node.target, HigherOrderOperator) and wrapped_operator(node) is None:
        return f"how torch traces the higher-order operator {operator_name(node)}"
    operator = wrapped_operator(node) or node.target
    if not isinstance(operator, OpOverload):
        return "what recorded the metadata of this node"
    if mismatch.what == "mutation":
        return f"the schema of {operator}, or its kernel: declare the argument as Tensor(a!) or do not write to it"
    if mismatch.what == "alias" and is_custom(node):
        return f"the kernel of {operator}, which returns memory that its schema says is its own: return a copy"
    if mismatch.what == "requires_grad" and is_custom(node):
        return f"the kernel of {operator}, which returns a tensor that requires grad: detach it"
    original = node.meta.get("original_aten")
    origin = ""
    if isinstance(original, OpOverload) and original.name() != operator.name() and original.namespace == "aten":
        origin = f", which a decomposition of {original} put there"
    return f"{_kernel(operator, is_custom(node), node, inputs)}{origin}"


def _kernel(operator: OpOverload, custom: bool, node: fx.Node, inputs: Any) -> str:
    function, kind = fake_kernel(operator)
    code = None if function is None else getattr(inspect.unwrap(function), "__code__", None)
    where = "" if code is None else f" ({shown_path(code.co_filename)}:{code.co_firstlineno})"
    side = f"the {kind} of {'the custom operator ' if custom else ''}{operator}{where}"
    agrees = _agrees(node.target, inputs)
    if agrees is True and _agrees(node.target, inputs, cached=True) is False:
        return (
            "torch's cache of fake results, which gives a trace something else than what it was given: "
            f"given these inputs, {side} agrees with what ran"
        )
    if agrees is True:
        return f"the trace: given these inputs, {side} agrees with what ran, so the recorded value is stale or wrong"
    if agrees is False:
        return f"{side}: given these inputs it says something else than the kernel does"
    return f"{side}, or the operator's kernel"


def is_own_fault(node: fx.Node, inputs: Inputs | None) -> bool:
    """Whether an operator differs from its fake kernel for the real inputs, which may not be the recorded ones."""
    return _agrees(node.target, inputs) is False


def _fake_result(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, cached: bool = False) -> Any:
    """Run an operator's fake kernel on fake copies of some inputs. Return the result and the fake copies.

    Args:
        cached: Return the result from torch's cache of fake results. A trace gets it when it calls an operator again.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value

    with torch.no_grad(), nullcontext() if cached else disable_fake_tensor_cache(mode), mode:
        for _ in range(2 if cached else 1):
            given = tree_map(fake, (args, kwargs))
            result = operator(*given[0], **given[1])
    return result, given


def _agrees(target: Any, inputs: Inputs | None, *, cached: bool = False) -> bool | None:
    """Whether the fake kernel, given the real inputs' metadata, agrees with the kernel; None if that is unknown."""
    if inputs is None:
        return None
    devices = {leaf.device.index for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
    try:
        call = unwrap_call(target, *inputs)
        if call is None:
            return None
        operator, args, kwargs = call
        if operator._schema.is_mutable and operator in (target, effectful(target, inputs[0])):
            return None  # it would write to the program's own tensors once more
        fake = expected_leaves(_fake_result(operator, args, kwargs, cached=cached))
        with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices)):
            real = tree_leaves((operator(*args, **kwargs), (args, kwargs)))
    except Exception:
        return None
    if len(fake) != len(real):
        return False
    return not any(compare(want, got, None, _known, _CHECKS) for want, got in zip(fake, real, strict=True))


def _known(size: Size) -> Any:
    return None if isinstance(size, sympy.Basic) else size


class _Caught(BaseException):
    """Ends a call of an operator, and carries its arguments."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.inputs: Inputs = tuple(args), dict(kwargs)


def unwrap_call(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None:
    """The operator that a node runs, with its own arguments.

    ``auto_functionalized`` clones the tensors that a mutating operator writes to, and its second version makes views of
    those clones. The arguments returned here are those clones and views.

    Args:
        target: The node's target: an operator, ``with_effects`` or ``auto_functionalized``.

    Returns:
        The operator and its arguments; None for any other target.
    """
    if isinstance(target, OpOverload):
        return target, args, dict(kwargs)
    inner = effectful(target, args)
    if inner is not None:
        return inner, args[2:], dict(kwargs)
    if not isinstance(target, HigherOrderOperator) or not target.name().startswith("auto_functionalized"):
        return None
    operator, kernel = (args[0] if args else None), higher_order_kernel(target)
    if not isinstance(operator, OpOverload) or kernel is None:
        return None

    def catch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func is operator:
            raise _Caught(args, kwargs)

    try:
        with disable_current_modes(), OperatorWatch(catch):
            kernel(*args, **kwargs)
    except _Caught as caught:
        return operator, *caught.inputs
    return None
