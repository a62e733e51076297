"""Make inputs for a shrunk model of transformers, by the parameter names of its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

import torch

from checked_backend.sweep.suites.base import Unsupported

_LENGTH = 16
_FIRST_TOKEN = 64
"""Lower tokens have meanings: the end of a text, the place of an image."""

_SAMPLES = 4000
_FRAMES = 4
_GRID = 4
_MOST_TRIED = 12

Maker = Callable[[Any, int], torch.Tensor]


def tiny_inputs(model: Any, config: Any, batch: int, parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Make keyword arguments of a forward pass, in several ways: models differ in what they need and in its shape.

    Args:
        model: Its main input says whether it takes text, images or sound.

    Raises:
        Unsupported: No rule here knows an input that it requires.
    """
    main = getattr(model, "main_input_name", "input_ids")
    taken = [(name, one) for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    required = [name for name, one in taken if one.default is one.empty]
    unknown = [name for name in required if name not in _MAKERS]
    first = [name for name in ([main] if isinstance(main, str) else main) if name in parameters and name in _MAKERS]
    if unknown or not (first or required):
        raise Unsupported(f"no inputs are known for a model whose main input is {', '.join(unknown) or main}")
    few = list(dict.fromkeys([*first, *(name for name in _ALSO if name in parameters), *required]))
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        few.append("decoder_input_ids")
    many = list(dict.fromkeys([*few, *(name for name in _modalities(model) if name in parameters)]))
    many += [name for name in _IF_NEEDED if name in parameters and name not in many]
    for names in dict.fromkeys((tuple(few), tuple(many))):
        for makers in islice(product(*(_MAKERS[name] for name in names)), _MOST_TRIED):
            inputs: dict[str, Any] = {name: maker(config, batch) for name, maker in zip(names, makers, strict=True)}
            if "attention_mask" in parameters and "input_ids" in inputs:
                inputs["attention_mask"] = torch.ones(inputs["input_ids"].shape[:2], dtype=torch.long)
            if "return_dict" in parameters:
                inputs["return_dict"] = True
            yield inputs


def _modalities(model: Any) -> Iterator[str]:
    declared = getattr(model, "input_modalities", ())
    for modality in (declared,) if isinstance(declared, str) else declared:
        yield from _OF_MODALITY.get(modality, ())


def _of(config: Any, names: Sequence[str] | str, default: Any) -> Any:
    """A number of the configuration, or of the first part of it that has one of the names."""
    for name in (names,) if isinstance(names, str) else names:
        for part in (config, *(getattr(config, sub, None) for sub in getattr(type(config), "sub_configs", {}) or {})):
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


def _number(names: Sequence[str] | str, default: int) -> Callable[[Any], int]:
    """Reads a number of a configuration."""

    def read(config: Any) -> int:
        value = _of(config, names, default)
        return int(value[0] if isinstance(value, list | tuple) and value else value)

    return read


_planes = _number(("num_channels", "in_channels", "in_chans"), 3)
_bins = _number(("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim"), 16)
_predicted = _number("prediction_length", 8)


def _tokens(config: Any, batch: int) -> torch.Tensor:
    vocabulary = _of(config, "vocab_size", 128)
    size = min(vocabulary) if isinstance(vocabulary, list | tuple) else int(vocabulary)
    return torch.randint(min(_FIRST_TOKEN, size // 2), size, (batch, _LENGTH))


def _channels_of_tokens(config: Any, batch: int) -> torch.Tensor:
    channels = _number(("num_channels", "num_codebooks", "num_quantizers"), 1)(config)
    return _tokens(config, batch * channels).reshape(batch, channels, _LENGTH).transpose(1, 2)


def _side(config: Any) -> tuple[int, int]:
    size = _of(config, ("image_size", "img_size"), 32)
    if isinstance(size, Mapping):
        return int(size.get("height", 32)), int(size.get("width", 32))
    if isinstance(size, list | tuple):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


def _patch(config: Any) -> int:
    return _number(("temporal_patch_size",), 1)(config) * _planes(config) * _number(("patch_size",), 8)(config) ** 2


def _frames(config: Any) -> int:
    return 2 * _number("max_source_positions", 32)(config)


def _history(config: Any) -> int:
    lags: Sequence[int] = _of(config, "lags_sequence", None) or [0]
    return _number("context_length", 16)(config) + max(lags)


def _times(config: Any) -> int:
    return max(1, _number("num_time_features", 1)(config))


def _noise(*shape: int | Callable[[Any], int | tuple[int, int]]) -> Maker:
    """Random numbers in this shape after the batch. A size of the configuration is a function of it."""

    def make(config: Any, batch: int) -> torch.Tensor:
        sizes = [size if isinstance(size, int) else size(config) for size in shape]
        return torch.randn(batch, *(part for size in sizes for part in ((size,) if isinstance(size, int) else size)))

    return make


_pixels = _noise(_planes, _side)
_video = _noise(_number("num_frames", _FRAMES), _planes, _side)
_pairs = _noise(2, _planes, _side)
_large_pixels = _noise(_planes, 64, 64)
_patches = _noise(_GRID * _GRID, _patch)
_features = _noise(_bins, _frames)
_hidden = _noise(_LENGTH, _number(("hidden_size", "d_model", "embed_dim", "n_embd"), 32))


def _features_in_time(config: Any, batch: int) -> torch.Tensor:
    return _features(config, batch).transpose(1, 2).contiguous()


def _flat_patches(config: Any, batch: int) -> torch.Tensor:
    return torch.randn(batch * _GRID * _GRID, _patch(config))


def _series(length: Callable[[Any], int]) -> Sequence[Maker]:
    return _noise(length), _noise(length, _number("num_input_channels", 1))


def _boxes(_config: Any, batch: int) -> torch.Tensor:
    return torch.zeros(batch, _LENGTH, 4, dtype=torch.long)


_SOUND: Sequence[Maker] = (
    _noise(_SAMPLES),
    _noise(_number("audio_channels", 1), _SAMPLES),
    _noise(_number("max_length", 64), _bins),
)
_MAKERS: Mapping[str, Sequence[Maker]] = {
    **dict.fromkeys(("input_ids", "decoder_input_ids"), (_tokens, _channels_of_tokens)),
    "qformer_input_ids": (_tokens,),
    "pixel_values": (_pixels, _video, _pairs, _large_pixels, _patches, _flat_patches),
    "prompt_pixel_values": (_pixels,),
    "prompt_masks": (_pixels,),
    "pixel_values_videos": (_video,),
    **dict.fromkeys(("input_values", "audio_values"), _SOUND),
    "input_features": (_features, _features_in_time, _noise(1, _frames, _bins)),
    "spectrogram": (_features_in_time, _features),
    "audio_mel": (_features_in_time, _features),
    "input_features_mask": (lambda config, batch: torch.ones(batch, _frames(config), dtype=torch.long),),
    "audio_mel_mask": (lambda config, batch: torch.zeros(batch, _frames(config), dtype=torch.bool),),
    "bbox": (_boxes, lambda config, batch: _boxes(config, batch).float()),
    "hidden_states": (_hidden, _flat_patches),
    "inputs_embeds": (_hidden,),
    **dict.fromkeys(
        ("grid_thw", "image_grid_thw"), (lambda _config, batch: torch.tensor([[1, _GRID, _GRID]] * batch),)
    ),
    "merge_sizes": (lambda _config, batch: torch.ones(batch, dtype=torch.long),),
    "spatial_shapes": (lambda _config, batch: torch.tensor([[_GRID, _GRID]] * batch),),
    "pixel_attention_mask": (lambda _config, batch: torch.ones(batch, _GRID * _GRID, dtype=torch.long),),
    "past_values": _series(_history),
    "future_values": _series(_predicted),
    "past_time_features": (_noise(_history, _times),),
    "future_time_features": (_noise(_predicted, _times),),
    "past_observed_mask": (lambda config, batch: torch.ones(batch, _history(config)),),
    "past_values_padding": (lambda config, batch: torch.zeros(batch, _history(config), dtype=torch.long),),
}
"""By the name of an input, ways to make it."""

_OF_MODALITY: Mapping[str, Sequence[str]] = {
    "text": ("input_ids",),
    "image": ("pixel_values",),
    "video": ("pixel_values_videos",),
    "audio": ("input_features", "input_values"),
    "time": ("past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features"),
}
_ALSO = ("bbox",)
_IF_NEEDED = ("input_features_mask", "image_grid_thw", "qformer_input_ids")
