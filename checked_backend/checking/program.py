"""A program that can be run any number of times from the same state."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch

from checked_backend._torch.dynamo import inner_exception
from checked_backend._torch.modes import disable_current_modes
from checked_backend._torch.tensors import version_of
from checked_backend.checking.backward import Incoming, Objective, roots_of, run_backward, unreached_leaves
from checked_backend.checking.code_search import put_in_place
from checked_backend.checking.copies import HANDED_OVER, Copier, refill
from checked_backend.checking.state import State
from checked_backend.checking.tree import (
    Container,
    argument_containers,
    argument_leaves,
    containers,
    output_leaves,
    settled,
    signature_of,
)
from checked_backend.errors import CandidateError, CheckedBackendError, OptionError
from checked_backend.modes.monte_carlo import PoisonMode
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.regions.execution import flat_tensors, grad_fn
from checked_backend.regions.inputs import repeats_elements
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.torch_state import RngState, modes_restored
from checked_backend.subjects import Subject

MakeOptimizer = Callable[[list[torch.Tensor]], Any]
"""A class of ``torch.optim``, or any function from parameters to an optimizer."""


def make_optimizer(make: MakeOptimizer, trained: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    """Make an optimizer over the parameters of one run.

    Raises:
        OptionError: There is nothing to train; or the factory raised, or returned no optimizer, or one over other
            parameters than it was given, so that all runs would train the same ones.
    """
    if not trained:
        raise OptionError("check: optimizer was given, but no parameter and no tensor argument requires grad.")
    try:
        optimizer = make(list(trained.values()))
    except Exception as error:
        raise OptionError(f"check: the optimizer could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"check: optimizer must be a torch.optim class or a function (params) -> optimizer; it returned "
            f"{type(optimizer).__qualname__}."
        )
    given = {id(tensor) for tensor in trained.values()}
    if any(id(tensor) not in given for group in optimizer.param_groups for tensor in group["params"]):
        raise OptionError(
            "check: the optimizer is over other parameters than the function was given. Eager and compiled train "
            "copies of the module: write optimizer=lambda params: torch.optim.SGD(params, lr=0.1)."
        )
    return optimizer


_LARGEST = 2**63
_AGAIN = "Trying to backward through the graph a second time"


@dataclass(slots=True)
class Outcome:
    """The results and the effects of one call of a program.

    Attributes:
        subjects: Everything to compare, by subject: the objects themselves.
        values: The plain tensors among them (numbers too), as they were at the end of the call, by name.
        outputs: Leaves of the result, by subject.
        containers: The containers of the result and of the arguments afterwards, by path.
        gradients: Gradients of inputs and parameters, by subject; None for a leaf that got none.
        unreached: Leaves that eager's backward pass reaches and whose gradients are not in `gradients`.
        evaluations: How often the function ran: an optimizer may ask for its loss several times.
        settings: The process's settings before and after the call.
        runs_backward: Whether the program itself has been through the history of its loss, as a training step.
    """

    subjects: dict[str, Any] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    unreached: list[torch.Tensor] = field(default_factory=list)
    evaluations: int = 0
    rng: RngState | None = None
    settings: tuple[ProcessState, ProcessState] | None = None
    error: Exception | None = None
    backward_error: Exception | None = None
    runs_backward: bool = False

    @property
    def is_differentiable(self) -> bool:
        """Whether results have a history, and not that of a loss which the program itself has been through."""
        return len(roots_of(self.outputs, refusing=False)) > int(self.runs_backward)

    @property
    def is_last(self) -> bool:
        """Whether it raised, so that no call follows."""
        return self.error is not None or (self.backward_error is not None and self.is_differentiable)

    def release(self) -> None:
        """Forget all tensors once they are compared. The names of the gradients are kept."""
        for tensors in (self.subjects, self.values, self.outputs):
            tensors.clear()
        self.unreached.clear()
        self.gradients = dict.fromkeys(self.gradients)

    def note_values(self, *, copies: bool) -> None:
        """Take the values of all subjects: copies, if later calls may change the tensors."""
        for subject, value in self.subjects.items():
            for name, tensor in flat_tensors(subject, as_tensor(value)).items():
                plain = tensor.detach()
                self.values[name] = plain.clone() if copies else plain


def in_step(index: int, name: str) -> str:
    """The name of one call's tensor among those of all calls."""
    return Subject(name, index).key


