"""Make sizes smaller everywhere at once: in inputs, in arguments that name sizes, and in the shapes of views."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import fx

from checked_backend._torch.fake_tensors import FakeTensorMode, fake_errors_unlogged
from checked_backend._torch.operators import OpOverload
from checked_backend.diagnose.reduce.failing_case import Draft, FailingCase, call_nodes, compact
from checked_backend.diagnose.reduce.problem import Problem
from checked_backend.graphs.nodes import is_getitem

_STEPS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64)
_AT_ONCE = (2, 17, 33, 65)
"""Sizes tried for all dimensions together: tiny; just beyond the width of the vectors that compilers use."""

_PAIRS, _LARGEST_OF_PAIR, _FITTING = 6, 12, 4
"""Bounds on the attempts for sizes that depend on each other."""

_NOT_SIZES = frozenset(
    {"stride", "padding", "dilation", "output_padding", "groups", "step", "start", "index", "dim", "storage_offset"}
)
_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "_reshape_copy", "view_copy"})


def make_static(problem: Problem) -> None:
    """Compile for fixed sizes."""
    best = problem.best
    if best.case.dynamic:
        problem.consider(replace(best, case=replace(best.case, dynamic=False)))


def shrink_sizes(problem: Problem) -> None:
    """Make sizes smaller: all of them at once, then one after the other. Equal sizes stay equal."""
    for target in _AT_ONCE:
        changes = {size: min(size, target) for size in _sizes(problem.best)}
        if any(size != new for size, new in changes.items()) and problem.consider(resized(problem.best, changes)):
            break
    tried: set[tuple[int, ...]] = set()
    while (sizes := tuple(_sizes(problem.best))) not in tried:
        tried.add(sizes)
        for size in sizes:
            smaller = sorted({step for step in (*_STEPS, size // 2, size - 1) if 0 < step < size})
            any(problem.consider(resized(problem.best, {size: step})) for step in smaller)
        _shrink_pairs(problem)


def _shrink_pairs(problem: Problem) -> None:
    """Make pairs of sizes smaller that depend on each other, as the input and the output of a pooling do."""
    sizes = [size for size in _sizes(problem.best) if not _fits_alone(problem.best, size)]
    pairs = [(one, other) for at, one in enumerate(sizes) for other in sizes[at + 1 :]][:_PAIRS]
    for one, other in pairs:
        steps = [
            {one: first, other: second}
            for first in range(1, min(one, _LARGEST_OF_PAIR))
            for second in range(1, min(other, _LARGEST_OF_PAIR))
        ]
        steps.sort(key=lambda changes: math.prod(changes.values()))
        fitting = (candidate for changes in steps if (candidate := resized(problem.best, changes)) is not None)
        if problem.first_of(list(islice(fitting, _FITTING))):
            return


def _fits_alone(program: FailingCase, size: int) -> bool:
    return any(resized(program, {size: step}) is not None for step in (1, 2, 3, size // 2, size - 1) if step < size)


def drop_dimensions(problem: Problem) -> None:
    """Drop the first dimension of all inputs, as long as its size is 1 in all of them."""
    while True:
        values = problem.best.placeholders()
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        ranks = {tensor.dim() for tensor in tensors.values()}
        if len(ranks) != 1 or 0 in ranks or any(tensor.shape[0] != 1 for tensor in tensors.values()):
            return
        smaller = problem.best.with_inputs({name: tensor[0].clone() for name, tensor in tensors.items()})
        if _shapes(smaller) is None or not problem.consider(smaller):
            return


def _sizes(program: FailingCase) -> list[int]:
    """The different sizes of the inputs and of tensors that the graph makes without inputs, the greatest first."""
    tensors = [value for value in program.case.inputs if isinstance(value, torch.Tensor)]
    found = {size for tensor in tensors for size in tensor.shape}
    for node in call_nodes(program.case.graph.graph):
        if not node.all_input_nodes and isinstance(node.target, OpOverload) and node.args:
            first = node.args[0]
            found.update(size for size in (first if isinstance(first, (list, tuple)) else [first]) if type(size) is int)
    return sorted((size for size in found if size > 1), reverse=True)


def resized(program: FailingCase, changes: Mapping[int, int]) -> FailingCase | None:
    """Give a program other sizes.

    Inputs lose their last elements. Arguments that name a changed size follow. The shapes of views are derived from
    the view's input. Indices into a changed dimension are wrapped.

    Returns:
        The program, None if it does not run on fake tensors of these sizes.
    """
    before = _shapes(program)
    if before is None:
        return None
    draft = Draft(program)
    draft.inputs = {name: _cut(value, changes) for name, value in draft.inputs.items()}
    follow = _Follow(draft.module, before, changes)
    if not _runs(follow, draft.inputs.values()):
        return None
    for node in draft.graph.nodes:
        if node in follow.calls:
            node.args, node.kwargs = follow.calls[node]
    return draft.finish()


def _runs(interpreter: fx.Interpreter, inputs: Iterable[Any]) -> bool:
    """Whether a graph runs on fake tensors: sizes may not fit, or depend on data."""
    with fake_errors_unlogged(), FakeTensorMode() as mode, torch.no_grad():
        fakes = (mode.from_tensor(one, static_shapes=True) if isinstance(one, torch.Tensor) else one for one in inputs)
        try:
            interpreter.run(*fakes)
        except Exception:
            return False
    return True


def _shapes(program: FailingCase) -> Mapping[str, tuple[int, ...]] | None:
    """The shape of every node's value; None if it cannot be run on fake tensors."""
    found: dict[str, tuple[int, ...]] = {}

    class _Shapes(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor):
                found[n.name] = tuple(value.shape)
            return value

    return found if _runs(_Shapes(program.case.graph), program.case.inputs) else None


