"""Load what a Python file of the user makes: the program of ``FILE.py:FACTORY``, the compiler ``FILE.py:NAME``."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from checked_backend.checking.handwritten import TILES
from checked_backend.checking.tree import signature_of
from checked_backend.errors import CheckedBackendError

Loaded = tuple[Callable[..., Any], Any, Mapping[str, Any]]


def load_factory(target: str, sizes: Sequence[int] | None = None, *, sized: bool = False) -> Loaded:
    """Run a Python file and call its function that makes the program. The file's code runs: trust it.

    Args:
        target: ``FILE.py:FACTORY``; ``FACTORY()`` returns ``(fn_or_module, args, kwargs)``, without the last or the
            last two if they are empty.
        sized: Whether a factory with a required parameter, as ``make(n)``, makes arguments of each size.

    Returns:
        The program. Of a factory of sizes, a function from sizes to arguments stands in the place of these.

    Raises:
        CheckedBackendError: There is no such file or factory, it raised, or it returned something else.
    """
    if not _names_function(target):
        raise CheckedBackendError(f"got {target!r}; give FILE.py:FACTORY, for example model.py:make")
    factory = _function_of(target, run_file)
    if not (sized and _takes_size(factory)):
        return make_program(factory, target)
    function, _, kwargs = make_program(partial(factory, sizes[0] if sizes else TILES[0]), target)
    if kwargs:  # those of one size would go to all
        raise CheckedBackendError(f"{target} makes arguments of a size, so it must return (fn_or_module, args) alone")
    return function, lambda size: make_program(partial(factory, size), target)[1], kwargs


def _takes_size(factory: Callable[..., Any]) -> bool:
    """Whether a factory asks for a size: its first parameter has that name, or no default."""
    signature = signature_of(factory)
    first = None if signature is None else next(iter(signature.parameters.values()), None)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return first is not None and first.kind in positional and (first.name == "size" or first.default is first.empty)


def load_function(text: str) -> Callable[..., Any]:
    """The function ``FILE.py:NAME``. The file's code runs, unless it ran already in this process: trust it.

    Raises:
        CheckedBackendError: There is no such file or function, or the file raised.
    """
    if not _names_function(text):
        raise CheckedBackendError(f"got {text!r}; give FILE.py:NAME, for example kernel.py:fast_softmax")
    return _function_of(text, _run_file_once)


def load_compiler(text: str) -> str | Callable[..., Any]:
    """The candidate compiler that the user names: a backend, or ``FILE.py:NAME``. The file's code runs: trust it.

    ``NAME`` is a function ``(gm, example_inputs) -> callable``; a backend's name stays as it is.

    Raises:
        CheckedBackendError: There is no such file or function, or the file raised.
    """
    return load_function(text) if _names_function(text) else text


def _names_function(text: str) -> bool:
    path, _, name = text.rpartition(":")
    return name.isidentifier() and path.endswith(".py")


def _function_of(text: str, run: Callable[[Path], ModuleType]) -> Callable[..., Any]:
    path, _, name = text.rpartition(":")
    function: Callable[..., Any] | None = getattr(run(Path(path)), name, None)
    if not callable(function):
        raise CheckedBackendError(f"{path} has no function {name!r}")
    return function


def make_program(factory: Callable[..., Any], target: str, **settings: Any) -> Loaded:
    """Call a factory, and take apart what it makes.

    Args:
        factory: Returns ``(fn_or_module, args, kwargs)``, without the last or the last two if they are empty.

    Raises:
        CheckedBackendError: The factory raised (the cause of this error), or it returned something else.
    """
    try:
        made = factory(**settings)
    except (Exception, SystemExit) as error:  # SystemExit's code would be taken for a verdict
        raise CheckedBackendError(f"{target} raised:\n{_users_part(error)}") from error
    parts = made if isinstance(made, tuple) else (made,)
    function, args, kwargs = (*parts, *((), {})[len(parts) - 1 :]) if 1 <= len(parts) <= 3 else (None, (), {})
    if not callable(function) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise CheckedBackendError(f"{target} returned ({kinds}); it must return (fn_or_module, args, kwargs)")
    return function, args, kwargs


def run_file(path: Path) -> ModuleType:
    """Run a Python file as a module of its own. Trust it.

    Raises:
        CheckedBackendError: There is no such file, or it raised, which is the cause of this error.
    """
    if not path.is_file():
        raise CheckedBackendError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CheckedBackendError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python FILE.py` does
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CheckedBackendError(f"{path} raised:\n{_users_part(error)}") from error
    return module


def _run_file_once(path: Path) -> ModuleType:
    """The module of a file that has been run in this process, which may have registered backends; else run it."""
    known = sys.modules.get(path.stem)
    same = known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path.resolve()
    return known if known is not None and same else run_file(path)


def _users_part(error: BaseException) -> str:
    """The traceback from the user's file on."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [place for place, frame in enumerate(frames) if frame.filename == __file__ or "importlib" in frame.filename]
    kept = traceback.format_list(frames[mine[-1] + 1 :] if mine else frames)
    return "".join([*kept, *traceback.format_exception_only(error)]).rstrip()


def parse_optimizer(text: str) -> Callable[..., torch.optim.Optimizer]:
    """A ``torch.optim`` class by name, with its settings: ``Adam``, ``SGD:lr=0.1,momentum=0.9``.

    Raises:
        CheckedBackendError: There is no such class, or a setting has no value.
    """
    name, _, settings = text.partition(":")
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise CheckedBackendError(f"--optimizer got {name!r}, which torch.optim does not have")
    return partial(found, **dict(parse_value(one, "--optimizer") for one in settings.split(",") if one))


def parse_value(text: str, option: str) -> tuple[str, Any]:
    """``key=value``; the value is JSON, or else text.

    Raises:
        CheckedBackendError: There is no ``=``.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise CheckedBackendError(f"{option} got {text!r}; give KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, {"True": True, "False": False, "None": None}.get(value, value)
