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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

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
from checked_backend._torch.tensors import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from checked_backend.errors import CheckedBackendError
from checked_backend.numerics.bits import same_bits
from checked_backend.ranks.tape import CollectiveTape, RecordCollectives
from checked_backend.regions import schedule
from checked_backend.regions.execution import Cotangents, Result
from checked_backend.regions.gradient_gate import Edge, Site, find_sites
from checked_backend.regions.inputs import copy_in_layout, repeats_elements
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.returned_tensors import MemoryRange, memory_range, memory_ranges


class UnseenError(CheckedBackendError):
    """Raised where it cannot be seen which gradients come to a region. The message says why."""


Gradients = Mapping[int, "torch.Tensor | None"]
"""Gradients of inputs, by position."""


@dataclass(slots=True)
class BackwardPass:
    """The record of one backward pass at a region. What its hooks note is complete once it was closed.

    Attributes:
        needed: Positions of the inputs whose gradient this pass needs.
        keeps_graph: Whether the pass may be repeated (``retain_graph=True``).
        running: What is entered until the region's part of the pass is over, or other code raises.
        begun: What `BackwardObserver.begins` gave.
        at_exit: Whether it is closed before anything runs that comes after the region.
        cotangents: Copies of the gradients that arrived.
        gradients: Gradients that the candidate sent to the inputs whose gradient is needed, by position; None for an
            input to which it sent none.
        differentiable: Whether it records its own graph (``create_graph=True``).
        overwritten: Results whose arriving gradient the candidate wrote to.
        began: The process's settings when the pass came to the region.
        ended: Those when it left the latest of its nodes; None before.
        exchanged: The candidate's exchanges with other ranks in this pass.
        arrived: Where the gradients that arrived lie.
        seconds: The time that watching the pass took.
        elsewhere: Whether gradients also arrived at tensors that are no known results.
        failed: Whether eager's gradients are sent, because the candidate raised.
        short: Whether it is unknown what arrived, because copying that failed.
        recorder: Records the exchanges; None for a region that has none.
        copies: The gradients that arrived at results.
        came: Where each of them lies.
        fed: Those of them that came from inside of the region.
        sent: The gradients that it sent to inputs so far, by position.
    """

    needed: frozenset[int]
    keeps_graph: bool
    running: ExitStack
    begun: Any
    at_exit: bool = False
    cotangents: Cotangents = field(default_factory=lambda: Cotangents({}))
    gradients: Gradients = field(default_factory=dict)
    differentiable: bool = False
    overwritten: list[Result] = field(default_factory=list)
    began: ProcessState = field(default_factory=ProcessState.capture)
    ended: ProcessState | None = None
    exchanged: CollectiveTape = field(default_factory=CollectiveTape)
    arrived: list[MemoryRange] = field(default_factory=list)
    seconds: float = 0.0
    elsewhere: bool = False
    failed: bool = False
    short: bool = False
    recorder: RecordCollectives | None = None
    copies: dict[Result, torch.Tensor] = field(default_factory=dict)
    came: dict[Result, MemoryRange | None] = field(default_factory=dict)
    fed: dict[Result, torch.Tensor] = field(default_factory=dict)
    sent: dict[int, torch.Tensor] = field(default_factory=dict)

    def leaves(self, site: Site, sent: Sequence[Any], arrived: Sequence[Any]) -> None:
        """Note what a node has sent, and whether it wrote to what had arrived."""
        for output, result in site.results:
            if arrived[output] is None:
                self.copies.pop(result, None)
            elif memory_range(arrived[output]) != self.came.get(result):
                self.copies[result] = _kept(arrived[output])  # a hook of the user's, called after ours, put it there
            elif was_written_to(self.copies.get(result), arrived[output]):
                self.overwritten.append(result)
        for index, position in site.to_inputs:
            _add(self.sent, position, sent[index])
        for index, result in site.to_results:
            _add(self.fed, result, sent[index])

    def close(self) -> BackwardPass:
        """Put together what its hooks have noted."""
        if self.recorder is not None:
            self.recorder.finish()
        self.cotangents = Cotangents(
            {
                result: gradient if (fed := self.fed.get(result)) is None else _without(fed, gradient)
                for result, gradient in self.copies.items()
            }
        )
        self.gradients = {position: self.sent.get(position) for position in sorted(self.needed)}
        self.differentiable = torch.is_grad_enabled()
        return self


