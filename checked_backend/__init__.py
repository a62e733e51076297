"""Backends for `torch.compile` that check the compiled program against eager.

Importing this package imports nothing: each name loads its module, and with it torch, when it is first used.

PYTEST_DONT_REWRITE: the package is loaded before pytest where a program's checks start with Python, and has no asserts.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checked_backend import aot_compilers
    from checked_backend.aot_compilers.fusion import memory_efficient_fusion
    from checked_backend.backends import debug_interpreter, graph_dumper, nop, numcheck
    from checked_backend.checking import check, check_package
    from checked_backend.dump import Dump, load_dump
    from checked_backend.errors import (
        CandidateError,
        CheckedBackendError,
        DivergenceError,
        DumpError,
        DumpWarning,
        MetadataError,
        OptionError,
        SuiteError,
    )
    from checked_backend.findings import Coverage, Finding, Kind, Metrics, NoiseScale, Verdict
    from checked_backend.numerics.measure import measure
    from checked_backend.numerics.randomize import randomize
    from checked_backend.regions.compare_ranks import compare_ranks
    from checked_backend.regions.health import CheckRecord, on_check
    from checked_backend.report import Report
    from checked_backend.report.session import collect
    from checked_backend.tensors.deterministic import deterministic

    __version__: str

__all__ = [
    "CandidateError",
    "CheckRecord",
    "CheckedBackendError",
    "Coverage",
    "DivergenceError",
    "Dump",
    "DumpError",
    "DumpWarning",
    "Finding",
    "Kind",
    "MetadataError",
    "Metrics",
    "NoiseScale",
    "OptionError",
    "Report",
    "SuiteError",
    "Verdict",
    "__version__",
    "aot_compilers",
    "check",
    "check_package",
    "collect",
    "compare_ranks",
    "debug_interpreter",
    "deterministic",
    "graph_dumper",
    "load_dump",
    "measure",
    "memory_efficient_fusion",
    "nop",
    "numcheck",
    "on_check",
    "randomize",
]

_HOMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "backends": ("debug_interpreter", "graph_dumper", "nop", "numcheck"),
        "checking": ("check", "check_package"),
        "aot_compilers.fusion": ("memory_efficient_fusion",),
        "dump": ("Dump", "load_dump"),
        "errors": (
            "CandidateError",
            "CheckedBackendError",
            "DivergenceError",
            "DumpError",
            "DumpWarning",
            "MetadataError",
            "OptionError",
            "SuiteError",
        ),
        "tensors.deterministic": ("deterministic",),
        "report.session": ("collect",),
        "numerics.measure": ("measure",),
        "regions.compare_ranks": ("compare_ranks",),
        "regions.health": ("CheckRecord", "on_check"),
        "numerics.randomize": ("randomize",),
        "findings": ("Coverage", "Finding", "Kind", "Metrics", "NoiseScale", "Verdict"),
        "report": ("Report",),
    }
)


def __getattr__(name: str) -> Any:
    if name == "aot_compilers":
        with importlib.import_module("checked_backend.random_state").random_untouched():
            return importlib.import_module("checked_backend.aot_compilers")
    if name == "__version__":
        return _version()
    for home, names in _HOMES.items():
        if name in names:
            with importlib.import_module("checked_backend.random_state").random_untouched():
                value = getattr(importlib.import_module(f"checked_backend.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'checked_backend' has no attribute {name!r}")


def _version() -> str:
    metadata = importlib.import_module("importlib.metadata")  # slow to import, and seldom needed
    try:
        return str(metadata.version("checked-backend"))
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