def as_tensor(value: Any) -> Any:
    """A number or an array as a tensor, so that rounding counts as in tensors; any other value itself."""
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            return torch.from_numpy(np.array(value))  # a copy, writable
        except TypeError:  # strings, objects
            return value
    if isinstance(value, bool):
        return torch.tensor(value)
    if isinstance(value, int):
        return torch.tensor(value) if -_LARGEST <= value < _LARGEST else value
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.tensor(value, dtype=torch.complex128) if isinstance(value, complex) else value


Transform = Callable[[Callable[..., Any]], Callable[..., Any]]

Modes = Callable[[int], Sequence[AbstractContextManager[Any]]]
"""Gets the number of the evaluation, counted over all calls, and gives the context managers to run it under."""


@dataclass(frozen=True, slots=True, eq=False)
class ProgramCall:
    """One call of a program.

    Attributes:
        args: Positional arguments; each run gets copies that share memory where these do.
        label: How the call differs from the user's own, for people; "" for that one.
        incoming: The kind of the gradients that enter at its outputs. If it is not the usual one, the call is about its
            gradients alone, and no optimizer takes a step.
        dtypes: The dtypes of eager's outputs, by name, once it has run.
        refills: An earlier call whose tensors this one is given, with its own values in them (`refill`).
        junk: Fills the memory that the candidate allocates and has not written to, other junk for another number.
        entering: The gradients that enter, by the tensor of the call's that they enter at, instead of random ones at
            outputs; an empty mapping: no backward pass.
        is_exact: Whether nothing has to be rounded in it.
        varies_layout: Whether it repeats another one with an argument in another layout.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    label: str = ""
    incoming: Incoming = Incoming.CONTIGUOUS
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    refills: ProgramCall | None = None
    junk: int | None = None
    entering: Mapping[str, torch.Tensor] | None = None
    is_exact: bool = False
    varies_layout: bool = False

    @property
    def varies_gradients(self) -> bool:
        """Whether this call repeats another one with other incoming gradients."""
        return self.incoming is not Incoming.CONTIGUOUS


@dataclass(slots=True)
class Program:
    """A function or module, and its calls.

    Attributes:
        function: The function or module. If it holds state, it never runs itself: each run gets a copy.
        gradients: Whether to run the backward pass, with one fixed random gradient for each output.
        optimizer: Takes a step after each call.
        continued: Whether a call goes on from the state that the previous call left, as in training. Otherwise each
            call begins with the parameters, buffers and random state of the first call.
        undone: Makes a context around each call, and around the making of copies, which takes back what the call
            changes outside of the copies.
        untraced: Let Dynamo trace nothing in eager, not what the program compiles and not the bodies of ``cond``.
        candidate: A handwritten callable that is held against the function: it runs where a transform is given.
        numpy: Whether NumPy computes a part of it in eager, where no mode sees it, and torch when compiled.
    """

    function: Callable[..., Any]
    calls: list[ProgramCall]
    rng: RngState
    gradients: bool
    optimizer: MakeOptimizer | None = None
    continued: bool = True
    undone: Callable[[], AbstractContextManager[None]] = nullcontext
    untraced: bool = False
    candidate: Callable[..., Any] | None = None
    numpy: bool = False

    def leaves(self) -> dict[str, Any]:
        """The leaves of the first call's arguments, by name."""
        return dict(argument_leaves(self.function, self.calls[0].args, self.calls[0].kwargs))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among them."""
        return {name: leaf for name, leaf in self.leaves().items() if isinstance(leaf, torch.Tensor)}

    def run(self, transform: Transform | None = None, *, modes: Modes = lambda _: ()) -> Outcome:
        """Run the first call on a fresh copy, as `run_all` runs all."""
        return ProgramCopy(self, transform, modes=modes).step(0, self.calls[0])

    def run_all(
        self, transform: Transform | None = None, *, wide: bool = False, modes: Modes = lambda _: ()
    ) -> list[Outcome]:
        """Run all calls on one fresh copy, up to the first that raises if they are `continued`."""
        running = ProgramCopy(self, transform, wide=wide, modes=modes)
        outcomes: list[Outcome] = []
        for number, call in enumerate(self.calls):
            outcomes.append(running.step(number, call))
            if self.continued and outcomes[-1].is_last:
                break
        return outcomes


class ProgramCopy:
    """One copy of a program, called again and again.

    Args:
        transform: Applied to the copy of the function, for example ``torch.compile``. A candidate runs as it is.

    Attributes:
        rng: The random state from which the next call begins.
    """

    def __init__(
        self, program: Program, transform: Transform | None = None, *, wide: bool = False, modes: Modes = lambda _: ()
    ) -> None:
        self._program = program
        self._modes = modes
        self._copier = Copier(wide)
        with program.undone():
            called = self._function = self._copier.function(program.function)
            self._copier.find_variables((called, *program.calls[0].args, *program.calls[0].kwargs.values()))
            if program.candidate is not None and transform is not None:
                called = self._copier.candidate(program.candidate, self._function)
        if transform is not None and program.candidate is None:
            called = transform(_called_inside(called))
        self._called = called
        self._at_own_precision = transform is None and not wide
        self._arguments: dict[ProgramCall, tuple[list[Any], dict[str, Any]]] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._trained: dict[str, torch.Tensor] = {}
        self._initial: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.rng = program.rng
        self._grads: dict[int, tuple[torch.Tensor, int]] = {}
        self._left: ProcessState | None = None
        self._runs_backward = False
        self._evaluations = 0

    def leaves(self, call: ProgramCall) -> list[tuple[str, Any]]:
        """The leaves of this run's copies of a call's arguments, by name."""
        return argument_leaves(self._program.function, *self._copies(call))

    def memory(self, call: ProgramCall) -> list[Any]:
        """What a call may change by right: its arguments, parameters and buffers."""
        return [*(value for _, value in self.leaves(call)), *self._state(call).restorable()]

    def gained_history(self, call: ProgramCall) -> bool:
        """Whether a call has given a history to what it may change, with which another one would go on."""
        tensors = [one for one in self.memory(call) if isinstance(one, torch.Tensor)]
        nodes = [grad_fn(one._base if one._is_view() and one._base is not None else one) for one in tensors]
        return any(node is not None and node.name() != HANDED_OVER for node in nodes)

    def _state(self, call: ProgramCall) -> State:
        return State.of(self._function, self._copier.held(), self.leaves(call), self._copier.leaves)

    def is_copy(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was copied for this run."""
        return self._copier.is_copy(tensor)

    def forget(self, call: ProgramCall) -> None:
        """Free this run's copies of a call's arguments; the call would begin with new ones."""
        self._arguments.pop(call, None)

    def step(self, number: int, call: ProgramCall) -> Outcome:
        """Run one call, its backward pass and the optimizer's step. An exception of the program is in the outcome.

        Args:
            number: Its place among the calls that are compared: its backward pass has gradients of its own.
            call: The call; the same one again goes on with the same copies of its arguments.

        Raises:
            CheckedBackendError: The check itself failed, not the program.
        """
        self._prepare(self._state(call))
        # only in training does it matter how many calls went before
        objective = Objective(
            number if self._program.continued and not call.varies_gradients else 0,
            bounded=self._optimizer is not None and not call.varies_gradients,
            incoming=call.incoming,
            dtypes=call.dtypes,
            given=call.entering,
        )
        outcome = Outcome()
        before = self.rng.now()
        settings = ProcessState.capture()
        try:
            self.rng.restore()
            is_poisoned = call.junk is not None and self._called is not self._function
            junk = PoisonMode(call.junk or 0) if is_poisoned else nullcontext()
            own = put_in_place(self._copier.variables)
            with self._entered(), self._program.undone(), own, self._settings_noted(outcome), junk:
                self._train(partial(self._evaluate, call, objective, outcome), objective, outcome)
            outcome.rng = self.rng.now()
            if self._program.continued:
                self.rng = outcome.rng
        except _ProgramError as raised:
            _raise_if_ours(raised.error)
            outcome.error = raised.error
        finally:
            settings.restore()
            before.restore()
        self._look(call, outcome)
        return outcome

    # before a call

    def _copies(self, call: ProgramCall) -> tuple[list[Any], dict[str, Any]]:
        if call not in self._arguments:
            made = self._copier.arguments(self._program.function, call.args, call.kwargs)
            self._copier.find_variables()
            held = self._arguments.get(call.refills) if call.refills is not None else None
            leaves = partial(argument_leaves, self._program.function)
            self._arguments[call] = held if held is not None and refill(leaves(*held), leaves(*made)) else made
        return self._arguments[call]

    def _prepare(self, state: State) -> None:
        """Put the state back to where the first call found it, forget gradients, make the optimizer."""
        if not self._program.continued and self._initial is None:
            self._initial = [(tensor, tensor.detach().clone()) for tensor in state.restorable()]
        elif not self._program.continued:
            with torch.no_grad():
                for tensor, value in self._initial or ():
                    if tensor.shape == value.shape and not repeats_elements(tensor):
                        tensor.copy_(value)
        for leaf in state.differentiable.values():
            leaf.grad = None
        self._grads = {key: (grad, _fingerprint(grad)) for key, grad in self._copier.give_grads().items()}
        if self._program.optimizer is not None and self._optimizer is None:
            self._trained = state.trained()
            self._optimizer = make_optimizer(self._program.optimizer, self._trained)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with modes_restored(), torch.set_grad_enabled(self._program.gradients), warnings.catch_warnings():
            no_warning_is_an_error()
            yield

    @contextmanager
    def _settings_noted(self, outcome: Outcome) -> Iterator[None]:
        """Note the process's settings before and after a call, which goes on with those that the last one left."""
        if self._program.continued and self._left is not None:
            self._left.restore()
        start = ProcessState.capture()
        try:
            yield
        finally:
            self._left = ProcessState.capture()
            outcome.settings = start, self._left

    # the call

    def _train(self, evaluate: Callable[[], Any], objective: Objective, outcome: Outcome) -> None:
        if self._optimizer is None or objective.incoming is not Incoming.CONTIGUOUS:
            evaluate()
            return
        optimizer = self._optimizer

        def closure() -> Any:
            optimizer.zero_grad()
            loss = evaluate()
            if outcome.backward_error is not None:
                raise _StepImpossible
            return loss

        try:
            optimizer.step(closure)
        except _StepImpossible:
            return
        except _ProgramError:
            raise
        except Exception as error:
            if self._called is self._function:
                raise OptionError(f"check: the optimizer's step raises: {type(error).__name__}: {error}") from error
            raise _ProgramError(error) from error
        for name, parameter in self._trained.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and key != "step":
                    outcome.subjects[f"optimizer[{name}.{key}]"] = value

    def _evaluate(self, call: ProgramCall, objective: Objective, outcome: Outcome) -> Any:
        """Call the function and run its backward pass. The first evaluation of a step is the one that is compared."""
        first = not outcome.evaluations
        outcome.evaluations += 1
        number, self._evaluations = self._evaluations, self._evaluations + 1
        loss: Any = 0.0
        args, kwargs = self._copies(call)
        modes = self._modes(number)
        with ExitStack() as stack:
            if self._called is self._function:
                # the program's own torch.compile calls compile nothing here: a fault there would be on both sides
                untraced = bool(modes) or self._program.untraced
                stance: Any = ("force_eager",) if untraced else ("default",)
                stack.enter_context(torch.compiler.set_stance(*stance, force_backend=None if untraced else "eager"))
            for mode in modes:
                stack.enter_context(mode)
            try:
                returned = settled(self._called(*args, **kwargs))
            except Exception as error:
                raise _ProgramError(error) from error
            except SystemExit as stop:
                if self._program.candidate is None:
                    raise
                raise _ProgramError(RuntimeError(f"it calls sys.exit({stop.code!r})")) from stop
            outputs = dict(output_leaves(returned))
            if first:
                outcome.outputs = outputs
                outcome.containers = dict(containers(returned, "output"))
            roots = roots_of(outputs) if self._program.gradients else {}
            state = self._state(call)  # of now: a lazy module has its parameters only after its first call
            if objective.given:
                roots = roots_of(state.subjects() | outputs, refusing=False)
            if self._at_own_precision:
                objective.dtypes.update((name, root.dtype) for name, root in roots.items())
            wanted = state.differentiable if roots else {}
            if not number and self._at_own_precision:
                outcome.unreached = unreached_leaves(roots, wanted.values())
            if objective.given == {}:
                return loss
            for leaf in wanted.values():
                given, known = self._grads.get(id(leaf), (None, None))
                if given is not None and leaf.grad is given and _fingerprint(given) == known:
                    leaf.grad = None  # the program has read it at most
            if wanted:
                try:
                    loss = run_backward(roots, list(wanted.values()), objective)
                except Exception as error:  # the program's own: compared with the other run's
                    _raise_if_ours(error)
                    outcome.backward_error = error
                    again = _AGAIN in str(error)
                    self._runs_backward = again and (not number or self._runs_backward)  # later, state may bring it
                    outcome.runs_backward = self._runs_backward
                    if outcome.is_differentiable:
                        return loss
                    wanted = {}
            if first:
                copied = self._optimizer is not None  # which may change them
                outcome.gradients = {
                    f"grad[{name}]": leaf.grad.clone() if copied and leaf.grad is not None else leaf.grad
                    for name, leaf in state.differentiable.items()
                    if wanted or leaf.grad is not None or id(leaf) in self._grads
                }
        return loss

    # after the call

    def _look(self, call: ProgramCall, outcome: Outcome) -> None:
        if call.varies_gradients:
            outcome.subjects, outcome.containers, outcome.rng = dict(outcome.gradients), {}, None
        else:
            state = self._state(call).subjects()
            outcome.subjects = {**outcome.outputs, **state, **outcome.subjects, **outcome.gradients}
            outcome.containers |= argument_containers(self._program.function, *self._copies(call))
        outcome.note_values(copies=len(self._program.calls) > 1)


