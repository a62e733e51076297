"""Ways to spoil one tensor, and what faults of every class are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from tests.support.planting import (
    Edit,
)

__all__ = [
    "How",
    "PlantedError",
    "Spoil",
    "changed",
    "one_element_changed",
    "raising",
    "replaced",
    "restrided",
    "with_nan",
]


How = Literal["python", "aot"]
Spoil = Callable[[torch.Tensor], Any]


class PlantedError(RuntimeError):
    """What the crashing compilers raise."""


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Every element other than it should be, by far more than rounding."""
    if tensor.dtype == torch.bool:
        return tensor.logical_not()
    return tensor * 1.5 + 0.25 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else tensor + 1


def one_element_changed(tensor: torch.Tensor) -> torch.Tensor:
    """The last element a little off: by a hundredth of the greatest one."""
    spoiled = tensor.clone()
    if not tensor.numel():
        return spoiled
    last = tuple(size - 1 for size in tensor.shape)
    step = tensor.detach().abs().max() * 0.01 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 1
    spoiled[last] = tensor[last].logical_not() if tensor.dtype == torch.bool else tensor[last] + step
    return spoiled


def restrided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another order in memory: the dimensions reversed, or a contiguous tensor of another one."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in the first element."""
    spoiled = tensor.clone()
    spoiled.view(-1)[:1] = float("nan")
    return spoiled


def replaced(at: int, spoil: Spoil) -> Edit:
    def edit(results: list[Any], _args: Sequence[Any]) -> Any:
        results[at] = spoil(results[at])
        return tuple(results)

    return edit


def raising(message: str) -> Callable[..., Any]:
    def raises(*_args: Any) -> Any:
        raise PlantedError(message)

    return raises
