"""Write calls of a graph as a person would: ``torch.relu(x)`` for ``aten.relu.default``, checked by running both."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch import OpOverload
from checked_backend.reduce.program import Program, is_getitem, outputs, record_values

__all__ = ["Untranslatable", "program_lines"]

_HOMES: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.linalg", torch.linalg),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
)


class Untranslatable(Exception):
    """A graph that cannot be written as a script; the message says which node and why."""


def program_lines(program: Program, *, plain: bool) -> list[str]:
    """The body of a function of the program's placeholders, without indentation.

    Args:
        program: The program.
        plain: Write calls of ``torch`` where one gives the same results bit for bit; else only ``torch.ops``.

    Raises:
        Untranslatable: A call or a constant cannot be written.
    """
    graph = program.trial.graph.graph
    names = {node: _name(node.name) for node in graph.nodes}
    values = record_values(program) if plain else {}
    values |= program.placeholders() if plain else {}
    lines = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        lines.append(f"{names[node]} = {_call(node, names, values)}")
    returned = [_argument(value, names) for value in outputs(graph)]
    lines.append(f"return {', '.join(returned)}{',' if len(returned) == 1 else ''}")
    return lines


def _name(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _call(node: fx.Node, names: dict[fx.Node, str], values: dict[str, Any]) -> str:
    if is_getitem(node):
        return f"{_argument(node.args[0], names)}[{_argument(node.args[1], names)}]"
    args = [_argument(value, names) for value in node.args]
    keywords = [f"{key}={_argument(value, names)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join([*args[1:], *keywords])})"
    if not isinstance(node.target, OpOverload):
        raise Untranslatable(f"{node.name} calls {node.target}, which a script cannot name")
    if values:
        real_args, real_kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda item: values[item.name])
        for text, function in _spellings(node.target):
            if _same_result(function, real_args, real_kwargs, values[node.name]):
                return f"{text}({', '.join([*args, *keywords])})"
    return f"torch.ops.{node.target}({', '.join([*args, *keywords])})"


def _spellings(target: OpOverload) -> Sequence[tuple[str, Callable[..., Any]]]:
    base = target._schema.name.partition("::")[2]
    found = []
    for text, home in _HOMES:
        name = base.removeprefix(f"{text.rpartition('.')[2]}_")
        function = getattr(home, name, None)
        if callable(function):
            found.append((f"{text}.{name}", function))
    return found


def _same_result(function: Callable[..., Any], args: Any, kwargs: Any, expected: Any) -> bool:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            actual = function(*args, **kwargs)
    except Exception:  # takes other arguments
        return False
    return _equal(expected, actual)


def _equal(expected: Any, actual: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(actual, torch.Tensor)
            and (expected.dtype, expected.shape, expected.stride()) == (actual.dtype, actual.shape, actual.stride())
            and bool(
                (torch.equal(expected.nan_to_num(), actual.nan_to_num()) and torch.equal(expected, expected))
                or torch.equal(expected.isnan(), actual.isnan())
            )
        )
    if isinstance(expected, (tuple, list)):
        return (
            isinstance(actual, (tuple, list))
            and len(expected) == len(actual)
            and all(_equal(one, other) for one, other in zip(expected, actual, strict=True))
        )
    return type(expected) is type(actual) and bool(expected == actual)


def _argument(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_argument(item, names) for item in value)}]"
    if isinstance(value, slice):
        return f"slice({_argument(value.start, names)}, {_argument(value.stop, names)}, {_argument(value.step, names)})"
    raise Untranslatable(f"a constant of type {type(value).__name__}: {value!r}")
