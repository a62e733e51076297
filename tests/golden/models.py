"""A user's file: models for a sweep and for ``checked-backend check``, with a right compiler and wrong ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def right(gm: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


def wrong(gm: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    return lambda *args: [result * 2 + 1 for result in gm.forward(*args)]


def refusing(_gm: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    raise NotImplementedError("no lowering for anything")


def linear(batch_size: int = 4) -> Program:
    model = torch.nn.Linear(4, 2)
    model.weight.data = torch.arange(8.0).view(2, 4)
    model.bias.data = torch.ones(2)
    return model, (torch.arange(4.0 * batch_size).view(batch_size, 4),)


def uncompiled() -> Program:
    return torch.compiler.disable(torch.relu), (torch.arange(4.0),)


def broken() -> Program:
    raise ValueError("no weights here")


def leaving() -> Program:
    sys.exit(5)


MODELS = {"linear": linear, "broken": broken}
