"""Walk through a region's graph on the compiled program's own values, and check each operator by itself.

Each operator runs on the inputs that it has in the compiled program. In the backward pass it gets the gradients that
arrive there in the compiled program. So an error shows at the operator that makes it, and nowhere else. An operator may
be off by as much as in eager, and by as much as roundings of its inputs change its result. A fused kernel reads values
that were never rounded, while the value that is handed out was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import OpOverload
from checked_backend._torch.pytree import tree_leaves
from checked_backend._torch.tensors import clone_preserve_strides
from checked_backend.graphs.effects import has_effects, may_write_undeclared, sets_mode, writes, written_by
from checked_backend.graphs.nodes import outputs_of, recorded_value
from checked_backend.graphs.operators import OperatorKind, describe_operator
from checked_backend.modes.float64 import Float64Mode
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from checked_backend.numerics.bits import unit_roundoff
from checked_backend.regions.inputs import storage_key
from checked_backend.regions.operator_check.lane import CANCELS, Lane, Missing, Moved
from checked_backend.regions.operator_check.probe import CALLS, Exposed, Probed
from checked_backend.regions.operator_check.recorder import is_unchanged
from checked_backend.regions.operator_check.tensor_checks import (
    LOW,
    TOO_FEW,
    TensorChecks,
    TensorKey,
    Wrong,
    alike,
    can_be_checked,
    exact_error,
    is_rounded_otherwise,
    own_error,
    roundoff_of,
)
from checked_backend.regions.operator_check.units import Needed, Unit, Units
from checked_backend.verdict.elements import widened

SAMPLES = 3
"""The number of runs in float64 with inputs that are moved by a rounding."""

INSIDE_FLOAT32 = 2.0**29
"""The unit roundoff of float32 in those of float64. Operators of half precision compute in float32."""

SAME_DRAWS = 0.99
"""Results of a random operator that come from the same random numbers have at least this cosine."""


class Walk:
    """One walk through a region's graph.

    Args:
        gm: The region's graph for eager; its nodes have the names of those of the probe.
        exposed: The tensors that the probe hands out.
        units: The graph's units for these, if they are known.
        checks: Receives the results. In a quick walk there is no lane but eager's.
        strict: Whether all dtypes are checked, float32 by its own roundings, and no random operator.
        without: Calls that do not run.
        before: Called before each node with eager's values. It may fill in results of the probe.
        enough: Called with each error that is found: whether the walk ends there.

    Attributes:
        checks: The results of the walk.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        exposed: Exposed,
        probed: Probed,
        *,
        units: Units | None = None,
        checks: TensorChecks | None = None,
        strict: bool = False,
        without: Collection[fx.Node] = (),
        before: Callable[[fx.Node, Mapping[fx.Node, Any]], None] = lambda _node, _values: None,
        enough: Callable[[Wrong], bool] = lambda _wrong: False,
    ) -> None:
        self._strict = strict
        self._without = without
        self._before = before
        self._enough = enough
        self.checks = TensorChecks() if checks is None else checks
        self._exposed = exposed
        self._probed = probed
        self._units = units or Units(gm, exposed.values.keys(), returned=exposed.outputs > 0)
        self._tape = RandomTape()
        self._random: set[fx.Node] = set()
        self._blank: set[fx.Node] = set()  # tensors with elements to which nothing was written yet: they are NaN
        self._by_values: set[fx.Node] = set()
        self._inputs = gm.graph.find_nodes(op="placeholder")
        self._eager = Lane(gm)
        self._lanes = [self._eager]
        if not self.checks.quick:
            seeds = range(1, 1 + SAMPLES)
            moved = [Lane(gm, self._float64(seed), wide=True, moved=Moved(seed)) for seed in seeds]
            unrounded = Lane(gm, self._float64(), wide=True)  # it goes on with what was not rounded yet
            self._lanes += [Lane(gm, self._float64(), wide=True), *moved, unrounded]
        self._writes = any(writes(node) for node in gm.graph.nodes if node not in without)
        self._may_write = self.checks.quick and may_write_undeclared(gm)
        self._together = self._sharing_memory() if self._writes else set()
        self._uncopied: dict[fx.Node, torch.Tensor] = {}
        self._needed: Needed | None = None
        if self.checks.only is not None and not self._writes:
            values = {name for name, gradient, _ in self.checks.only if not gradient}
            gradients = {name for name, gradient, _ in self.checks.only if gradient}
            # what draws later gets other numbers without it
            self._needed = self._units.needed(values | self.checks.drew, gradients)
        self._gradients = GradientSums(self._lanes, self.checks)

    def _sharing_memory(self) -> set[fx.Node]:
        """The inputs in memory that others share and the graph writes to."""
        targets = [recorded_value(target) for node in self._units.order if (target := written_by(node)) is not None]
        written = {storage_key(target) for target in targets if isinstance(target, torch.Tensor)}
        groups: dict[int | None, list[fx.Node]] = {}
        for place, (node, value) in enumerate(zip(self._inputs, self._probed.inputs, strict=True)):
            if type(value) is torch.Tensor and place not in self._probed.gradients:
                groups.setdefault(storage_key(value), []).append(node)
        return {
            node
            for key, group in groups.items()
            if key is not None and len(group) > 1
            if not written.isdisjoint(storage_key(recorded_value(one)) for one in group)
            for node in group
        }

    def _float64(self, seed: int | None = None) -> Callable[[], AbstractContextManager[Any]]:
        """A mode for float64. With a seed, it rounds as float32 does inside of operators."""
        mode, tape = Float64Mode(default_dtype=False), self._tape
        noise = None if seed is None else MonteCarloMode(seed, INSIDE_FLOAT32, correlated=True)

        @contextmanager
        def entered() -> Iterator[None]:
            with ExitStack() as stack:
                if not tape.empty:
                    stack.enter_context(ReplayRandom(tape))
                if noise is not None:
                    stack.enter_context(noise)
                stack.enter_context(mode)
                yield

        return entered

    def _is_checked(self, node: fx.Node) -> bool:
        """Whether the gradient of a node's value is checked."""
        return self._needed is None or (node.name, True, None) in (self.checks.only or ())

    def run(self) -> None:
        """Walk through the graph, forward and backward."""
        known = 0
        for node, place in self._units.order.items():
            for wrong in self.checks.wrong[known:]:
                known += 1
                if self._enough(wrong):
                    return
            for source in node.all_input_nodes:
                is_read = self._needed is None or source in self._needed.sources
                if source.op == "placeholder" and is_read and source not in self._eager.values:
                    self._input(source)
            self._before(node, self._eager.values)
            if node.op == "placeholder":
                continue  # it takes memory from where it is first read
            if node.op == "output":
                self._results(node)
            else:
                self._call(node)
            for done in self._units.done.get(place, ()):
                self._finish(done)

    # forward

    def _input(self, node: fx.Node) -> None:
        if node in self._together:
            for lane in self._lanes:
                lane.values[node] = Missing("it reads an input in memory that another one shares, which is written to")
            return
        place = self._inputs.index(node)
        value, wanted = self._probed.inputs[place], place in self._probed.gradients
        for lane in self._lanes:
            lane.put(node, self._copied(node, value) if lane is self._eager else value, gradient=wanted)
        if wanted and self._is_checked(node):
            self._gradients.expect(node, value)

    def _copied(self, node: fx.Node, value: Any) -> Any:
        """What eager goes on with. Its writes may reach no memory of the user's, nor values that a later walk reads."""
        if not isinstance(value, torch.Tensor) or not (self._writes or self._may_write):
            return value
        if self._writes:
            return value.clone()
        self._uncopied[node] = value
        return clone_preserve_strides(value)

    def _call(self, node: fx.Node) -> None:
        if node in self._without:
            return
        if sets_mode(node):
            made = self._eager.run(node)
            for lane in self._lanes[1:]:
                lane.values[node] = made
            return
        if self._needed is not None and node.op in CALLS and node not in self._needed.calls:
            if node in self._needed.sources:
                self._go_on(
                    node, self._take(self._exposed.values[node.name]), (), tapped=node.name in self._exposed.taps
                )
            return
        self._tape.clear()
        with RecordRandom(self._tape) if _may_draw(node) else nullcontext():
            made = self._eager.run(node)
        if self._tape.by_values:
            self._by_values.add(node)
        if not self._tape.empty:
            self.checks.drew.add(node.name)
        shared = not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(made))
        for lane in self._lanes[1:]:
            if shared:
                lane.values[node] = made
            else:
                lane.run(node)
        inside = [source for source in node.all_input_nodes if not self._units.is_source(source)]
        if not self._tape.empty or any(source in self._random for source in inside):
            self._random.add(node)
        if has_effects(node):
            self._incomplete(node, "it writes in place")
        if node.name in self._exposed.versions:
            name, place = self._exposed.versions[node.name]
            self._rewritten(node, name, self._take(place))
        if node.name in self._exposed.values:
            found = self._take(self._exposed.values[node.name])
            if self._units.is_blank(node) and found.is_floating_point():
                self._blank.add(node)
                blank = [lane.values[node] for lane in self._lanes]
                self._go_on(node, torch.full_like(found, math.nan), blank[1:], tapped=False)
            else:
                self._check_tensor(node, found)

    def _take(self, place: int) -> Any:
        value, self._probed.results[place] = self._probed.results[place], None
        return value

    def _check_tensor(self, node: fx.Node, found: Any) -> None:
        """Check a tensor that is handed out, pass on its gradient, and go on with the compiled program's value."""
        made = [lane.values[node] for lane in self._lanes]
        unit = self._units.of(node)
        tapped = node.name in self._exposed.taps
        same = self._reads_values(node, unit.sources) and self._compare(node, found, made, unit)
        if tapped and same:
            arriving = self._probed.taps.get(node.name)
            self._gradients.pass_back(
                node,
                unit.sources,
                arriving,
                roundoff=roundoff_of(found),
                jumps=unit.jumps,
                smooth=unit.steady_gradient,
            )
        elif isinstance(self._eager.values[node], Missing) or getattr(self._eager.values[node], "requires_grad", False):
            self._incomplete(node, "the tensor is written to later, or complex, or its size follows from no input")
        self._go_on(node, found, made[1:], tapped=tapped)

    def _go_on(self, node: fx.Node, found: Any, exact: Sequence[Any], *, tapped: bool) -> None:
        # a wrong compiler may hand out the user's own memory
        self._eager.put(node, self._copied(node, found), gradient=tapped)
        for lane in self._lanes[1:]:
            lane.put(node, found, gradient=False)
        if can_be_checked(found):
            carried = self._units.carries(node) and len(exact) > 0 and all(alike(value, found) for value in exact)
            for number, lane in enumerate(self._lanes[1:]):
                if lane.moved is None:
                    continue
                shift = lane.moved.shift(found, unit_roundoff(found.dtype))
                if carried:
                    more = exact[number].detach() - exact[0].detach()
                    shift = shift + more.to(torch.float64).nan_to_num_(0.0, 0.0, 0.0)
                lane.values[node] = lane.values[node] + shift
            if carried:
                self._lanes[-1].put(node, exact[-1], gradient=False)
        if tapped:
            for lane in self._lanes[1:]:
                lane.values[node] = lane.values[node].detach().requires_grad_()
            if self._is_checked(node):
                self._gradients.expect(node, found)

    def _rewritten(self, writer: fx.Node, name: str, found: Any) -> None:
        """Check the values that a node wrote to a tensor, and renew the tensor's views."""
        owner = next(node for node in self._units.order if node.name == name)
        after = [lane.values.get(writer) for lane in self._lanes]
        made = [
            value if isinstance(value, Missing) else lane.values.get(owner)
            for value, lane in zip(after, self._lanes, strict=True)
        ]
        blank = self._still_blank(owner, made[0])
        if blank is None:
            self._compare(writer, found, made, self._units.of(writer))
        else:
            filled: list[Any] = [_filled(value, blank) for value in made]
            self._compare(writer, found.masked_fill(blank, 0.0), filled, self._units.of(writer))
            found = found.masked_fill(blank, math.nan)
        self._go_on(owner, found, made[1:], tapped=False)
        key = storage_key(recorded_value(owner))
        for node, place in self._units.order.items():
            if place > self._units.order[writer]:
                break
            value = recorded_value(node)
            if node is owner or node not in self._eager.values or not isinstance(value, torch.Tensor):
                continue
            if storage_key(value) == key and node.op != "placeholder":
                for lane in self._lanes:
                    if (target := written_by(node)) is not None:
                        lane.values[node] = lane.values.get(target)
                    else:
                        lane.run(node)

    def _still_blank(self, owner: fx.Node, value: Any) -> torch.Tensor | None:
        """A mask of elements without a value, because nothing was written to them yet; None if there are none."""
        if owner in self._blank and isinstance(value, torch.Tensor):
            blank = value.detach().isnan()
            if bool(blank.any()):
                return blank
        self._blank.discard(owner)
        return None

    def _reads_values(self, node: fx.Node, sources: Sequence[fx.Node]) -> bool:
        """Whether all inputs of a node have been written to. Junk differs from run to run."""
        if all(self._units.is_overwritten(source) for source in self._blank.intersection(sources)):
            return True
        self.checks.unchecked[node.name] = "it reads memory to which nothing may have been written"
        return False

    def _compare(
        self, node: fx.Node, found: Any, made: Sequence[Any], unit: Unit, *, output: int | None = None
    ) -> bool:
        """Check one tensor. Returns whether the gradients that it passes back can be checked too."""
        if self._strict:
            if node in self._random:  # a draw depends on earlier draws, and a compiler may choose some of these
                return True
            made = [made[0] if isinstance(value, Missing) else value for value in made]
            error = exact_error(found, made)
            if error is not None:
                self.checks.note(node, error, found, made[0], output=output)
                return True
            if isinstance(found, torch.Tensor) and found.is_complex():
                found, *made = (torch.view_as_real(value.resolve_conj()) for value in (found, *made))
        if not can_be_checked(found, strict=self._strict) or found.numel() == 0:
            if is_rounded_otherwise(found) and not _is_same(found, made[0]):
                self.checks.unchecked[node.name] = (
                    f"roundings of {str(found.dtype).removeprefix('torch.')} are not known"
                )
            return True
        lost = next((value for value in made if isinstance(value, Missing)), None)
        if lost is not None or any(not alike(value, found) for value in made):
            self.checks.unchecked[node.name] = (
                lost.reason if lost else "eager computes another shape from the same inputs"
            )
            return False
        if self.checks.settle(node, found, made[0], output=output):
            return self.checks.earlier.get(node.name, TOO_FEW) == TOO_FEW
        narrows = found.dtype in LOW and any(
            _is_wide(recorded_value(source)) for source in self._units.of(node).sources
        )
        roundoff = roundoff_of(found, strict=self._strict)
        error = own_error(found, made, roundoff=roundoff, narrows=narrows, jumps=unit.jumps, smooth=unit.steady)
        if error is None:
            if not _is_same(found, made[0]):
                self.checks.unchecked[node.name] = TOO_FEW
            return True
        if error.wrong and node in self._random and (node in self._by_values or not _same_draws(found, made[0])):
            self.checks.unchecked[node.name] = "it draws other random numbers than eager"
            return False
        self.checks.note(node, error, found, made[1], output=output)
        return True

    def _results(self, node: fx.Node) -> None:
        for place, source in enumerate(outputs_of(node.graph)[: self._exposed.outputs]):
            if not isinstance(source, fx.Node):
                continue
            found = self._probed.results[place]
            known = any(wrong.node is source and not wrong.gradient for wrong in self.checks.wrong)
            if (
                not known
                and (self.checks.only is None or (source.name, False, place) in self.checks.only)
                and source.op != "placeholder"
                and self._reads_values(source, (source, *self._units.of(source).sources))
            ):
                made = [lane.values.get(source) for lane in self._lanes]
                self._compare(source, found, made, self._units.of(source), output=place)
            whole = self._units.is_source(source)
            sources = (source,) if whole else self._units.of(source).sources
            smooth = whole or self._units.of(source).steady_gradient
            arriving = self._probed.cotangents.get(place)
            if arriving is not None:
                self._gradients.pass_back(
                    source, sources, arriving, roundoff=roundoff_of(found), jumps=False, smooth=smooth, exact=True
                )

    # backward

    def _incomplete(self, node: fx.Node, reason: str) -> None:
        """Note that a node's gradients for its inputs are unknown, so that their sums cannot be checked."""
        self._gradients.incomplete(node, self._units.of(node).sources, reason)

    def _finish(self, node: fx.Node) -> None:
        """Check the gradient of a node that nothing reads any more, and free the node's values."""
        self._gradients.finish(node, self._found_gradient(node))
        uncopied = self._uncopied.pop(node, None)
        if uncopied is not None and not is_unchanged(uncopied, self._eager.values[node]):
            self.checks.written = True
        for lane in self._lanes:
            lane.values.pop(node, None)

    def _found_gradient(self, node: fx.Node) -> torch.Tensor | None:
        if node.op != "placeholder":
            return self._probed.taps.get(node.name)
        return self._probed.gradients.get(self._inputs.index(node))


