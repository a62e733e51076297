"""A graph as prepared steps: how each node is run, and what its value is compared with.

A graph is read once. A check that holds then costs a few attribute reads; one that fails is made again in detail
(`checked_backend.metadata.run`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import sympy
import torch
from torch import fx

from checked_backend._torch.operators import HigherOrderOperator, OpOverload
from checked_backend._torch.symbols import deferred_asserts
from checked_backend.graphs.nodes import is_getitem, recorded_value
from checked_backend.graphs.schema import is_custom, operator_name, read_only_inputs
from checked_backend.metadata.expected import ExpectedTensor, ExpectedValue, Leaf, Size, expected_leaves
from checked_backend.metadata.symbols import UNKNOWN, Lesson, SizeValues, Symbols
from checked_backend.options import MetadataCheck

Slot = tuple[int, int]
"""An output: the place of the node that made it, and which of its outputs it is."""


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """The user's choice of checks for a graph.

    Attributes:
        ignore_ops: Operators whose findings are not reported, as ``aten.relu``, ``aten.relu.default`` or ``mylib::op``.
        ignore: Findings that are not reported: kinds, finer kinds or subjects.
        nonfinite: Also look for the first node that makes a NaN or an infinity of finite inputs.
        immediate: Report each node's findings before the next node runs, not at the end. Those about strides and
            storage offsets wait until a later node depends on them.
        light: Compare dtypes and shapes only, because the graph runs under `torch.vmap`, which wraps its tensors.
    """

    checks: Collection[str] = get_args(MetadataCheck)
    ignore_ops: Collection[str] = ()
    ignore: Collection[str] = ()
    nonfinite: bool = False
    immediate: bool = False
    light: bool = False

    def ignores(self, operator: fx.Node | OpOverload) -> str | None:
        """The entry of ``ignore_ops`` that names an operator, or this node's; None if there is none."""
        name = operator_name(operator) if isinstance(operator, fx.Node) else str(operator)
        names = (name, name.rpartition(".")[0])
        return next((entry for entry in self.ignore_ops if _plain_name(entry) in names), None)

    def hides(self, *words: str) -> str | None:
        """The first entry of ``ignore`` among a finding's kind, finer kind and subject; None if there is none."""
        return next((word for word in words if word in self.ignore), None)


@dataclass(frozen=True, slots=True)
class Base:
    """The input whose memory an output shared when the graph was traced.

    Attributes:
        slot: Where the identity of its storage is kept; None if it is not.
        moves: Whether it may begin elsewhere in its storage in a run. Then its views move with it.
    """

    node: fx.Node
    offset: Size
    slot: Slot | None
    moves: bool


@dataclass(slots=True)
class TensorCheck:
    """Compares one tensor with its recorded metadata. An aspect that is not compared is None.

    Attributes:
        k: Which of the node's outputs it is.
        bits: Whether it is conjugated, and whether it is negated.
        fixed: Whether shape, strides and offset are the same in every run.
        may_be_absent: Whether the output may be None: a kernel of torch may leave out what nobody needs.
        base: The input whose memory it shares; None if it has its own.
        lessons: The method that gives a real size, its arguments, and what is learnt from that.
        keeps: Whether the identity of its storage is kept, and compared with that of the node's inputs.
        others: The slots of inputs whose memory it must not share.
    """

    k: int
    want: ExpectedTensor
    dtype: torch.dtype | None
    layout: torch.layout | None
    device: torch.device | None
    shape: tuple[Size, ...] | None
    stride: tuple[Size, ...] | None
    offset: Size | None
    bits: tuple[bool, bool] | None
    fixed: bool
    may_be_absent: bool
    base: Base | None
    lessons: Sequence[tuple[str, tuple[int, ...], Lesson]]
    keeps: bool
    others: frozenset[Slot]

    def learn(self, value: Any, sizes: SizeValues) -> None:
        """Learn the symbols that appear here first: those of an input's sizes, or of sizes that depend on data."""
        want = self.want
        known = isinstance(value, torch.Tensor) and value.ndim == len(want.shape or ()) and value.layout is want.layout
        for source, place, lesson in self.lessons:
            sizes.learn(lesson, getattr(value, source)(*place) if known else UNKNOWN)

    def holds(self, value: Any, sizes: SizeValues, values: Mapping[fx.Node, Any]) -> bool:
        """Whether a tensor is as recorded. False calls for a comparison in detail: strides may be insignificant."""
        if not isinstance(value, torch.Tensor):
            return False
        shape, stride, offset = self.shape, self.stride, self.offset
        if not self.fixed:
            shape, stride, offset = sizes.all_of(shape), sizes.all_of(stride), self._moved(offset, sizes, values)
        return (
            (self.dtype is None or value.dtype is self.dtype)
            and (shape is None or value.shape == shape)
            and (self.layout is None or value.layout is self.layout)
            and (self.device is None or value.device == self.device)
            and (stride is None or value.stride() == stride)
            and (offset is None or value.storage_offset() == offset)
            and (self.bits is None or (value.is_conj(), value.is_neg()) == self.bits)
        )

    def _moved(self, offset: Size | None, sizes: SizeValues, values: Mapping[fx.Node, Any]) -> Any:
        """The storage offset in this run."""
        base = self.base
        if offset is None or base is None or not base.moves:
            return offset if offset is None else sizes.of(offset)
        return values[base.node].storage_offset() + sizes.of(offset) - sizes.of(base.offset)

    def is_misplaced(self, storage: int, storages: Mapping[Slot, int]) -> bool:
        """Whether its memory is not that of its base, or is that of an input that it must not share."""
        for other in self.others:
            if storages.get(other) == storage:
                return True
        slot = None if self.base is None else self.base.slot
        return slot is not None and slot not in self.others and storages.get(slot) != storage