class BackwardObserver:
    """Is told of the backward passes through a region, in the context of the call.

    Args:
        on_passed: What `passed` does.

    Attributes:
        of_errors: Whether it is told of exceptions of the candidate's compiled backward.
    """

    of_errors: ClassVar[bool] = False

    def __init__(self, on_passed: Callable[[BackwardPass], Gradients | None] = lambda _passed: None) -> None:
        self._on_passed = on_passed

    def begins(self, running: ExitStack) -> Any:
        """A pass comes to the region. `BackwardPass.begun` is the result.

        Args:
            running: Closed when the region's part of the pass is over; not if that ends by an exception of other code.
        """

    def passed(self, passed: BackwardPass) -> Gradients | None:
        """A pass has left the region. What it returns is used instead, if one node sends all gradients."""
        return self._on_passed(passed)

    def raised(self, error: Exception, passed: BackwardPass) -> Gradients | None:
        """The candidate's compiled backward has raised, and sent nothing. It may return gradients too."""

    def again(self, error: Exception) -> AbstractContextManager[Any] | None:
        """Asked before `raised`: the context under which to run that backward once more; None to leave it."""

    def not_copied(self, error: Exception) -> None:
        """Memory ran out while a pass was watched, or watching failed otherwise. Nothing else is told of that pass."""

    def left_out(self) -> None:
        """Dynamo captures passes in one graph, so that this watch and later ones see none."""


def _run(watch: BackwardWatch, see: Callable[..., Any], *given: Any) -> Any:
    return watch.context.run(see, watch, *given)


def _left_out(watch: BackwardWatch, *_given: Any) -> bool:
    return watch.left_out()


_untraced = dynamo_disable(_run)
_hook = outside_of_graphs(_run, _left_out)
"""What is hooked on to autograd nodes: a watch, its function, and that function's arguments."""


