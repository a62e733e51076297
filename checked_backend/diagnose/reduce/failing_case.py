"""The program that is being reduced: a case, and the result that is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from checked_backend._torch.pytree import tree_map_only
from checked_backend.graphs.effects import sets_mode, writes
from checked_backend.graphs.nodes import is_getitem
from checked_backend.regions.compile import copy_graph
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.inputs import copy_values
from checked_backend.scripts.values import each_element_once

_OUTPUT = re.compile(r"output\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class FailingCase:
    """A case and the subject that must stay wrong.

    Attributes:
        case: The graph has no attributes that are tensors; inputs correspond to placeholders.
        subject: ``output[2]``, ``mutated[x]``, ``candidate``.
    """

    case: GraphCase
    subject: str

    @classmethod
    def of(cls, case: GraphCase, subject: str) -> FailingCase:
        """Start from any case: constants of its graph become inputs."""
        draft = Draft(cls(case, subject))
        for node in list(draft.graph.find_nodes(op="get_attr")):
            value = attrgetter(str(node.target))(draft.module)
            if isinstance(value, torch.Tensor):
                draft.replace_by_value(node, value.detach())
        return draft.finish()

    @property
    def tracked(self) -> int | None:
        """The position of the output that must stay wrong; None if the subject is no output."""
        match = _OUTPUT.fullmatch(self.subject)
        return None if match is None else int(match[1])

    def placeholders(self) -> dict[str, Any]:
        """The inputs by the name of their placeholder."""
        nodes = self.case.graph.graph.find_nodes(op="placeholder")
        return {node.name: value for node, value in zip(nodes, self.case.inputs, strict=True)}

    def with_inputs(self, inputs: Mapping[str, Any]) -> FailingCase:
        """The same graph on other inputs, given by name; those not given stay."""
        values = tuple(inputs.get(name, value) for name, value in self.placeholders().items())
        return replace(self, case=replace(self.case, inputs=values))


class Draft:
    """A copy of a program that is being edited.

    Attributes:
        module: The copy; nodes keep their names.
        subject: The subject, which follows its output.
    """

    def __init__(self, program: FailingCase) -> None:
        self._case = program.case
        self.module = copy_graph(program.case.graph)
        self.graph: fx.Graph = self.module.graph
        self.inputs = program.placeholders()
        self.subject = program.subject

    def node(self, name: str) -> fx.Node:
        """The node of this name."""
        found: fx.Node | None = next((node for node in self.graph.nodes if node.name == name), None)
        if found is None:
            raise LookupError(f"the graph has no node {name!r}")
        return found

    def set_outputs(self, chosen: Sequence[Any], tracked: int | None) -> None:
        """Return these values only.

        Args:
            chosen: Nodes of this draft, or constants.
            tracked: Which of them is the subject; None if the subject is no output.
        """
        self.graph.output_node().args = (tuple(chosen),)
        if tracked is not None:
            self.subject = f"output[{tracked}]"

    def replace_by_value(self, node: fx.Node, value: Any) -> None:
        """Give a node's users a value instead. A tensor becomes an input; any other value is written into the call."""
        if not isinstance(value, torch.Tensor):
            for user in list(node.users):
                user.args = fx.map_arg(user.args, lambda item: value if item is node else item)
                user.kwargs = fx.map_arg(user.kwargs, lambda item: value if item is node else item)
            return
        first = next(iter(self.graph.nodes))
        places = self.graph.find_nodes(op="placeholder")
        with self.graph.inserting_after(places[-1]) if places else self.graph.inserting_before(first):
            new = self.graph.placeholder(node.name)
        new.meta = {key: item for key, item in node.meta.items() if key in ("val", "stack_trace")}
        node.replace_all_uses_with(new)
        self.inputs[new.name] = compact(value)

    def finish(self) -> FailingCase:
        """Drop unused nodes and inputs, and make the program."""
        for node in reversed(list(self.graph.nodes)):
            acts = node.op == "output" or (node.op != "placeholder" and (writes(node) or sets_mode(node)))
            if not node.users and not acts:
                self.graph.erase_node(node)
        self.module.delete_all_unused_submodules()
        self.module.recompile()
        inputs = tuple(self.inputs[node.name] for node in self.graph.find_nodes(op="placeholder"))
        return FailingCase(replace(self._case, graph=self.module, inputs=inputs), self.subject)


def call_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute, ``getitem`` aside."""
    return [node for node in graph.nodes if node.op.startswith("call_") and not is_getitem(node)]


def record_values(program: FailingCase, names: frozenset[str] | None = None) -> dict[str, Any]:
    """The values of a program's nodes in eager, by their names. They may share memory."""
    found: dict[str, Any] = {}

    class _Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if names is None or n.name in names:
                found[n.name] = tree_map_only(torch.Tensor, compact, value)
            return value

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _Recorder(program.case.graph).run(*copy_values(program.case.inputs))
    return found


def compact(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """A copy with the same strides, or with others, that owns no more memory than it needs."""
    if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
        return tensor.detach().clone()
    strides = tensor.stride() if strides is None else strides
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    if tensor.numel():
        each_element_once(copy).copy_(each_element_once(tensor.detach()))
    return copy
