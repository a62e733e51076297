"""Calls from the samples that torch's own operator database has for its tests."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from checked_backend._torch.op_database import operator_database
from checked_backend.fuzz.generate.draft import Draft
from checked_backend.fuzz.generate.undefined import UNDEFINED_OPS
from checked_backend.fuzz.known import is_known
from checked_backend.fuzz.program import CONSTANTS, DTYPES, Constant, Ref, Statement

if TYPE_CHECKING:
    from checked_backend.fuzz.generate.rules import Rule

__all__ = ["rules"]

_RANDOM_ORDER = ("torch.meshgrid",)
"""Entries whose samples come in the order of a set of strings, which each process has its own of."""

_WEIGHT = 14
_SAMPLES = 24
_MOST_ELEMENTS = 512


class _Unusable(Exception):
    """Raised for an argument that a program cannot have."""


@functools.cache
def _entries() -> Mapping[str, Any]:
    """The entries that name an operation of a program, by its name."""
    found: dict[str, Any] = {}
    for info in operator_database():
        name = f"torch.{info.name}"
        if info.name.startswith("nn.functional."):
            name = f"F.{info.name.removeprefix('nn.functional.')}"
        if not is_known(name):
            name = f"Tensor.{info.name}"
        left_out = name in _RANDOM_ORDER or name.rpartition(".")[2] in UNDEFINED_OPS or "linalg" in name
        if is_known(name) and not left_out:
            found.setdefault(name, info)
    return found


def rules() -> list[Rule]:
    """The rule for operations of torch's database; none where it cannot be imported."""
    from checked_backend.fuzz.generate.rules import Rule  # noqa: PLC0415  that module lists this one's neighbours

    ops = tuple(_entries())
    return [Rule("torch's samples", _WEIGHT, ops, _make)] if ops else []


def _make(draft: Draft, op: str) -> Statement | None:
    info = _entries()[op]
    near = draft.any()
    dtype = draft.dtype() if near is None or draft.chance(0.3) else _name(draft.value(near).dtype)
    if getattr(torch, dtype) not in info.dtypes:
        dtype = "float32"
    sample = _sample(draft, info, getattr(torch, dtype))
    if sample is None:
        return None
    try:
        args = tuple(_argument(draft, value) for value in (sample.input, *sample.args))
        kwargs = {str(key): _argument(draft, value) for key, value in sample.kwargs.items()}
    except _Unusable:
        return None
    return Statement(op, args, kwargs)


def _sample(draft: Draft, info: Any, dtype: torch.dtype) -> Any:
    """One of the first samples of an entry. No more of them are made than are needed."""
    place = draft.rng.randrange(_SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = info.sample_inputs_func(info, "cpu", dtype, False)  # sample_inputs seeds torch for each of them
            found = list(itertools.islice(samples, place + 1))
        except Exception:  # an entry that has no samples of this dtype, or that needs what is not here
            return None
    return found[-1] if len(found) > place else draft.rng.choice(found) if found else None


def _argument(draft: Draft, raw: Any) -> Any:
    if isinstance(raw, torch.Tensor):
        return _tensor(draft, raw)
    if isinstance(raw, list | tuple):
        return type(raw)(_argument(draft, item) for item in raw) if type(raw) in (list, tuple) else _unusable(raw)
    if isinstance(raw, torch.dtype | torch.memory_format):
        name = str(raw).removeprefix("torch.")
        return Constant(name) if name in CONSTANTS else _unusable(raw)
    if raw is None or raw is ... or isinstance(raw, bool | int | float | complex | str):
        return raw
    return _unusable(raw)


def _tensor(draft: Draft, raw: torch.Tensor) -> Ref:
    """A tensor of the program with the sample's shape and dtype: one there is, or an input like the sample's."""
    if raw.layout is not torch.strided or _name(raw.dtype) not in DTYPES or raw.numel() > _MOST_ELEMENTS:
        _unusable(raw)
    if raw.is_floating_point() and draft.chance(0.75):
        found = draft.any(lambda tensor: tensor.shape == raw.shape and tensor.dtype == raw.dtype)
        if found is not None:
            return found
    if raw.dtype is torch.bool or raw.is_complex() or not raw.numel():
        return draft.new_input(_name(raw.dtype), raw.shape)
    low, high = float(raw.min()), float(raw.max())
    if not (low >= -1e18 and high <= 1e18):
        low, high = -3.0, 3.0
    if not raw.is_floating_point():  # they may be indices
        return draft.new_input(_name(raw.dtype), raw.shape, fill="range", low=int(low), high=int(high))
    fill = "edges" if draft.chance(0.1) else "range"
    return draft.new_input(_name(raw.dtype), raw.shape, fill=fill, low=low, high=high)


def _unusable(raw: Any) -> Any:
    raise _Unusable(type(raw).__name__)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
