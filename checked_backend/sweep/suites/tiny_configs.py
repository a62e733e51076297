"""Shrink configurations of transformers to a few small layers, in several ways, by names that its models share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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
