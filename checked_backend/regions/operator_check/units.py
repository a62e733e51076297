"""The units in which a region's graph is checked: a tensor that is handed out, with the calls that lead to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Set
from dataclasses import dataclass

import torch
from torch import fx

from checked_backend._torch.operators import HigherOrderOperator
from checked_backend.graphs.effects import has_effects
from checked_backend.graphs.nodes import recorded_value
from checked_backend.modes.choice_tape import CHOOSING
from checked_backend.numerics.bits import is_floating
from checked_backend.regions.operator_check.probe import CALLS

LONGEST_CHAIN = 32
"""Compilers recompute chains of up to this many elementwise operators. Results of longer chains go through memory."""

_JUMPING = CHOOSING | {"fmod", "remainder", "frac", "bucketize", "searchsorted", "fake_quantize_per_tensor_affine"}
# Nobody computes these twice: their results go through memory, rounded once.
_KEPT = (
    "linear", "matmul", "mm", "bmm", "mv", "dot", "conv", "einsum", "attention", "embedding", "lstm", "gru", "rnn",
    "fft", "_grouped_mm", "tensordot",
)  # fmt: skip


_SMOOTH = frozenset(
    {
        "linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "outer", "einsum", "bilinear",
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding",
        "scaled_dot_product_attention", "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm",
        "mul", "add", "sub", "rsub", "neg", "div", "truediv", "true_divide", "iadd", "imul", "isub", "itruediv",
        "add_", "mul_", "sub_", "div_", "addcmul", "addcdiv", "lerp", "pow", "sqrt", "rsqrt", "square", "reciprocal",
        "exp", "expm1", "exp2", "log", "log1p", "log2", "sin", "cos", "tanh", "erf", "sigmoid", "logsigmoid", "silu",
        "gelu", "mish", "softplus", "softmax", "log_softmax", "logsumexp", "softsign", "glu", "dropout",
        "sum", "mean", "var", "std", "cumsum", "avg_pool1d", "avg_pool2d", "avg_pool3d",
        "cross_entropy", "nll_loss", "mse_loss", "cat", "concat", "stack", "tril", "triu",
        "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "getitem",
        "getattr", "chunk", "split", "tensor_split", "unbind", "contiguous", "to", "type", "type_as", "float", "half",
        "bfloat16", "clone", "detach", "flatten", "unflatten", "movedim", "swapaxes", "t", "repeat", "pad", "roll",
        "flip", "select", "narrow", "index_select", "gather", "squeeze_", "unsqueeze_",
        # of lowered graphs
        "_to_copy", "convert_element_type", "var_mean", "convolution", "full", "full_like", "iota", "scalar_tensor",
        "slice", "slice_scatter", "select_scatter", "constant_pad_nd", "index", "_unsafe_index", "copy",
        "split_with_sizes", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    }
)  # fmt: skip
"""Operators whose value and gradient have no step anywhere."""

_KINKED = frozenset(
    {
        "relu", "relu_", "relu6", "leaky_relu", "prelu", "elu", "celu", "selu", "hardtanh", "hardswish", "hardsigmoid",
        "clamp", "clamp_min", "clamp_max", "clip", "abs", "maximum", "minimum", "amax", "amin", "max", "min", "norm",
        "max_pool1d", "max_pool2d", "max_pool3d", "l1_loss", "smooth_l1_loss", "huber_loss", "normalize",
        "adaptive_avg_pool1d", "adaptive_avg_pool2d", "where", "masked_fill",
    }
)  # fmt: skip
"""Operators whose value has no step, though their gradient has."""

_BLANK = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
_OVERWRITING = frozenset(
    {"cauchy", "copy", "exponential", "fill", "geometric", "log_normal", "normal_functional", "random", "uniform"}
)
"""Operators without effects that read nothing but the size of their first argument."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One tensor that is handed out, or a result of the region.

    Attributes:
        sources: The tensors that it is computed from: tensors that are handed out, and inputs.
        nodes: The calls between those and it, itself included.
        jumps: Whether rounding may change a choice in it.
        kept: Whether its result goes through memory.
        steady: Whether no rounding makes an element of its value jump, as far as is known of its operators.
        steady_gradient: Whether no rounding makes an element of the gradients that it passes back jump.
    """

    sources: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    jumps: bool
    kept: bool
    steady: bool
    steady_gradient: bool


@dataclass(frozen=True, slots=True)
class Needed:
    """The part of a graph that a walk runs.

    Attributes:
        sources: Tensors that are handed out, and inputs, that others are computed from.
        calls: The calls that run.
    """

    sources: set[fx.Node]
    calls: set[fx.Node]


class Units:
    """The units of a graph.

    Args:
        exposed: Names of the nodes that are handed out.
        returned: Whether the graph's results are read, too.

    Attributes:
        order: Each node's place.
        done: By place: the nodes that nothing behind it reads.
    """

    def __init__(self, gm: fx.GraphModule, exposed: Collection[str], *, returned: bool = True) -> None:
        self.exposed = exposed
        self._units: dict[fx.Node, Unit] = {}
        self._choices: set[fx.Node] = set()
        self._depths: dict[fx.Node, int] = {}
        self.order: dict[fx.Node, int] = {node: place for place, node in enumerate(gm.graph.nodes)}
        self._last: dict[fx.Node, int] = {}
        for node, place in self.order.items():
            if not returned:
                if node.op == "output":
                    break
                self._last[node] = place
            for source in node.all_input_nodes:
                self._used(source, place)
            # a write reads its sources through views, too: until then their gradients are not complete
            if node.op == "output" or node.name in exposed or has_effects(node):
                for source in self.of(node).sources:
                    self._used(source, place)
            if node.name in exposed:
                self._take_note(node)
        self.done: dict[int, list[fx.Node]] = defaultdict(list)
        for node, place in self._last.items():
            self.done[place].append(node)

    def of(self, node: fx.Node) -> Unit:
        """The unit that a node ends."""
        if node not in self._units:
            self._units[node] = self._found(node)
        return self._units[node]

    def needed(self, values: Set[str], gradients: Set[str] = frozenset()) -> Needed:
        """What has to run so that some nodes' values and gradients are checked as in a walk that checks all."""
        needed = Needed({node for node in self.order if node.name in gradients}, set())
        pending = [
            node
            for node in self.order
            if (node.op in CALLS and gradients and not needed.sources.isdisjoint(self.of(node).sources))
            or node.name in values
        ]
        while pending:
            unit = self.of(pending.pop())
            needed.calls.update(unit.nodes)
            # what reads a tensor may have computed it anew
            pending += [one for one in unit.sources if one not in needed.calls and self.carries(one)]
            needed.sources.update(unit.sources)
        return needed

    def is_blank(self, node: fx.Node) -> bool:
        """Whether a call makes a tensor of which no element has a value yet."""
        return node.op in ("call_function", "call_method") and _name(node) in _BLANK

    def is_overwritten(self, node: fx.Node) -> bool:
        """Whether nothing reads the values of a node, since all that takes it replaces each of them."""
        return all(
            _name(user) in _OVERWRITING and user.args[0] is node and node not in user.args[1:] for user in node.users
        )

    def carries(self, node: fx.Node) -> bool:
        """Whether what reads this tensor may have computed it anew, from other roundings than the tensor handed out."""
        return 0 < self._depths.get(node, 0) < LONGEST_CHAIN

    def is_source(self, node: fx.Node) -> bool:
        """Whether a node's value is the compiled program's own."""
        return node.op == "placeholder" or node.name in self.exposed

    def _used(self, node: fx.Node, place: int) -> None:
        self._last[node] = max(place, self._last.get(node, 0))

    def _take_note(self, node: fx.Node) -> None:
        unit, value = self.of(node), recorded_value(node)
        if not value.is_floating_point() and any(
            source in self._choices or is_floating(recorded_value(source)) for source in unit.sources
        ):
            self._choices.add(node)
        depth = 1 + max((self._depths.get(source, 0) for source in unit.sources), default=0)
        self._depths[node] = 0 if unit.kept or depth > LONGEST_CHAIN else depth

    def _found(self, node: fx.Node) -> Unit:
        sources: dict[fx.Node, None] = {}
        nodes: dict[fx.Node, None] = {node: None}
        pending = [node]
        while pending:
            for source in pending.pop().all_input_nodes:
                if self.is_source(source):
                    sources[source] = None
                elif source not in nodes and source.op in CALLS:
                    nodes[source] = None
                    pending.append(source)
        calls = [one for one in nodes if one.op in CALLS]
        names = [_name(one) for one in calls]
        # words and places, and masks of them, are what they are; what comes of rounded values is not
        rounded = {one for one in sources if is_floating(recorded_value(one)) or one in self._choices}
        for one in sorted(nodes, key=self.order.__getitem__):
            if is_floating(recorded_value(one)) or not rounded.isdisjoint(one.all_input_nodes):
                rounded.add(one)
        jumping = [one for one in calls if _name(one) in _JUMPING]
        steps = any(map(_quantizes, calls))
        return Unit(
            tuple(sources),
            tuple(nodes),
            not rounded.isdisjoint(source for one in jumping for source in one.all_input_nodes)
            or not self._choices.isdisjoint(sources),
            any(part in name for name in names for part in _KEPT)
            or any(isinstance(one.target, HigherOrderOperator) for one in calls),
            not steps and all(name in _SMOOTH or name in _KINKED for name in names),
            not steps and all(name in _SMOOTH for name in names),
        )


def _quantizes(node: fx.Node) -> bool:
    """Whether a call makes integers, truth values or floating-point numbers of 8 bits of others."""
    value = recorded_value(node)
    narrow = isinstance(value, torch.Tensor) and (not is_floating(value) or value.dtype.itemsize == 1)
    return narrow and any(is_floating(recorded_value(source)) for source in node.all_input_nodes)


def _name(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
    return name.partition(".")[0]
