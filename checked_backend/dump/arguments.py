"""The arguments of a node as JSON values: encoded, checked, and decoded by one table of kinds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import HigherOrderOperator, OpOverload
from checked_backend.dump.schema import DEVICE, named_constant
from checked_backend.dump.targets import encode_target, leaves_uninitialized

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


def _is_operator(name: str) -> bool:
    # `rebuild_graph` cannot fill the result of an inner call
    return name.startswith(("op:", "higher_order:")) and not leaves_uninitialized(name)


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
    **{
        kind.__name__: (_is_a(kind), lambda name: vars(torch)[name])
        for kind in (torch.dtype, torch.layout, torch.memory_format)
    },
}
"""Whether a value fits a kind, and what it is decoded to."""

_NAMED: Mapping[str, Callable[[str], bool]] = {
    "node": lambda _: True,
    "device": lambda name: re.fullmatch(DEVICE, name) is not None,
    "target": _is_operator,
}
"""Whether a text may be the name of something that is not in the argument."""


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


def decode_argument(value: Any, named: Callable[[str, str], Any], depth: int = 0, *, message: bool = False) -> Any:
    """Check an argument, and build it.

    Args:
        value: A result of `encode_argument`: plain values, lists, and ``{kind: inner}`` for everything else.
        named: Gives the ``node``, ``target`` or ``device`` of a name. What it raises is raised here.
        message: Whether texts in it are messages, see `takes_message`.

    Raises:
        BadArgument: The value is of no known kind, nested too deeply, or its type does not take it.
    """
    if depth > _DEPTH:
        raise BadArgument("arguments are nested too deeply")

    def decoded(items: Iterable[Any]) -> list[Any]:
        return [decode_argument(item, named, depth + 1, message=message) for item in items]

    if isinstance(value, _PLAIN):
        return _plain(value, message)
    if isinstance(value, list):
        return decoded(value)
    if not isinstance(value, dict) or len(value) != 1:
        raise BadArgument(f"an argument is {str(value)[:60]!r}")
    ((kind, inner),) = value.items()
    if kind in _NAMED and isinstance(inner, str) and _NAMED[kind](inner):
        return named(kind, inner)
    if kind in _LEAVES and _LEAVES[kind][0](inner):
        return _LEAVES[kind][1](inner)
    if kind == "dict" and isinstance(inner, list) and all(map(_is_pair, inner)):
        keys = [_plain(key, message=False) for key, _ in inner]
        return dict(zip(keys, decoded(item for _, item in inner), strict=True))
    if kind in _COMPOUNDS and isinstance(inner, list) and _COMPOUNDS[kind][2] in (None, len(inner)):
        parts = decoded(inner)
        with suppress(OverflowError, RuntimeError, TypeError, ValueError):
            return _COMPOUNDS[kind][3](parts)
    raise BadArgument(f"an argument of kind {str(kind)[:60]!r} with a bad value")


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], _PLAIN)


def _plain(value: Any, message: bool) -> Any:
    if isinstance(value, str):
        if len(value) > _LONGEST:
            raise BadArgument(f"a text of {len(value)} characters")
        if not message and not _WORD.fullmatch(value):
            raise BadArgument(f"the text {value[:60]!r} has characters that no word has")
        return _NO_WORD.sub("_", value)  # only a message has such characters
    if isinstance(value, int) and abs(value) > _GREATEST:
        raise BadArgument("an integer of more than 64 bits")
    return value
