"""The facts in a region's graph about itself: where it comes from, and the user's names of its inputs."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
from torch import fx

from checked_backend._torch.dynamo import compile_id
from checked_backend.findings import RegionInfo
from checked_backend.graphs.effects import writes
from checked_backend.graphs.graph_name import graph_name, self_of
from checked_backend.graphs.nodes import outputs_of
from checked_backend.graphs.source_line import source_line
from checked_backend.regions.execution import Result

_SPLITTING = "DDPOptimizer"
"""How torch's reason for a graph begins that is one of several, one for each bucket of gradients."""

_ROOT = re.compile(r"^(?:L|G)\['(?P<root>[^']*)'\]")
_MODULE = "__import_"  # the beginning of Dynamo's names for the globals of a module
_KEY = re.compile(r"list\(dict\.keys\([^()]*\)\)\[(\d+)\]")  # that of a dictionary at a place, for a key without a text
_OF_CLASS = re.compile(r"^(?:dict\()?type\(.*\)\.__dict__\)?\['(?P<name>\w+)'\]$")
_STEP = re.compile(
    r"\.(?:_modules|_parameters|_buffers)\['(?P<member>[^']+)'\]|\.(?P<attribute>\w+)|\[(?P<item>[^\]]+)\]"
)


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """Names and source lines of one region.

    Attributes:
        name: The region, for people: the module or function it is of, and Dynamo's compile id.
        inputs: For each placeholder, the user's name for it.
        input_sources: For each placeholder, the user's line that first uses it ("" where there is none).
        output_sources: For each output, the user's line that made it ("" where there is none).
        sources: The user's lines in the region, first to last, without repetition.
        graph: The kind of an AOT graph; None for Dynamo's.
        outputs: For each output, its name, where it is not ``output[place]``.
        free_outputs: Places of outputs that only another compiled graph or autograd sees. The compiler may choose their
            strides, and they need not share the memory that eager's share.
        mutates_in_backward: Whether it writes to inputs in its backward pass.
        collectives: The user's lines of collectives that the graph names, in order, by family; None if the region
            exchanges nothing with other ranks.
        pending_inputs: Places of inputs that the program has begun to receive, and that the region waits for.
        returns_pending_collectives: Whether it begins exchanges whose results the program waits for.
    """

    name: str
    inputs: tuple[str, ...]
    input_sources: tuple[str, ...]
    output_sources: tuple[str, ...]
    sources: tuple[str, ...]
    nodes: int
    graph: str | None = None
    outputs: tuple[str, ...] = ()
    free_outputs: frozenset[int] = frozenset()
    mutates_in_backward: bool = False
    enables_grad: bool = False
    collectives: Mapping[str, Sequence[str]] | None = None
    pending_inputs: tuple[int, ...] = ()
    returns_pending_collectives: bool = False

    def source(self, result: Result) -> str:
        """The user's line that made a result, or that first uses a mutated input; "" where there is none."""
        sources = self.output_sources if result[0] == "output" else self.input_sources
        return sources[result[1]] if result[1] < len(sources) else ""

    @property
    def region(self) -> RegionInfo:
        """The region as reports have it, before any call."""
        return RegionInfo(self.name, self.sources, self.nodes)

    @classmethod
    def of(cls, gm: fx.GraphModule) -> GraphInfo:
        """Read a Dynamo graph. Call it while Dynamo compiles the region, so that the compile id is known."""
        calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        lines = [line for node in calls if (line := source_line(node))]
        called = graph_name(gm)
        where = compile_id()
        inputs = _unique(_placeholder_names(gm))
        return cls(
            name=(f"{called} [{where}]" if where else called) + _part(gm, inputs),
            inputs=inputs,
            input_sources=tuple(
                next((line for user in node.users if (line := source_line(user))), "")
                for node in gm.graph.find_nodes(op="placeholder")
            ),
            output_sources=tuple(
                (source_line(node) or "") if isinstance(node, fx.Node) else "" for node in outputs_of(gm.graph)
            ),
            sources=tuple(dict.fromkeys(lines)),
            nodes=len(calls),
            mutates_in_backward=writes_in_backward(gm),
            enables_grad=any(
                getattr(node.target, "__name__", "") == "_set_grad_enabled" and node.args[:1] == (True,)
                for node in calls
            ),
        )


def _part(gm: fx.GraphModule, inputs: Sequence[str]) -> str:
    """Which part of a split graph this is: all parts have one compile id. "" for a graph that was not split."""
    reason = str(getattr(getattr(gm, "compile_subgraph_reason", None), "reason", ""))
    if not reason.startswith(_SPLITTING):
        return ""
    return f" from {next((name for name in inputs if '.' in name), inputs[0] if inputs else 'its inputs')}"


