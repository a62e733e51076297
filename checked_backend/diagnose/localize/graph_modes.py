"""The modes under which the calls of a Dynamo graph run, so that each part of the graph runs under its own modes.

Dynamo writes modes (autocast, inference mode, flags of kernels) as calls between the others. A part of a graph gets
the modes of its own calls, entered and left inside the part.
"""

from __future__ import annotations

from torch import fx

from checked_backend._torch.modes import enter_autocast, exit_autocast
from checked_backend.graphs.effects import mode_name
from checked_backend.regions.compile import copy_graph
from checked_backend.regions.torch_state import TorchState


def self_contained(gm: fx.GraphModule, ambient: TorchState, *, gradients: bool = False) -> fx.GraphModule:
    """Copy a Dynamo graph so that it computes the same wherever it is called, gradients aside.

    Args:
        ambient: The modes that it was called under. Autocast becomes part of the graph.
        gradients: Whether the copy will be differentiated. If not, it sets no grad mode.
    """
    copied = copy_graph(gm)
    for node in [] if gradients else reversed(list(copied.graph.nodes)):
        if mode_name(node) == "_set_grad_enabled" and not node.users:
            copied.graph.erase_node(node)
    first = next(node for node in copied.graph.nodes if node.op != "placeholder")
    for device, dtype in ambient.autocast.items():
        with copied.graph.inserting_before(first):
            entered = copied.graph.call_function(enter_autocast, (device, dtype, True, False))
        with copied.graph.inserting_before(copied.graph.output_node()):
            copied.graph.call_function(exit_autocast, (entered,))
    copied.recompile()
    return copied


class PartModes:
    """Sets the modes in a part of a graph that its calls have in the whole graph."""

    def __init__(self, part: fx.Graph) -> None:
        self._part = part
        self._whole: list[fx.Node] = []  # entered in the whole, up to the calls that were met
        self._whole_flags: dict[object, fx.Node] = {}
        self._entered: list[tuple[fx.Node, fx.Node]] = []
        self._flags: dict[object, fx.Node] = {}

    def meet(self, node: fx.Node) -> None:
        """Go past a call of the whole."""
        name = mode_name(node)
        if name.startswith("_enter_"):
            self._whole.append(node)
        elif name.startswith("_exit_"):
            self._whole = [one for one in self._whole if one not in node.args]
        elif name:
            self._whole_flags.pop(node.target, None)  # the latest comes last
            self._whole_flags[node.target] = node

    def set_here(self) -> None:
        """Set the modes for the next call of the part."""
        wanted = self._whole
        common = 0
        while common < min(len(wanted), len(self._entered)) and self._entered[common][0] is wanted[common]:
            common += 1
        self._leave(common)
        self._set_flags()
        for node in wanted[common:]:
            self._entered.append((node, self._part.node_copy(node)))

    def finish(self) -> None:
        """Leave the modes that are still entered, and set flags as they are at the end of the whole graph."""
        self._leave(0)
        if self._flags:
            self._set_flags()

    def _leave(self, depth: int) -> None:
        while len(self._entered) > depth:
            node, own = self._entered.pop()
            leaving = next((user for user in node.users if mode_name(user).startswith("_exit_")), None)
            if leaving is not None:
                self._part.node_copy(leaving, {node: own}.__getitem__)

    def _set_flags(self) -> None:
        for target, node in self._whole_flags.items():
            if self._flags.get(target) is not node:
                as_it_was = (
                    target not in self._flags and mode_name(node) == "_set_grad_enabled" and node.args == (True,)
                )
                self._flags[target] = node
                if not as_it_was:  # parts are differentiated with grad mode on
                    self._part.node_copy(node)
