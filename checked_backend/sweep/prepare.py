"""Bring a model and its inputs to the mode, the dtype and the device of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.pytree import tree_leaves, tree_map
from checked_backend.sweep.suites.base import Built

__all__ = ["Prepared", "prepare"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program to run.

    Attributes:
        function: A function or a module. The module applies autocast itself if the case asks for it.
        training: Whether a step has a backward pass.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    training: bool

    def step(self) -> object:
        """Run one step: forward, and in training backward, too. Returns the results of the program."""
        if not self.training:
            with torch.no_grad():
                return self.function(*self.args, **self.kwargs)
        results = self.function(*self.args, **self.kwargs)
        loss = scalar_loss(results)
        if loss is not None:
            loss.backward()
        return results


def scalar_loss(results: object) -> torch.Tensor | None:
    """A loss that depends on every result that requires grad; None if no result does."""
    leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not leaves:
        return None
    parts = [(leaf.abs() if leaf.is_complex() else leaf).float().mean() for leaf in leaves]
    return torch.stack([part.cpu() for part in parts]).sum() if len(parts) > 1 else parts[0]


def prepare(built: Built, mode: str, dtype: str, device: str) -> Prepared:
    """Bring a program to a mode, a device, and the case's dtype or the one that a rule replaces it with."""
    training = mode == "training"
    if built.ready:
        return Prepared(built.function, built.args, built.kwargs, training)
    module = built.function if isinstance(built.function, torch.nn.Module) else None
    wanted = _DTYPES.get(dtype)
    if module is not None:
        module.train(training)
        module.to(device)
        if wanted is not None:
            module.to(wanted)
    args, kwargs = tree_map(lambda leaf: _moved(leaf, device, wanted), (tuple(built.args), dict(built.kwargs)))
    function = built.function
    if dtype == "amp":
        function = Autocast(module, device) if module is not None else _autocast(built.function, device)
    return Prepared(function, args, kwargs, training)


def _moved(leaf: object, device: str, dtype: torch.dtype | None) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    wanted = dtype if leaf.is_floating_point() and dtype is not None else leaf.dtype
    if leaf.dtype == wanted and leaf.device.type == device:
        return leaf
    return leaf.detach().to(device=device, dtype=wanted).requires_grad_(leaf.requires_grad)


class Autocast(torch.nn.Module):
    """A model whose forward pass runs under autocast. Its backward pass does not, as torch recommends."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        super().__init__()
        self.model = model
        self._device = device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        with torch.autocast(self._device):
            return self.model(*args, **kwargs)


def _autocast(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device):
            return function(*args, **kwargs)

    return run
