"""Fresh data for a program's tensors, to find values that tracing has baked into the compiled program."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from checked_backend.checking.program import Program, ProgramCall
from checked_backend.checking.substitute import substituted
from checked_backend.checking.tree import argument_leaves
from checked_backend.findings import Skip
from checked_backend.numerics.randomize import randomize_tensors
from checked_backend.report.ledger import Ledger

__all__ = ["fresh_data"]

ROUNDS = 2


def fresh_data(program: Program, ledger: Ledger) -> Iterator[ProgramCall]:
    """Calls with other data of the same metadata.

    There are some rounds of `randomize`, which keeps data valid. Then follows one round that also varies the integers
    and booleans that `randomize` leaves alone: single ones, and sorted ones.
    """
    call = program.calls[0]
    leaves = dict(argument_leaves(program.function, call.args, call.kwargs))
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    kept: dict[str, torch.Tensor] = dict(tensors)
    for number in range(ROUNDS):
        fresh = dict(zip(tensors, randomize_tensors(list(tensors.values()), number), strict=True))
        changed = {name: tensor for name, tensor in fresh.items() if tensor is not tensors[name]}
        kept = {name: tensor for name, tensor in tensors.items() if name not in changed}
        if (made := substituted(program, changed, f"on fresh data ({number + 1})")) is not None:
            yield made
    bolder = {name: tensor for name, old in kept.items() if (tensor := _other_integers(old)) is not None}
    if (made := substituted(program, bolder, f"on other values of {', '.join(bolder)}")) is not None:
        yield made
    for name in kept.keys() - bolder.keys():
        ledger.skip(Skip(f"fresh data for {name}", "its data cannot be varied"))


def _other_integers(old: torch.Tensor) -> torch.Tensor | None:
    """Other integers in the range from 0 or the least to the greatest; None if they are no plain integers."""
    plain = type(old) is torch.Tensor and old.layout is torch.strided and not old.is_quantized
    if not plain or old.is_floating_point() or old.is_complex() or not old.numel():
        return None
    generator = torch.Generator().manual_seed(0)
    if old.dtype == torch.bool:
        return ~old if old.numel() == 1 else _like(torch.rand(old.shape, generator=generator) < 0.5, old)
    low, high = min(int(old.min()), 0), int(old.max())
    if old.numel() > 1:
        return _like(torch.randint(low, high + 1, old.shape, generator=generator), old)
    return _like(torch.full(old.shape, high - 1 if high > low else high + 1), old)


def _like(values: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    new = torch.empty_like(old)
    return new.copy_(values)
