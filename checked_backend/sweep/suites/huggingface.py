"""The suite ``huggingface``: architectures of the installed transformers, shrunk, and without any download."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from types import MappingProxyType
from typing import Any

import torch

from checked_backend.errors import SuiteError
from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Settings
from checked_backend.sweep.suites.base import Built, Model, Suite, Unsupported

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


# Configurations shrunk to a few small layers, in several ways, by names that the models share.

_LAYERS = 2
_TOKENS = 128
_SPECIAL_TOKENS = range(3, 63)


def _each(number: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), number)


_WIDTHS: Mapping[str, int] = MappingProxyType(
    _each(32, "hidden_size d_model n_embd dim embed_dim embedding_size projection_dim hidden_dim")
    | _each(64, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dim_feedforward n_inner d_inner")
    | _each(64, "ffn_hidden_size mlp_dim")
    | _each(4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads")
    | _each(4, "num_encoder_attention_heads num_decoder_attention_heads linear_num_heads")
    | _each(2, "num_key_value_heads num_kv_heads")
    | _each(8, "head_dim d_kv attention_head_size v_head_dim linear_head_dim")
    | _each(8, "qk_nope_head_dim qk_rope_head_dim rope_head_dim rotary_dim")
    | _each(16, "q_lora_rank kv_lora_rank num_mel_bins")
    | _each(32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size flow_size")
    | _each(64, "upsample_initial_channel")  # vocoders halve it at each of up to five steps
    | _each(8, "mamba_d_state state_size")
    | _each(2, "mamba_expand")
)
"""Widths that fit together in most models: four heads of eight are 32."""

_COUNTS: Mapping[str, int] = MappingProxyType(
    _each(4, "num_experts num_local_experts n_routed_experts moe_num_experts")
    | _each(2, "num_experts_per_tok moe_topk num_experts_per_token top_k_experts moe_k")
    | _each(1, "n_group topk_group first_k_dense_replace num_mtp_modules")
    | _each(8, "num_queries")
)
_LENGTHS: Mapping[str, int] = MappingProxyType(
    _each(64, "max_position_embeddings n_positions n_ctx max_target_positions context_length")
    | _each(32, "image_size img_size input_size max_source_positions")
    | _each(8, "chunk_size mamba_chunk_size attention_chunk_size patch_size")
)
_MISSING: Mapping[str, int] = MappingProxyType(
    {"prediction_length": 8, "sliding_window": 8, "num_frames": 4, "pad_token_id": 0}
)
"""Values for what a configuration leaves open, besides the numbers above."""

_KNOWN_TOKENS = MappingProxyType(
    {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
)
_IS_TOKEN = re.compile(r".*token_(id|index|ids)")
_IS_VOCABULARY = re.compile(r"(.*_)?vocab_size")
_IS_DEPTH = re.compile(r"((num|n)_(.*_)?layers?|(.*_)?(layers|depth|blocks))")
_IS_WIDTH = re.compile(
    r"(.*_)?(hidden_sizes?|hidden_channels|hidden_dims?|embed_dims?|embed_size|embedding_size|intermediate_sizes?|dims?"
    r"|d_model|d_ff|d_inner|d_kv|n_embd|n_inner|rank|ranks|channels|width|widths|size_per_layer_input|projection_size"
    r"|feature_size|inner_size|mlp_size|head_size|mrope_section|input_size)"
)
_IS_HEAD_COUNT = re.compile(r"(n|num)_(.*_)?heads?|(.*_)?attention_heads")
_IS_HEAD_WIDTH = re.compile(r"(.*_)?(head_dim|head_size|d_kv|rotary_dim|mrope_section)")
_IS_NO_WIDTH = re.compile(r".*(image|patch|kernel|window|pool|stride|num_channels).*")
_LEAST_WIDTH = 16


@dataclass(frozen=True, slots=True)
class Shrinking:
    """A way to make a model small.

    Attributes:
        factor: What widths are divided by, so that their proportions stay; None sets them to known small numbers.
        fewer_heads: Whether the factor makes heads fewer, and not each head smaller.
        layers: Whether to have two layers of each kind only.
        lengths: Whether to shrink images and the greatest number of positions.
        fill: Whether to set numbers that the configuration leaves open.
    """

    factor: int | None = None
    fewer_heads: bool = False
    layers: bool = True
    lengths: bool = True
    fill: bool = False


WAYS: Sequence[Shrinking] = (
    Shrinking(),
    Shrinking(fill=True),
    Shrinking(factor=16),
    Shrinking(factor=16, fewer_heads=True),
    Shrinking(factor=16, lengths=False),
    Shrinking(factor=8),
    Shrinking(factor=4, fewer_heads=True, lengths=False),
    Shrinking(factor=4, lengths=False),
    Shrinking(factor=16, layers=False, lengths=False),
    Shrinking(factor=2),
    Shrinking(factor=1),
    Shrinking(factor=1, lengths=False),
    Shrinking(factor=1, layers=False, lengths=False),
)
"""Ways to make a model small, from the smallest models to larger ones. The proportions that a model needs differ."""


def tiny_config(config_class: Any, way: Shrinking) -> Any:
    """Make a small configuration. Attributes without a rule here keep their values."""
    config = config_class(**_shrunk(config_class, None, way))
    _turn_caches_off(config)
    return config


def _shrunk(config_class: Any, held: Any, way: Shrinking) -> dict[str, Any]:
    """The arguments for a small configuration: all that differs from what the class has by itself."""
    default = config_class()
    own: Mapping[str, Any] = default.to_dict()
    written: Mapping[str, Any] = own if held is None else held.to_dict()
    parts: Mapping[str, Any] = getattr(config_class, "sub_configs", {}) or {}
    values = {name: value for name, value in written.items() if name not in parts}
    found = {
        name: small
        for name, small in _small_values(values, way).items()
        if small != values[name] or (name in own and own[name] != small)
    }
    for name, part in parts.items():
        inner = getattr(default if held is None else held, name, None)
        kind = type(inner) if hasattr(inner, "to_dict") else part
        if hasattr(kind, "to_dict") and kind.__name__ != "AutoConfig":
            model_type = getattr(kind, "model_type", "")
            small = _shrunk(kind, inner if hasattr(inner, "to_dict") else None, way)
            found[name] = {**small, **({"model_type": model_type} if model_type else {})}
    return found


def _small_values(values: Mapping[str, Any], way: Shrinking) -> dict[str, Any]:
    special = iter(_SPECIAL_TOKENS)
    layers = _Layers.of(values) if way.layers else None
    found = {name: _small(name, value, way, special, layers) for name, value in values.items()}
    for groups in ("num_key_value_heads", "num_kv_heads"):
        if values.get(groups) is not None and values[groups] == values.get("num_attention_heads"):
            found[groups] = found["num_attention_heads"]
    return found


@dataclass(frozen=True, slots=True)
class _Layers:
    """Which layers are kept, of how many. Lists with an entry for each layer are cut accordingly."""

    depth: int
    kept: Sequence[int]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> _Layers:
        if isinstance(values.get("depths"), list):  # "layers" are stages then
            return cls(0, range(0))
        depth = max((int(value) for name, value in values.items() if _is_depth(name, value)), default=0)
        for value in values.values():
            if isinstance(value, list) and len(value) == depth and all(isinstance(kind, str) for kind in value):
                firsts = [value.index(kind) for kind in dict.fromkeys(value)][:_LAYERS]
                return cls(depth, (firsts * _LAYERS)[:_LAYERS])  # one layer of each kind
        return cls(depth, range(_LAYERS))

    def cut(self, entries: list[Any]) -> list[Any]:
        if len(entries) != self.depth or self.depth <= _LAYERS or any(isinstance(e, list | dict) for e in entries):
            return entries
        return [entries[number] for number in self.kept]


def _small(name: str, value: Any, way: Shrinking, special: Iterator[int], layers: _Layers | None) -> Any:
    if value is None:
        return _filled(name) if way.fill else None
    if isinstance(value, bool | str):
        return value
    if _IS_TOKEN.fullmatch(name):
        return _small_token(name, value, special)
    if isinstance(value, int) and _IS_VOCABULARY.fullmatch(name):
        return min(value, _TOKENS)
    if name in _COUNTS and isinstance(value, int):
        return min(value, _COUNTS[name])
    if way.lengths and name in _LENGTHS:
        return _small_length(value, _LENGTHS[name])
    if layers is not None:
        if layers.depth and _is_depth(name, value):
            return min(value, _LAYERS)
        if name == "depths" and isinstance(value, list):
            return [1] * len(value)
        if isinstance(value, list) and layers.cut(value) is not value:
            return layers.cut(value)
    if way.fewer_heads and way.factor is not None:
        if _IS_HEAD_COUNT.fullmatch(name) and isinstance(value, int):
            return max(1, value // way.factor)
        if _IS_HEAD_WIDTH.fullmatch(name):
            return value
    return _small_width(name, value, way.factor)


def _small_length(value: Any, most: int) -> Any:
    """A length of at most that many. An image may have a length for each of its sides."""
    if isinstance(value, list | tuple) and all(isinstance(side, int) for side in value):
        return type(value)(min(side, most) for side in value)
    return min(value, most) if isinstance(value, int) else value


def _is_depth(name: str, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and _IS_DEPTH.fullmatch(name) is not None


def _small_token(name: str, value: Any, special: Iterator[int]) -> Any:
    """A token of the small vocabulary. No two names get the same one."""
    if isinstance(value, list):
        return [_KNOWN_TOKENS.get(name, 2)] if value else value
    if not isinstance(value, int) or value < 0:
        return value
    if name in _KNOWN_TOKENS:
        return _KNOWN_TOKENS[name]
    return next(special, value)


def _small_width(name: str, value: Any, factor: int | None) -> Any:
    if factor is None:
        number = _WIDTHS.get(name)
        return min(value, number) if number is not None and isinstance(value, int) and value > 0 else value
    if isinstance(value, dict):
        return {key: _small_width(str(key), part, factor) for key, part in value.items()}
    if not _IS_WIDTH.fullmatch(name) or _IS_NO_WIDTH.fullmatch(name):
        return value
    if isinstance(value, list | tuple):
        small = [_divided(part, factor) for part in value]
        return value if None in small else type(value)(small)
    divided = _divided(value, factor) if isinstance(value, int) and value >= _LEAST_WIDTH else None
    return value if divided is None else divided


def _divided(value: Any, factor: int) -> int | None:
    """A width divided by the factor; None if that is no whole number."""
    return value // factor if isinstance(value, int) and value >= factor and value % factor == 0 else None


def _filled(name: str) -> int | None:
    for numbers in (_WIDTHS, _COUNTS, _LENGTHS, _MISSING):
        if name in numbers:
            return numbers[name]
    if _IS_DEPTH.fullmatch(name):
        return _LAYERS
    return _TOKENS if _IS_VOCABULARY.fullmatch(name) else None


def _turn_caches_off(config: Any) -> None:
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for name in getattr(type(config), "sub_configs", {}) or {}:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            _turn_caches_off(part)


# Inputs for a shrunk model, by the parameter names of its forward pass.

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
