"""Architectures of transformers, shrunk."""

from __future__ import annotations

import pytest

from checked_backend.sweep.case import Case, CaseResult, Settings
from checked_backend.sweep.examine import examine
from checked_backend.sweep.suites.huggingface import HuggingFace

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
]


def examined(model: str, **way: str) -> CaseResult:
    answers: list[CaseResult] = []
    case = Case("huggingface", model, compiler="eager", **way)  # type: ignore[arg-type]
    examine("huggingface", case, Settings(), speed=False, note=lambda _: None, answer=answers.append)
    return answers[-1]


def test_the_registry_of_the_installed_transformers_is_the_suite() -> None:
    names = [model.name for model in HuggingFace().models()]
    assert len(names) > 200
    assert len(set(names)) == len(names)
    assert set(KINDS) <= set(names)


@pytest.mark.parametrize("model", KINDS)
def test_kinds_of_models_build_small_and_run(model: str) -> None:
    built = HuggingFace().build(Case("huggingface", model), Settings(batch_size=1))
    assert sum(parameter.numel() for parameter in built.function.parameters()) < 20_000_000  # type: ignore[attr-defined]
    built.function(*built.args, **built.kwargs)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_one_is_trained_under_autocast() -> None:
    found = examined("LlamaForCausalLM", mode="training", dtype="amp")
    assert (found.status.value, found.message) == ("pass", "")


def test_what_cannot_be_shrunk_is_unsupported_and_no_failure() -> None:
    found = examined("BlipModel")
    assert found.status.value == "unsupported"
    assert "as small as this suite makes it, it does not run in eager" in found.message


@pytest.mark.slow
def test_at_least_a_hundred_build_and_run() -> None:
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
