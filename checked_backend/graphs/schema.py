"""Read an operator's schema: the arguments that it writes to, and those that its results may share memory with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from checked_backend._torch.operators import HigherOrderOperator, OpOverload, OpOverloadPacket

# Namespaces of operators that come with torch. Their kernels are torch's own, and run far below the place where the
# version counter would see an undeclared write. All other operators are custom ones, and are watched.
_BUILT_IN_NAMES = """
    _c10d_functional _c10d_functional_autograd _quantized aten c10d c10d_functional fsdp inductor mkl mkldnn
    mkldnn_prepacked onednn onednn_prepacked prepacked prim prims profiler quantized quantized_decomposed rngprims
    streams symm_mem xla
"""
_BUILT_IN = frozenset(_BUILT_IN_NAMES.split())
# Operators of torch that return their input by design, though their schema gives the result its own memory.
_RETURN_THEIR_INPUT = frozenset({"wait_tensor"})
_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})


def auto_functionalized(node: fx.Node) -> OpOverload | None:
    """The mutating custom operator that a node runs on copies of its inputs; None for any other node."""
    if isinstance(node.target, HigherOrderOperator) and node.target.name().startswith("auto_functionalized"):
        inner = node.args[0] if node.args else None
        return inner if isinstance(inner, OpOverload) else None
    return None


def effectful(target: Any, args: Sequence[Any]) -> OpOverload | None:
    """The operator that ``with_effects`` runs between two tokens, which keep the order; None for any other target."""
    if isinstance(target, HigherOrderOperator) and target.name() == "with_effects" and len(args) > 1:
        return args[1] if isinstance(args[1], OpOverload) else None
    return None


def wrapped_operator(node: fx.Node) -> OpOverload | None:
    """The operator that a node runs through a higher-order operator; None for any other node."""
    return auto_functionalized(node) or effectful(node.target, node.args)


def is_custom(node: fx.Node) -> bool:
    """Whether a node runs an operator that does not come with torch."""
    if auto_functionalized(node) is not None:
        return True
    operator = effectful(node.target, node.args) or node.target
    return isinstance(operator, (OpOverload, OpOverloadPacket)) and not is_built_in(operator)


def is_built_in(operator: OpOverload | OpOverloadPacket | str) -> bool:
    """Whether an operator, or one of this name, comes with torch."""
    return str(operator).partition(".")[0] in _BUILT_IN


def operator_name(node: fx.Node) -> str:
    """A node's operator for people: ``aten.relu.default``, ``cond``, ``placeholder``."""
    if node.op in ("placeholder", "get_attr", "output"):
        return node.op
    target = node.target
    if isinstance(target, HigherOrderOperator):
        inner = wrapped_operator(node)
        return str(target) if inner is None else str(inner)
    if isinstance(target, (OpOverload, str)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}".lstrip(".")


def arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """A node's arguments as ``(schema argument or None, value)``."""
    target = node.target
    if not isinstance(target, OpOverload):
        yield from ((None, value) for value in (*node.args, *node.kwargs.values()))
        return
    declared = target._schema.arguments
    by_name = {argument.name: argument for argument in declared}
    for position, value in enumerate(node.args):
        yield (declared[position] if position < len(declared) else None), value
    for name, value in node.kwargs.items():
        yield by_name.get(name), value


def read_only_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """The inputs that an operator neither writes to nor shares memory with, by its schema; empty for other calls."""
    if not isinstance(node.target, OpOverload):
        return ()
    if node.target.namespace in _COLLECTIVES and node.target._opname in _RETURN_THEIR_INPUT:
        return ()
    free: dict[fx.Node, None] = {}
    bound: set[fx.Node] = set()
    for argument, value in arguments(node):
        found: list[fx.Node] = []
        fx.node.map_arg(value, lambda item, found=found: found.append(item))  # type: ignore[misc]
        if argument is None or argument.alias_info is not None:
            bound.update(found)
        else:
            free.update(dict.fromkeys(found))
    return tuple(item for item in free if item not in bound)
