"""Walk through a region's graph on the compiled program's own values, and judge each operator by itself.

Each operator runs on what the compiled program computed in front of it, and, backwards, on the gradients that arrive
there in the compiled program. So an error shows at the operator that makes it, and nowhere else. What an operator may
be off is what it is off in eager, and what roundings of its inputs change: a fused kernel reads values that were never
rounded, while the value that is handed out was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checked_backend._torch.pytree import tree_leaves
from checked_backend.graphs.effects import has_effects, sets_mode
from checked_backend.modes.float64 import Float64Mode
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from checked_backend.regions.inputs import storage_key
from checked_backend.regions.operator_check.lane import Lane, Missing, Moved
from checked_backend.regions.operator_check.probe import Exposed, value_of
from checked_backend.regions.operator_check.units import Units
from checked_backend.verdict.envelope import unit_roundoff
from checked_backend.verdict.local_error import LocalError, local_error

__all__ = ["Probed", "Walk", "Wrong"]

SAMPLES = 3
"""Runs in float64 with inputs that are moved by a rounding."""

COARSEST_FLOAT32 = 2.0**-13
"""Of float32 in a region of half precision less is asked: libraries' fast functions, and products in TF32."""

INSIDE_FLOAT32 = 2.0**29
"""Roundings of float32, in unit roundoffs of float64: operators of half precision compute in it."""

SAME_DRAWS = 0.99
"""Two results of a random operator are so much alike (their cosine) if they come from the same random numbers."""

_LOW = (torch.float16, torch.bfloat16)
_JUDGED = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(slots=True)
class Probed:
    """What the compiled probe gave for one call.

    Attributes:
        inputs: The inputs it was called with, as they were before.
        wanted: Positions of those whose gradients were taken.
        results: All that it returned.
        cotangents: The gradients sent in, by place among the results.
        gradients: The gradients of the inputs, by position.
        taps: Those of the taps, by node.
    """

    inputs: Sequence[Any]
    wanted: frozenset[int]
    results: list[Any]
    cotangents: Mapping[int, torch.Tensor]
    gradients: Mapping[int, torch.Tensor | None]
    taps: Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Wrong:
    """An operator with an error of its own.

    Attributes:
        node: The node whose value, or whose gradient, is wrong.
        error: By how much.
        found: The compiled program's tensor.
        right: What it should be, at the same precision.
        gradient: Whether it is the gradient: of those that read the node, one passes on a wrong one.
        output: The place of the region's result that is wrong, if it is not the tensor inside that it is made of.
    """

    node: fx.Node
    error: LocalError
    found: torch.Tensor
    right: torch.Tensor
    gradient: bool = False
    output: int | None = None


@dataclass(slots=True)
class _Sums:
    """Gradients on their way to one tensor."""

    by_lane: list[torch.Tensor | None]
    roundoff: float
    narrows: bool = False
    jumps: bool = False
    whole: bool = True