class BackwardWatch:
    """Tells an observer of each backward pass through a region.

    Args:
        outputs: The candidate's outputs, as the user gets them.
        mutated: The mutated inputs after the call, by position.
        edges: The result of `input_edges`, taken before the call.
        since: The autograd sequence number when the candidate began to run; the user's nodes are older.
        observer: It must not hold the outputs: they hold the nodes whose hooks hold it.
        exchanges: Whether the region exchanges tensors with other ranks. These exchanges are recorded.

    Attributes:
        context: That of the call, in which the observer is told.
        outside_edges: Number of edges that leave the region towards something that is not an input of it.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        mutated: Mapping[int, Any],
        edges: Mapping[Edge, int],
        since: int,
        observer: BackwardObserver,
        *,
        exchanges: bool = False,
    ) -> None:
        self.context = CallersContext()
        self._observer = observer
        self._exchanges = exchanges
        self._edges = edges
        self._passes: dict[int, BackwardPass] = {}
        self._freed = self._differentiated = False
        sites, nodes, self.outside_edges = find_sites(outputs, mutated, edges, since)
        self._is_one_node = len(nodes) == 1
        self._sites = tuple(sites.values())
        exits = [number for number, site in enumerate(self._sites) if site.to_inputs]
        # every node that an only exit (AOT autograd's node, or a `gradient_gate`) depends on has run before it, so that
        # gradients can be replaced before they go on; else a pass is told when the whole backward pass ends
        self._exit = exits[0] if len(exits) == 1 else None
        for node in nodes if exchanges else ():
            node.register_prehook(partial(_hook, self, BackwardWatch._entered))
            node.register_hook(partial(_hook, self, BackwardWatch._left))
        for number, node in enumerate(sites):
            node.register_prehook(partial(_hook, self, BackwardWatch._arriving, number))
            node.register_hook(partial(_hook, self, BackwardWatch._fired, number))
            if observer.of_errors:
                catch_backward_error(node, partial(_untraced, self, BackwardWatch._raised, number), observer.again)

    @asked_while_tracing
    def left_out(self) -> bool:
        """Whether Dynamo must leave out the hooks of this watch. A backward pass that it so captures is not seen."""
        if must_stay_one_graph():
            self._observer.left_out()
            return True
        return False

    def _arriving(self, number: int, grad_outputs: Any) -> None:
        began, passed, site = schedule.clock(), self._pass(), self._sites[number]
        passed.arrived += memory_ranges(grad_outputs)
        passed.elsewhere |= any(
            gradient is not None and output not in site.known for output, gradient in enumerate(grad_outputs)
        )
        with self._unless_short(passed):
            if self._differentiated and not self._is_one_node:
                raise UnseenError("gradients of gradients come to tensors inside of the region (create_graph=True)")
            for output, result in site.results:
                if grad_outputs[output] is not None:
                    passed.copies[result] = _kept(grad_outputs[output])
                    passed.came[result] = memory_range(grad_outputs[output])
        passed.seconds += schedule.clock() - began

    def _pass(self) -> BackwardPass:
        """The pass that is running; it may have come to the region just now."""
        task = current_graph_task_id()
        if (known := self._passes.get(task)) is not None:
            return known
        needed = frozenset(position for (node, _), position in self._edges.items() if _is_needed(node))
        running = ExitStack()
        begun, at_exit = self._observer.begins(running), self._exit is not None
        passed = BackwardPass(needed, graph_task_keeps_graph(), running, begun, at_exit)
        if self._exchanges:
            passed.recorder = RecordCollectives(passed.exchanged)
        # eager may raise too; and compiled autograd, whose graph is a region of its own, tells no end of a pass
        if self._freed or in_compiled_backward():
            running.close()
        self._passes[task] = passed
        if self._exit is None:
            call_after_backward(partial(_untraced, self, BackwardWatch._finish, task))
        return passed

    def _entered(self, _grad_outputs: Any) -> None:
        """Record what a node of the region exchanges, from here on."""
        if (recorder := self._pass().recorder) is not None:
            recorder.__enter__()

    def _left(self, _grad_inputs: Any, _grad_outputs: Any) -> None:
        passed = self._passes.get(current_graph_task_id())
        if passed is not None and passed.recorder is not None:
            passed.recorder.__exit__(None, None, None)

    @contextmanager
    def _unless_short(self, passed: BackwardPass) -> Iterator[None]:
        """Leave a pass unchecked from the point where memory runs out, or watching it fails otherwise."""
        try:
            yield
        except Exception as error:
            if not passed.short:
                self._observer.not_copied(error)
            passed.short = True
            passed.copies.clear()

    def _fired(self, number: int, grad_inputs: Any, grad_outputs: Any) -> tuple[torch.Tensor | None, ...] | None:
        began, task = schedule.clock(), current_graph_task_id()
        passed, site = self._passes[task], self._sites[number]
        passed.ended = ProcessState.capture()
        leaving = list(grad_outputs if site.is_gate else grad_inputs)
        with self._unless_short(passed):
            passed.leaves(site, leaving, grad_outputs)
        passed.seconds += schedule.clock() - began
        replacements = dict((self._finish(task) if number == self._exit else None) or {})
        for index, position in site.to_inputs:
            if site.is_gate or leaving[index] is not None:  # torch lets no hook replace a gradient that is None
                leaving[index] = replacements.get(position, leaving[index])
                if position in replacements:
                    replacements[position] = None  # all of it is sent: an input that is given twice has two places
        return tuple(leaving) if replacements or site.is_gate else None

    def _raised(self, number: int, error: Exception, _grad_outputs: Sequence[Any]) -> Gradients | None:
        task = current_graph_task_id()
        passed, site = self._passes.get(task), self._sites[number]
        gradients = None
        # backward through the graph a second time: eager raises too
        if passed is not None and not self._freed and not passed.short:
            passed.ended = ProcessState.capture()
            gradients = self._observer.raised(error, passed.close())
        only = number == self._exit or sum(bool(one.to_gate) for one in self._sites) == 1
        if passed is None or gradients is None or not only:
            self._ended(task)
            return None
        passed.failed = True
        once = dict(gradients)  # as in `_fired`
        return {index: once.pop(position, None) for index, position in (*site.to_inputs, *site.to_gate)}

    def _finish(self, task: int) -> Gradients | None:
        passed = self._ended(task)
        if passed is None or passed.failed or passed.short:
            return None
        self._freed = self._freed or not passed.keeps_graph
        passed.needed |= self._cut_off(passed)
        self._differentiated |= passed.close().differentiable
        return self._observer.passed(passed)

    def _cut_off(self, passed: BackwardPass) -> frozenset[int]:
        """Inputs to which no result leads whose gradient arrived.

        A pass does not tell whether their gradients are needed; eager's graph does.
        """
        if self.outside_edges:
            return frozenset()
        arrived = (site for site in self._sites if any(result in passed.copies for _, result in site.results))
        return frozenset(self._edges.values()).difference(*(site.reaches for site in arrived))

    def _ended(self, task: int) -> BackwardPass | None:
        passed = self._passes.pop(task, None)
        if passed is not None:
            passed.running.close()
        return passed


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
    """A copy of a gradient; the gradient itself if no kernel can write to it in place, as to those of ``sum``.

    Raises:
        UnseenError: It is many gradients.
    """
    if is_legacy_batchedtensor(grad):
        raise UnseenError("many gradients come at once (is_grads_batched=True, jacobian(vectorize=True))")
    plain = type(grad) is torch.Tensor and grad.layout is torch.strided and not grad.is_quantized
    if not plain or is_functorch_wrapped_tensor(grad):
        return grad
    return grad if repeats_elements(grad) else copy_in_layout(grad)


def was_written_to(kept: torch.Tensor | None, grad: torch.Tensor | None) -> bool:
    """Whether a gradient differs from its kept copy."""
    if kept is None or grad is None or kept is grad or kept.shape != grad.shape:
        return False
    return not same_bits(kept, grad)


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
