"""Scripts for findings that are taken for granted, and backends that do the like."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checked_backend.diagnose.repro import Repro, write_repro
from checked_backend.findings import Finding, Kind
from checked_backend.regions.graph_case import GraphCase

OTHER_BACKENDS = """
import os

import torch


def restrided(gm, example_inputs):
    return lambda *args: tuple(value.t().contiguous().t() for value in gm(*args))


def aliased(gm, example_inputs):
    return lambda *args: (args[0],)


def raises(gm, example_inputs):
    raise RuntimeError("cannot compile this")


def dies(gm, example_inputs):
    return lambda *args: os.abort()


def mutates(gm, example_inputs):
    return lambda *args: (args[0].add_(1),)


def draws(gm, example_inputs):
    return lambda *args: (torch.rand(()), gm(*args))[1]


def makes_nan(gm, example_inputs):
    return lambda *args: tuple(value / 0 * 0 for value in gm(*args))


def uncounted(gm, example_inputs):
    return lambda *args: gm(*(value.data for value in args))


def drops(gm, example_inputs):
    return lambda *args: gm(*(value.clone() for value in args))


def writes_wrongly(gm, example_inputs):
    return lambda *args: (gm(*args), args[0].add_(1))[0]


def rounds(gm, example_inputs):
    return lambda *args: (gm(*args), args[0].mul_(1.000001))[0]
"""


def backend_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """One of these backends, in a module of its own."""
    (tmp_path / "other_backends.py").write_text(OTHER_BACKENDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_backends", raising=False)
    return getattr(__import__("other_backends"), name)


def wrote(case: GraphCase, folder: Path, kind: Kind, detail: str = "", **further: Any) -> Repro:
    """A script for a finding that is taken for granted."""
    finding = Finding(kind, "output[0]", "planted", detail)

    def oracle(_case: GraphCase, _timeout: float) -> tuple[Finding, ...]:
        return (finding,)

    return write_repro(case, folder, name=f"{kind}", subject="output[0]", kind=kind, oracle=oracle, **further)
