"""The outcome of one call of a program: its results and effects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from checked_backend.regions.execution import flat_tensors
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.torch_state import RngState

_LARGEST = 2**63


@dataclass(slots=True)
class Outcome:
    """The results and the effects of one call of a program.

    Attributes:
        subjects: Everything to compare, by subject: the objects themselves.
        values: The plain tensors among them (numbers too), as they were at the end of the call, by name.
        outputs: Leaves of the result, by subject.
        containers: The names of the types of the result's containers, by path.
        memory: The tensors that outputs may share memory with, by name.
        gradients: Gradients of inputs and parameters, by subject; None for a leaf that got none.
        unreached: Leaves that eager's backward pass reaches and whose gradients are not in `gradients`.
        evaluations: How often the function ran: an optimizer may ask for its loss several times.
        rng: The random state that the call left.
        settings: The process's settings before and after the call.
        error: The exception that the function raised instead of returning.
        backward_error: The exception that the backward pass raised.
    """

    subjects: dict[str, Any] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    unreached: list[torch.Tensor] = field(default_factory=list)
    evaluations: int = 0
    rng: RngState | None = None
    settings: tuple[ProcessState, ProcessState] | None = None
    error: Exception | None = None
    backward_error: Exception | None = None

    def release(self) -> None:
        """Forget all tensors once they are compared. The names of the gradients are kept."""
        for tensors in (self.subjects, self.values, self.outputs, self.memory):
            tensors.clear()
        self.unreached.clear()
        self.gradients = dict.fromkeys(self.gradients)

    def note_values(self, *, copies: bool) -> None:
        """Take the values of all subjects: copies, if later calls may change the tensors."""
        for subject, value in self.subjects.items():
            for name, tensor in flat_tensors(subject, as_tensor(value)).items():
                plain = tensor.detach()
                self.values[name] = plain.clone() if copies else plain


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
