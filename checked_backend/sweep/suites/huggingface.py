"""The suite ``huggingface``: architectures of the installed transformers, shrunk, and without any download."""

from __future__ import annotations

import copy
import importlib
import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checked_backend.errors import SuiteError
from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Settings
from checked_backend.sweep.suites.base import Built, Model, Suite, Unsupported
from checked_backend.sweep.suites.tiny_configs import WAYS, tiny_config
from checked_backend.sweep.suites.tiny_inputs import tiny_inputs

_REGISTRY = "transformers.models.auto.modeling_auto"
_HEADS = (
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
_MOST_PARAMETERS = 20_000_000
_BATCH = 2
_SECONDS = 60.0


class HuggingFace(Suite):
    """One class for each model type in the registry of transformers: the one with the head the type is known for."""

    def models(self) -> Sequence[Model]:
        """See `Suite`."""
        return [Model(name) for name in sorted(set(_architectures()), key=str.lower)]

    def build(self, case: Case, settings: Settings) -> Built:
        """See `Suite`."""
        found = _architectures()
        if case.model not in found:
            raise SuiteError(f"this transformers has no architecture {case.model!r}")
        transformers: Any = importlib.import_module("transformers")
        made = getattr(transformers, case.model, None)
        if made is None:
            raise Unsupported(f"transformers does not offer {case.model}")
        config_class = getattr(made, "config_class", None) or transformers.CONFIG_MAPPING[found[case.model]]
        return _smallest(made, config_class, settings.batch_size or _BATCH)


def _smallest(made: Any, config_class: Any, batch: int) -> Built:
    """Build the smallest model that runs: which proportions and inputs a model needs, only trying tells."""
    _, *named = inspect.signature(made.forward).parameters.items()
    parameters = dict(named)  # without self
    end = time.monotonic() + _SECONDS
    first: Exception | None = None
    for way in WAYS:
        seed = torch.initial_seed()
        try:
            config = tiny_config(config_class, way)
            _refuse_giants(made, config)
            torch.manual_seed(seed)
            model = made(config).eval()
            inputs = _inputs_that_run(model, config, batch, parameters)
            torch.manual_seed(seed)
            return Built(made(config), (), inputs, shrunk=True)  # a new one: running may have changed that one's state
        except (ImportError, MemoryError):
            raise
        except Exception as error:
            first = first or error
        if time.monotonic() > end:
            break
    if isinstance(first, Unsupported):
        raise first
    raise Unsupported(f"it cannot be made this small: {type(first).__name__}: {first}") from first


def _inputs_that_run(model: Any, config: Any, batch: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    first: Exception | None = None
    for inputs in tiny_inputs(model, config, batch, parameters):
        try:
            with torch.no_grad():
                model(**copy.deepcopy(inputs))
        except (ImportError, MemoryError):
            raise
        except Exception as error:
            first = first or error
        else:
            return inputs
    raise first or Unsupported("no inputs are known for it")


def _architectures() -> Mapping[str, str]:
    """The classes by name, each with its model type."""
    registry = importlib.import_module(_REGISTRY)
    by_type: dict[str, str] = {}
    for head in _HEADS:
        for model_type, names in getattr(registry, head, {}).items():
            by_type.setdefault(model_type, names if isinstance(names, str) else names[0])
    found: dict[str, str] = {}
    for model_type, name in by_type.items():
        found.setdefault(name, model_type)
    return found


def _refuse_giants(made: Any, config: Any) -> None:
    """Raise for a model that could not be shrunk. Its parameters are counted without allocating them."""
    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in made(config).parameters())
    except (RuntimeError, NotImplementedError):  # the model computes with its weights while it is built
        return
    if count > _MOST_PARAMETERS:
        raise Unsupported(f"not small without its own configuration: {count / 1e6:.0f} million parameters")