def _placeholder_names(gm: fx.GraphModule) -> list[str]:
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    texts = [_source_text(node) for node in nodes]
    # one module only: its parameters are called as its own named_parameters() calls them
    roots = {
        match["root"]
        for text in texts
        if ("_parameters[" in text or "_buffers[" in text) and (match := _ROOT.match(text))
    }
    return [_user_name(text, drop=len(roots) == 1) or str(node.target) for text, node in zip(texts, nodes, strict=True)]


def _source_text(node: fx.Node) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    text, nested = str(name() if callable(name) else name), 1
    while nested:
        text, nested = _KEY.subn(r"\1", text)
    return text


def _user_name(text: str, *, drop: bool) -> str:
    match = _ROOT.match(text)
    if match is None:
        of_class = _OF_CLASS.match(text)
        return of_class["name"] if of_class else ""
    rest = text[match.end() :]
    parts: list[str] = []
    for step in _STEP.finditer(rest):
        if step["item"] is not None:
            parts.append(f"[{step['item'].strip(chr(39))}]")
        else:
            parts.append("." + (step["member"] or step["attribute"]))
    own = "".join(part for part in parts if part != "._orig_mod")
    is_module = "_parameters[" in rest or "_buffers[" in rest
    if (is_module and drop) or (own and match["root"].startswith(_MODULE)):
        return own.lstrip(".")
    return match["root"] + own


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(result)


def qualified_names(tensors: Sequence[object]) -> Mapping[int, str]:
    """Names of parameters and buffers in the user's outermost module on the call stack.

    After a graph break Dynamo compiles the frame of a submodule on its own and only knows ``self.weight``. The user
    knows ``encoder.layers.3.weight``.

    Args:
        tensors: A region's inputs. Values that are not tensors are skipped.

    Returns:
        For each position whose tensor was found, its qualified name.
    """
    wanted = {id(tensor): position for position, tensor in enumerate(tensors) if isinstance(tensor, torch.Tensor)}
    best: dict[int, str] = {}
    seen: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = self_of(frame)
        owner = getattr(owner, "_orig_mod", owner) if isinstance(owner, torch.nn.Module) else None
        if owner is not None and id(owner) not in seen and "_modules" in vars(owner):  # not before it is initialized
            seen.add(id(owner))
            for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
                position = wanted.get(id(tensor))
                if position is not None:
                    best[position] = name.replace("_orig_mod.", "")  # outer frames come later and win
        frame = frame.f_back
    return best


_APPLY = "autograd_function_apply"
_CHECKPOINT = "tag_activation_checkpoint"
_VIEWS = frozenset(
    {"detach", "getitem", "narrow", "reshape", "select", "squeeze", "t", "transpose", "unsqueeze", "view"}
)


def writes_in_backward(gm: fx.GraphModule) -> bool:
    """Whether a region's backward pass writes to something that it did not make there.

    A call of a `torch.autograd.Function` may. A checkpointed body that writes to its inputs (a batch norm to its
    statistics) does so again when eager recomputes it. The compiled program mostly does not.
    """
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name == _CHECKPOINT and _writes_to_operands(gm, node):
            return True
        if node.op != "call_function" or name != _APPLY:
            continue
        forward, backward = (getattr(gm, str(body.target), None) for body in node.args[:2])
        if not isinstance(forward, fx.GraphModule) or not isinstance(backward, fx.GraphModule):
            return True  # nobody knows
        returned = forward.graph.output_node().args[0]
        results = returned[0] if isinstance(returned, (tuple, list)) and returned else None
        gradients = len(results) if isinstance(results, (tuple, list)) else 1
        held = backward.graph.find_nodes(op="placeholder")[gradients:]
        if any(writes(call) and _written(call) in held for call in backward.graph.nodes):
            return True
    return False


def _writes_to_operands(gm: fx.GraphModule, call: fx.Node) -> bool:
    body = getattr(gm, str(getattr(call.args[0], "target", "")), None)
    if not isinstance(body, fx.GraphModule):
        return True  # nobody knows
    given = body.graph.find_nodes(op="placeholder")
    return any(writes(inner) and _written(inner) in given for inner in body.graph.nodes)


def _written(call: fx.Node) -> fx.Node | None:
    """The node that a call writes to. The call's first argument may be a view of it."""
    target = call.args[0] if call.args else None
    while isinstance(target, fx.Node) and target.op.startswith("call_"):
        name = target.target if isinstance(target.target, str) else getattr(target.target, "__name__", "")
        if name not in _VIEWS:
            return None
        target = target.args[0]
    return target if isinstance(target, fx.Node) else None
