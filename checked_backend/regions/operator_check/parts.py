"""Check the kernels of a module part by part, where there is no room for all of its tensors at once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from checked_backend._torch.generated_modules import GeneratedModule
from checked_backend._torch.operators import HigherOrderOperator, OpOverload
from checked_backend.graphs.effects import writes
from checked_backend.graphs.nodes import is_getitem, outputs_of, recorded_value
from checked_backend.graphs.operators import describe_operator
from checked_backend.regions.operator_check.probe import CALLS
from checked_backend.regions.operator_check.recorder import Key, Recording
from checked_backend.regions.operator_check.units import Needed, Units

MOST_RUNS = 32
"""The most runs of a region to check its kernels."""

FEW_RUNS = 4
"""About so many runs are worth the memory that they save."""


class Parts:
    """The tensors of a module that are not checked yet.

    In each run of the region some of them are kept, with all that they are computed from.

    Args:
        recording: The first run.
        kept: The bytes that the first run may have kept.
        room: The most bytes to keep in a run.

    Attributes:
        module: The module.
        room: The most bytes that are kept in a run.
        units: The units of the module's graph, as far as it is known which tensors can be seen.
        ends: The calls at the end of its graph that write to inputs. They are compared with the region as a whole.
        unchecked: Nodes that cannot be checked, with the reason.
    """

    def __init__(self, module: GeneratedModule, recording: Recording, kept: float, room: float) -> None:
        self.module = module
        self._sizes = dict(recording.sizes)
        self._graph = module.graph
        nodes = list(module.graph.graph.nodes)
        last = itertools.takewhile(lambda node: node.op == "output" or (writes(node) and not node.users), nodes[::-1])
        self.ends = {node for node in last if node.op != "output"}
        self._buffers: dict[fx.Node, Key] = {}
        for name, held in module.held.items():
            if name in recording.sizes:  # others are never written
                self._buffers |= {node: name for node in held if node is not None and node not in self.ends}
            if name in recording.left_out:
                self._sizes[name] *= len(held)
        self._add_results()
        self.room = min(room, max(kept, sum(self._sizes.values()) / FEW_RUNS))
        self._places: dict[fx.Node, Key] = {
            node: place for place, node in enumerate(module.graph.graph.find_nodes(op="placeholder"))
        }
        self._drawing = [node for node in nodes if _draws(node)]
        self._pending = [node for node in nodes if node in self._buffers]
        self.unchecked: dict[str, str] = {}
        self.units = self._new_units()
        self._asked = False
        self._runs = 1

    def take(self, recording: Recording, values: Mapping[str, torch.Tensor]) -> list[fx.Node]:
        """The nodes that can be checked now, because all that they are computed from was kept.

        Args:
            values: The values of nodes that are known of the recording.
        """
        hidden = [node for node, name in self._buffers.items() if name in recording.values and node.name not in values]
        if hidden:  # they are checked with what reads them
            for node in hidden:
                del self._buffers[node]
            self._pending = [node for node in self._pending if node in self._buffers]
            self._pending += self._add_results()
            self.units = self._new_units()
        arguments = recording.arguments or ()
        known = {node for node in self._buffers if node.name in values}
        known |= {node for (node, _), value in zip(self._places.items(), arguments, strict=True) if value is not None}
        ready = [node for node in self._pending if node in known and known.issuperset(self._kept_for(node))]
        if self._asked and not ready and not hidden:
            self._give_up(self._pending[0])
        self._pending = [node for node in self._pending if node not in ready]
        return ready

    def _add_results(self) -> list[fx.Node]:
        """Let the results that no buffer has be checked, too, but those that are views."""
        added = []
        for place, node in enumerate(outputs_of(self._graph.graph)):
            is_known = not isinstance(node, fx.Node) or node.op not in CALLS or node in self._buffers or _is_view(node)
            if not is_known and isinstance(recorded_value(node), torch.Tensor):
                self._buffers[node] = ~place
                added.append(node)
        return added

    def drawing_before(self, nodes: Sequence[fx.Node]) -> set[str]:
        """Names of the nodes that draw random numbers up to the last of some nodes."""
        last = max(map(self.units.order.__getitem__, nodes), default=0)
        return {node.name for node in self._drawing if self.units.order[node] <= last}

    def next_part(self) -> set[Key]:
        """What to keep in the next run; nothing if all is checked."""
        keys: set[Key] = set()
        self._runs += 1
        for node in list(self._pending):
            if self._runs > MOST_RUNS:
                self._give_up(node)
                continue
            more = {self._buffers.get(one, self._places.get(one, "")) for one in (node, *self._kept_for(node))}
            size = sum(self._sizes.get(key, 0) for key in keys | more)
            if size <= self.room:
                keys |= more
            elif keys:
                break
            else:
                self._give_up(node)
        self._asked = bool(keys)
        return keys

    def _give_up(self, node: fx.Node) -> None:
        self._pending.remove(node)
        self.unchecked[node.name] = f"the tensors inside of the region take more than {self.room / 2**30:.2g} GiB"

    def _new_units(self) -> Units:
        self._known_needs: dict[fx.Node, set[fx.Node]] = {}
        return Units(self._graph, {node.name for node in self._buffers}, returned=False)

    def _kept_for(self, node: fx.Node) -> set[fx.Node]:
        """The tensors that have to be known so that a node can be checked."""
        if node not in self._known_needs:
            needed: Needed = self.units.needed({node.name, *self.drawing_before([node])})
            self._known_needs[node] = needed.sources | needed.calls.intersection(self._buffers)
        return self._known_needs[node]


def _is_view(node: fx.Node) -> bool:
    target = node.args[0].target if is_getitem(node) and isinstance(node.args[0], fx.Node) else node.target
    returns = target._schema.returns if isinstance(target, OpOverload) else ()
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _draws(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        return describe_operator(node.target).draws
    return isinstance(node.target, HigherOrderOperator)
