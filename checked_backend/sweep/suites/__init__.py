"""The sources of models. Only worker processes load this package, because it runs the code of the suite's authors."""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from typing import Any, cast

import torch

from checked_backend.errors import CheckedBackendError, SuiteError
from checked_backend.process.job import AnswerFolder
from checked_backend.sweep.suites.base import Suite, Unsupported

__all__ = ["list_models", "suite_of"]

_MODULES: Mapping[str, tuple[str, str]] = {
    "python": ("python_file", "PythonFile"),
    "dumps": ("dumps", "Dumps"),
    "torchbench": ("torchbench", "TorchBench"),
    "huggingface": ("huggingface", "HuggingFace"),
    "timm": ("timm_models", "Timm"),
}


def suite_of(spec: str) -> Suite:
    """Make a suite from its spec.

    Args:
        spec: ``huggingface``, ``timm``, ``torchbench:DIR``, ``python:FILE.py`` or ``dumps:DIR``.

    Raises:
        ImportError: The library with the suite's models is not installed.
    """
    kind, colon, where = spec.partition(":")
    module, name = _MODULES[kind]
    made = cast(
        "Callable[..., Suite]", getattr(importlib.import_module(f"checked_backend.sweep.suites.{module}"), name)
    )
    return made(where) if colon else made()


def list_models(question: Mapping[str, Any], answers: AnswerFolder) -> None:
    """Answer with the models of a suite, and with the versions and devices of this machine; or why not.

    Args:
        question: The suite's ``spec``, and the names of ``compilers``. Each of these must be a Dynamo backend or
            ``FILE.py:NAME`` once the suite's code has run.
    """
    spec = question["spec"]
    try:
        suite = suite_of(spec)
        models = suite.models()
        for compiler in question["compilers"]:
            load_compiler = importlib.import_module("checked_backend.checking.target").load_compiler
            importlib.import_module("checked_backend.sweep.examine").refuse_unknown(load_compiler(compiler))
        found = {"models": [asdict(model) for model in models], "fingerprint": suite.fingerprint()}
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        answers.answer(json.dumps({**found, "versions": _versions(), "devices": devices}))
    except ImportError as error:
        answers.answer(json.dumps({"error": f"{spec}: import error: {error}"}))
    except Unsupported as error:
        answers.answer(json.dumps({"error": f"{spec}: unsupported here: {error}"}))
    except CheckedBackendError as error:
        answers.answer(json.dumps({"error": str(error) if isinstance(error, SuiteError) else f"{spec}: {error}"}))


def _versions() -> dict[str, str]:
    """Versions by library name, without libraries that are not installed: results depend on them."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("checked-backend", "triton", "transformers", "timm", "torchvision"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
