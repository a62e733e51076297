"""A call of a program as it was before, and what the program's own call made of it.

A program's own call cannot be run twice. So what it begins with is copied, and every other run is of copies of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from checked_backend._torch.autograd import autograd_sequence_number
from checked_backend.checking.code_search import PatchedGlobals
from checked_backend.checking.copies import Copier
from checked_backend.checking.outcome import Outcome
from checked_backend.checking.program import Program
from checked_backend.checking.side_effects import Remembered, SideEffects
from checked_backend.checking.stance import NEED_DYNAMO
from checked_backend.checking.state import State
from checked_backend.checking.tree import argument_leaves, containers, output_leaves
from checked_backend.errors import CheckedBackendError
from checked_backend.regions.backward import BackwardPass, BackwardWatch
from checked_backend.regions.gradient_gate import Edge, input_edges
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.torch_state import RngState, TorchState

__all__ = ["OwnCall"]


@dataclass(slots=True)
class OwnCall:
    """One call of a program's own.

    Attributes:
        program: The call as it was before it ran, to be run in eager or compiled on copies.
        changed: What other runs changed beside the program's own call, and was left so.
    """

    program: Program
    changed: list[str] = field(default_factory=list)
    _function: Callable[..., Any] = field(kw_only=True)
    _arguments: tuple[Sequence[Any], Mapping[str, Any]] = field(kw_only=True)
    _captured: Mapping[str, Any] = field(kw_only=True)
    _globals: PatchedGlobals = field(kw_only=True)
    _remembered: Remembered = field(kw_only=True)
    _settings: ProcessState = field(kw_only=True)
    _ambient: TorchState = field(kw_only=True)
    _tensors: Sequence[tuple[torch.Tensor, torch.Tensor, int]] = field(kw_only=True)
    _wanted: tuple[str, ...] = field(default=(), kw_only=True)
    _edges: Mapping[Edge, int] = field(default_factory=dict, kw_only=True)
    _since: int = field(default=0, kw_only=True)

    @classmethod
    def before(cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OwnCall:
        """Copy what a call begins with.

        Raises:
            CheckedBackendError: Something cannot be copied.
        """
        cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        copier = Copier(own_code=True, keep_grad=True, hooks=False)
        copied = copier.function(function)
        copied_args, copied_kwargs = copier.arguments(function, args, kwargs)
        gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        reached = SideEffects(function)
        program = Program(
            copied,
            copied_args,
            copied_kwargs,
            RngState.capture(cuda),
            gradients,
            own_code=True,
            keep_grad=True,
            untraced=NEED_DYNAMO.isdisjoint(reached.names),
            entering={},
        )
        patched = copier.patched_globals([copied, *copied_args, *copied_kwargs.values()])
        call = cls(
            program,
            _function=function,
            _arguments=(args, kwargs),
            _captured=copier.originals(),
            _globals=patched,
            _remembered=reached.now(),
            _settings=ProcessState.capture(),
            _ambient=TorchState.capture(("cpu", "cuda") if cuda else ("cpu",)),
            _tensors=[(own, copy, own._version) for own, copy in copier.tensors() if not own.is_inference()],
        )
        program.undone = call._as_before
        if gradients:
            call._expect_gradients()
        return call

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        with self._ambient.entered(), self._remembered.in_place(self.changed.append), self._globals.in_place():
            yield

    def refuse_harm(self) -> None:
        """Take back what a run of copies wrote to the program's own tensors. Call it before the program's own call.

        Raises:
            CheckedBackendError: It wrote to some: the copies are not the whole program.
        """
        written = [(own, copy) for own, copy, version in self._tensors if own._version != version]
        with torch.no_grad():
            for own, copy in written:
                own.copy_(copy)
        if written:
            raise CheckedBackendError(
                "a copy of it writes to the program's own tensors, because something in it holds the original (as "
                "optimizer.step does that a learning rate scheduler has wrapped)"
            )

    def _state(self) -> State:
        named = argument_leaves(self._function, *self._arguments)
        return State.of(self._function, self._captured, named, {})

    def _expect_gradients(self) -> None:
        state = self._state()
        tensors = {name: leaf for name, leaf in state.inputs.items() if isinstance(leaf, torch.Tensor)}
        wanted = {name: leaf for name, leaf in tensors.items() if leaf.requires_grad} | state.differentiable
        self._wanted = tuple(wanted)
        self._edges = input_edges(list(wanted.values()), frozenset(range(len(wanted))))
        self._since = autograd_sequence_number()

    def returned(self, result: Any) -> Outcome:
        """The outcome of the call, whose result the program is about to get. It holds the program's own tensors."""
        outcome = self._ended()
        outcome.outputs = dict(output_leaves(result))
        outcome.containers = dict(containers(result, "output"))
        state = self._state()
        outcome.memory = state.memory()
        outcome.subjects = {**outcome.outputs, **state.subjects()}
        outcome.evaluations = 1
        outcome.note_values(copies=False)
        return outcome

    def raised(self, error: Exception) -> Outcome:
        """The outcome of the call, which has raised."""
        outcome = self._ended()
        outcome.error = error
        return outcome

    def _ended(self) -> Outcome:
        return Outcome(
            rng=RngState.capture(tuple(self.program.rng.cuda)), settings=(self._settings, ProcessState.capture())
        )

    def watch(self, outcome: Outcome, then: Callable[[OwnCall, Outcome], None], fails: Callable[[str], None]) -> None:
        """Have the call's first backward pass compared, whenever it comes.

        Args:
            then: Receives the call with the gradients that entered at what it made, and the gradients that it sent to
                inputs and parameters as an outcome.
            fails: Receives the reason if these cannot be compared.
        """
        made = {name: value for name, value in outcome.subjects.items() if self._has_made(value)}
        if not self._edges or not made:
            return
        names, passes = tuple(made), 0

        def passed(one: BackwardPass) -> None:
            nonlocal passes
            passes += 1
            if passes > 1:
                return
            if one.elsewhere:
                fails("a gradient enters at something that it made and that nobody finds in its results and its state")
                return
            entered = {names[place]: gradient for place, gradient in one.cotangents.outputs.items()}
            sent = {f"grad[{self._wanted[place]}]": gradient for place, gradient in one.gradients.items()}
            found = Outcome(subjects=dict(sent), evaluations=1)
            found.note_values(copies=False)
            if entered and sent:
                then(replace(self, program=replace(self.program, keep_grad=False, entering=entered)), found)

        BackwardWatch(list(made.values()), {}, self._edges, self._since, passed)

    def _has_made(self, value: Any) -> bool:
        """Whether the call has made a tensor, with a history; it may also have changed an input in place."""
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        return node is not None and node._sequence_nr() >= self._since
