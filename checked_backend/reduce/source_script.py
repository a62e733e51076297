"""A repro out of the user's own function, for what goes wrong before there is a graph: in Dynamo."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checked_backend.reduce.inputs_code import write_inputs
from checked_backend.reduce.naming import name_of
from checked_backend.reduce.repro import Repro, script_path, write_and_run
from checked_backend.reduce.script import BUG_GONE, BUG_THERE, Script, facts, safe
from checked_backend.reduce.translate import Untranslatable

__all__ = ["write_source_repro"]

_COMPARISON = f"""\
def flat(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, (list, tuple)) else [value]


def alike(one, other):
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and (isinstance(one, Exception) or one == other)
    same = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return same and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


outcomes = []
for name, run in ("eager", {{function}}), ("compiled", compiled):
    inputs = make_inputs()
    try:
        outcomes.append(flat((run(*inputs), inputs)))
    except Exception as error:
        outcomes.append([error])
    print(f"{{{{name}}}}, results and then inputs:", repr(outcomes[-1])[:2000])
expected, actual = outcomes
wrong = len(expected) != len(actual) or not all(map(alike, expected, actual))
print("{BUG_THERE}" if wrong else "{BUG_GONE}")
raise SystemExit(int(wrong))
"""


@dataclass(slots=True)
class _Source:
    """What a function needs: imports, assignments and definitions, in order."""

    imports: dict[str, None] = field(default_factory=dict)
    assignments: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def write_source_repro(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    folder: Path,
    *,
    name: str,
    title: str,
    source: str | None,
    dynamic: bool | None = None,
    timeout: float = 120,
) -> Repro:
    """Write a script of a function's own source, and run it from disk in a fresh process.

    It compiles with ``backend="eager"``: what is wrong there is wrong whatever compiles Dynamo's graph.

    Args:
        function: A plain function; what it refers to must be modules, importable, literals, tensors or such functions.
        args: Its arguments: tensors and numbers.
        kwargs: Must be empty.
        folder: Where the script goes.
        name: What the script is about, for its name.
        title: What is wrong.
        source: The user's line.
        dynamic: As for ``torch.compile``.
        timeout: Seconds for a run.

    Returns:
        The script, and whether it showed the bug.

    Raises:
        Untranslatable: The function needs something that a script cannot make.
        OSError: The folder cannot be written to.
    """
    if kwargs:
        raise Untranslatable("it is called with keyword arguments")
    found = _Source()
    own = _describe(function, found)
    inputs = write_inputs({f"x{place}": value for place, value in enumerate(args)} | found.tensors)
    path = script_path(folder, name)
    values = path.with_suffix(".safetensors").name
    making = [
        *([f'saved = load_file(__file__.rpartition("/")[0] + "/{values}")'] if inputs.saved else []),
        *inputs.lines,
    ]
    count = len(args)
    text = "\n".join(
        [
            f'"""{safe(title)[:200]}',
            "",
            *(safe(line) for line in (*facts(), *([f"Found at {source}"] if source else []))),
            "Exits 1 while the bug is there, 0 when it is gone.",
            '"""',
            "from __future__ import annotations",
            "",
            "import torch",
            *(["from safetensors.torch import load_file  # pip install safetensors"] if inputs.saved else []),
            *(line for line in found.imports if line != "import torch"),
            "",
            "",
            "def make_inputs():",
            *(f"    {line}" for line in making),
            f"    return [{', '.join(inputs.values[:count])}]",
            "",
            "",
            *(f"{key} = {text}" for key, text in found.assignments.items()),
            *(f"{key} = {text}" for key, text in zip(found.tensors, inputs.values[count:], strict=True)),
            *(f"\n{text}\n" for text in found.definitions.values()),
            "",
            "torch.set_grad_enabled(False)",
            f'compiled = torch.compile({own}, backend="eager"{", dynamic=True" if dynamic else ""})',
            "",
            "",
            _COMPARISON.format(function=own),
        ]
    )
    return write_and_run(path, Script(text, inputs.saved), timeout)


def _describe(function: Callable[..., Any], found: _Source) -> str:
    """Note what a function needs, and give its name."""
    if not isinstance(function, types.FunctionType):
        raise Untranslatable(f"what is compiled is a {type(function).__name__}, and no plain function")
    if function.__name__ in found.definitions:
        return function.__name__
    found.definitions[function.__name__] = text = _definition(function)
    for name, value in _referred(function):
        _note(name, value, found)
    del found.definitions[function.__name__]
    found.definitions[function.__name__] = text  # behind what it calls
    return function.__name__


def _definition(function: types.FunctionType) -> str:
    try:
        text = textwrap.dedent(inspect.getsource(function))
        [tree] = ast.parse(text).body
    except (OSError, SyntaxError, ValueError):
        raise Untranslatable(f"the source of {function.__name__} is not known") from None
    if not isinstance(tree, ast.FunctionDef):
        raise Untranslatable(f"{function.__name__} is no plain function")
    return "\n".join(text.splitlines()[tree.lineno - 1 :])


def _referred(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The names that a function looks up outside of itself, with their values."""
    outside = inspect.getclosurevars(function)
    yield from outside.nonlocals.items()
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _note(name: str, value: Any, found: _Source) -> None:
    if isinstance(value, types.ModuleType):
        found.imports[f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"] = None
    elif isinstance(value, torch.Tensor):
        found.tensors[name] = value.detach()
    elif value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        found.assignments[name] = repr(value)
    elif isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        found.assignments[name] = str(value)
    elif isinstance(value, types.FunctionType) and value.__name__ == name and not _is_torchs(value):
        _describe(value, found)
    elif callable(value) and _is_torchs(value) and (known := name_of(value)) is not None:
        if known.text.startswith("F."):
            found.imports["import torch.nn.functional as F"] = None
        if known.module is not None:
            found.imports[f"import {known.module}"] = None
        if known.text != name:
            found.assignments[name] = known.text
    else:
        raise Untranslatable(f"it refers to {name}, a {type(value).__name__}")


def _is_torchs(value: Any) -> bool:
    home = str(getattr(value, "__module__", None) or "torch")
    return home.partition(".")[0] in ("torch", "math", "operator", "builtins")
