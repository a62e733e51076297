"""Rounding noise from private generators: relative perturbations, and junk for uninitialised memory."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator

import torch

from checked_backend.numerics.bits import flat_view, unit_roundoff

# Noise is a slice, at a random offset, of a pool of this many values. An operator then costs two passes and no call of
# a generator. On a CPU the pool should stay in the cache; on an accelerator each piece costs a launch.
_POOL_CPU = 1 << 16
_POOL_ACCELERATOR = 1 << 22
# A step of 1.25 unit roundoffs moves every mantissa by exactly one unit in the last place: 0.625 to 1.25 of it.
_STEP = 1.25
# Mean square of such a step, in unit roundoffs, over logarithmically distributed mantissas: 4 * (3/8) / ln 2.
_STEP_SQUARE = 1.5 / math.log(2)
# Below this amplitude, uniform noise would often round away, and always on powers of two. Single steps are used there.
_UNIFORM_FROM = 2.0
# The dtypes that can be perturbed, each with the integers of its width.
_INTEGERS = {
    torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16,
}  # fmt: skip


class NoiseSource:
    """Random numbers that touch no global generator and depend on the seed alone.

    Values come from pools. A private ``torch.Generator`` fills each pool once per device and dtype, and a private
    ``random.Random`` draws the offsets at which it is read. A pool is finite, so noise repeats, but at offsets that do
    not depend on the data.

    Args:
        seed: Two sources with the same seed give the same noise to the same sequence of calls.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._offsets = random.Random(seed)
        self._pools: dict[tuple[torch.device, torch.dtype, int | str], torch.Tensor] = {}

    def _pool(self, device: torch.device, dtype: torch.dtype, key: int | str) -> torch.Tensor:
        pool = self._pools.get((device, dtype, key))
        if pool is None:
            number = sum(known == device for known, *_ in self._pools)
            make = _cpu_pool if device.type == "cpu" else _make_pool
            pool = self._pools[device, dtype, key] = make(self._seed, device, number, dtype, key)
        return pool

    def perturb_(self, tensor: torch.Tensor, amplitude: float) -> bool:
        """Multiply each element by ``1 + amplitude * xi``, xi uniform in [-1, 1], rounded so that the spread is right.

        Zeros, infinities and NaN stay as they are; a finite value never becomes infinite. For amplitudes under 2 unit
        roundoffs of the dtype, elements move by one representable value. The probability of that gives the same root
        mean square, ``amplitude / sqrt(3)`` (on average over mantissas).

        Args:
            tensor: A strided floating or complex tensor, changed in place. Its version counter is the caller's concern.
            amplitude: Relative, so one unit roundoff of float32 is ``2**-24``.

        Returns:
            Whether it was perturbed; False for dtypes (float8) and layouts (sparse, overlapping) that are not handled.
        """
        if tensor.dtype.is_complex:
            tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
        dtype, count = tensor.dtype, tensor.numel()
        if dtype not in _INTEGERS:
            return False
        if count == 0 or amplitude <= 0:
            return True
        ratio = amplitude / unit_roundoff(dtype)
        if ratio < _UNIFORM_FROM:
            pool, scale = self._pool(tensor.device, dtype, round(8 * math.log2(ratio))), 1.0
        else:
            pool, scale = self._pool(tensor.device, dtype, "uniform"), amplitude
        # Clamped: infinity gets a finite increment, and the greatest values (masks) one that rounds away.
        limit = torch.finfo(dtype).max / 8
        for part, noise in self._pieces(tensor, pool):
            _scale(part, noise, scale, limit)
        return True

    def fill_(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with junk: floats in [-100, 100], integers from 0, booleans."""
        if tensor.dtype.is_complex:
            tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
        # expanded memory may be written to once only
        tensor = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
        if tensor.numel():
            for part, junk in self._pieces(tensor, self._pool(tensor.device, tensor.dtype, "junk")):
                part.copy_(junk)

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers in [-1, 1], as many as a tensor has elements."""
        made = torch.empty_like(like, memory_format=torch.contiguous_format)
        for part, noise in self._pieces(made, self._pool(made.device, made.dtype, "uniform")):
            part.copy_(noise)
        return made

    def _pieces(self, tensor: torch.Tensor, pool: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of a tensor, together all of it, each with as many values of a pool."""
        flat, count, size = flat_view(tensor), tensor.numel(), pool.numel() // 2
        if flat is None:
            yield tensor, self._slice(pool, count).view(tensor.shape)
            return
        for start in range(0, count, size):
            part = flat if count <= size else flat[start : start + size]
            yield part, self._slice(pool, part.numel())

    def _slice(self, pool: torch.Tensor, count: int) -> torch.Tensor:
        size = pool.numel() // 2
        offset = int(self._offsets.random() * size)
        if count <= size:
            return pool[offset : offset + count]
        return pool[offset : offset + size].repeat(-(-count // size))[:count]


def _make_pool(seed: int, device: torch.device, number: int, dtype: torch.dtype, key: int | str) -> torch.Tensor:
    """Fill a pool.

    Args:
        number: How many pools of this device come before it, from the same generator.
        key: ``uniform``, ``junk``, or the size of the steps (`_step_chance`).
    """
    size = _POOL_CPU if device.type == "cpu" else _POOL_ACCELERATOR
    generator = torch.Generator(device).manual_seed(seed)
    with torch.inference_mode(False):
        for _ in range(number + 1):
            values = torch.rand(size, dtype=torch.float32, device=device, generator=generator)
        if key == "uniform":
            values = values * 2 - 1
        elif key == "junk":
            # Any representable value would do; moderate ones keep indexing and overflow out of the program's way.
            if dtype == torch.bool:
                values = values < 0.5
            elif dtype.is_floating_point:
                values = values * 200 - 100
            else:
                values = values * min(torch.iinfo(dtype).max, 32767)
        else:
            chance = _step_chance(int(key)) / 2
            step = _STEP * unit_roundoff(dtype)
            values = ((values > 1 - chance).double() - (values < chance).double()) * step
        values = values.to(dtype)
        # The values stand there twice, so that a whole pool follows every offset.
        return torch.cat((values, values))


_cpu_pool = functools.lru_cache(maxsize=32)(_make_pool)
"""Each control run has a source of its own, and the runs of all tensors have the same few seeds."""


def _scale(part: torch.Tensor, noise: torch.Tensor, scale: float, limit: float) -> None:
    """Multiply by ``1 + scale * noise`` in place. The sign of -0.0, which a sum with 0.0 would lose, is kept."""
    clamped = part.clamp(-limit, limit)
    part.addcmul_(clamped, noise, value=scale)
    integers = _INTEGERS[part.dtype]
    # The sign bits that differ are turned back. That is faster than copysign for 16-bit dtypes.
    flipped = clamped.view(integers).bitwise_xor_(part.view(integers)).bitwise_and_(torch.iinfo(integers).min)
    part.view(integers).bitwise_xor_(flipped)


def _step_chance(key: int) -> float:
    """The probability that an element moves by one place, for an amplitude of ``2 ** (key / 8)`` unit roundoffs."""
    return float(2.0 ** (key / 4)) / 3 / _STEP_SQUARE
