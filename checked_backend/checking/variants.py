"""Other arguments for a program's own call: fresh data, to find values that tracing has baked in, and other layouts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from checked_backend.checking.backward import roots_of, variants_of, with_gaps
from checked_backend.checking.program import Program, ProgramCall
from checked_backend.checking.tree import signature_of
from checked_backend.findings import Coverage, Finding, Kind, Skip
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

    Returns:
        The call; None if nothing could be substituted, or containers of the arguments cannot be copied.
    """
    call = program.calls[0]
    leaves = program.leaves()
    memo = {id(leaf): leaf for leaf in leaves.values() if isinstance(leaf, (torch.Tensor, torch.nn.Module))}
    memo |= {id(leaves[name]): value for name, value in new.items() if isinstance(leaves[name], torch.Tensor)}
    try:
        args, kwargs = copy.deepcopy((list(call.args), dict(call.kwargs)), dict(memo))
    except Exception:  # the check itself has copied them, so this is about an object without tensors
        return None
    for name, value in new.items():
        if isinstance(leaves[name], torch.Tensor):
            continue
        signature = signature_of(program.function)
        positions = [] if signature is None else list(signature.parameters)[: len(args)]
        if name in kwargs:
            kwargs[name] = value
        elif name in positions:
            args[positions.index(name)] = value
        else:
            return None
    return ProgramCall(args, kwargs, label) if new else None


def fresh_data(program: Program, ledger: Ledger) -> Iterator[ProgramCall]:
    """Calls with other data of the same metadata.

    There are some rounds of `randomize`, which keeps data valid. Then follows one round that also varies the integers
    and booleans that `randomize` leaves alone: single ones, and sorted ones.
    """
    tensors = kept = program.tensors()
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
    return torch.empty_like(old).copy_(values)


def other_layouts(program: Program, ledger: Ledger) -> Iterator[ProgramCall]:
    """Calls that each have one tensor argument in another layout. Only expanded tensors have other values."""
    made: list[ProgramCall] = []
    for name, leaf in program.tensors().items():
        if leaf.layout is not torch.strided or type(leaf) is not torch.Tensor or not leaf.numel() or leaf.is_nested:
            ledger.skip(Skip(f"layouts of {name}", "not a plain tensor with elements"))
            continue
        for how, variant in _variants(leaf.detach()):
            if (variant.stride(), variant.storage_offset()) == (leaf.stride(), leaf.storage_offset()):
                continue
            new = substituted(program, {name: variant.requires_grad_(leaf.requires_grad)}, f"with {name} {how}")
            if new is not None:
                made.append(replace(new, varies_layout=True))
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


OF_VALUES = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE})

ROUNDOFFS = 32.0
"""Differences up to this many roundoffs of the same gradient in the user's own call are rounding."""


def gradient_variants(call: ProgramCall, outputs: Mapping[str, Any]) -> Iterator[ProgramCall]:
    """The same call, once for each kind of gradients that can enter at its outputs."""
    for incoming in variants_of(list(roots_of(outputs).values())):
        yield replace(call, label=f"with incoming gradients {incoming.value}", incoming=incoming)


def roundings(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """How large the rounding of each gradient may be, by the gradients of the user's own call.

    If one number is expanded over a whole tensor, gradients through a normalisation or a softmax vanish. Only their
    rounding is left, and no run repeats that.
    """
    found = {}
    for subject, gradient in gradients.items():
        if isinstance(gradient, torch.Tensor) and gradient.layout is torch.strided and gradient.numel():
            size = gradient.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()
            found[subject] = ROUNDOFFS * torch.finfo(gradient.dtype).eps * float(size)
    return found


def without_rounding(
    findings: Sequence[Finding], call: ProgramCall, rounding: Mapping[str, float], ledger: Ledger
) -> list[Finding]:
    """The findings of a gradient variant that are errors. The ledger gets reasons for the others."""
    left = []
    for finding in findings:
        greatest = math.inf if finding.metrics is None else finding.metrics.max_abs_diff
        is_rounded = finding.kind in (Kind.LOGIC, Kind.PRECISION)
        if not finding.kind.fails:
            why = f"{finding.kind}: {finding.message}"
        elif call.incoming.is_laid_out and is_rounded and greatest <= rounding.get(finding.subject, -1.0):
            why = "it is zero but for rounding"
        elif not call.incoming.is_finite and finding.kind in OF_VALUES and not _is_lost(finding):
            why = "it is NaN or infinite in other elements"
        else:
            left.append(finding)
            continue
        ledger.skip(Skip(f"{finding.subject} {call.label}", why))
    return left


def _is_lost(finding: Finding) -> bool:
    """Whether nothing in a compiled result shows that gradients were infinite or NaN, as eager's result does.

    Which elements show it is no error: formulas that are equal for numbers make NaN in different elements.
    """
    metrics = finding.metrics
    if metrics is None:
        return False
    seen = (metrics.nan_reference + metrics.inf_reference, metrics.nan_candidate + metrics.inf_candidate)
    return seen[0] > 0 and seen[1] == 0


def coverage_of(call: ProgramCall, coverage: Coverage) -> Coverage:
    """The part of a gradient variant's coverage that is added to that of the user's own calls.

    Tensors that stay undecided here were decided about there, with contiguous gradients. The detection limit is that of
    the user's own calls. So are the numbers of calls, tensors and gradients, because they describe the user's program.
    """
    skipped = [replace(skip, subject=f"{skip.subject} {call.label}", matters=False) for skip in coverage.skipped]
    return Coverage(skipped=tuple(skipped), ignored=coverage.ignored, notes=coverage.notes)
