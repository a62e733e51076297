"""Names for the tensors in a function's arguments and results, whatever containers they are in."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["argument_leaves", "leaves", "output_leaves"]


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested tuples, lists, mappings and dataclasses, each with its path.

    Hugging Face outputs are mappings. What is no container is a leaf, tensors among them.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}[{key}]")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield from leaves(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for member in dataclasses.fields(value):
            yield from leaves(getattr(value, member.name), f"{path}.{member.name}")
    else:
        yield path, value


def output_leaves(returned: Any) -> list[tuple[str, Any]]:
    """The leaves of a result: ``output[0]`` for a single value, else ``output[<place>]``."""
    if isinstance(returned, torch.Tensor) or next(iter(leaves(returned, "")), ("", None))[0] == "":
        return [("output[0]", returned)]
    return list(leaves(returned, "output"))


def argument_leaves(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """The leaves of a call's arguments under the names that the function's signature gives them."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        bound = inspect.signature(target).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or a call that the function will reject itself
        bound = {**{f"args[{index}]": value for index, value in enumerate(args)}, **kwargs}
    return [leaf for name, value in bound.items() for leaf in leaves(value, name)]
