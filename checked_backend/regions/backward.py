"""Watch a candidate's backward pass without changing the user's autograd graph.

A candidate's results hang on autograd nodes made while it ran: one ``CompiledFunctionBackward`` for AOT autograd, any
number for a candidate that runs torch operators. Hooks on those nodes see the gradients that arrive at the results and
those that leave towards the region's inputs. If a result feeds another result inside the region, the gradient that
arrives at it from inside is subtracted (`_without`).

Where the compiled program itself calls ``backward``, Dynamo sees the hooks run, and must leave them alone. A graph that
it must not break for them (compiled autograd with ``fullgraph=True``) is traced without them.

The hooks know nodes by number only: a hook that held its own node would be a cycle that Python's collector cannot see
through, and would keep every activation of the region.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from checked_backend._torch.aot import catch_backward_error
from checked_backend._torch.autograd import (
    CallersContext,
    call_after_backward,
    current_graph_task_id,
    graph_task_keeps_graph,
    will_engine_execute_node,
)
from checked_backend._torch.dynamo import (
    asked_while_tracing,
    dynamo_disable,
    in_compiled_backward,
    must_stay_one_graph,
    outside_of_graphs,
)
from checked_backend._torch.tensors import is_functorch_wrapped_tensor
from checked_backend.numerics.bits import resolved, same_bits
from checked_backend.ranks.tape import CollectiveTape, RecordCollectives
from checked_backend.regions.execution import Cotangents
from checked_backend.regions.gradient_gate import Edge, find_sites
from checked_backend.regions.inputs import copy_in_layout
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.returned_tensors import MemoryRange, memory_ranges

__all__ = ["BackwardPass", "BackwardWatch", "eager_uses", "was_written_to"]

_ABOUT = "checked_backend"
"""Where the nodes of a region keep what `eager_uses` needs."""


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """The record of one backward pass at a region.

    Attributes:
        gradients: Gradients that the candidate sent to the inputs whose gradient this pass needs, by position; None
            for an input to which it sent none.
        keeps_graph: Whether the pass may be repeated (``retain_graph=True``).
        differentiable: Whether it records its own graph (``create_graph=True``).
        overwritten: Results ("output" or "mutated", index) whose arriving gradient the candidate wrote to.
        settings: The process's settings when the pass came to the region, and when it left it.
        begun: The value that the watch's ``on_begin`` gave when the pass began.
        exchanged: The candidate's exchanges with other ranks in this pass; None if they were not recorded.
        arrived: Where the gradients that arrived lie. The cotangents are copies of them.
        seconds: The time that watching the pass took.
        elsewhere: Whether gradients also arrived at tensors that are no known results.
    """

    cotangents: Cotangents
    gradients: Mapping[int, torch.Tensor | None]
    keeps_graph: bool
    differentiable: bool
    settings: tuple[ProcessState, ProcessState]
    overwritten: tuple[tuple[str, int], ...] = ()
    begun: object = None
    exchanged: CollectiveTape | None = None
    arrived: tuple[MemoryRange, ...] = ()
    seconds: float = 0.0
    elsewhere: bool = False


@dataclass(slots=True)
class _Progress:
    """What the hooks of one backward pass have seen so far."""

    needed: frozenset[int]
    keeps_graph: bool
    begun: object = None
    failed: bool = False
    short: bool = False
    arrived: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    places: list[MemoryRange] = field(default_factory=list)
    overwritten: list[tuple[str, int]] = field(default_factory=list)
    fed: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    settings: ProcessState = field(default_factory=ProcessState.capture)
    left: ProcessState | None = None
    tape: CollectiveTape = field(default_factory=CollectiveTape)
    recorder: RecordCollectives | None = None
    seconds: float = 0.0
    elsewhere: bool = False

    def summary(self) -> BackwardPass:
        outputs: dict[int, torch.Tensor] = {}
        mutated: dict[int, torch.Tensor] = {}
        for key, grad in self.arrived.items():
            place, index = key
            arrived = _without(self.fed[key], grad) if key in self.fed else grad
            (outputs if place == "output" else mutated)[index] = arrived
        return BackwardPass(
            Cotangents(outputs, mutated),
            {position: self.sent.get(position) for position in sorted(self.needed)},
            keeps_graph=self.keeps_graph,
            differentiable=torch.is_grad_enabled(),
            settings=(self.settings, self.left or ProcessState.capture()),
            overwritten=tuple(self.overwritten),
            begun=self.begun,
            exchanged=None if self.recorder is None else self.tape,
            arrived=tuple(self.places),
            seconds=self.seconds,
            elsewhere=self.elsewhere,
        )


def _run(watch: BackwardWatch, see: Callable[..., Any], *given: Any) -> Any:
    return watch.context.run(see, watch, *given)


def _left_out(watch: BackwardWatch, *_given: Any) -> bool:
    return watch.left_out()


_untraced = dynamo_disable(_run)
_hook = outside_of_graphs(_run, _left_out)
"""What is hooked on to autograd nodes: a watch, its function, and that function's arguments."""