@dataclass(slots=True)
class ValueCheck:
    """Compares a number, None or another constant with the recorded one.

    Attributes:
        k: Which of the node's outputs it is.
        lessons: What is learnt from it, if it is not known.
    """

    k: int
    want: ExpectedValue
    lessons: Sequence[Lesson]

    def learn(self, value: Any, sizes: SizeValues) -> None:
        """Learn a number that depends on data."""
        for lesson in self.lessons:
            sizes.learn(lesson, value if isinstance(value, (int, float)) else UNKNOWN)


@dataclass(slots=True)
class Step:
    """One node: how it is run, and its checks.

    Attributes:
        leaves: Its expected values, flat; None if nothing is compared.
        inputs: Places of the nodes whose results it takes.
        allowed: Places of inputs that its outputs may share memory with.
        compared: Whether any comparison of this node is made whose result is reported.
        function: What is called; None for an input and for the output.
        flat: Whether no argument is a container with nodes in it.
        watched: Whether it is a custom operator that is watched while it runs.
        count: The number of its outputs; None if its value is the only one.
        finite: Whether it may make no NaN and no infinity of finite inputs.
        dead: The values that no later node needs.
    """

    node: fx.Node
    index: int
    leaves: list[Leaf] | None = None
    inputs: tuple[int, ...] = ()
    allowed: frozenset[int] = frozenset()
    compared: bool = False
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    flat: bool = True
    watched: bool = False
    count: int | None = None
    checks: list[TensorCheck | ValueCheck] = field(default_factory=list)
    finite: bool = False
    dead: Sequence[fx.Node] = ()


@dataclass(slots=True)
class GraphSteps:
    """A prepared graph.

    Attributes:
        symbols: The symbolic sizes that a run learns.
        asserts: The trace's assumptions about sizes that depend on data, each with its message.
        unchecked: The number of nodes without recorded metadata.
    """

    steps: list[Step]
    position: Mapping[fx.Node, int]
    symbols: Symbols
    asserts: list[tuple[sympy.Basic, str]]
    unchecked: int


def prepare(gm: fx.GraphModule, settings: CheckSettings, subgraphs: Mapping[fx.Node, Any]) -> GraphSteps:
    """Read a graph.

    Args:
        subgraphs: For nodes that fetch a graph for a higher-order operator, the module to hand to the operator instead.
    """
    return _Preparation(gm, settings, subgraphs).run()


