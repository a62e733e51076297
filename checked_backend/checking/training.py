"""The optimizer of a check: made for each run anew, over that run's own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from checked_backend.errors import OptionError

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


def take_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> None:
    """Let an optimizer take a step with a closure that evaluates the loss and leaves the gradients.

    If its ``step`` takes no closure, the gradients are computed before.
    """
    step: Any = optimizer.step
    try:
        inspect.signature(step).bind(closure)
    except TypeError:
        closure()
        step()
    else:
        step(closure)


def optimizer_state(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in an optimizer's state, as ``optimizer[<parameter>.<name>]``; step counts are left out."""
    for name, parameter in trained.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and key != "step":
                yield f"optimizer[{name}.{key}]", value
