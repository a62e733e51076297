"""Training runs of the kinds that real programs have. Each gives all that a run leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Compile = Callable[[Any], Any]
Left = list[torch.Tensor]

STEPS = 6


class Blocks(nn.Module):
    """Blocks with dropout. Each may be computed again in the backward pass, in a compiled program or around it."""

    def __init__(self, run: Callable[..., Any] = lambda block, x: block(x), count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 12), nn.LayerNorm(12))
            for _ in range(count)
        )
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.run(block, x)
        return x


def _recomputed(block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def _data(number: int) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(number))


def _left(model: nn.Module, optimizer: torch.optim.Optimizer) -> Left:
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, torch.Tensor)]
    return [*(parameter.detach() for parameter in model.parameters()), *tensors, torch.get_rng_state()]


def _trained(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], *, micro: int = 1) -> Left:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(STEPS):
        for part in range(micro):
            loss = run(_data(number * micro + part)).square().mean() / micro
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return _left(model, optimizer)


def checkpoint_inside(compiled: Compile) -> Left:
    """Activation checkpointing inside of the compiled program."""
    model = Blocks(_recomputed)
    return _trained(model, compiled(model))


def checkpoint_around(compiled: Compile) -> Left:
    """Activation checkpointing around compiled blocks."""
    model = Blocks(_recomputed)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = compiled(block)
    return _trained(model, model)


def accumulation(compiled: Compile) -> Left:
    """Gradients of several small batches are added up before a step."""
    model = Blocks()
    return _trained(model, compiled(model), micro=3)


def scaled(compiled: Compile) -> Left:
    """A loss scaler in float16, with steps that overflow and are left out."""
    model = Blocks()
    run = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    scales = []
    for number in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run(_data(number)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    if len(set(scales)) < 2:
        raise AssertionError(f"nothing overflowed: {scales}")
    return [*_left(model, optimizer), torch.tensor(scales)]


def compiled_optimizer(compiled: Compile) -> Left:
    """A compiled optimizer step beside a compiled model."""
    model = Blocks()
    run = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = compiled(lambda: optimizer.step())
    for number in range(STEPS):
        optimizer.zero_grad()
        run(_data(number)).square().mean().backward()
        step()
    return _left(model, optimizer)


def compiled_backward(compiled: Compile) -> Left:
    """Compiled autograd: a whole training step, backward pass included, is compiled."""
    model = Blocks()

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    run = compiled(step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch._dynamo.config.patch(compiled_autograd=True):
        for number in range(STEPS):
            run(_data(number))
            optimizer.step()
            optimizer.zero_grad()
    return _left(model, optimizer)


RUNS = (checkpoint_inside, checkpoint_around, accumulation, scaled, compiled_optimizer, compiled_backward)