class Walk:
    """One walk.

    Args:
        gm: The region's graph for eager; its nodes have the names of those of the probe.
        exposed: What the probe hands out.
        probed: What it gave.

    Attributes:
        wrong: Operators with an error of their own, in order.
        limits: For each tensor judged: the smallest relative error that would have been found. Forward, backward.
        unjudged: Nodes that could not be judged, with the reason.
    """

    def __init__(self, gm: fx.GraphModule, exposed: Exposed, probed: Probed) -> None:
        self.wrong: list[Wrong] = []
        self.limits: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self.unjudged: dict[str, str] = {}
        self._gm = gm
        self._exposed = exposed
        self._probed = probed
        self._units = Units(gm, exposed.values.keys())
        self._tape = RandomTape()
        self._random: set[fx.Node] = set()
        self._by_values: set[fx.Node] = set()
        self._eager = Lane(gm)
        self._moved = [Moved(1 + seed) for seed in range(SAMPLES)]
        self._lanes = [self._eager, Lane(gm, self._float64(), wide=True)]
        self._lanes += [
            Lane(gm, self._float64(1 + seed), wide=True, moved=moved) for seed, moved in enumerate(self._moved)
        ]
        self._sums: dict[fx.Node, _Sums] = {}

    def _float64(self, seed: int | None = None) -> Callable[[], AbstractContextManager[Any]]:
        """float64; with a seed, with the roundings that float32 has inside of operators."""
        mode = Float64Mode(default_dtype=False)
        noise = None if seed is None else MonteCarloMode(seed, INSIDE_FLOAT32, correlated=True)

        @contextmanager
        def entered() -> Iterator[None]:
            with ExitStack() as stack:
                if not self._tape.empty:
                    stack.enter_context(ReplayRandom(self._tape))
                if noise is not None:
                    stack.enter_context(noise)
                stack.enter_context(mode)
                yield

        return entered

    def run(self) -> None:
        """Walk."""
        places = iter(range(len(self._probed.inputs)))
        for node, place in self._units.order.items():
            if node.op == "placeholder":
                self._input(node, next(places))
            elif node.op == "output":
                self._results(node)
            else:
                self._call(node)
            for done in self._units.done.get(place, ()):
                self._finish(done)

    # forward

    def _input(self, node: fx.Node, place: int) -> None:
        value, wanted = self._probed.inputs[place], place in self._probed.wanted
        for lane in self._lanes:
            lane.put(node, value, gradient=wanted)
        if wanted:
            self._expect(node, value)

    def _call(self, node: fx.Node) -> None:
        if sets_mode(node):
            made = self._eager.run(node)
            for lane in self._lanes[1:]:
                lane.values[node] = made
            return
        self._tape = RandomTape()
        with RecordRandom(self._tape):
            made = self._eager.run(node)
        if self._tape.by_values:
            self._by_values.add(node)
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
        for name, place in self._exposed.versions.get(node.name, {}).items():
            self._rewritten(node, name, self._take(place))
        if node.name in self._exposed.values:
            self._judge(node, self._take(self._exposed.values[node.name]))

    def _take(self, place: int) -> Any:
        value, self._probed.results[place] = self._probed.results[place], None
        return value

    def _judge(self, node: fx.Node, found: Any) -> None:
        """Judge a tensor that is handed out, pass on its gradient, and go on with it."""
        made = [lane.values[node] for lane in self._lanes]
        unit = self._units.of(node)
        tapped = node.name in self._exposed.taps
        same = self._compare(node, found, made, jumps=unit.jumps)
        if tapped and same:
            arriving = self._probed.taps.get(node.name)
            self._pass_back(node, unit.sources, arriving, roundoff=_roundoff(found), jumps=unit.jumps)
        elif isinstance(self._eager.values[node], Missing) or getattr(self._eager.values[node], "requires_grad", False):
            self._incomplete(node, "the tensor is written to later, or complex, or its size follows from no input")
        self._go_on(node, found, made[1:], tapped=tapped)

    def _go_on(self, node: fx.Node, found: Any, exact: Sequence[Any], *, tapped: bool) -> None:
        self._eager.put(node, found, gradient=tapped)
        for lane in self._lanes[1:]:
            lane.put(node, found, gradient=False)
        if isinstance(found, torch.Tensor) and found.dtype in _JUDGED:
            for moved, lane, value in zip(self._moved, self._lanes[2:], exact[1:], strict=True):
                shift = moved.shift(found, unit_roundoff(found.dtype))
                if self._units.carries(node) and _alike(value, exact[0]):
                    shift = shift + (value.detach() - exact[0].detach()).to(torch.float64).nan_to_num_(0.0, 0.0, 0.0)
                lane.values[node] = lane.values[node] + shift
        if tapped:
            for lane in self._lanes[1:]:
                lane.values[node] = lane.values[node].detach().requires_grad_()
            self._expect(node, found)

    def _rewritten(self, writer: fx.Node, name: str, found: Any) -> None:
        """A tensor that the node wrote to: what it wrote is judged, and views of it are made anew."""
        owner = next(node for node in self._units.order if node.name == name)
        made = [lane.values.get(owner) for lane in self._lanes]
        self._compare(writer, found, made, jumps=self._units.of(writer).jumps)
        self._go_on(owner, found, made[1:], tapped=False)
        key = storage_key(value_of(owner))
        for node, place in self._units.order.items():
            if place > self._units.order[writer]:
                break
            value = value_of(node)
            if node is owner or node not in self._eager.values or not isinstance(value, torch.Tensor):
                continue
            if storage_key(value) == key and node.op != "placeholder":
                for lane in self._lanes:
                    if has_effects(node) and isinstance(node.args[0], fx.Node):
                        lane.values[node] = lane.values.get(node.args[0])
                    else:
                        lane.run(node)

    def _compare(
        self, node: fx.Node, found: Any, made: Sequence[Any], *, jumps: bool, output: int | None = None
    ) -> bool:
        """Judge one tensor. Returns whether what is made of its backward pass can be judged too."""
        if not isinstance(found, torch.Tensor) or found.dtype not in _JUDGED or found.numel() == 0:
            return True
        lost = next((value for value in made if isinstance(value, Missing)), None)
        if lost is not None or any(not _alike(value, found) for value in made):
            self.unjudged[node.name] = lost.reason if lost else "eager computes another shape from the same inputs"
            return False
        narrows = found.dtype in _LOW and any(_is_wide(value_of(source)) for source in self._units.of(node).sources)
        error = local_error(
            candidate=found.detach(),
            reference=made[0].detach(),
            exact=made[1].detach(),
            samples=[value.detach() for value in made[2:]],
            roundoff=_roundoff(found),
            narrows=narrows,
            jumps=jumps,
        )
        if error is None:
            return True
        if error.wrong and node in self._random and (node in self._by_values or not _same_draws(found, made[0])):
            self.unjudged[node.name] = "it draws other random numbers than eager"
            return False
        self._note_limit(False, node, error)
        if error.wrong:
            self.wrong.append(Wrong(node, error, found.detach(), made[1].detach().to(found.dtype), output=output))
        return True

    def _results(self, node: fx.Node) -> None:
        returned = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
        for place, source in enumerate(returned):
            if not isinstance(source, fx.Node):
                continue
            found = self._probed.results[place]
            known = any(wrong.node is source and not wrong.gradient for wrong in self.wrong)
            if not known and source.op != "placeholder":
                made = [lane.values.get(source) for lane in self._lanes]
                self._compare(source, found, made, jumps=self._units.of(source).jumps, output=place)
            sources = (source,) if self._units.is_source(source) else self._units.of(source).sources
            arriving = self._probed.cotangents.get(place)
            if arriving is not None:
                self._pass_back(source, sources, arriving, roundoff=_roundoff(found), jumps=False, exact=True)

    # backward

    def _expect(self, node: fx.Node, value: torch.Tensor) -> None:
        self._sums[node] = _Sums([None] * len(self._lanes), _roundoff(value))

    def _incomplete(self, node: fx.Node, reason: str) -> None:
        """What a node passes back is not known, so the sums that it takes part in cannot be judged."""
        for source in self._units.of(node).sources:
            if source in self._sums:
                self._sums[source].whole = False
                if reason and not any(node.name in told for told in self.unjudged):
                    self.unjudged[f"gradients that pass {node.name}"] = reason

    def _pass_back(
        self,
        node: fx.Node,
        sources: Sequence[fx.Node],
        arriving: torch.Tensor | None,
        *,
        roundoff: float,
        jumps: bool,
        exact: bool = False,
    ) -> None:
        if arriving is None:
            return  # nothing that was asked for depends on it
        for place, lane in enumerate(self._lanes):
            given = arriving
            if place >= 2 and not exact:
                moved = self._moved[place - 2].shift(arriving, unit_roundoff(arriving.dtype))
                given = arriving.to(torch.float64) + moved
            try:
                found = lane.gradients(node, sources, given)
            except Exception as error:
                self.unjudged[f"gradient at {node.name}"] = f"{type(error).__name__}: {error}".splitlines()[0]
                self._incomplete(node, "")
                return
            for source, gradient in found.items():
                sums = self._sums.get(source)
                if gradient is None or sums is None:
                    continue
                known = sums.by_lane[place]
                sums.by_lane[place] = gradient if known is None else known + gradient
        for source in sources:
            if source in self._sums:
                sums = self._sums[source]
                sums.narrows |= roundoff > sums.roundoff
                sums.roundoff = max(roundoff, sums.roundoff)
                sums.jumps |= jumps

    def _finish(self, node: fx.Node) -> None:
        """Nothing reads this node any more: judge the gradient that it has, and free it."""
        sums = self._sums.pop(node, None)
        if sums is not None and sums.whole:
            self._judge_gradient(node, sums)
        for lane in self._lanes:
            lane.values.pop(node, None)

    def _judge_gradient(self, node: fx.Node, sums: _Sums) -> None:
        sent = self._found_gradient(node)
        known = [one for one in (sent, *sums.by_lane) if one is not None]
        if not known:
            return
        found = torch.zeros_like(known[0]) if sent is None else sent
        made = [torch.zeros_like(known[0]) if one is None else one for one in sums.by_lane]
        if found.dtype not in _JUDGED or found.layout is not torch.strided or not found.numel():
            return
        if any(not _alike(one, found) for one in made):
            self.unjudged[f"gradient of {node.name}"] = "eager computes another shape from the same inputs"
            return
        error = local_error(
            candidate=found.detach(),
            reference=made[0].detach(),
            exact=made[1].detach(),
            samples=[one.detach() for one in made[2:]],
            roundoff=sums.roundoff,
            narrows=sums.narrows,
            jumps=sums.jumps,
        )
        if error is None:
            return
        self._note_limit(True, node, error)
        if error.wrong:
            self.wrong.append(Wrong(node, error, found.detach(), made[1].detach().to(found.dtype), gradient=True))

    def _found_gradient(self, node: fx.Node) -> torch.Tensor | None:
        if node.op != "placeholder":
            return self._probed.taps.get(node.name)
        place = [one for one in self._units.order if one.op == "placeholder"].index(node)
        return self._probed.gradients.get(place)

    def _note_limit(self, backward: bool, node: fx.Node, error: LocalError) -> None:
        self.limits[backward][node.name] = max(error.limit, self.limits[backward].get(node.name, 0.0))


def _roundoff(value: Any) -> float:
    if not isinstance(value, torch.Tensor) or value.dtype not in _JUDGED:
        return 0.0
    return max(unit_roundoff(value.dtype), COARSEST_FLOAT32)


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 2


def _alike(value: Any, found: Any) -> bool:
    return isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and value.shape == found.shape


def _same_draws(found: torch.Tensor, expected: torch.Tensor) -> bool:
    one, two = (tensor.detach().to(torch.float64).flatten().nan_to_num_() for tensor in (found, expected))
    return bool(torch.dot(one, two) >= SAME_DRAWS * one.norm() * two.norm())
