"""Programs whose reports are looked at: real runs with one planted fault each, and a clean one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import checked_backend as cb
from checked_backend.report import Report
from checked_backend.report.session import Session
from tests.support import faults, models
from tests.support.planting import Compiler
from tests.support.spoiling import with_nan

__all__ = ["REPORTED", "reported"]


def wrong_gradient(folder: Path) -> Report:
    """A training step of a BERT with four layers, the backward pass of whose GELU is 10 % off."""
    case = models.bert_classifier(dropout=0.0, layers=4)
    with _recorded() as session:
        compiled = _compiled(case.model, faults.wrong_operator("aten.gelu_backward.default", _scaled, "aot"), folder)
        case.loss(compiled(**case.inputs)).backward()
    return session.report


def nan(folder: Path) -> Report:
    """The same model in inference, whose softmax has a NaN."""
    case = models.bert_classifier(attention="eager", dropout=0.0, layers=4)
    with _recorded() as session, torch.no_grad():
        compiled = _compiled(case.model.eval(), faults.wrong_operator("aten._softmax.default", with_nan, "aot"), folder)
        compiled(**case.inputs)
    return session.report


def stride(folder: Path) -> Report:
    """A model whose result lies otherwise in memory than in eager."""
    with _recorded() as session:
        _compiled(nn.Linear(6, 4), faults.wrong_stride(), folder)(torch.randn(3, 6))
    return session.report


def clean(folder: Path) -> Report:
    """A training step of a BERT in bfloat16, by a compiler without a fault."""
    case = models.bert_classifier(dropout=0.0, layers=2)
    with _recorded() as session:
        compiled = _compiled(case.model.to(torch.bfloat16), faults.clean("aot"), folder)
        case.loss(compiled(**case.inputs)).backward()
    return session.report


def fifty(folder: Path) -> Report:
    """A model of fifty layers, each compiled by itself, and each wrong."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    with _recorded() as session, torch.no_grad(), torch._dynamo.config.patch(recompile_limit=100):
        for place, layer in enumerate(layers):
            layers[place] = _compiled(layer, faults.wrong_value(), folder, localize=False)
        layers(torch.randn(4, 8))
    return session.report


REPORTED: Mapping[str, Callable[[Path], Report]] = MappingProxyType(
    {function.__name__: function for function in (wrong_gradient, nan, stride, clean, fifty)}
)
"""The programs. Each gets the folder for its reports."""


def reported(name: str, folder: Path) -> Report:
    """Run a program, always with the same random numbers, and return its report."""
    torch.manual_seed(0)
    return REPORTED[name](folder)


def _scaled(gradient: Tensor) -> Tensor:
    return gradient * 1.1


def _recorded() -> contextlib.AbstractContextManager[Session]:
    return cb.collect(closing=False)


def _compiled(program: Callable[..., Any], compiler: Compiler, folder: Path, **options: Any) -> Callable[..., Any]:
    given = {"compiler": compiler, "on_divergence": "record", "report_dir": folder, "progress": False, **options}
    compiled: Callable[..., Any] = torch.compile(program, backend="numcheck", options=given)
    return compiled
