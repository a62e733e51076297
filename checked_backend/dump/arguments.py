"""The arguments of nodes, from their JSON values: a small grammar, checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from checked_backend.dump.targets import resolve_target

__all__ = ["BadArgument", "argument_nodes", "decode_argument"]

_DEPTH = 60
_PLAIN = (bool, int, float, str, type(None))
_NONFINITE = ("nan", "inf", "-inf")


class BadArgument(Exception):
    """JSON values that are no argument."""


def argument_nodes(value: Any, depth: int = 0) -> Iterator[str]:
    """Check an argument, and yield the names of the nodes that it refers to.

    Args:
        value: What ``encode_value`` writes: plain values, lists, and ``{kind: inner}`` for everything else.
        depth: How deep the value lies in the argument.

    Raises:
        BadArgument: It is of no known kind, or nested too deeply.
    """
    if depth > _DEPTH:
        raise BadArgument("arguments are nested too deeply")
    if isinstance(value, _PLAIN):
        return
    if isinstance(value, list):
        for item in value:
            yield from argument_nodes(item, depth + 1)
        return
    if not isinstance(value, dict) or len(value) != 1:
        raise BadArgument(f"an argument is {str(value)[:60]!r}")
    ((kind, inner),) = value.items()
    if kind == "node" and isinstance(inner, str):
        yield inner
    elif kind in _LENGTHS and isinstance(inner, list) and _LENGTHS[kind] in (None, len(inner)):
        for item in inner:
            yield from argument_nodes(item, depth + 1)
    elif kind == "dict" and isinstance(inner, list) and all(map(_is_pair, inner)):
        for _, item in inner:
            yield from argument_nodes(item, depth + 1)
    elif kind not in _LEAVES or not _LEAVES[kind](inner):
        raise BadArgument(f"an argument of kind {str(kind)[:60]!r} with a bad value")


def decode_argument(value: Any, nodes: Mapping[str, fx.Node], imported: Collection[str]) -> Any:
    """Build an argument.

    Args:
        value: Passed `argument_nodes`.
        nodes: The nodes that it may refer to, by name.
        imported: See `resolve_target`.

    Raises:
        Unresolved: It names an operator that is not here.
        ValueError, TypeError, RuntimeError: A value that its type does not take.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [decode_argument(item, nodes, imported) for item in value]
    ((kind, inner),) = value.items()
    if kind == "node":
        return nodes[inner]
    if kind in _LENGTHS:
        items = [decode_argument(item, nodes, imported) for item in inner]
        return _COMPOUNDS[kind](items)
    if kind == "dict":
        return {key: decode_argument(item, nodes, imported) for key, item in inner}
    if kind == "float":
        return float(inner)
    if kind == "ellipsis":
        return ...
    if kind == "device":
        return torch.device(inner)
    if kind == "target":
        return resolve_target(inner, imported)
    return getattr(torch, inner)


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], _PLAIN)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_a(kind: type) -> Callable[[Any], bool]:
    """Whether a text is the name of one of torch's dtypes, layouts or memory formats."""
    return lambda name: isinstance(name, str) and isinstance(getattr(torch, name, None), kind)


_LENGTHS: Mapping[str, int | None] = MappingProxyType({"tuple": None, "size": None, "slice": 3, "complex": 2})
_COMPOUNDS: Mapping[str, Callable[[list[Any]], Any]] = MappingProxyType(
    {
        "tuple": tuple,
        "size": torch.Size,
        "slice": lambda parts: slice(*parts),
        "complex": lambda parts: complex(*parts),
    }
)
_LEAVES: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "float": lambda text: text in _NONFINITE,
        "ellipsis": lambda mark: mark is True,
        "device": _is_text,
        "target": _is_text,
        "dtype": _is_a(torch.dtype),
        "layout": _is_a(torch.layout),
        "memory_format": _is_a(torch.memory_format),
    }
)
