"""Names for the values in a function's arguments and results, whatever containers they are in."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from checked_backend.errors import CheckedBackendError

MOST_YIELDED = 10_000
"""Items taken from an iterator that a program returns: it may have no end."""

_LEAST_ADDRESS = 1 << 32
"""A key of a dictionary that is as great as this may be ``id(tensor)``, which is another one in each run."""

_ATOMS = (torch.Tensor, torch.nn.Module, torch.Generator, str, bytes, type, ModuleType)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def leaves(value: Any, path: str, objects: int = 2) -> Iterator[tuple[str, Any]]:
    """The leaves of nested containers, each with its path.

    Containers are tuples, lists, deques, mappings (Hugging Face outputs are some), dataclasses and objects that have
    nothing but attributes. Sets are leaves. An object inside of itself is not entered again.

    Args:
        path: The beginning of the leaves' names.
        objects: How many objects with attributes may be inside each other. Deeper ones are leaves.

    Yields:
        Name and leaf; tensors, modules, functions and strings are leaves.
    """
    for place, found, is_leaf in _walk(value, path, (), objects):
        if is_leaf:
            yield place, found


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """A container as it is compared.

    Attributes:
        kind: The name of its type.
        keys: The keys of a mapping, in order.
    """

    kind: str
    keys: tuple[str, ...] = ()


def containers(value: Any, path: str) -> Iterator[tuple[str, Container]]:
    """The containers that `leaves` enters, outermost first, each with its path."""
    for place, found, is_leaf in _walk(value, path, (), 2):
        if not is_leaf:
            kind = type(found)
            module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            keys = tuple(step for step, _ in _items(found) or ()) if isinstance(found, Mapping) else ()
            yield place, Container(f"{module}{kind.__qualname__}", keys)


def _walk(value: Any, path: str, inside: tuple[int, ...], objects: int) -> Iterator[tuple[str, Any, bool]]:
    steps = None if id(value) in inside else _items(value)
    if steps is None and objects and id(value) not in inside and has_attributes(value):
        steps, objects = [(f".{name}", inner) for name, inner in vars(value).items()], objects - 1
    yield path, value, steps is None
    for step, inner in steps or ():
        yield from _walk(inner, path + step, (*inside, id(value)), objects)


def _items(value: Any) -> list[tuple[str, Any]] | None:
    """The items of a container, by the step that leads to each; None if the value is no container."""
    if isinstance(value, _ATOMS + _FUNCTIONS):
        return None
    if isinstance(value, Mapping):
        # what a class of its own gives may have to be imported first
        kind: Any = next((one for one in (OrderedDict, dict) if isinstance(value, one)), type(value))
        return [(f"[{_named(key, place)}]", inner) for place, (key, inner) in enumerate(kind.items(value))]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, (tuple, list, deque)):
        return [(f"[{index}]", inner) for index, inner in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f".{member.name}", _field(value, member.name)) for member in dataclasses.fields(value)]
    return None


def _field(value: Any, name: str) -> Any:
    """What an object keeps in a field; its class may refuse to be asked, as a configuration with layers that differ."""
    try:
        return object.__getattribute__(value, name)
    except Exception:  # a field that was never set, or a property in its place that raises
        return None


def _named(key: object, place: int) -> str:
    """A key as it is written; its place if the written form would show values or an address, as for a parameter."""
    return str(key) if _is_written(key) else f"{type(key).__name__} {place}"


def _is_written(key: object) -> bool:
    if isinstance(key, (tuple, frozenset)):
        return all(map(_is_written, key))
    is_address = isinstance(key, int) and key >= _LEAST_ADDRESS
    return (isinstance(key, (str, int, float, complex, bytes, Enum)) and not is_address) or key is None


def has_attributes(value: Any) -> bool:
    """Whether a value is an object of a Python class that keeps something in attributes."""
    if isinstance(value, (*_ATOMS, *_FUNCTIONS, Enum)) or type(value).__module__ == "builtins":
        return False
    return bool(getattr(value, "__dict__", None))


def has_tensors(value: Any) -> bool:
    """Whether a value is, or holds, tensors, modules or generators."""
    return any(isinstance(leaf, (torch.Tensor, torch.nn.Module, torch.Generator)) for _, leaf in leaves(value, ""))


def comparable(value: Any) -> Any:
    """The value by which a leaf that is no tensor is compared: itself if it can be compared, else its type.

    Functions and objects without an equality of their own differ from each of their copies.
    """
    if isinstance(value, torch.Tensor):
        return value
    kind = type(value)
    if isinstance(value, Iterator):
        return "iterator"  # Dynamo makes its own
    equality: Any = kind.__eq__
    if isinstance(value, (torch.nn.Module, torch.Generator, *_FUNCTIONS)) or equality is object.__eq__:
        return value if value is None or isinstance(value, type) else kind.__qualname__
    try:
        return value if isinstance(value == value, bool) else kind.__qualname__
    except Exception:  # an equality that fails is none
        return kind.__qualname__


def settled(returned: Any) -> Any:
    """A result in a form that can be compared: an iterator becomes a list of its items.

    Raises:
        CheckedBackendError: The result is a coroutine, which has not run yet.
    """
    if isinstance(returned, Coroutine):
        returned.close()
        raise CheckedBackendError(
            "check: the function is asynchronous, so calling it runs nothing. Give a function that runs it: "
            "check(lambda *args: asyncio.run(fn(*args)), args)."
        )
    return list(islice(returned, MOST_YIELDED)) if isinstance(returned, Iterator) else returned


def output_leaves(returned: Any) -> list[tuple[str, Any]]:
    """The leaves of a result: ``output[0]`` for a single value, else ``output[<place>]``."""
    found = list(leaves(returned, "output"))
    return [("output[0]", returned)] if [name for name, _ in found] == ["output"] else found


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function, or of a module's ``forward``; None if it has none, as builtin functions."""
    try:
        return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):
        return None


def named_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments under the names that the function's signature gives them."""
    signature = signature_of(function)
    bound = {**{f"args[{index}]": value for index, value in enumerate(args)}, **kwargs}
    if signature is not None:
        with contextlib.suppress(TypeError):  # a call that the function will reject itself
            bound = dict(signature.bind(*args, **kwargs).arguments)
            for name, parameter in signature.parameters.items():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    bound |= bound.pop(name, {})
    return bound


def argument_leaves(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """The leaves of a call's arguments under the names that the function's signature gives them."""
    return [leaf for name, value in named_arguments(function, args, kwargs).items() for leaf in leaves(value, name)]


def argument_containers(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Container]:
    """The containers among a call's arguments, as subjects that the call may have changed."""
    named = named_arguments(function, args, kwargs).items()
    return {f"mutated[{path}]": held for name, value in named for path, held in containers(value, name)}
