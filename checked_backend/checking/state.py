"""The tensors that a program reads and may change: arguments, parameters, buffers, captured tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from checked_backend.checking.code_search import is_library
from checked_backend.checking.tree import leaves

_COMPARED = (torch.Tensor, np.ndarray, np.generic, int, float, complex, str, bytes, type(None))
_OWN = ("_parameters", "_buffers", "_modules")
_OF_COMPILE = ("_is_torch_compile", "_compile_kwargs")  # torch.compile writes them, and Lightning's in its place


@dataclass(slots=True)
class State:
    """The tensors of one run, by name.

    Attributes:
        inputs: Leaves of the arguments and of captured values; not only tensors.
        attributes: Other leaves that modules hold as plain attributes: of those of torch only tensors.
        differentiable: Leaves whose gradients are wanted; one may stand for several views.
    """

    inputs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    differentiable: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        captured: Mapping[str, Any],
        arguments: Iterable[tuple[str, Any]],
        histories: Mapping[int, torch.Tensor],
    ) -> State:
        """Look at a run's copies.

        Args:
            captured: The values that functions hold, by name.
            histories: For a tensor with an autograd history, by identity: the leaf that stands for it.
        """
        state = cls()
        if isinstance(function, torch.nn.Module):
            state._add_module(function, "")
        held = [leaf for name, value in captured.items() for leaf in leaves(value, name)]
        for name, leaf in (*arguments, *held):
            if isinstance(leaf, torch.nn.Module):
                state._add_module(leaf, f"{name}.")
            else:
                taken = state.inputs.get(name, leaf) is not leaf
                state.inputs[f"{name} (not the argument)" if taken else name] = leaf
        sources: dict[object, tuple[torch.Tensor, list[str]]] = {}
        for name, leaf in state.inputs.items():
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                source = histories.get(id(leaf), leaf)
                if source.is_leaf:
                    sources.setdefault(name if source is leaf else id(source), (source, []))[1].append(name)
        state.differentiable = {", ".join(names): source for source, names in sources.values()}
        known = {id(tensor) for tensor in state.differentiable.values()}
        for name, tensor in (state.parameters | state.attributes).items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf and id(tensor) not in known:
                state.differentiable[f"self.{name}" if name in state.differentiable else name] = tensor
        return state

    def _add_module(self, module: torch.nn.Module, prefix: str) -> None:
        self.parameters |= {prefix + name: tensor for name, tensor in module.named_parameters()}
        self.buffers |= {prefix + name: tensor for name, tensor in module.named_buffers()}
        for path, child in module.named_modules():
            own = {name: value for name, value in vars(child).items() if name not in (*_OWN, *_OF_COMPILE)}
            of_torch = is_library(type(child).__module__)
            for name, leaf in leaves(own, "", objects=0):
                if isinstance(leaf, torch.Tensor) or (isinstance(leaf, _COMPARED) and not of_torch):
                    step = name[1:].replace("]", "", 1)  # "[scale]" is an attribute
                    self.attributes[f"{prefix}{path}.{step}" if path else f"{prefix}{step}"] = leaf

    def trained(self) -> dict[str, torch.Tensor]:
        """The tensors for an optimizer, each once: the parameters that require grad; if there are none, the inputs."""
        chosen = {name: tensor for name, tensor in self.differentiable.items() if name in self.parameters}
        chosen = chosen or self.differentiable
        names = {id(tensor): name for name, tensor in reversed(chosen.items())}
        return {name: tensor for name, tensor in chosen.items() if names[id(tensor)] == name}

    def restorable(self) -> Iterator[torch.Tensor]:
        """The tensors that must be as in the first call when a call begins anew. Arguments have their own copies."""
        for tensor in (*self.parameters.values(), *self.buffers.values(), *self.attributes.values()):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                yield tensor

    def subjects(self) -> dict[str, Any]:
        """The tensors, numbers and strings that a call may have changed, by subject."""
        inputs = {f"mutated[{name}]": leaf for name, leaf in self.inputs.items() if isinstance(leaf, _COMPARED)}
        groups = {"attribute": self.attributes, "param": self.parameters, "buffer": self.buffers}
        return inputs | {f"{kind}[{name}]": leaf for kind, group in groups.items() for name, leaf in group.items()}