class _Preparation:
    def __init__(self, gm: fx.GraphModule, settings: CheckSettings, subgraphs: Mapping[fx.Node, Any]) -> None:
        self.gm = gm
        self.settings = settings
        self.subgraphs = subgraphs
        self.steps = [Step(node, index) for index, node in enumerate(gm.graph.nodes)]
        self.position = {step.node: step.index for step in self.steps}
        self.symbols = Symbols()
        self.tensors: dict[fx.Node, ExpectedTensor] = {}  # the recorded metadata of nodes that are one tensor
        self.slots: dict[fx.Node, Slot] = {}  # where the identity of a node's storage is kept
        self.exact: set[fx.Node] = set()  # nodes whose storage offset is the recorded one, whatever the inputs' are
        self.tuples: dict[tuple[Size, ...], tuple[Size, ...]] = {}
        values = (recorded_value(step.node) for step in self.steps)
        self.lazy_bits = any(
            isinstance(value, torch.Tensor) and (value.is_complex() or value.is_neg()) for value in values
        )

    def run(self) -> GraphSteps:
        unchecked, ordering = 0, _tokens(self.gm.graph)
        dying = _last_uses([step.node for step in self.steps])
        for step in self.steps:
            self.call(step)
            step.dead = dying.get(step.node, ())
            step.inputs = tuple(self.position[producer(item)] for item in step.node.all_input_nodes)
            if step.node in ordering or step.node in self.subgraphs or step.node.op == "output":
                continue
            value = recorded_value(step.node)
            if not step.node.meta.keys() & {"val", "example_value"}:
                unchecked += step.node.op != "get_attr"
            elif not (is_getitem(step.node) and self.passed_on(step.node, value)):
                self.check(step, value)
        environment = _shape_env(self.gm.graph) if "assert" in self.settings.checks else None
        deferred = () if environment is None else deferred_asserts(environment)
        # as far as this graph knows the sizes that they are about
        asserts = [(condition, text) for condition, text in deferred if condition.free_symbols <= self.symbols.learnt]
        return GraphSteps(self.steps, self.position, self.symbols, asserts, unchecked)

    # running a node

    def call(self, step: Step) -> None:
        node, gm = step.node, self.gm
        step.args, step.kwargs = node.args, node.kwargs
        nested: list[fx.Node] = []
        for part in (*step.args, *step.kwargs.values()):
            if not isinstance(part, fx.Node):
                fx.node.map_arg(part, nested.append)
        step.flat = not nested
        step.function = _function(gm, node, self.subgraphs)
        # under vmap tensors have no memory to look at
        wanted = {"alias", "mutation", "requires_grad"} & set(self.settings.checks) and not self.settings.light
        step.watched = bool(wanted) and is_custom(node) and self.settings.ignores(node) is None

    # checking a node

    def check(self, step: Step, value: Any) -> None:
        node = step.node
        step.leaves = leaves = expected_leaves(value)
        step.compared = self.compares(node, leaves)
        free = read_only_inputs(node)
        step.allowed = frozenset(self.position[producer(item)] for item in node.all_input_nodes if item not in free)
        step.finite = self.settings.nonfinite and not self.settings.light and node.op.startswith("call")
        carriers: Mapping[int, fx.Node] = {0: node}  # by output, the node that is its value
        first = 0
        if len(leaves) != 1 or isinstance(value, (tuple, list, dict)):
            step.count = len(leaves)
            carriers = {user.args[1]: user for user in node.users if is_getitem(user) and isinstance(user.args[1], int)}
            first = 1 if _with_effects(node) else 0  # its first result is a token
        for k, leaf in enumerate(leaves):
            if k >= first and isinstance(leaf, ExpectedTensor):
                step.checks.append(self.tensor(step, k, leaf, carriers.get(k)))
            elif k >= first and isinstance(leaf, ExpectedValue):
                if isinstance(leaf.value, float) and not math.isfinite(leaf.value):
                    continue
                known = self.symbols.known(leaf.value)
                step.checks.append(ValueCheck(k, leaf, [] if known else [self.symbols.learn(leaf.value)]))

    def compares(self, node: fx.Node, leaves: Sequence[Leaf]) -> bool:
        """Whether any of the chosen checks applies to a node."""
        checks, whole = set(self.settings.checks), not self.settings.light
        if self.settings.ignores(node):
            return False
        if whole and self.settings.nonfinite and node.op.startswith("call"):
            return True
        if whole and is_custom(node) and checks & {"mutation", "requires_grad"}:
            return True
        tensors = any(isinstance(leaf, ExpectedTensor) for leaf in leaves)
        values = any(isinstance(leaf, ExpectedValue) for leaf in leaves)
        of_tensors = checks - {"assert", "mutation", "requires_grad", "value"}
        return (tensors and bool(of_tensors)) or (values and bool(checks & {"structure", "value"}))

    def passed_on(self, node: fx.Node, value: Any) -> bool:
        """Whether a ``getitem`` hands on an output that was checked where it was made."""
        parent, key = node.args
        checked = isinstance(parent, fx.Node) and self.steps[self.position[parent]].leaves is not None
        outputs = recorded_value(parent) if checked and isinstance(parent, fx.Node) else None
        if not isinstance(outputs, (tuple, list)) or not isinstance(key, int):
            return False
        if not -len(outputs) <= key < len(outputs):
            return False
        return outputs[key] is value or expected_leaves(outputs[key]) == expected_leaves(value)

    def tensor(self, step: Step, k: int, want: ExpectedTensor, carrier: fx.Node | None) -> TensorCheck:
        """The check of one tensor. ``carrier`` is the node whose value it is, maybe a ``getitem``; None if none is."""
        node, given = step.node, step.node.op == "placeholder"
        base = None if given else self.base(node, want)
        lessons = list(self.lessons(want))
        keeps = "alias" in self.settings.checks and not self.settings.light and want.storage is not None
        others: set[Slot] = set()
        if isinstance(node.target, OpOverload) and (base is None or is_custom(node)):
            others = {self.slots[item] for item in read_only_inputs(node) if item in self.slots}
        compared = self.aspects(node, want)
        sizes = *(compared["shape"] or ()), *(compared["stride"] or ()), compared["offset"]
        moves = base is not None and base.moves and compared["offset"] is not None
        fixed = not moves and not any(isinstance(size, sympy.Basic) for size in sizes)
        absent = carrier is None and not is_custom(node)
        check = TensorCheck(
            k,
            want,
            **compared,
            fixed=fixed,
            may_be_absent=absent,
            base=base,
            lessons=lessons,
            keeps=keeps,
            others=frozenset(others),
        )
        if carrier is not None:
            self.tensors[carrier] = want
            if keeps:
                self.slots[carrier] = step.index, k
            if not given and (base is None or not base.moves):
                self.exact.add(carrier)
        return check

    def aspects(self, node: fx.Node, want: ExpectedTensor) -> dict[str, Any]:
        """The aspects of a tensor that are compared; None for the others."""
        light, given = self.settings.light, node.op == "placeholder"
        lazy = want.stride is not None and (self.lazy_bits or given or is_custom(node))
        # under `torch.vmap` indices have another width than when they were traced
        is_index = not (want.dtype.is_floating_point or want.dtype.is_complex or want.dtype is torch.bool)
        chosen = {
            "dtype": None if light and is_index else want.dtype,
            "shape": self.shared(want.shape),
            "layout": None if light else want.layout,
            "device": None if light else want.device,
            "stride": None if light else self.shared(want.stride),
            "offset": None if light or given else want.offset,
            "bits": None if light or not lazy else (want.conj, want.neg),
        }
        return {aspect: value if aspect in self.settings.checks else None for aspect, value in chosen.items()}

    def shared(self, sizes: tuple[Size, ...] | None) -> tuple[Size, ...] | None:
        """The same object for equal sizes, whose values are then looked up once in a run."""
        return None if sizes is None else self.tuples.setdefault(sizes, sizes)

    def base(self, node: fx.Node, want: ExpectedTensor) -> Base | None:
        """The input that shared memory with an output when the graph was traced."""
        for item in node.all_input_nodes if want.storage is not None else ():
            known = self.tensors.get(item)
            if known is not None and known.storage == want.storage:
                return Base(item, known.offset or 0, self.slots.get(item), item not in self.exact)
        return None

    def lessons(self, want: ExpectedTensor) -> Iterator[tuple[str, tuple[int, ...], Lesson]]:
        """What is learnt from a tensor's sizes."""
        for source, sizes in (("size", want.shape), ("stride", want.stride)):
            for dim, size in enumerate(sizes or ()):
                if isinstance(size, sympy.Basic) and not self.symbols.known(size):
                    yield source, (dim,), self.symbols.learn(size)
        if isinstance(want.offset, sympy.Basic) and not self.symbols.known(want.offset):
            yield "storage_offset", (), self.symbols.learn(want.offset)


