"""A checkout shaped like pytorch/benchmark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checked_backend.errors import SuiteError
from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Settings
from checked_backend.sweep.suites.torchbench import TorchBench
from tests.support.sweep_tools import examined

BASE = """
import pathlib
import torch

class BenchmarkModel:
    DEFAULT_TRAIN_BSIZE = 4
    DEFAULT_EVAL_BSIZE = 2

    def __init__(self, test, device, batch_size=None, extra_args=[]):
        assert test in ("train", "eval")
        self.test, self.device = test, device
        self.batch_size = batch_size or (self.DEFAULT_TRAIN_BSIZE if test == "train" else self.DEFAULT_EVAL_BSIZE)
"""
PLAIN = """
import pathlib
import torch
from ...util.model import BenchmarkModel

class Model(BenchmarkModel):
    def __init__(self, test, device, batch_size=None, extra_args=[]):
        super().__init__(test=test, device=device, batch_size=batch_size, extra_args=extra_args)
        width = int(pathlib.Path("torchbenchmark/data/width").read_text())  # models read what lies in the checkout
        self.model = torch.nn.Linear(width, 2).to(device)
        self.example_inputs = (torch.randn(self.batch_size, width).to(device),)
        assert self.name

    def get_module(self):
        return self.model, self.example_inputs
"""
KEYWORDS = PLAIN.replace(
    "return self.model, self.example_inputs", 'return self.model, {"input": self.example_inputs[0]}'
)
FIXED = PLAIN.replace("class Model(BenchmarkModel):", "class Model(BenchmarkModel):\n    ALLOW_CUSTOMIZE_BSIZE = False")
CUDA_ONLY = PLAIN.replace(
    "super()", "if device != 'cuda':\n            raise NotImplementedError('CUDA only')\n        super()"
)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "benchmark"
    files = {
        "__init__.py": "",
        "util/__init__.py": "",
        "util/model.py": BASE,
        "data/width": "3",
        "models/__init__.py": "",
        "models/plain/__init__.py": PLAIN,
        "models/plain/metadata.yaml": "eval_benchmark: true\n",
        "models/keywords/__init__.py": KEYWORDS,
        "models/fixed_size/__init__.py": FIXED,
        "models/cuda_only/__init__.py": CUDA_ONLY,
        "models/no_class/__init__.py": "Model = None\n",
        "models/needs/__init__.py": "import nowhere_to_be_found\n",
        "models/no_code/README.md": "",
        "models/fb/__init__.py": "",
        "models/fb/internal/__init__.py": PLAIN.replace("...util", "....util"),
        "canary_models/__init__.py": "",
        "canary_models/tweety/__init__.py": PLAIN,
        "canary_models/plain/__init__.py": "raise RuntimeError\n",
    }
    for name, text in files.items():
        path = folder / "torchbenchmark" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("KALDI_ROOT", str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchbenchmark"]:
        del sys.modules[name]


def test_models_are_folders_with_code_and_canaries_are_known_as_such(checkout: Path) -> None:
    found = {model.name: model.canary for model in TorchBench(str(checkout)).models()}
    own = ("plain", "keywords", "fixed_size", "cuda_only", "no_class", "needs", "internal")
    assert found == {**dict.fromkeys(own, False), "tweety": True}
    assert "torchbenchmark" not in sys.modules  # nothing of it was run


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("model", ["plain", "keywords", "fixed_size", "internal", "tweety"])
def test_models_pass_in_both_modes_from_the_checkouts_own_folder(checkout: Path, model: str, mode: str) -> None:
    found = examined(f"torchbench:{checkout}", model, mode=mode)
    assert (found.status.value, found.message) == ("pass", "")


@pytest.mark.parametrize(
    ("model", "status", "why"),
    [
        ("cuda_only", "unsupported", "CUDA only"),
        ("no_class", "unsupported", "no_class has no class Model"),
        ("needs", "import error", "No module named 'nowhere_to_be_found'"),
        ("absent", "error", "has no model 'absent'; looked for torchbenchmark.models.absent"),
    ],
)
def test_models_that_cannot_be_run(checkout: Path, model: str, status: str, why: str) -> None:
    found = examined(f"torchbench:{checkout}", model)
    assert found.status.value == status
    assert why in found.message


def test_batch_sizes(checkout: Path) -> None:
    suite = TorchBench(str(checkout))
    assert suite.build(Case("torchbench", "plain"), Settings(batch_size=7)).args[0].shape == (7, 3)
    assert suite.build(Case("torchbench", "plain", mode="training"), Settings()).args[0].shape == (4, 3)
    found = examined(f"torchbench:{checkout}", "fixed_size", Settings(batch_size=7))
    assert found.status.value == "unsupported"
    assert "cannot change its batch size" in found.message


def test_folders_that_are_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="expected models in torchbenchmark/models/NAME/"):
        TorchBench(str(tmp_path)).models()
    (tmp_path / "torchbenchmark" / "models").mkdir(parents=True)
    with pytest.raises(SuiteError, match=r"no models in it; expected a folder with an __init__\.py for each"):
        TorchBench(str(tmp_path)).models()


def test_each_python_file_is_the_source(checkout: Path) -> None:
    before = TorchBench(str(checkout)).fingerprint()
    assert before == TorchBench(str(checkout)).fingerprint()
    model = next((checkout / "torchbenchmark" / "models").rglob("*.py"))
    model.write_text(model.read_text() + "\n# mended, and not committed\n")
    assert TorchBench(str(checkout)).fingerprint() != before
