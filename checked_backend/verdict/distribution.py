"""The distribution of differences in a tensor: a block-wise map, a histogram in ulps, and the worst elements.

This is made for a finding alone, so a clean run pays nothing for it. The tensors are read in parts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from checked_backend.findings import Distribution, WorstElement
from checked_backend.numerics.bits import FORMATS
from checked_backend.verdict.elements import difference

__all__ = ["BLOCK_COLUMNS", "BLOCK_ROWS", "MOST_WORST", "distribution"]

log = logging.getLogger(__name__)

BLOCK_ROWS = 32
"""Rows of blocks of a map, at most."""

BLOCK_COLUMNS = 48
"""Columns of blocks of a map, at most."""

MOST_WORST = 8
"""How many of the worst elements are kept."""

_AT_ONCE = 1 << 20
"""Elements that are read at once."""


def distribution(
    reference: torch.Tensor, candidate: torch.Tensor, high_precision: torch.Tensor | None = None
) -> Distribution | None:
    """Return where two tensors differ.

    Args:
        candidate: The compiled program's, of the same shape and dtype.
        high_precision: Eager's in float64, if that is known.

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
    folded = len(shape) < 2 or total == shape[-1]
    columns = math.isqrt(total - 1) + 1 if folded and total > BLOCK_COLUMNS else shape[-1] if shape else 1
    rows = -(-total // columns)
    left, right = reference.reshape(-1), candidate.reshape(-1)
    high, wide = -(-rows // BLOCK_ROWS), -(-columns // BLOCK_COLUMNS)  # of one block
    blocks = [[0.0] * -(-columns // wide) for _ in range(-(-rows // high))]
    counts = [0] * 66
    worst: list[tuple[float, int]] = []
    for part in _parts(rows, columns, high, wide):
        first, last = part.begin * columns + part.left, min((part.end - 1) * columns + part.right, total)
        one, two = left[first:last], right[first:last]
        found = difference(one, two).to(torch.float64)
        found = torch.linalg.vector_norm(found, dim=-1) if reference.is_complex() else found  # of pairs of reals
        worst = _worst([*worst, *_greatest(found, first)])
        row = blocks[part.begin // high]
        greatest = _by_columns(found, part.end - part.begin, part.right - part.left, wide)
        for place, value in enumerate(greatest, part.left // wide):
            row[place] = max(row[place], value)
        for place, count in enumerate(_ulps(one, two)):
            counts[place] += count
    if not worst:
        return None
    return Distribution(
        shape=shape,
        matrix=(rows, columns),
        blocks=tuple(map(tuple, blocks)),
        ulps=_trimmed(counts),
        worst=tuple(_element(place, reference, candidate, high_precision) for _, place in worst),
    )


class _Part(NamedTuple):
    """Rows from ``begin`` to ``end``, and of a single row perhaps only the columns from ``left`` to ``right``."""

    begin: int
    end: int
    left: int
    right: int


def _parts(rows: int, columns: int, high: int, wide: int) -> Iterator[_Part]:
    """Parts of the matrix, each in one row of blocks, that are read at once. They lie in memory without gaps."""
    if columns > _AT_ONCE:
        across = wide * max(1, _AT_ONCE // wide)
        for row in range(rows):
            yield from (_Part(row, row + 1, at, min(at + across, columns)) for at in range(0, columns, across))
        return
    step = max(1, min(high, _AT_ONCE // columns))
    for block in range(0, rows, high):
        end = min(block + high, rows)
        yield from (_Part(begin, min(begin + step, end), 0, columns) for begin in range(block, end, step))


def _greatest(found: torch.Tensor, first: int) -> list[tuple[float, int]]:
    values, places = torch.topk(found, min(MOST_WORST, found.numel()))
    pairs = zip(values.tolist(), places.tolist(), strict=True)
    return [(value, first + place) for value, place in pairs if value > 0]


def _worst(found: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return sorted(found, key=lambda entry: (-entry[0], entry[1]))[:MOST_WORST]


def _by_columns(found: torch.Tensor, rows: int, columns: int, wide: int) -> list[float]:
    """The greatest of each block, of some whole rows of which the last may be short."""
    across = -(-columns // wide)
    padded = found.new_zeros(rows * columns)
    padded[: found.numel()] = found
    greatest = padded.view(rows, columns).amax(0)
    full = greatest.new_zeros(across * wide)
    full[:columns] = greatest
    result: list[float] = full.view(across, wide).amax(1).tolist()
    return result


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


def _trimmed(counts: list[int]) -> tuple[int, ...]:
    last = max((place for place, count in enumerate(counts) if count), default=-1)
    return tuple(counts[: last + 1])


def _element(
    place: int, reference: torch.Tensor, candidate: torch.Tensor, high_precision: torch.Tensor | None
) -> WorstElement:
    index, rest = [], place
    for size in reversed(reference.shape):
        rest, axis = divmod(rest, size)
        index.append(axis)
    at = tuple(reversed(index))
    known = high_precision is not None and high_precision.shape == reference.shape
    return WorstElement(
        at,
        reference[at].item(),
        candidate[at].item(),
        high_precision[at].item() if known and high_precision is not None else None,
    )