class BackwardWatch:
    """Calls back once for each backward pass through a region.

    Args:
        outputs: The candidate's outputs, as the user gets them.
        mutated: The mutated inputs after the call, by position.
        edges: The result of `input_edges`, taken before the call.
        since: The autograd sequence number when the candidate began to run; the user's nodes are older.
        on_backward: Receives each pass when the region's part of it is over. It may return gradients, by position, to
            be used instead of the candidate's; they are used if `can_replace`.
        on_error: Receives the exception of the candidate's compiled backward, and the pass, in which nothing was sent
            yet. It may return gradients too. Without it exceptions are left alone.
        on_begin: Called when a pass begins. `BackwardPass.begun` is its result.
        on_end: Receives that result when the region's part of the pass is over, however it went. It is not called if
            the pass ends by an exception that is not the compiled backward's.
        on_short: Receives the exception if memory ran out while a pass was watched, or watching failed otherwise; it
            may raise it. That pass gives nothing else.
        on_left_out: Called when Dynamo captures passes in one graph, so that this watch and later ones see none.
        exchanges: Whether the region exchanges tensors with other ranks. These exchanges are recorded.
        eager: Runs the call in eager once more; gives its outputs.
        again: Asked before `on_error`: gives the context under which to run that backward once more; None to leave it.

    Attributes:
        can_replace: Whether all gradients leave the region through one autograd node (AOT autograd's, or that of
            `gradient_gate`), so that they can be replaced before they go on.
            Otherwise the callback comes when the whole backward pass ends.
        context: That of the call, in which the callbacks run.
        outside_edges: Number of edges that leave the region towards something that is not an input of it.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        mutated: Mapping[int, Any],
        edges: Mapping[Edge, int],
        since: int,
        on_backward: Callable[[BackwardPass], Mapping[int, torch.Tensor | None] | None],
        on_error: Callable[[Exception, BackwardPass], Mapping[int, torch.Tensor | None] | None] | None = None,
        on_begin: Callable[[], object] = lambda: None,
        on_end: Callable[[object], None] = lambda _begun: None,
        again: Callable[[Exception], AbstractContextManager[Any] | None] = lambda _error: None,
        on_short: Callable[[Exception], None] = lambda _error: None,
        on_left_out: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        exchanges: bool = False,
        eager: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        self.context = CallersContext()
        self._exchanges = exchanges
        self._clock = clock
        self._on_short = on_short
        self._on_left_out = on_left_out
        self._edges = edges
        self._on_backward = on_backward
        self._on_error = on_error
        self._on_begin = on_begin
        self._on_end = on_end
        self._passes: dict[int, _Progress] = {}
        self._freed = False
        sites, nodes, self.outside_edges = find_sites(outputs, mutated, edges, since)
        self._sites = tuple(sites.values())
        exits = [number for number, site in enumerate(self._sites) if site.to_inputs]
        # every node that an only exit depends on has run before it
        self._exit = exits[0] if len(exits) == 1 else None
        self.can_replace = self._exit is not None
        for node in nodes if exchanges else ():
            node.register_prehook(partial(_hook, self, BackwardWatch._entered))
            node.register_hook(partial(_hook, self, BackwardWatch._left))
        for number, node in enumerate(sites):
            if eager is not None:
                places = {output: index for output, place, index in self._sites[number].results if place == "output"}
                _metadata(node)[_ABOUT] = eager, places
            node.register_prehook(partial(_hook, self, BackwardWatch._arriving, number))
            node.register_hook(partial(_hook, self, BackwardWatch._fired, number))
            if on_error is not None:
                catch_backward_error(node, partial(_untraced, self, BackwardWatch._raised, number), again)

    @asked_while_tracing
    def left_out(self) -> bool:
        """Whether Dynamo must leave out the hooks of this watch. A backward pass that it so captures is not seen."""
        if must_stay_one_graph():
            self._on_left_out()
            return True
        return False

    def _arriving(self, number: int, grad_outputs: Any) -> None:
        """Copy the gradients that arrive before the candidate can write to them."""
        began = self._clock()
        progress = self._progress()
        progress.places += memory_ranges(grad_outputs)
        progress.elsewhere |= any(
            gradient is not None and output not in self._sites[number].known
            for output, gradient in enumerate(grad_outputs)
        )
        with self._unless_short(progress):
            for output, place, index in self._sites[number].results:
                if grad_outputs[output] is not None:
                    progress.arrived[place, index] = _kept(grad_outputs[output])
        progress.seconds += self._clock() - began

    def _progress(self) -> _Progress:
        task = current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = self._begun()
            if not self.can_replace:
                call_after_backward(partial(_untraced, self, BackwardWatch._finish, task))
        return self._passes[task]

    def _entered(self, _grad_outputs: Any) -> None:
        """Record what a node of the region exchanges, from here on."""
        recorder = self._progress().recorder
        if recorder is not None:
            recorder.__enter__()

    def _left(self, _grad_inputs: Any, _grad_outputs: Any) -> None:
        progress = self._passes.get(current_graph_task_id())
        if progress is not None and progress.recorder is not None:
            progress.recorder.__exit__(None, None, None)

    @contextmanager
    def _unless_short(self, progress: _Progress) -> Iterator[None]:
        """Leave a pass unchecked from the point where memory runs out, or watching it fails otherwise."""
        try:
            yield
        except Exception as error:
            if not progress.short:
                self._on_short(error)
            progress.short = True
            progress.arrived.clear()

    def _fired(self, number: int, grad_inputs: Any, grad_outputs: Any) -> tuple[torch.Tensor | None, ...] | None:
        began, task = self._clock(), current_graph_task_id()
        progress = self._passes[task]
        progress.left = ProcessState.capture()
        site = self._sites[number]
        with self._unless_short(progress):
            for output, place, index in site.results:
                if was_written_to(progress.arrived.get((place, index)), grad_outputs[output]):
                    progress.overwritten.append((place, index))
            for index, position in site.to_inputs:
                _add(progress.sent, position, grad_inputs[index])
            for index, key in site.to_results:
                _add(progress.fed, key, grad_inputs[index])
        progress.seconds += self._clock() - began
        if number != self._exit:
            return None
        if progress.failed or progress.short:  # eager's gradients are sent, or it is unknown what arrived
            self._ended(task)
            return None
        replacements = self._finished(task)
        if not replacements:
            return None
        changed = list(grad_inputs)
        for index, position in site.to_inputs:
            changed[index] = replacements.get(position, changed[index])
        return tuple(changed)

    def _begun(self) -> _Progress:
        needed = frozenset(position for (node, _), position in self._edges.items() if _is_needed(node))
        progress = _Progress(needed, graph_task_keeps_graph(), self._on_begin())
        if self._exchanges:
            progress.recorder = RecordCollectives(progress.tape)
        # eager may raise too; and compiled autograd, whose graph is a region of its own, tells no end of a pass
        if self._freed or in_compiled_backward():
            self._on_end(progress.begun)
        return progress

    def _raised(
        self, number: int, error: Exception, _grad_outputs: Sequence[Any]
    ) -> Mapping[int, torch.Tensor | None] | None:
        task = current_graph_task_id()
        if self._freed:  # backward through the graph a second time: eager raises too
            self._ended(task)
            return None
        progress = self._passes[task]
        if progress.short:  # it is unknown what arrived
            self._ended(task)
            return None
        progress.left = ProcessState.capture()
        if progress.recorder is not None:
            progress.recorder.finish()
        site = self._sites[number]
        gradients = None if self._on_error is None else self._on_error(error, progress.summary())
        only = number == self._exit or sum(bool(one.to_gate) for one in self._sites) == 1
        if gradients is None or not only:
            self._ended(task)
            return None
        progress.failed = True
        return {index: gradients.get(position) for index, position in (*site.to_inputs, *site.to_gate)}

    def _finish(self, task: int) -> None:
        progress = self._passes.get(task)
        if progress is not None and not progress.failed and not progress.short:
            self._finished(task)
        else:
            self._ended(task)

    def _ended(self, task: int) -> None:
        progress = self._passes.pop(task, None)
        if progress is not None:
            self._on_end(progress.begun)

    def _finished(self, task: int) -> Mapping[int, torch.Tensor | None] | None:
        progress = self._passes[task]
        self._ended(task)
        self._freed = self._freed or not progress.keeps_graph
        if progress.recorder is not None:
            progress.recorder.finish()
        return self._on_backward(progress.summary())


def _without(fed: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The part of a gradient that came from outside of the region.

    Nothing can be subtracted from an infinity that came from inside, or from NaN. There the part from outside is taken
    to be 0 if it changed nothing, and to be what arrived if it did, so that the sum in eager is the same.
    """
    outside = grad - fed
    if grad.layout is not torch.strided or fed.layout is not torch.strided:
        return outside
    unchanged = (grad == fed) | (grad.isnan() & fed.isnan())
    return torch.where(fed.isfinite(), outside, torch.where(unchanged, torch.zeros_like(outside), grad))


