"""timm's registry."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from checked_backend.process.job import AnswerFolder
from checked_backend.sweep.rules import Settings
from checked_backend.sweep.suites import list_models
from checked_backend.sweep.suites.timm_models import Timm
from tests.support.sweep_tools import examined


def listed(folder: Path) -> str:
    list_models({"spec": "timm", "compilers": ["eager"]}, AnswerFolder(folder))
    return (folder / "result.json").read_text()


def test_a_torchvision_of_another_torch_is_a_clear_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ModuleType:
        if name == "timm":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", refuse)
    told = listed(tmp_path)
    assert "timm: unsupported here: timm cannot be imported: operator torchvision::nms does not exist" in told
    assert "install the torchvision that belongs to your torch" in told


def test_no_timm_is_an_import_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "timm: import error: " in listed(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_of_the_real_registry_build_and_pass() -> None:
    pytest.importorskip("torchvision", exc_type=ImportError) if _shimmed() else pytest.skip("no torchvision")
    pytest.importorskip("timm")
    assert len(Timm().models()) > 500
    found = examined("timm", "resnet10t", Settings(batch_size=1))
    assert (found.status.value, found.message) == ("pass", "")


def _shimmed() -> bool:
    """Define the operators whose absence keeps a torchvision for CUDA from being imported beside a torch without."""
    if importlib.util.find_spec("torchvision") is None:
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)
    return True


_KEPT: list[torch.library.Library] = []
