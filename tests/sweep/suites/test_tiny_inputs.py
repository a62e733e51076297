"""Inputs for a forward pass, by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checked_backend.sweep.suites.base import Unsupported
from checked_backend.sweep.suites.huggingface import tiny_inputs
from tests.support.stub_config import Stub


def made(forward: Callable[..., Any], config: dict[str, Any] | None = None, **model: Any) -> list[dict[str, Any]]:
    kind = type("Model", (), model)
    given = Stub(**{"vocab_size": 128, "image_size": 32, "num_mel_bins": 16, **(config or {})})
    return list(tiny_inputs(kind(), given, 3, inspect.signature(forward).parameters))


def shapes(inputs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def test_text_comes_with_a_mask_and_no_special_tokens() -> None:
    found = made(lambda input_ids=None, attention_mask=None, **kwargs: None)[0]
    assert shapes(found) == {"input_ids": (3, 16), "attention_mask": (3, 16)}
    assert int(found["input_ids"].min()) >= 64
    assert int(found["input_ids"].max()) < 128


def test_the_main_input_alone_comes_first_and_then_all_that_the_model_takes() -> None:
    found = made(lambda input_ids=None, pixel_values=None: None, input_modalities=("image", "text"))
    assert list(dict.fromkeys(tuple(inputs) for inputs in found)) == [("input_ids",), ("input_ids", "pixel_values")]


def test_sound_comes_with_either_axis_first() -> None:
    found = made(lambda input_features: None, main_input_name="input_features")
    assert [shapes(inputs)["input_features"] for inputs in found[:2]] == [(3, 16, 64), (3, 64, 16)]


def test_images_come_as_frames_too() -> None:
    found = made(lambda pixel_values: None, {"num_frames": 2}, main_input_name="pixel_values")
    assert [shapes(inputs)["pixel_values"] for inputs in found[:2]] == [(3, 3, 32, 32), (3, 2, 3, 32, 32)]


def test_a_decoder_gets_tokens() -> None:
    found = made(lambda input_ids=None, decoder_input_ids=None: None, {"is_encoder_decoder": True})[0]
    assert set(found) == {"input_ids", "decoder_input_ids"}


def test_an_unknown_input_that_is_required_is_named() -> None:
    with pytest.raises(Unsupported, match="no inputs are known for a model whose main input is torque"):
        made(lambda input_ids, torque: None)


def test_a_forward_pass_without_any_known_input_is_refused() -> None:
    with pytest.raises(Unsupported, match="whose main input is tactile"):
        made(lambda tactile=None: None, main_input_name="tactile")
