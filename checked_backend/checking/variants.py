"""Other arguments for a program's own call: fresh data, to find values that tracing has baked in, and other layouts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from checked_backend.checking.cotangents import with_gaps
from checked_backend.checking.program import Program, ProgramCall
from checked_backend.checking.tree import argument_leaves, signature_of
from checked_backend.findings import Skip
from checked_backend.numerics.randomize import randomize_tensors
from checked_backend.report.ledger import Ledger

ROUNDS = 2
"""Rounds of fresh data of the same kind."""

MOST_CALLS = 40
"""Calls with other layouts in one check."""

_OFFSET = 3
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def substituted(program: Program, new: Mapping[str, Any], label: str) -> ProgramCall | None:
    """The program's own call with other values.

    Args:
        new: New values by the names of `argument_leaves`. Tensors may be anywhere, other values only be arguments
            themselves.
        label: How the new call differs from the user's own.

    Returns:
        The call; None if nothing could be substituted, or containers of the arguments cannot be copied.
    """
    call = program.calls[0]
    leaves = dict(argument_leaves(program.function, call.args, call.kwargs))
    memo = {id(leaf): leaf for leaf in leaves.values() if isinstance(leaf, (torch.Tensor, torch.nn.Module))}
    memo |= {id(leaves[name]): value for name, value in new.items() if isinstance(leaves[name], torch.Tensor)}
    try:
        args, kwargs = copy.deepcopy((list(call.args), dict(call.kwargs)), dict(memo))
    except Exception:  # the check itself has copied them, so this is about an object without tensors
        return None
    values = {name: value for name, value in new.items() if not isinstance(leaves[name], torch.Tensor)}
    if values and not _set_arguments(program, args, kwargs, values):
        return None
    return ProgramCall(args, kwargs, label) if new else None


def _set_arguments(program: Program, args: list[Any], kwargs: dict[str, Any], values: Mapping[str, Any]) -> bool:
    if (signature := signature_of(program.function)) is None:
        return False
    positions = list(signature.parameters)
    for name, value in values.items():
        if name in kwargs:
            kwargs[name] = value
        elif name in positions[: len(args)]:
            args[positions.index(name)] = value
        else:
            return False
    return True


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


def other_layouts(program: Program, ledger: Ledger) -> Iterator[ProgramCall]:
    """Calls that each have one tensor argument in another layout. Only expanded tensors have other values."""
    call = program.calls[0]
    made: list[ProgramCall] = []
    for name, leaf in argument_leaves(program.function, call.args, call.kwargs):
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.layout is not torch.strided or type(leaf) is not torch.Tensor or not leaf.numel() or leaf.is_nested:
            ledger.skip(Skip(f"layouts of {name}", "not a plain tensor with elements"))
            continue
        for how, variant in _variants(leaf.detach()):
            if (variant.stride(), variant.storage_offset()) == (leaf.stride(), leaf.storage_offset()):
                continue
            new = substituted(program, {name: variant.requires_grad_(leaf.requires_grad)}, f"with {name} {how}")
            if new is not None:
                made.append(new)
    if len(made) > MOST_CALLS:
        ledger.skip(Skip("other layouts", f"only {MOST_CALLS} of {len(made)} were tried"))
    yield from made[:MOST_CALLS]


def _variants(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "contiguous", tensor.clone(memory_format=torch.contiguous_format)
    if tensor.dim() > 1:
        yield "transposed", tensor.mT.clone(memory_format=torch.contiguous_format).mT
    if form := _CHANNELS_LAST.get(tensor.dim()):
        yield "channels last", tensor.clone(memory_format=form)
    if tensor.dim() and len(tensor) > 1:
        yield "expanded", tensor[:1].clone(memory_format=torch.contiguous_format).expand(tensor.shape)
    if tensor.dim():
        yield "with gaps", with_gaps(tensor)
    memory = tensor.new_zeros(tensor.numel() + _OFFSET)
    yield "at an offset", memory[_OFFSET:].view(tensor.shape).copy_(tensor)
