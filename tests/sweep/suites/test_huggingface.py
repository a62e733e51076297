"""Architectures of transformers, shrunk."""

from __future__ import annotations

import importlib

import pytest
import torch

from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Settings
from checked_backend.sweep.suites import huggingface
from checked_backend.sweep.suites.huggingface import HuggingFace
from tests.support.stub_config import Stub
from tests.support.sweep_tools import examined

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

KINDS = [
    "BertForMaskedLM",
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "Wav2Vec2ForCTC",
    "WhisperForConditionalGeneration",
    "LayoutLMForMaskedLM",
    "DeepseekV3ForCausalLM",  # parts of heads that are widths of their own
    "SwinForImageClassification",  # more heads in each stage
    "Qwen2VLTextModel",  # positions in three parts of a head, of a fixed size
    "EsmForMaskedLM",  # a configuration that leaves the vocabulary open
    "Emu3ForCausalLM",  # the configuration of a part of its model type
    "ParakeetForCTC",  # sound with time first
    "VideoMAEModel",  # images that are frames
    "BlipModel",  # text and images together
]


def test_the_registry_of_the_installed_transformers_is_the_suite() -> None:
    names = [model.name for model in HuggingFace().models()]
    assert len(names) > 200
    assert len(set(names)) == len(names)
    assert set(KINDS) <= set(names)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", KINDS)
def test_kinds_of_models_build_small_and_run(model: str) -> None:
    built = HuggingFace().build(Case("huggingface", model), Settings(batch_size=1))
    assert sum(parameter.numel() for parameter in built.function.parameters()) < 20_000_000  # type: ignore[attr-defined]
    built.function(*built.args, **built.kwargs)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_one_is_trained_under_autocast() -> None:
    found = examined("huggingface", "LlamaForCausalLM", mode="training", dtype="amp")
    assert (found.status.value, found.message) == ("pass", "")


class Unknown(torch.nn.Module):
    """Requires an input that no rule here knows."""

    config_class = Stub
    main_input_name = "light_years"

    def __init__(self, _config: Stub) -> None:
        super().__init__()

    def forward(self, light_years: torch.Tensor) -> torch.Tensor:
        return light_years


class Broken(Unknown):
    """Does not run, however it is made."""

    main_input_name = "input_ids"

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError(f"not for {len(input_ids)}")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Unknown, "no inputs are known for a model whose main input is light_years"),
        (Broken, "it cannot be made this small: ValueError: not for 2"),
    ],
)
def test_what_cannot_be_shrunk_is_unsupported_and_no_failure(
    made: type[Unknown], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "_architectures", lambda: {made.__name__: "stub"})
    monkeypatch.setattr(importlib.import_module("transformers"), made.__name__, made, raising=False)
    found = examined("huggingface", made.__name__)
    assert (found.status.value, found.message) == ("unsupported", message)


def test_a_model_is_the_same_however_many_ways_failed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    found = HuggingFace().build(Case("huggingface", "SwinForImageClassification"), Settings()).function
    monkeypatch.setattr(huggingface, "WAYS", [way for way in huggingface.WAYS if way.factor is not None])
    torch.manual_seed(0)
    again = HuggingFace().build(Case("huggingface", "SwinForImageClassification"), Settings()).function
    assert isinstance(found, torch.nn.Module)
    assert isinstance(again, torch.nn.Module)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_at_least_a_hundred_and_most_build_and_run() -> None:
    suite = HuggingFace()
    running = 0
    for model in suite.models():
        try:
            built = suite.build(Case("huggingface", model.name), Settings(batch_size=1))
            built.function(*built.args, **built.kwargs)
        except Exception:  # what is told of each such model, other tests say
            continue
        running += 1
    assert running >= 100
    assert running >= 0.7 * len(suite.models())
