"""What a node calls in eager: the ATen operator to which a user's call comes down, or the bodies of control flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from checked_backend._torch.modes import OperatorWatch
from checked_backend._torch.operators import HigherOrderOperator, OpOverload
from checked_backend._torch.tensors import middle_lane
from checked_backend.diagnose.localize.subgraph import called_name, is_view_operator, unshared
from checked_backend.graphs.nodes import graph_fetched
from checked_backend.graphs.operators import OperatorKind, describe_operator
from checked_backend.regions.compile import eager_graph
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.torch_state import modes_restored

_HELPERS = frozenset({"clone", "lift_fresh", "detach", "_to_copy", "copy", "alias", "scalar_tensor", "expand"})
"""Operators that functions call as helpers, besides their main one."""


def aten_name(gm: fx.GraphModule, inputs: Sequence[Any], node: fx.Node) -> str:
    """The name of the ATen operator to which a node of a Dynamo graph comes down.

    Args:
        node: The node. If it raises in eager, the operator that raises is meant.

    Returns:
        ``aten.relu.default``. If the node comes down to several operators, the composite operator that they form
        (``aten.ldexp.Tensor``). If ATen has none, the Python function
        (``torch.nn.functional.multi_head_attention_forward``).
    """
    if isinstance(node.target, OpOverload):
        return str(node.target)
    single, raised = operators_called(gm, inputs, node)
    if len(single) > 1:
        about = [func for func in single if not _helps(func)]
        single = about or single
    if len(set(single)) == 1 and not raised:  # the last operator may be a check that the raising one makes
        return str(single[0])
    whole, _ = operators_called(gm, inputs, node, torch.inference_mode)
    return str(whole[0]) if len(set(whole)) == 1 else called_name(node)


def operators_called(
    gm: fx.GraphModule, inputs: Sequence[Any], node: fx.Node | None = None, mode: Callable[[], Any] = torch.no_grad
) -> tuple[Sequence[OpOverload], bool]:
    """The operators that a node calls, or all nodes of a graph, and whether one raises in eager.

    Composite operators are only seen under inference mode.
    """
    found: list[OpOverload] = []
    calls = OperatorWatch(lambda func, *_: found.extend([func] if isinstance(func, OpOverload) else []))
    own = eager_graph(gm)
    follower = fx.Interpreter(own)
    try:
        with mode(), modes_restored():
            given = iter(copy_values(inputs))
            for one in own.graph.nodes:
                with calls if node is None or one.name == node.name else nullcontext():
                    follower.env[one] = next(given) if one.op == "placeholder" else follower.run_node(one)
                if node is not None and one.name == node.name:
                    break
                for used in follower.user_to_last_uses.get(one, ()):
                    del follower.env[used]
    except Exception:  # the node itself raises in eager, or the graph cannot be run under this mode
        return found, True
    return found, False


def _helps(func: OpOverload) -> bool:
    operator = describe_operator(func)
    return operator.base in _HELPERS or operator.kind is OperatorKind.UNINITIALISED or is_view_operator(func)


BodyCall = tuple[fx.GraphModule, tuple[Any, ...]]
"""A graph, and the inputs that it is called with."""


def is_higher_order(node: fx.Node) -> bool:
    """Whether a node calls graphs: ``cond``, ``while_loop``, ``invoke_subgraph``."""
    return isinstance(node.target, HigherOrderOperator) and bool(_bodies(node))


def called_bodies(gm: fx.GraphModule, inputs: Sequence[Any], node: fx.Node) -> list[BodyCall]:
    """The bodies that a higher-order operator calls in eager, with the inputs of the first and the last call of each.

    A body that is called under vmap, as ``flex_attention`` calls it, gets the values of one element.
    """
    own = eager_graph(gm)  # there a checkpoint calls its body as Python
    follower = fx.Interpreter(own)
    given = iter(unshared(gm, inputs))
    calls: dict[str, list[BodyCall]] = {}
    with torch.no_grad(), modes_restored():
        for one in own.graph.nodes:
            for source in _bodies(node) if one.name == node.name else ():
                path = str(source.target)
                body, kept = own.get_submodule(path), gm.get_submodule(path)
                if isinstance(body, fx.GraphModule) and isinstance(kept, fx.GraphModule):
                    body.forward = _noting(body.forward, kept, calls.setdefault(path, []))
            follower.env[one] = next(given) if one.op == "placeholder" else follower.run_node(one)
            if one.name == node.name:
                break
    return [call for made in calls.values() for call in made]


def _noting(run: Callable[..., Any], body: fx.GraphModule, calls: list[BodyCall]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        del calls[1:]  # loops may be long: only the first and the last call are kept
        calls.append((body, tuple(copy_values([middle_lane(arg) for arg in args]))))
        return run(*args)

    return forward


def _bodies(node: fx.Node) -> list[fx.Node]:
    home = node.graph.owning_module
    if home is None:
        return []
    return [source for source in node.all_input_nodes if graph_fetched(home, source) is not None]