def refuse_misfits(program: Program, error: Exception | None) -> None:
    """Tell a call that fits no signature from a program that raises: both sides raise then, and would agree.

    Raises:
        OptionError: The arguments do not fit the function.
    """
    signature = signature_of(program.function)
    if signature is None or not isinstance(error, TypeError):
        return
    try:
        signature.bind(*program.calls[0].args, **program.calls[0].kwargs)
    except TypeError as misfit:
        raise OptionError(f"check: the function cannot be called with these arguments: {misfit}.") from error


def _fingerprint(grad: torch.Tensor) -> int:
    """Tells whether a gradient is written to: by its bits, or as autograd counts where these cannot be read."""
    with disable_current_modes():
        bits = fingerprint(grad) if type(grad) is torch.Tensor else None
        return version_of(grad) if bits is None else bits


class _ProgramError(Exception):
    """Carries what the program raised past everything that is the check's own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _StepImpossible(Exception):
    """Leaves an optimizer whose closure has no gradients to give."""


def _raise_if_ours(error: Exception) -> None:
    """Raise an exception of the check itself: it says nothing about the program."""
    for cause in (error, inner_exception(error)):
        if isinstance(cause, CheckedBackendError) and not isinstance(cause, CandidateError):
            raise cause


def no_warning_is_an_error() -> None:
    """Show warnings that filters turn into errors: when torch compiles, it gives other warnings, at other times."""
    shown: list[Any] = [("default", *entry[1:]) if entry[0] == "error" else entry for entry in warnings.filters]
    vars(warnings)["filters"][:] = shown
    warnings.simplefilter("default", append=True)  # so that it is noticed


def eager_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The original of a function that ``torch.compile`` returned; any other function itself.

    A function that ``torch.compiler.disable`` returned stays as it is.
    """
    if isinstance(function, MethodType):
        return MethodType(eager_function(function.__func__), function.__self__)
    if _is_disabled(function):
        return function
    inner = getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", None)
    return function if inner is None else eager_function(inner)


def function_name(function: Callable[..., Any]) -> str:
    """The name of the user's function, for people: ``ConvNet`` for a module, ``train_step``, ``<lambda>``."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    named = str(getattr(function, "__qualname__", type(function).__name__))
    return named.rpartition("<locals>.")[2]


def _called_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function to compile: for a disabled function one that calls it.

    ``torch.compile`` removes ``torch.compiler.disable`` from the function that it is given. Everywhere else in the
    user's program, where compiled code calls the function, it is not compiled.
    """
    if not _is_disabled(function):
        return function

    def calls_disabled(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return calls_disabled


def _is_disabled(function: Callable[..., Any]) -> bool:
    """Whether ``torch.compiler.disable`` returned a function, or a module's ``forward``."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    return bool(getattr(called, "_torchdynamo_disable", False))


class Stopwatch:
    """Counts the processor time of this process since it was made, but no more than the time that has passed."""

    def __init__(self) -> None:
        self._passed, self._used = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """The seconds so far. Several threads use more than the time that passes; a shared machine gives less of it."""
        return min(time.perf_counter() - self._passed, time.process_time() - self._used)