class _Follow(fx.Interpreter):
    """Runs a graph on inputs of new sizes, and finds the arguments that fit them."""

    def __init__(
        self, module: fx.GraphModule, before: Mapping[str, tuple[int, ...]], changes: Mapping[int, int]
    ) -> None:
        super().__init__(module)
        self._before = before
        self._changes = changes
        self.calls: dict[fx.Node, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if isinstance(n.target, OpOverload) and not is_getitem(n):
            args, kwargs = self._arguments(n, n.target)
            self.calls[n] = args, kwargs
            n.args, n.kwargs = args, kwargs
        return super().run_node(n)

    def _arguments(self, node: fx.Node, target: OpOverload) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = list(node.args)
        kwargs: dict[str, Any] = dict(node.kwargs)
        # the arguments that are sizes may be symbolic, and are no strides, steps or positions
        symbolic = set(re.findall(r"\bSymInt\S* (\w+)", str(target._schema)))
        sizes = {"end"} if target._schema.name == "aten::arange" else symbolic - _NOT_SIZES
        for position, declared in enumerate(target._schema.arguments):
            if declared.name not in sizes:
                continue
            if position < len(args):
                args[position] = self._renamed(args[position])
            elif declared.name in kwargs:
                kwargs[declared.name] = self._renamed(kwargs[declared.name])
        source = args[0] if args else None
        if isinstance(source, fx.Node) and source.name in self._before and len(args) > 1:
            new = tuple(self.env[source].shape)
            name = target._schema.name.partition("::")[2]
            if name in _VIEWS:
                args[1] = _viewed(self._before[source.name], new, self._before[node.name], args[1])
            elif name == "expand":
                args[1] = _expanded(self._before[source.name], new, self._before[node.name], args[1])
            elif name == "native_layer_norm":
                args[1] = list(new[len(new) - len(args[1]) :])
        return tuple(args), kwargs

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._renamed(item) for item in value]
        if isinstance(value, int) and not isinstance(value, bool):
            return self._changes.get(value, value)
        return value


def _viewed(
    old_in: Sequence[int], new_in: Sequence[int], old_out: Sequence[int], wanted: Sequence[Any]
) -> Sequence[Any]:
    """The new shape of a view: each group of dimensions that stay together gets the present number of elements."""
    if any(isinstance(size, fx.Node) for size in wanted):
        return wanted
    result = [old_out[at] if size == -1 else size for at, size in enumerate(wanted)]
    for ins, outs in _groups(old_in, old_out):
        count = math.prod(new_in[at] for at in ins)
        if math.prod(result[at] for at in outs) == count:
            continue
        for at in sorted(outs, key=lambda place: -old_out[place]):
            others = math.prod(result[other] for other in outs if other != at)
            if others and count % others == 0:
                result[at] = count // others
                break
    return result


def _groups(old_in: Sequence[int], old_out: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dimensions on both sides with the same number of elements, as short as possible."""
    left = right = 0
    while left < len(old_in) or right < len(old_out):
        ins, outs = [left] if left < len(old_in) else [], [right] if right < len(old_out) else []
        left, right = left + len(ins), right + len(outs)
        while (one := math.prod(old_in[at] for at in ins)) != (other := math.prod(old_out[at] for at in outs)):
            if left < len(old_in) and (one < other or right == len(old_out)):
                ins.append(left)
                left += 1
            elif right < len(old_out):
                outs.append(right)
                right += 1
            else:
                return  # a size of 0
        yield ins, outs


def _expanded(
    old_in: Sequence[int], new_in: Sequence[int], old_out: Sequence[int], wanted: Sequence[Any]
) -> Sequence[Any]:
    """The shape of an expanded tensor: dimensions that were not expanded have the size they have now."""
    added = len(wanted) - len(old_in)
    return [
        new_in[at - added] if at >= added and old_in[at - added] == old_out[at] and size != -1 else size
        for at, size in enumerate(wanted)
    ]


def _cut(value: Any, changes: Mapping[int, int]) -> Any:
    if not isinstance(value, torch.Tensor):
        is_size = isinstance(value, int) and not isinstance(value, bool)
        return changes.get(value, value) if is_size else value
    shape = [changes.get(size, size) for size in value.shape]
    cut = value.detach()
    for dimension, size in enumerate(shape):
        cut = cut.narrow(dimension, 0, size)
    return _wrapped(compact(cut, _strides(value, shape)), changes)


def _strides(value: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Strides of the smaller tensor: the same order of dimensions without gaps; expanded ones stay expanded."""
    strides, step = [0] * len(shape), 1
    for at in sorted(range(len(shape)), key=lambda place: (value.stride(place), -place)):
        if value.stride(at) or value.shape[at] == 1:
            strides[at] = step
            step *= shape[at]
    return strides


def _wrapped(tensor: torch.Tensor, changes: Mapping[int, int]) -> torch.Tensor:
    """Bring indices into a dimension that became smaller into its bounds."""
    if tensor.dtype not in (torch.int64, torch.int32) or not tensor.numel():
        return tensor
    low, high = int(tensor.min()), int(tensor.max())
    bounds = [(size, new) for size, new in changes.items() if low >= 0 and new <= high < size]
    return tensor.remainder_(min(bounds)[1]) if bounds and tensor.is_contiguous() else tensor