def _function(gm: fx.GraphModule, node: fx.Node, subgraphs: Mapping[fx.Node, Any]) -> Callable[..., Any] | None:
    """What a step calls; None for an input and for the output."""
    name = str(node.target)
    if node.op == "get_attr":
        read = operator.attrgetter(name)
        return lambda: subgraphs[node] if node in subgraphs else read(gm)
    if node.op == "call_method":
        return lambda own, *args, **kwargs: getattr(own, name)(*args, **kwargs)
    if node.op == "call_module":
        return lambda *args, **kwargs: gm.get_submodule(name)(*args, **kwargs)
    return node.target if callable(node.target) else None


def _plain_name(entry: str) -> str:
    """The name used here (``mylib.op``) for an operator as users write it (``torch.ops.aten.relu``, ``mylib::op``)."""
    return entry.strip().removeprefix("torch.ops.").removeprefix("higher_order.").replace("::", ".")


def producer(node: fx.Node) -> fx.Node:
    """The node that computes a value, behind the ``getitem`` that picks it."""
    while is_getitem(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _with_effects(node: fx.Node) -> bool:
    """Whether a node runs an operator with an effect, ordered by a token."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "with_effects"


def _tokens(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are effect tokens. Tokens order operators, and are None or empty when the graph runs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _with_effects(node):
            found.update(arg for arg in node.args[:1] if isinstance(arg, fx.Node))
            found.update(user for user in node.users if is_getitem(user) and user.args[1] == 0)
    return found


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that no later node needs."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        dead = [item for item in node.all_input_nodes if item not in seen]
        seen.update(dead)
        if not node.users and node.op != "output":
            dead.append(node)
        found[node] = dead
    return found


def _shape_env(graph: fx.Graph) -> Any:
    """The shape environment that a graph's symbols belong to; None for a static graph."""
    for node in graph.nodes:
        value = recorded_value(node)
        mode = getattr(value, "fake_mode", None)
        found = getattr(mode, "shape_env", None) or getattr(getattr(value, "node", None), "shape_env", None)
        if found is not None:
            return found
    return None
