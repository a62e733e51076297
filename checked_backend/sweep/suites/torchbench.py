"""The suite ``torchbench:DIR``: a checkout of pytorch/benchmark."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from checked_backend.errors import SuiteError
from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Settings
from checked_backend.sweep.suites.base import Built, Model, Unsupported, digest_of

_PACKAGE = "torchbenchmark"
_MODELS, _CANARIES, _INTERNAL = "models", "canary_models", "fb"


class TorchBench:
    """The models of a checkout, listed by their folders. A model's code is imported when the model is built.

    The checkout's code is run: trust it. It expects the checkout as working folder and on Python's path. Some models
    write there.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def models(self) -> Sequence[Model]:
        """See `Suite`."""
        package = self._folder / _PACKAGE
        if not (package / _MODELS).is_dir():
            raise SuiteError(
                f"{self._folder}: no checkout of pytorch/benchmark; expected models in {_PACKAGE}/{_MODELS}/NAME/"
            )
        own = [*_named(package / _MODELS, without=_INTERNAL), *_named(package / _MODELS / _INTERNAL)]
        canaries = [name for name in _named(package / _CANARIES, without=_INTERNAL) if name not in own]
        if not own and not canaries:
            raise SuiteError(f"{package / _MODELS}: no models in it; expected a folder with an __init__.py for each")
        return sorted([*map(Model, own), *(Model(name, canary=True) for name in canaries)], key=lambda m: m.name)

    def fingerprint(self) -> str:
        """See `Suite`. It changes with each Python file of the checkout's package, committed or not."""
        return digest_of((self._folder / _PACKAGE).rglob("*.py"), self._folder)

    def build(self, case: Case, settings: Settings) -> Built:
        """See `Suite`."""
        os.environ.setdefault("KALDI_ROOT", tempfile.gettempdir())  # without it the audio models raise
        os.chdir(self._folder)
        if str(self._folder) not in sys.path:
            sys.path.insert(0, str(self._folder))
        made = self._class_of(case.model)
        if made is None:
            raise Unsupported(f"{case.model} has no class Model")
        if not hasattr(made, "name"):
            made.name = case.model
        test = "train" if case.mode == "training" else "eval"
        fixed_size = not getattr(made, "ALLOW_CUSTOMIZE_BSIZE", True)
        if fixed_size and settings.batch_size is not None:
            raise Unsupported(f"{case.model} cannot change its batch size, and a rule or --batch-size sets one")
        own: Mapping[str, Any] = _ARGUMENTS.get((case.model, test), {})
        benchmark = made(test=test, device=case.device, batch_size=settings.batch_size, extra_args=[], **own)
        model, inputs = benchmark.get_module()
        if case.model in _INPUTS:
            inputs = _INPUTS[case.model](benchmark)
        if isinstance(inputs, Mapping):
            return Built(model, (), dict(inputs))
        return Built(model, tuple(inputs))

    def _class_of(self, model: str) -> Any:
        places = [f"{_PACKAGE}.{part}.{model}" for part in (_MODELS, _CANARIES, f"{_MODELS}.{_INTERNAL}")]
        for place in places:
            try:
                return getattr(importlib.import_module(place), "Model", None)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                    raise
        raise SuiteError(f"{self._folder} has no model {model!r}; looked for {', '.join(places)}")


def _named(folder: Path, without: str = "") -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.name != without and (path / "__init__.py").is_file())


# it sorts boxes by scores that nearly tie, so its results cannot be compared
_ARGUMENTS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("vision_maskrcnn", "train"): {"model_kwargs": {"box_detections_per_img": 4}}
}
# the model's own example comes from a data loader
_INPUTS: Mapping[str, Callable[[Any], tuple[Any, ...]]] = {
    "yolov3": lambda benchmark: (torch.rand(benchmark.batch_size, 3, 384, 512, device=benchmark.device),)
}
