"""Build the arguments of nodes from JSON values. They follow a small grammar, which is checked first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from checked_backend.dump.schema import DEVICE, named_constant
from checked_backend.dump.targets import Trusted, leaves_uninitialized, resolve_target

__all__ = ["BadArgument", "argument_nodes", "decode_argument", "takes_message"]

_DEPTH = 60
_PLAIN = (bool, int, float, str, type(None))
_NONFINITE = ("nan", "inf", "-inf")
_GREATEST = 2**64
_LONGEST = 10_000

# Compilers write the texts of a graph into the code that they make, some of them without quoting: into comments, and
# into C++ between quotation marks. A word of these characters ends neither of them, and calls nothing.
_WORD = re.compile(r"[A-Za-z0-9_ .,:>+-]*")
_NO_WORD = re.compile(r"[^A-Za-z0-9_ .,:;<>=+*/()\[\]-]")
_MESSAGES = re.compile(r"assert|_check|_hooks_disable|_log_api_usage")


class BadArgument(Exception):
    """Raised for JSON values that are no argument."""


def takes_message(target: str) -> bool:
    """Whether a target takes a text that is only ever shown to people."""
    return _MESSAGES.search(target) is not None


def argument_nodes(value: Any, depth: int = 0, *, message: bool = False) -> Iterator[str]:
    """Check an argument, and yield the names of the nodes that it refers to.

    Args:
        value: A result of ``encode_value``: plain values, lists, and ``{kind: inner}`` for everything else.
        depth: How deep the value lies in the argument.
        message: Whether texts in it are messages, see `takes_message`.

    Raises:
        BadArgument: The value is of no known kind, or nested too deeply.
    """
    if depth > _DEPTH:
        raise BadArgument("arguments are nested too deeply")
    if isinstance(value, _PLAIN):
        _check_plain(value, message)
        return
    if isinstance(value, list):
        for item in value:
            yield from argument_nodes(item, depth + 1, message=message)
        return
    if not isinstance(value, dict) or len(value) != 1:
        raise BadArgument(f"an argument is {str(value)[:60]!r}")
    ((kind, inner),) = value.items()
    if kind == "node" and isinstance(inner, str):
        yield inner
    elif kind in _LENGTHS and isinstance(inner, list) and _LENGTHS[kind] in (None, len(inner)):
        for item in inner:
            yield from argument_nodes(item, depth + 1, message=message)
    elif kind == "dict" and isinstance(inner, list) and all(map(_is_pair, inner)):
        for key, item in inner:
            _check_plain(key, message=False)
            yield from argument_nodes(item, depth + 1, message=message)
    elif kind not in _LEAVES or not _LEAVES[kind](inner):
        raise BadArgument(f"an argument of kind {str(kind)[:60]!r} with a bad value")


def decode_argument(value: Any, nodes: Mapping[str, fx.Node], trusted: Trusted) -> Any:
    """Build an argument.

    Args:
        value: A value that passed `argument_nodes`.
        nodes: The nodes that it may refer to, by name.
        trusted: See `resolve_target`.

    Raises:
        Unresolved: It names an operator that is not registered here.
        ValueError, TypeError, RuntimeError: A value that its type does not take.
    """
    if isinstance(value, str):
        return _NO_WORD.sub("_", value)  # only a message has such characters
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [decode_argument(item, nodes, trusted) for item in value]
    ((kind, inner),) = value.items()
    if kind == "node":
        return nodes[inner]
    if kind in _LENGTHS:
        items = [decode_argument(item, nodes, trusted) for item in inner]
        return _COMPOUNDS[kind](items)
    if kind == "dict":
        return {key: decode_argument(item, nodes, trusted) for key, item in inner}
    if kind == "float":
        return float(inner)
    if kind == "ellipsis":
        return ...
    if kind == "device":
        return torch.device(inner)
    if kind == "target":
        return resolve_target(inner, trusted)
    return named_constant(inner, _CONSTANTS[kind])


def _check_plain(value: Any, message: bool) -> None:
    if isinstance(value, str):
        if len(value) > _LONGEST:
            raise BadArgument(f"a text of {len(value)} characters")
        if not message and not _WORD.fullmatch(value):
            raise BadArgument(f"the text {value[:60]!r} has characters that no word has")
    elif isinstance(value, int) and abs(value) > _GREATEST:
        raise BadArgument("an integer of more than 64 bits")


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], _PLAIN)


def _is_device(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(DEVICE, value) is not None


def _is_operator(value: Any) -> bool:
    known = isinstance(value, str) and value.startswith(("op:", "higher_order:"))
    return known and not leaves_uninitialized(value)  # `rebuild_graph` cannot fill the result of an inner call


def _is_a(kind: type) -> Callable[[Any], bool]:
    """Whether a text is the name of one of torch's dtypes, layouts or memory formats."""
    return lambda name: isinstance(name, str) and named_constant(name, kind) is not None


_CONSTANTS: Mapping[str, type] = MappingProxyType(
    {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
)
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
        "device": _is_device,
        "target": _is_operator,
        **{kind: _is_a(constant) for kind, constant in _CONSTANTS.items()},
    }
)
