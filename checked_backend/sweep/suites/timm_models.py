"""The suite ``timm``: models of the installed timm, with random weights."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Settings
from checked_backend.sweep.suites.base import Built, Model, Suite, Unsupported

_BATCH = 2
_HINT = (
    "timm cannot be imported: {error}. timm imports torchvision, and this torchvision is built for another torch; "
    "install the torchvision that belongs to your torch"
)


class Timm(Suite):
    """The models in timm's own registry."""

    def models(self) -> Sequence[Model]:
        """See `Suite`."""
        return [Model(name) for name in _timm().list_models()]

    def build(self, case: Case, settings: Settings) -> Built:
        """See `Suite`."""
        model = _timm().create_model(case.model, pretrained=False)
        size = model.default_cfg.get("input_size", (3, 224, 224))
        return Built(model, (torch.randn(settings.batch_size or _BATCH, *size),))


def _timm() -> Any:
    try:
        return importlib.import_module("timm")
    except ImportError:
        raise
    except Exception as error:  # a torchvision built for another torch raises it at import
        raise Unsupported(_HINT.format(error=error)) from error
