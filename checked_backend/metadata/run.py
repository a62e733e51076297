"""One run of a checked graph: run each node, compare its value, and say which mismatch follows from which."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from checked_backend._torch.pytree import tree_leaves, tree_map_only
from checked_backend._torch.tensors import storage_identity
from checked_backend.findings import Finding
from checked_backend.graphs.schema import is_custom, operator_name
from checked_backend.metadata.attribution import is_own_fault
from checked_backend.metadata.expected import ExpectedTensor, Inputs, Leaf, Mismatch, Size, compare
from checked_backend.metadata.findings import NodeMismatch, depended_on, to_finding
from checked_backend.metadata.layout import LAYOUT, dependent
from checked_backend.metadata.nonfinite import MAY_BE_ANYTHING, first_nonfinite
from checked_backend.metadata.steps import Slot, Step, TensorCheck, ValueCheck, producer
from checked_backend.metadata.symbols import SizeValues
from checked_backend.metadata.watch import KnownStorages, call_watched

if TYPE_CHECKING:
    from checked_backend.metadata.interpreter import MetadataInterpreter

_REMEMBERED = 1000
_FOLLOWS = "it follows from a node that is ignored"
# mismatches that an operator causes by itself, whatever its inputs are
_OF_ITSELF = frozenset({"mutation", "requires_grad", "nonfinite"})
_MISSING = object()  # stands for a missing output, which was reported already


class History:
    """The facts that earlier graphs and calls of one region leave to later ones.

    Attributes:
        wrong: Names of values that were found wrong in forward graphs, which hand them on to the backward graph under
            the same names. Each has a bool: whether it is wrong only because of something that the user ignores.
        memory: Storages that custom operators, and graphs with custom operators, were given or returned.
        told: Findings of earlier calls, by their facts, so that attribution is not repeated at every training step.
        own_faults: For a graph's nodes whose inputs were wrong, whether the operator is wrong by itself.
    """

    def __init__(self) -> None:
        self.wrong: dict[str, bool] = {}
        self.memory = KnownStorages()
        self.own_faults: dict[str, bool] = {}
        self.told: dict[Hashable, Finding] = {}

    def hand_on(self, names: Iterable[str], *, ignored: bool) -> None:
        """Note values of a forward graph that are wrong."""
        for name in names:
            self.wrong[name] = ignored and self.wrong.get(name, True)


class GraphRun:
    """One run of a graph. Threads and calls must not share it.

    Args:
        outer: The run of the graph that this graph lies in; None for an outermost graph.

    Attributes:
        wrong: Places of nodes that are wrong, each with whether it is wrong only because of something that the user
            ignores.
    """

    def __init__(self, owner: MetadataInterpreter, outer: GraphRun | None) -> None:
        self.findings: list[Finding] = []  # the outermost run holds the findings of the whole run
        self._owner = owner
        self._graph = owner.graph
        self._outer = outer
        self._values: dict[fx.Node, Any] = {}  # those that a later node needs
        self._storages: dict[Slot, int] = {}
        self._sizes = SizeValues(self._graph.symbols)
        self.wrong: dict[int, bool] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._untold: list[int] = []  # the findings that were not handed on yet
        self._layout: dict[int, frozenset[int]] = {}  # for each node, its findings on which nothing depends yet

    def run(self, args: list[Any]) -> Any:
        """Run the graph on a list of inputs, which is emptied."""
        values, given = self._values, deque(args)  # each is freed after its last use
        args.clear()
        for step in self._graph.steps:
            if step.function is not None:
                values[step.node] = self._call(step, step.function)
            elif step.node.op == "placeholder":
                values[step.node] = given.popleft()
            else:
                break
            if step.leaves is not None:
                self._check(step, values[step.node])
            for node in step.dead:
                del values[node]
        # at the end, so that a graph which holds the assertion itself raises eager's exception first
        for condition, message in self._graph.asserts:
            if not self._sizes[condition]:
                self._assertion(condition, message)
        return fx.node.map_arg(step.args[0], values.__getitem__)

    def _call(self, step: Step, function: Callable[..., Any]) -> Any:
        values, kwargs = self._values, step.kwargs
        args: Sequence[Any] = step.args
        if step.flat:
            args = [values[item] if item.__class__ is fx.Node else item for item in args]
            if kwargs:
                kwargs = {key: values[item] if item.__class__ is fx.Node else item for key, item in kwargs.items()}
        else:
            args, kwargs = fx.node.map_arg((step.args, kwargs), values.__getitem__)
        return self._custom(step, args, kwargs) if step.watched else function(*args, **kwargs)

    def _check(self, step: Step, value: Any) -> None:
        outputs: Sequence[Any] = (value,)
        if step.count is not None:
            fits = type(value) in (tuple, list) and len(value) == step.count
            outputs = value if fits else self._flat(step, value, step.count)
        sizes, storages = self._sizes, self._storages
        for check in step.checks:
            output = outputs[check.k]
            if output is _MISSING:
                continue
            if check.lessons:
                check.learn(output, sizes)
            if isinstance(check, ValueCheck):
                if not check.lessons:
                    self._fail(step, check.k, check.want, output)
                continue
            if output is None and check.may_be_absent:
                continue
            if not check.holds(output, sizes, self._values):
                self._fail(step, check.k, self._wanted(step, check), output)
            if check.keeps and isinstance(output, torch.Tensor) and output.layout is torch.strided:
                storages[step.index, check.k] = storage = storage_identity(output)
                if check.is_misplaced(storage, storages):
                    self._alias(step, check, storage)
        if step.finite:
            self._finite(step, value)

    # a comparison that did not hold, in detail

    def _wanted(self, step: Step, check: TensorCheck) -> ExpectedTensor:
        """The recorded metadata with the storage offset that is right in this run."""
        want, base = check.want, check.base
        if step.node.op == "placeholder":
            return replace(want, offset=None)
        if base is None or want.offset is None:
            return want
        owner, expected, began = self._values.get(base.node), self._value_of(want.offset), self._value_of(base.offset)
        if not isinstance(owner, torch.Tensor) or expected is None or began is None:
            return replace(want, offset=None)
        begins = owner.storage_offset()
        return want if begins == began else replace(want, offset=int(begins + expected - began))

    def _fail(self, step: Step, k: int, want: Leaf, value: Any) -> None:
        place = None if step.count is None else k
        self._add(step, compare(want, value, place, self._value_of, self._owner.settings.checks))

    def _alias(self, step: Step, check: TensorCheck, storage: int) -> None:
        """Find the owner of the memory in which an output unexpectedly lies."""
        node, base, steps = step.node, check.base, self._graph.steps
        if node.op != "call_function":
            return
        place = None if step.count is None else check.k
        inputs = {slot[0] for slot, identity in self._storages.items() if identity == storage}
        shared = [position for position in step.inputs if position in inputs]
        maker = None if base is None else self._graph.position[producer(base.node)]
        undeclared = [p for p in shared if p not in step.allowed and (p != maker or is_custom(node))]
        if undeclared:
            names = ", ".join(steps[position].node.name for position in undeclared)
            self._add(step, [Mismatch("alias", place, "memory of its own", f"the memory of {names}")])
        elif base is not None and not shared and base.slot is not None and self._storages.get(base.slot):
            self._add(step, [Mismatch("alias", place, f"a view of {base.node.name}", "memory of its own")])

    def _flat(self, step: Step, value: Any, count: int) -> Sequence[Any]:
        """The outputs of a node, flat. Their number is the recorded one, whatever the node returned."""
        found: Sequence[Any] = tree_leaves(value)
        if len(found) == count:
            return found
        self._add(step, [Mismatch("structure", None, f"{count} values", f"{len(found)} values")])
        return [_MISSING] * count

    def _custom(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a custom operator, and check that it keeps to its schema."""
        checks, memory = self._owner.settings.checks, self._owner.history.memory
        # an operator may change the shape or the strides of its inputs
        given = tree_map_only(torch.Tensor, torch.Tensor.detach, (tuple(args), dict(kwargs)))
        result, mismatches = call_watched(step.node, step.function, tuple(args), kwargs, checks=checks, memory=memory)
        self._add(step, mismatches, given)
        return result

    def _finite(self, step: Step, value: Any) -> None:
        """Look for a NaN or an infinity that a node made of finite inputs."""
        if not MAY_BE_ANYTHING.isdisjoint(operator_name(step.node).split(".")[1:2]):
            return
        mismatch = first_nonfinite(step.node, value, tuple(self._values[item] for item in step.node.all_input_nodes))
        if mismatch is not None:
            self._add(step, [mismatch])

    def _assertion(self, condition: sympy.Basic, message: str) -> None:
        """Report that an assumption of the trace about sizes that depend on data does not hold."""
        values = {str(symbol): self._value_of(symbol) for symbol in condition.free_symbols}
        if None in values.values():
            return
        texts = ", ".join(f"{name}={value}" for name, value in sorted(values.items()))
        self._add(self._maker_of(condition), [Mismatch("assert", None, str(condition), texts, message)])

    # who is to blame

    def _maker_of(self, condition: sympy.Basic) -> Step:
        """The first node in whose recorded value a symbol of the condition appears."""
        for step in self._graph.steps:
            for leaf in step.leaves or ():
                sizes: list[Any] = [*(getattr(leaf, "shape", None) or ()), getattr(leaf, "value", None)]
                if any(isinstance(s, sympy.Basic) and s.free_symbols & condition.free_symbols for s in sizes):
                    return step
        return self._graph.steps[-1]

    def _value_of(self, size: Size) -> Any:
        """The value of a size; None if it is not known."""
        value = self._sizes.of(size)
        return None if value != value else value

    def _add(self, step: Step, mismatches: Sequence[Mismatch], given: Inputs | None = None) -> None:
        if not mismatches:
            return
        index, urgent = self._graph.position[step.node], False
        for mismatch in mismatches:
            owner, inputs = self._owner, given or self._inputs(step)
            found = self._attributed(NodeMismatch(step.node, mismatch, owner.kind, owner.place, inputs), step)
            ignored = bool(found.ignored)
            self.wrong[index] = ignored and self.wrong.get(index, True)
            if step.node.op != "placeholder" and self._owner.kind == "forward":
                names = (item.name for item in (step.node, *step.node.users))
                self._owner.history.hand_on(names, ignored=ignored)
            urgent |= self._deliver(found, step, ignored=ignored)
        if urgent:  # once all that is wrong with the node is known
            self._root().tell()

    def _root(self) -> GraphRun:
        return self if self._outer is None else self._outer._root()

    def _attributed(self, found: NodeMismatch, step: Step) -> NodeMismatch:
        """The mismatch, marked if it merely follows from an earlier one, or if the user ignores it."""
        causes = self._causes(step, found.mismatch)
        if causes and is_custom(step.node):
            known, key = self._owner.history.own_faults, f"{found.graph} {found.subject}"
            if key not in known:
                known[key] = is_own_fault(step.node, found.inputs)
            causes = [] if known[key] else causes
        settings = self._owner.settings
        entry = settings.ignores(step.node) or settings.hides(found.kind.value, found.detail, found.subject)
        follows = _FOLLOWS if causes and all(causes) else ""
        return replace(found, inherited=bool(causes), ignored=entry or follows)

    def _causes(self, step: Step, mismatch: Mismatch) -> list[bool]:
        """For each earlier mismatch that may have made a node wrong, whether the user ignores that mismatch."""
        if step.node.op == "placeholder":
            return self._causes_outside(step.node)
        alone = mismatch.what in _OF_ITSELF or (
            mismatch.what == "alias" and is_custom(step.node) and not mismatch.expected.startswith("a view")
        )
        # a graph that a higher-order operator runs is part of that operator, not an input
        inputs = [p for p in step.inputs if not alone or self._graph.steps[p].node.op == "get_attr"]
        return [self.wrong[position] for position in inputs if position in self.wrong]

    def _causes_outside(self, node: fx.Node) -> list[bool]:
        """The same for an input of the graph, which comes from an earlier graph or from the graph around this one."""
        known, outer = self._owner.history.wrong, self._outer
        if outer is None:
            return [known[node.name]] if node.name in known else []
        users = outer._graph.steps[self._owner.position].node.users
        given = dict.fromkeys(item for user in users for item in user.all_input_nodes)
        positions = {outer._graph.position[place] for item in given for place in (item, producer(item))}
        return [outer.wrong[position] for position in sorted(positions) if position in outer.wrong]

    def _inputs(self, step: Step) -> Inputs | None:
        """The real arguments of a node, as far as they still exist."""
        if step.node.op != "call_function" or any(item not in self._values for item in step.node.all_input_nodes):
            return None
        return fx.node.map_arg((step.args, step.kwargs), self._values.__getitem__)

    def tell(self) -> None:
        """Hand on the findings that were not handed on yet."""
        untold, self._untold = sorted(self._untold), []
        if untold:
            self._owner.on_findings(tuple(self.findings[number] for number in untold))

    def _deliver(self, found: NodeMismatch, step: Step, *, ignored: bool) -> bool:
        """Keep a mismatch. Returns whether it ends the run at once."""
        root, runs = self, [(self, self._graph.position[step.node])]
        while root._outer is not None:
            # the mismatch makes the results of the inner graph wrong
            place, root = root._owner.position, root._outer
            root.wrong[place] = ignored and root.wrong.get(place, True)
            runs.append((root, place))
        key = (found.subject, found.mismatch.what)
        known = root._seen.get(key)  # a loop's body runs many times
        number = root._seen.setdefault(key, len(root.findings))
        # the findings about layout that the node's inputs carry, on which nothing depends so far
        before: frozenset[int] = frozenset()
        if found.inherited:
            before = before.union(*(self._layout.get(position, frozenset()) for position in step.inputs))
        layout = found.mismatch.what in LAYOUT
        reason = dependent(found.node, found.mismatch.index) if layout else ""
        if known is None:
            root.findings.append(self._finding(replace(found, depended=reason)))
            root._untold.append(number)
        if found.ignored:
            return False
        if layout and not reason:
            for run, place in runs:
                run._layout[place] = run._layout.get(place, frozenset()) | before | {number}
            return False
        for earlier in before:  # a mismatch that matters follows from them
            if not root.findings[earlier].more_than_layout:
                root.findings[earlier] = depended_on(root.findings[earlier], f"{found.subject} follows from it")
        return root._owner.settings.immediate

    def _finding(self, found: NodeMismatch) -> Finding:
        """The finding of a mismatch. It is remembered, because the next call has the same mismatch."""
        told = self._owner.history.told
        if len(told) >= _REMEMBERED:  # sizes may differ in each call
            told.clear()
        key = (found.graph, found.subject, found.mismatch, found.inherited, found.ignored, found.depended)
        return told.get(key) or told.setdefault(key, to_finding(found))
