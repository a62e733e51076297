"""The distribution of differences in a tensor: a block-wise map, a histogram in ulps, and the worst elements.

This is made for a finding alone, so a clean run pays nothing for it.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import torch
from torch.nn.functional import pad

from checked_backend.findings import Distribution, WorstElement
from checked_backend.numerics.bits import FORMATS
from checked_backend.verdict.elements import blocks, difference

log = logging.getLogger(__name__)

BLOCK_ROWS = 32
"""Rows of blocks of a map, at most."""

BLOCK_COLUMNS = 48
"""Columns of blocks of a map, at most."""

MOST_WORST = 8
"""How many of the worst elements are kept."""


def distribution(
    reference: torch.Tensor, candidate: torch.Tensor, high_precision: torch.Tensor | None = None
) -> Distribution | None:
    """Return where two tensors differ.

    Returns:
        The numbers; None if no element differs, or if the tensors cannot be read so. The finding stands without them.
    """
    try:
        with torch.no_grad():
            return _distribution(reference.detach(), candidate.detach(), high_precision)
    except (RuntimeError, NotImplementedError, TypeError, MemoryError) as error:
        log.debug("no distribution: %s", error)
        return None


def _distribution(
    reference: torch.Tensor, candidate: torch.Tensor, high_precision: torch.Tensor | None
) -> Distribution | None:
    shape, total = tuple(reference.shape), reference.numel()
    if not total:
        return None
    parts, counts = [], [0] * 66
    for one, two in blocks(reference, candidate):
        part = difference(one, two)
        parts.append(torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) if one.is_complex() else part)
        for place, count in enumerate(_ulps(one, two)):
            counts[place] += count
    found = torch.cat(parts)
    least = torch.topk(found, min(MOST_WORST, total)).values[-1]
    places = torch.cat([(found > least).nonzero(), (found == least).nonzero()[:MOST_WORST]]).flatten()
    sized = zip(found[places].tolist(), places.tolist(), strict=True)
    worst = sorted((-value, place) for value, place in sized if value)[:MOST_WORST]  # of equal ones the first
    if not worst:
        return None
    folded = len(shape) < 2 or total == shape[-1]
    columns = math.isqrt(total - 1) + 1 if folded and total > BLOCK_COLUMNS else shape[-1] if shape else 1
    rows = -(-total // columns)
    high, wide = -(-rows // BLOCK_ROWS), -(-columns // BLOCK_COLUMNS)  # of one block
    matrix = pad(found, (0, rows * columns - total)).view(rows, columns)
    matrix = pad(matrix, (0, -columns % wide, 0, -rows % high))
    greatest = matrix.view(-1, high, matrix.shape[1] // wide, wide).amax((1, 3))
    return Distribution(
        shape=shape,
        matrix=(rows, columns),
        blocks=tuple(map(tuple, greatest.tolist())),
        ulps=tuple(counts[: max((place for place, count in enumerate(counts) if count), default=-1) + 1]),
        worst=tuple(_element(place, reference, candidate, high_precision) for _, place in worst),
    )


def _ulps(reference: torch.Tensor, candidate: torch.Tensor) -> list[int]:
    """How many elements differ by 0, 1, 2 to 3, 4 to 7, ... representable numbers. Finite elements alone count."""
    form = FORMATS.get(reference.dtype)
    if form is None or candidate.dtype is not reference.dtype:
        return []
    one, two = reference.view(form.bits).to(torch.int64), candidate.view(form.bits).to(torch.int64)
    mask = torch.iinfo(form.bits).max if form.signed else 0xFF
    sizes = one & mask, two & mask
    finite = (sizes[0] <= form.largest) & (sizes[1] <= form.largest)
    same_sign = (one < 0) == (two < 0)
    apart = sizes[0].to(torch.float64) + sizes[1].to(torch.float64)
    distance = torch.where(same_sign, (sizes[0] - sizes[1]).abs().to(torch.float64), apart)[finite]
    _, exponent = torch.frexp(distance)  # 0 for 0, 1 for 1, 2 for 2 and 3, ...
    counted: list[int] = torch.bincount(exponent.to(torch.int64).clamp_(0, 65)).tolist()
    return counted


def _element(
    place: int, reference: torch.Tensor, candidate: torch.Tensor, high_precision: torch.Tensor | None
) -> WorstElement:
    at = tuple(map(int, np.unravel_index(place, reference.shape)))
    in_float64 = None
    if high_precision is not None and high_precision.shape == reference.shape:
        in_float64 = high_precision[at].item()
    return WorstElement(at, reference[at].item(), candidate[at].item(), in_float64)