@dataclass(slots=True)
class _Sum:
    """Gradients on their way to one tensor."""

    by_lane: list[torch.Tensor | None]
    roundoff: float
    narrows: bool = False
    jumps: bool = False
    smooth: bool = True
    whole: bool = True
    largest: torch.Tensor | None = None


class GradientSums:
    """The gradients that arrive at tensors of a region, in each lane: the sums of what their readers pass back."""

    def __init__(self, lanes: Sequence[Lane], checks: TensorChecks) -> None:
        self._lanes = lanes
        self._checks = checks
        self._sums: dict[fx.Node, _Sum] = {}

    def expect(self, node: fx.Node, value: torch.Tensor) -> None:
        """Gather the gradient of a node's value from now on."""
        self._sums[node] = _Sum([None] * len(self._lanes), roundoff_of(value))

    def incomplete(self, node: fx.Node, sources: Sequence[fx.Node], reason: str = "") -> None:
        """Note that a node's gradients for its sources are unknown, so that the sources' sums cannot be checked."""
        for source in sources:
            if source in self._sums:
                self._sums[source].whole = False
                if reason and not any(node.name in told for told in self._checks.unchecked):
                    self._checks.unchecked[f"gradients that pass {node.name}"] = reason

    def pass_back(
        self,
        node: fx.Node,
        sources: Sequence[fx.Node],
        arriving: torch.Tensor | None,
        *,
        roundoff: float,
        jumps: bool,
        smooth: bool,
        exact: bool = False,
    ) -> None:
        """Run a node's backward pass in each lane, and add the resulting gradients to the sums of its sources.

        Args:
            sources: The nodes that it is made of.
            arriving: The compiled program's gradient of the node's value; None if nothing depends on it.
            roundoff: How far the node's value may be off.
            jumps: Whether rounding may change the gradients that it passes back by any amount.
            smooth: Whether rounding is known not to.
            exact: Whether the gradient is known exactly, and is not moved.
        """
        if arriving is None or not any(source in self._sums for source in sources):
            return  # no requested gradient depends on it
        for place, lane in enumerate(self._lanes):
            given = arriving
            if lane.moved is not None and not exact:
                given = arriving.to(torch.float64) + lane.moved.shift(arriving, unit_roundoff(arriving.dtype))
            largest: dict[fx.Node, torch.Tensor] = {}
            try:
                found = lane.gradients(node, sources, given, largest)
            except Exception as error:
                self._checks.unchecked[f"gradient at {node.name}"] = f"{type(error).__name__}: {error}".splitlines()[0]
                self.incomplete(node, sources)
                return
            for source, gradient in found.items():
                if gradient is not None and source in self._sums:
                    known = self._sums[source].by_lane[place]
                    self._sums[source].by_lane[place] = gradient if known is None else known + gradient
            for source, part in largest.items():
                if source in self._sums:
                    most = self._sums[source].largest
                    self._sums[source].largest = part if most is None else torch.maximum(most, part)
        for source in sources:
            if source in self._sums:
                one = self._sums[source]
                one.narrows |= roundoff > one.roundoff
                one.roundoff = max(roundoff, one.roundoff)
                one.jumps |= jumps
                one.smooth &= smooth

    def _round_sum(self, made: list[torch.Tensor], largest: torch.Tensor, roundoff: float) -> None:
        """Move the perturbed lanes' sums by a rounding of their greatest part, where it is far greater than the sum."""
        cancelled = torch.where(largest > CANCELS * made[1].detach().abs(), largest, 0.0)
        if bool(cancelled.any()):
            for place, lane in enumerate(self._lanes):
                if lane.moved is not None:
                    made[place] = made[place] + torch.where(cancelled > 0, lane.moved.shift(cancelled, roundoff), 0.0)

    def finish(self, node: fx.Node, sent: torch.Tensor | None) -> None:
        """Check the gradient of a node's value once its sum is complete, and forget the sum."""
        total = self._sums.pop(node, None)
        if total is not None and total.whole:
            self._check_gradient(node, total, sent)

    def _check_gradient(self, node: fx.Node, total: _Sum, sent: torch.Tensor | None) -> None:
        known = [one for one in (sent, *total.by_lane) if one is not None]
        if not known:
            return
        found = torch.zeros_like(known[0]) if sent is None else sent
        made = [torch.zeros_like(known[0]) if one is None else one for one in total.by_lane]
        if not can_be_checked(found) or found.layout is not torch.strided or not found.numel():
            return
        if any(not alike(one, found) for one in made):
            self._checks.unchecked[f"gradient of {node.name}"] = "eager computes another shape from the same inputs"
            return
        if self._checks.settle(node, found, made[0], gradient=True):
            return
        if total.largest is not None and alike(total.largest, found):
            self._round_sum(made, total.largest, unit_roundoff(found.dtype))
        error = own_error(
            found,
            made,
            roundoff=total.roundoff,
            narrows=total.narrows,
            jumps=total.jumps,
            smooth=total.smooth,
        )
        if error is None:
            if not torch.equal(found.nan_to_num(), made[0].nan_to_num()):
                self._checks.unchecked[f"gradient of {node.name}"] = TOO_FEW
        else:
            self._checks.note(node, error, found, made[1], gradient=True)


