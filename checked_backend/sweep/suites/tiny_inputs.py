"""Make inputs for a shrunk model of transformers, by the parameter names of its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from checked_backend.sweep.suites.base import Unsupported

__all__ = ["tiny_inputs"]

_LENGTH = 16
_FIRST_TOKEN = 5
_SAMPLES = 4000


def tiny_inputs(model: Any, config: Any, batch: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Make the keyword arguments of a forward pass.

    Args:
        model: The model. Its main input says whether it takes text, images or sound.
        config: The model's configuration.
        batch: The number of examples.
        parameters: The parameter names of the forward pass.

    Raises:
        Unsupported: No rule here knows its main input.
    """
    main = str(getattr(model, "main_input_name", "input_ids"))
    if main not in _MAKERS or main not in parameters:
        raise Unsupported(f"no inputs are known for a model whose main input is {main}")
    names = [main, *(name for name in _ALSO if name in parameters and name != main)]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        names.append("decoder_input_ids")
    names += [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name in _MAKERS and name not in names
    ]
    found: dict[str, Any] = {name: _MAKERS[name](config, batch) for name in names}
    if "attention_mask" in parameters and "input_ids" in found:
        found["attention_mask"] = torch.ones_like(found["input_ids"])
    if "return_dict" in parameters:
        found["return_dict"] = True
    return found


def _of(config: Any, name: str, default: Any) -> Any:
    """A number of the configuration, or of the first part of it that has one of the names."""
    for part in (config, *(getattr(config, sub, None) for sub in getattr(type(config), "sub_configs", {}) or {})):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def _tokens(config: Any, batch: int) -> torch.Tensor:
    vocabulary = _of(config, "vocab_size", 128)
    size = min(vocabulary) if isinstance(vocabulary, list | tuple) else int(vocabulary)
    return torch.randint(min(_FIRST_TOKEN, size - 1), size, (batch, _LENGTH))


def _side(config: Any) -> tuple[int, int]:
    size = _of(config, "image_size", 32)
    if isinstance(size, Mapping):
        return int(size.get("height", 32)), int(size.get("width", 32))
    if isinstance(size, list | tuple):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


def _pixels(config: Any, batch: int) -> torch.Tensor:
    return torch.randn(batch, int(_of(config, "num_channels", 3)), *_side(config))


def _video(config: Any, batch: int) -> torch.Tensor:
    return torch.randn(batch, int(_of(config, "num_frames", 4)), int(_of(config, "num_channels", 3)), *_side(config))


def _features(config: Any, batch: int) -> torch.Tensor:
    bins = int(_of(config, "num_mel_bins", 16))
    return torch.randn(batch, bins, 2 * int(_of(config, "max_source_positions", 32)))


_MAKERS: Mapping[str, Callable[[Any, int], torch.Tensor]] = MappingProxyType(
    {
        "input_ids": _tokens,
        "decoder_input_ids": _tokens,
        "pixel_values": _pixels,
        "pixel_values_videos": _video,
        "input_values": lambda _config, batch: torch.randn(batch, _SAMPLES),
        "input_features": _features,
        "bbox": lambda _config, batch: torch.zeros(batch, _LENGTH, 4, dtype=torch.long),
    }
)
_ALSO = ("bbox",)