def _kept(grad: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient; the gradient itself if no kernel can write to it in place, as to those of ``sum``."""
    plain = type(grad) is torch.Tensor and grad.layout is torch.strided and not grad.is_quantized
    if not plain or is_functorch_wrapped_tensor(grad):
        return grad
    if any(stride == 0 and size > 1 for stride, size in zip(grad.stride(), grad.shape, strict=True)):
        return grad
    return copy_in_layout(grad)


def _metadata(node: Node) -> dict[str, Any]:
    kept: Any = node.metadata  # a property, which torch declares as a method
    known: dict[str, Any] = kept
    return known


def eager_uses(result: torch.Tensor, roots: Sequence[torch.Tensor]) -> bool | None:
    """Whether, in eager, tensors depend on a result of a region as far as its other results go into them.

    Compiled, no result of a region depends on another: the region is one node of autograd's graph.

    Returns:
        None if it is no result of a checked region, or if eager could not be asked.
    """
    node = result.grad_fn
    about = None if node is None else _metadata(node).get(_ABOUT)
    if about is None:
        return None
    eager, places = about
    used: set[int] = set()
    queue = [(root.grad_fn, root.output_nr) for root in roots]
    seen = set()
    while queue:
        target, number = queue.pop()
        if target is node and number in places:
            used.add(places[number])
        if target is not None and target is not node and target not in seen:
            seen.add(target)
            queue += target.next_functions
    if result.output_nr not in places or not used:
        return None
    try:
        with torch.enable_grad():
            outputs = eager()
            others = [outputs[index].sum() for index in used if outputs[index].requires_grad]
            wanted = outputs[places[result.output_nr]]
            return torch.autograd.grad(others, wanted, allow_unused=True)[0] is not None
    except Exception:  # eager raises, or its inputs have been written to
        return None


def was_written_to(kept: torch.Tensor | None, grad: torch.Tensor | None) -> bool:
    """Whether a gradient differs from its kept copy."""
    if kept is None or grad is None or kept is grad or kept.shape != grad.shape:
        return False
    return not same_bits(resolved(kept), resolved(grad))


def _is_needed(node: Node) -> bool:
    """Whether the backward pass that is running computes a gradient for this node."""
    try:
        return bool(will_engine_execute_node(node))
    except RuntimeError:
        # torch raises for a leaf among the inputs of ``torch.autograd.grad``. Such a leaf's gradient is needed.
        return True


def _add(sums: dict[Any, torch.Tensor], key: Any, grad: torch.Tensor | None) -> None:
    if grad is not None:
        sums[key] = sums[key] + grad if key in sums else grad