def walk_again(
    walk: Callable[[TensorChecks], object],
    earlier: TensorChecks | None,
    part: Set[TensorKey] | None = None,
    drew: Collection[str] = (),
) -> TensorChecks:
    """Walk through a graph in eager alone, and in all lanes to what is further from eager than in earlier walks.

    A tensor that is eager's, bit for bit, is right, and no lane has to run for it.

    Args:
        walk: Walks, and notes the results in the checks that it is given.
        earlier: The results of earlier walks; None if there was none.
        part: The tensors to check; None for all.
        drew: Names of nodes that draw random numbers, if they are known.

    Returns:
        The results, those of earlier walks where nothing changed.
    """
    distances = {} if earlier is None else earlier.distances
    unchecked = {} if earlier is None else earlier.unchecked
    quick = TensorChecks(distances=distances, earlier=unchecked, quick=True, only=part, drew={*drew})
    walk(quick)
    if earlier is not None and not earlier.wrong and not quick.changed and quick.unchecked.keys() <= unchecked.keys():
        return earlier
    # a running mean is written to by no operator that says so
    only = part if quick.written else frozenset(quick.different if part is None else quick.different & part)
    checks = TensorChecks(
        limits=quick.limits, unchecked=quick.unchecked, distances=distances, drew=quick.drew, only=only
    )
    if quick.different:
        walk(checks)
    return checks


def _may_draw(node: fx.Node) -> bool:
    """Whether a call may draw random numbers: any, but that of an operator of which torch says that it does not."""
    if not isinstance(node.target, OpOverload):
        return True
    operator = describe_operator(node.target)
    return operator.draws or operator.kind is OperatorKind.COMPOSITE


def _filled(value: Any, blank: torch.Tensor) -> Any:
    alike = isinstance(value, torch.Tensor) and value.shape == blank.shape
    return value.masked_fill(blank, 0.0) if alike else value


def _is_same(found: torch.Tensor, expected: Any) -> bool:
    """Whether a tensor is equal to eager's for the same inputs, so that nothing is hidden there."""
    if not alike(expected, found):
        return False
    one, two = (widened(value) if is_rounded_otherwise(value) else value.detach() for value in (found, expected))
    return torch.equal(one.nan_to_num(), two.nan_to_num())


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 2


def _same_draws(found: torch.Tensor, expected: torch.Tensor) -> bool:
    one, two = (tensor.detach().to(torch.float64).flatten().nan_to_num_() for tensor in (found, expected))
    return bool(torch.dot(one, two) >= SAME_DRAWS * one.norm() * two.norm())
