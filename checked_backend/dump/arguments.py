"""The arguments of a node as JSON values: encoded, checked, and decoded by one table of kinds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import HigherOrderOperator, OpOverload
from checked_backend.dump.schema import DEVICE, named_constant
from checked_backend.dump.targets import Trusted, encode_target, leaves_uninitialized, resolve_target

_DEPTH = 60
_PLAIN = (bool, int, float, str, type(None))
_GREATEST = 2**64
_LONGEST = 10_000

# Compilers write the texts of a graph into the code that they make, some of them without quoting: into comments, and
# into C++ between quotation marks. A word of these characters ends neither of them, and calls nothing.
_WORD = re.compile(r"[A-Za-z0-9_ .,:>+-]*")
_NO_WORD = re.compile(r"[^A-Za-z0-9_ .,:;<>=+*/()\[\]-]")
_MESSAGES = re.compile(r"assert|_check|_hooks_disable|_log_api_usage")


class BadArgument(Exception):
    """Raised for JSON values that are no argument."""


def _is_operator(value: Any) -> bool:
    known = isinstance(value, str) and value.startswith(("op:", "higher_order:"))
    return known and not leaves_uninitialized(value)  # `rebuild_graph` cannot fill the result of an inner call


def _is_a(kind: type) -> Callable[[Any], bool]:
    """Whether a text is the name of one of torch's dtypes, layouts or memory formats."""
    return lambda name: isinstance(name, str) and named_constant(name, kind) is not None


_COMPOUNDS: Mapping[str, tuple[type, Callable[[Any], list[Any]], int | None, Callable[[list[Any]], Any]]] = {
    "size": (torch.Size, list, None, torch.Size),
    "tuple": (tuple, list, None, tuple),
    "slice": (slice, lambda value: [value.start, value.stop, value.step], 3, lambda parts: slice(*parts)),
    "complex": (complex, lambda value: [value.real, value.imag], 2, lambda parts: complex(*parts)),
}
"""The type of a kind, the items of a value, how many they are, and how a value is made of them."""

_LEAVES: Mapping[str, tuple[Callable[[Any], bool], Callable[[Any], Any]]] = {
    "float": (lambda text: text in ("nan", "inf", "-inf"), float),
    "ellipsis": (lambda mark: mark is True, lambda _: ...),
    "device": (lambda name: isinstance(name, str) and re.fullmatch(DEVICE, name) is not None, torch.device),
    "target": (_is_operator, str),
    **{
        kind.__name__: (_is_a(kind), lambda name: vars(torch)[name])
        for kind in (torch.dtype, torch.layout, torch.memory_format)
    },
}
"""Whether a value fits a kind, and what it is decoded to."""


def encode_argument(value: Any) -> Any:
    """An argument of a node as JSON values; a TypeError whose message is the type that a dump cannot hold."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [encode_argument(item) for item in value]
    if isinstance(value, Mapping):
        return {"dict": [[encode_argument(key), encode_argument(item)] for key, item in value.items()]}
    for kind, (made, items, *_) in _COMPOUNDS.items():
        if isinstance(value, made):
            return {kind: [encode_argument(item) for item in items(value)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (OpOverload, HigherOrderOperator)):
        return {"target": encode_target("call_function", value)}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def takes_message(target: str) -> bool:
    """Whether a target takes a text that is only ever shown to people."""
    return _MESSAGES.search(target) is not None


def argument_nodes(value: Any, depth: int = 0, *, message: bool = False) -> Iterator[str]:
    """Check an argument, and yield the names of the nodes that it refers to.

    Args:
        value: A result of `encode_argument`: plain values, lists, and ``{kind: inner}`` for everything else.
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
    elif kind in _COMPOUNDS and isinstance(inner, list) and _COMPOUNDS[kind][2] in (None, len(inner)):
        for item in inner:
            yield from argument_nodes(item, depth + 1, message=message)
    elif (
        kind == "dict"
        and isinstance(inner, list)
        and all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], _PLAIN) for item in inner)
    ):
        for key, item in inner:
            _check_plain(key, message=False)
            yield from argument_nodes(item, depth + 1, message=message)
    elif kind not in _LEAVES or not _LEAVES[kind][0](inner):
        raise BadArgument(f"an argument of kind {str(kind)[:60]!r} with a bad value")


def decode_argument(value: Any, nodes: Mapping[str, fx.Node], trusted: Trusted) -> Any:
    """Build an argument that passed `argument_nodes`.

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
    if kind in _COMPOUNDS:
        return _COMPOUNDS[kind][3]([decode_argument(item, nodes, trusted) for item in inner])
    if kind == "dict":
        return {key: decode_argument(item, nodes, trusted) for key, item in inner}
    return resolve_target(inner, trusted) if kind == "target" else _LEAVES[kind][1](inner)


def _check_plain(value: Any, message: bool) -> None:
    if isinstance(value, str):
        if len(value) > _LONGEST:
            raise BadArgument(f"a text of {len(value)} characters")
        if not message and not _WORD.fullmatch(value):
            raise BadArgument(f"the text {value[:60]!r} has characters that no word has")
    elif isinstance(value, int) and abs(value) > _GREATEST:
        raise BadArgument("an integer of more than 64 bits")
