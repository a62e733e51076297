"""Shrink configurations of transformers to a few small layers, by attribute names that its models share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["tiny_config"]

_NUMBERS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(
            ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "projection_dim", "hidden_dim"),
            32,
        ),
        **dict.fromkeys(
            (
                "intermediate_size",
                "ffn_dim",
                "encoder_ffn_dim",
                "decoder_ffn_dim",
                "d_ff",
                "dim_feedforward",
                "n_inner",
                "d_inner",
                "ffn_hidden_size",
                "mlp_dim",
            ),
            64,
        ),
        **dict.fromkeys(
            (
                "num_hidden_layers",
                "n_layer",
                "n_layers",
                "num_layers",
                "encoder_layers",
                "decoder_layers",
                "num_decoder_layers",
                "num_encoder_layers",
                "depth",
            ),
            2,
        ),
        **dict.fromkeys(
            (
                "num_attention_heads",
                "n_head",
                "n_heads",
                "num_heads",
                "encoder_attention_heads",
                "decoder_attention_heads",
                "num_encoder_attention_heads",
                "num_decoder_attention_heads",
            ),
            4,
        ),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
        **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "v_head_dim", "qk_nope_head_dim"), 8),
        **dict.fromkeys(("qk_rope_head_dim", "rope_head_dim"), 4),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "top_k_experts"), 2),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_mtp_modules"), 1),
        **dict.fromkeys(("vocab_size", "entity_vocab_size", "text_vocab_size"), 128),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"), 64),
        **dict.fromkeys(("image_size", "img_size", "input_size"), 32),
        "patch_size": 8,
        "max_source_positions": 32,
        "num_mel_bins": 16,
        "num_queries": 8,
        "mamba_expand": 2,
        "mamba_d_state": 8,
        "state_size": 8,
    }
)
_TOKENS = MappingProxyType(
    {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
)
_LAYERS = 2


def tiny_config(config_class: Any) -> Any:
    """Make a small configuration. Attributes without a rule here keep their values.

    Args:
        config_class: The configuration class of a model type.
    """
    config = config_class(**_shrunk(config_class))
    _turn_caches_off(config)
    return config


def _shrunk(config_class: Any) -> dict[str, Any]:
    default = config_class()
    written: Mapping[str, Any] = default.to_dict()
    parts: Mapping[str, Any] = getattr(config_class, "sub_configs", {}) or {}
    found: dict[str, Any] = {}
    for name, value in written.items():
        if name in parts:
            continue
        small = _small(name, value)
        if small is not value:
            found[name] = small
    for name, part in parts.items():
        held = getattr(default, name, None)
        kind = type(held) if hasattr(held, "to_dict") else part
        if hasattr(kind, "to_dict") and kind.__name__ != "AutoConfig":
            model_type = getattr(kind, "model_type", "")
            found[name] = {**_shrunk(kind), **({"model_type": model_type} if model_type else {})}
    return found


def _small(name: str, value: Any) -> Any:
    if name in _TOKENS and isinstance(value, int):
        return _TOKENS[name]
    if name in _NUMBERS and isinstance(value, int) and not isinstance(value, bool):
        return min(value, _NUMBERS[name]) if value > 0 else value
    if name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
        kinds = list(dict.fromkeys(value))[:_LAYERS]  # one layer of each kind
        return (kinds * _LAYERS)[:_LAYERS]
    if name == "depths" and isinstance(value, list):
        return [1] * len(value)
    return value


def _turn_caches_off(config: Any) -> None:
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for name in getattr(type(config), "sub_configs", {}) or {}:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            _turn_caches_off(part)
