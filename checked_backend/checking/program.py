"""A program that can be run any number of times from the same state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from checked_backend.checking.tree import argument_leaves, output_leaves
from checked_backend.interpret.promote import promote
from checked_backend.regions.ambient import RngState
from checked_backend.regions.execution import flat_tensors

__all__ = ["Outcome", "Program"]


@dataclass(slots=True)
class Outcome:
    """What one run of a program returned and left behind.

    Attributes:
        outputs: Leaves of the result, by subject.
        inputs: Leaves of the arguments after the run, by name.
        parameters: The module's parameters after the run, by name.
        buffers: The module's buffers after the run, by name.
        gradients: Gradients of inputs and parameters, by subject.
        rng: The random state that the run left.
        error: The exception it raised instead of returning.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    rng: RngState | None = None
    error: Exception | None = None

    def subjects(self) -> dict[str, Any]:
        """Everything to compare, by subject."""
        named = dict(self.outputs)
        named |= {f"mutated[{name}]": value for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}
        named |= {f"param[{name}]": value for name, value in self.parameters.items()}
        named |= {f"buffer[{name}]": value for name, value in self.buffers.items()}
        return named | self.gradients

    def tensors(self) -> dict[str, torch.Tensor]:
        """The plain tensors among `subjects`."""
        return {
            part: tensor.detach()
            for name, value in self.subjects().items()
            for part, tensor in flat_tensors(name, value).items()
        }


@dataclass(slots=True)
class Program:
    """A function or module with its arguments.

    Attributes:
        function: Never run itself, where it is a module: each run gets a copy.
        args: Positional arguments; each run gets copies that share memory where these do.
        kwargs: Keyword arguments.
        rng: The random state that each run starts from.
        gradients: Whether to run the backward pass, with one fixed random cotangent for each output.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    rng: RngState
    gradients: bool

    def run(
        self,
        transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        *,
        wide: bool = False,
        modes: Sequence[Callable[[], Any]] = (),
    ) -> Outcome:
        """Run a fresh copy.

        Args:
            transform: Applied to the copy of the function, for example ``torch.compile``.
            wide: Run in float64.
            modes: Makes context managers to run it under.

        Returns:
            The outcome; an exception of the program is in it, not raised.
        """
        function, args, kwargs = self._copies(wide)
        called = function if transform is None else transform(function)
        inputs = argument_leaves(function, args, kwargs)
        before = RngState.capture(tuple(self.rng.cuda))
        outcome = Outcome()
        try:
            self.rng.restore()
            with torch.set_grad_enabled(self.gradients), ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode())
                returned = called(*args, **kwargs)
                outcome.outputs = dict(output_leaves(returned))
                if self.gradients:
                    self._backward(function, inputs, outcome)
            outcome.rng = RngState.capture(tuple(self.rng.cuda))
        except Exception as error:  # the program's own: compared with the other run's
            outcome.error = error
        finally:
            before.restore()
        outcome.inputs = dict(inputs)
        if isinstance(function, torch.nn.Module):
            outcome.parameters = dict(function.named_parameters())
            outcome.buffers = dict(function.named_buffers())
        return outcome

    def _copies(self, wide: bool) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        memo: dict[int, Any] = {}
        function = copy.deepcopy(self.function, memo) if isinstance(self.function, torch.nn.Module) else self.function
        held = [leaf for _, leaf in argument_leaves(self.function, self.args, self.kwargs)]
        tensors = [leaf for leaf in held if isinstance(leaf, torch.Tensor)]
        for tensor, duplicate in zip(tensors, _duplicates(tensors, memo, wide), strict=True):
            memo[id(tensor)] = duplicate
        if wide and isinstance(function, torch.nn.Module):
            function = function.double()
        args, kwargs = copy.deepcopy((list(self.args), dict(self.kwargs)), memo)
        return function, args, kwargs

    def _backward(self, function: Callable[..., Any], inputs: Sequence[tuple[str, Any]], outcome: Outcome) -> None:
        roots = [value for value in outcome.outputs.values() if isinstance(value, torch.Tensor) and value.requires_grad]
        wanted = {
            f"grad[{name}]": leaf for name, leaf in inputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        }
        if isinstance(function, torch.nn.Module):
            wanted |= {f"grad[{name}]": leaf for name, leaf in function.named_parameters() if leaf.requires_grad}
        wanted = {name: leaf for name, leaf in wanted.items() if leaf.is_leaf}
        if not roots or not wanted:
            return
        cotangents = [_cotangent(root, index) for index, root in enumerate(roots)]
        torch.autograd.backward(roots, cotangents, inputs=list(wanted.values()))
        outcome.gradients = {name: leaf.grad for name, leaf in wanted.items()}


def _duplicates(tensors: Sequence[torch.Tensor], memo: dict[int, Any], wide: bool) -> list[torch.Tensor]:
    """Copies that share memory as the originals do; leaves that require grad where the originals do."""
    copies = [copy.deepcopy(tensor.detach(), memo) if tensor.is_leaf else tensor.detach().clone() for tensor in tensors]
    if wide:
        copies = promote(copies)
    return [duplicate.requires_grad_(tensor.requires_grad) for tensor, duplicate in zip(tensors, copies, strict=True)]


def _cotangent(root: torch.Tensor, index: int) -> torch.Tensor:
    """A random gradient for one output: the same in every run, exact in every floating dtype."""
    generator = torch.Generator().manual_seed(index + 1)
    shape = (*root.shape, 2) if root.is_complex() else tuple(root.shape)
    eighths = torch.randint(-16, 17, shape, generator=generator).to(torch.float64) / 8
    exact = torch.view_as_complex(eighths) if root.is_complex() else eighths
    return exact.to(dtype=root.dtype, device=root.device)
