"""The same inputs in other places of memory: transposed, channels last, expanded, with gaps, at an offset."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from checked_backend.checking.program import Program, ProgramCall
from checked_backend.checking.strided import at_an_offset, channels_last, expanded, transposed, with_gaps
from checked_backend.checking.substitute import substituted
from checked_backend.checking.tree import argument_leaves
from checked_backend.findings import Skip
from checked_backend.report.ledger import Ledger

__all__ = ["other_layouts"]

MOST_CALLS = 40
"""Calls with other layouts in one check."""


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
    made = {
        "contiguous": tensor.clone(memory_format=torch.contiguous_format),
        "transposed": transposed(tensor),
        "channels last": channels_last(tensor),
        "expanded": expanded(tensor),
        "with gaps": with_gaps(tensor) if tensor.dim() else None,
        "at an offset": at_an_offset(tensor),
    }
    yield from ((how, variant) for how, variant in made.items() if variant is not None)
