"""The suite ``python:FILE.py``: the user's own models, with a factory for each."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from checked_backend.checking.target import make_program, run_file
from checked_backend.errors import SuiteError
from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Settings
from checked_backend.sweep.suites.base import Built, Model, Unsupported

_NAMED = "MODELS"


class PythonFile:
    """A file of factories, which return ``(fn_or_module, args, kwargs)``: its public functions, or those in ``MODELS``.

    A factory may take ``batch_size``, ``device`` and ``training`` by keyword. The file is run: trust it.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def models(self) -> Sequence[Model]:
        """See `Suite`."""
        names = list(self._factories())
        if not names:
            raise SuiteError(
                f"{self._path} has no models; expected public functions without required arguments that return "
                f"(fn_or_module, args, kwargs), or {_NAMED} = {{'name': function}}"
            )
        return [Model(name) for name in names]

    def fingerprint(self) -> str:
        """See `Suite`. A change in a file that this one imports does not change it."""
        return hashlib.sha256(self._path.read_bytes()).hexdigest()[:16]

    def build(self, case: Case, settings: Settings) -> Built:
        """See `Suite`."""
        factories = self._factories()
        if case.model not in factories:
            raise SuiteError(f"{self._path} has no model {case.model!r}; it has {', '.join(factories)}")
        factory = factories[case.model]
        offered = {"batch_size": settings.batch_size, "device": case.device, "training": case.mode == "training"}
        taken = _keywords(factory)
        if settings.batch_size is not None and "batch_size" not in taken:
            raise Unsupported(f"{case.model} takes no batch_size, and a rule or --batch-size sets one")
        given = {name: value for name, value in offered.items() if name in taken and value is not None}
        return Built(*make_program(factory, f"{self._path}:{case.model}", **given))

    def _factories(self) -> Mapping[str, Callable[..., Any]]:
        module = run_file(self._path)
        named = getattr(module, _NAMED, None)
        if named is None:
            return _public(module)
        if not isinstance(named, Mapping) or not all(callable(factory) for factory in named.values()):
            raise SuiteError(f"{self._path}: {_NAMED} is no mapping of names to functions")
        found = {str(name): factory for name, factory in named.items()}
        if len(found) < len(named):
            raise SuiteError(f"{self._path}: {_NAMED} has two models of one name")
        return found


def _public(module: ModuleType) -> Mapping[str, Callable[..., Any]]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and inspect.isfunction(value)
        and value.__module__ == module.__name__
        and all(
            one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) or one.default is not one.empty
            for one in inspect.signature(value).parameters.values()
        )
    }


def _keywords(factory: Callable[..., Any]) -> set[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a builtin has no signature
        return set()
    return {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY}
