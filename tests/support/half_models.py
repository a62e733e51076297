"""Models that people train in 16 bits: mixtures of experts, state spaces, SiLU nets, decoders that return their cache.

Random weights from tiny configurations, as in `models`. Each is run in bfloat16 and under autocast.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tests.support.models import VOCABULARY, Case

_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}


def _words(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _language(model: nn.Module, **more: Any) -> Case:
    words = _words()
    return Case(model, {"input_ids": words, "labels": words, **more}, lambda returned: returned.loss)


def llama() -> Case:
    return _language(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, **_HEADS)))


def qwen3() -> Case:
    return _language(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SMALL, **_HEADS, head_dim=8)))


def gemma3() -> Case:
    config = transformers.Gemma3TextConfig(**_SMALL, **_HEADS, head_dim=8, sliding_window=4)
    return _language(transformers.Gemma3ForCausalLM(config))


def phi() -> Case:
    return _language(transformers.PhiForCausalLM(transformers.PhiConfig(**_SMALL, **_HEADS)))


def gpt_neox() -> Case:
    config = transformers.GPTNeoXConfig(**_SMALL, num_attention_heads=4, max_position_embeddings=32)
    return _language(transformers.GPTNeoXForCausalLM(config))


def bloom() -> Case:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    return _language(transformers.BloomForCausalLM(config))


def opt() -> Case:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
    )
    return _language(transformers.OPTForCausalLM(config))


def gpt2() -> Case:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return _language(transformers.GPT2LMHeadModel(config))


def mixtral() -> Case:
    config = transformers.MixtralConfig(**_SMALL, **_HEADS, num_local_experts=4, num_experts_per_tok=2)
    return _language(transformers.MixtralForCausalLM(config))


def qwen2_moe() -> Case:
    config = transformers.Qwen2MoeConfig(
        **_SMALL, **_HEADS, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=32
    )
    return _language(transformers.Qwen2MoeForCausalLM(config))


def qwen3_moe() -> Case:
    config = transformers.Qwen3MoeConfig(**_SMALL, **_HEADS, **_EXPERTS, head_dim=8, num_experts=4)
    return _language(transformers.Qwen3MoeForCausalLM(config))


def qwen3_next() -> Case:
    """Linear attention with a gate, full attention, and experts."""
    config = transformers.Qwen3NextConfig(
        **_SMALL,
        **_HEADS,
        **_EXPERTS,
        head_dim=8,
        num_experts=4,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    return _language(transformers.Qwen3NextForCausalLM(config))


def deepseek_v3() -> Case:
    config = transformers.DeepseekV3Config(
        **_SMALL,
        **{**_HEADS, "num_key_value_heads": 4},
        **_EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return _language(transformers.DeepseekV3ForCausalLM(config))


def mamba() -> Case:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1, time_step_rank=2
    )
    words = _words(2, 6)
    return Case(
        transformers.MambaForCausalLM(config), {"input_ids": words, "labels": words}, lambda returned: returned.loss
    )


def mamba2() -> Case:
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=8,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        num_hidden_layers=1,
        chunk_size=4,
    )
    return _language(transformers.Mamba2ForCausalLM(config))


def _encoder_decoder(model: nn.Module) -> Case:
    """Without ``labels``, with which some of these models return no cache."""
    inputs = {"input_ids": _words(), "decoder_input_ids": _words(2, 8), "use_cache": True}
    return Case(model, inputs, lambda returned: returned.logits.float().logsumexp(-1).mean())


def t5() -> Case:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    return _encoder_decoder(transformers.T5ForConditionalGeneration(config))


_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 0,
}


def bart() -> Case:
    return _encoder_decoder(transformers.BartForConditionalGeneration(transformers.BartConfig(**_BART)))


def mbart() -> Case:
    return _encoder_decoder(transformers.MBartForConditionalGeneration(transformers.MBartConfig(**_BART)))


def bert() -> Case:
    config = transformers.BertConfig(**_SMALL, num_attention_heads=4, max_position_embeddings=32)
    model = transformers.BertForSequenceClassification(config)
    inputs = {"input_ids": _words(), "labels": torch.tensor([0, 1])}
    return Case(model, inputs, lambda returned: returned.loss)


_IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 3}


def vit() -> Case:
    config = transformers.ViTConfig(
        **_IMAGES, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return Case(transformers.ViTForImageClassification(config), inputs, lambda returned: returned.loss)


def convnext() -> Case:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2, image_size=16)
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return Case(transformers.ConvNextForImageClassification(config), inputs, lambda returned: returned.loss)


def _scalar(returned: Any) -> Any:
    return returned


class _Gated(nn.Module):
    """SwiGLU feed-forward blocks with root-mean-square norms, and Mish."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(32) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, gate, up, down in zip(self.norms, self.gates, self.ups, self.downs, strict=True):
            inner = norm(x)
            x = x + down(F.silu(gate(inner)) * up(inner))
        return F.mish(x).float().square().mean()


def gated() -> Case:
    return Case(_Gated(), {"x": torch.randn(4, 8, 32)}, _scalar)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + F.silu(norm(convolution(x)))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)).float(), torch.arange(4))


def residual() -> Case:
    return Case(_Residual(), {"x": torch.randn(4, 3, 8, 8)}, _scalar)


class _UNet(nn.Module):
    """Two scales of a diffusion model, told the time."""

    def __init__(self) -> None:
        super().__init__()

        def block(inside: int, outside: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU())

        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down, self.middle, self.up = block(3, 16), block(16, 16), block(32, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        fine = self.down(x) + self.time(time)[:, :, None, None]
        coarse = self.middle(F.avg_pool2d(fine, 2))
        words = coarse.flatten(2).transpose(1, 2)
        mixed = words + self.attention(words, words, words, need_weights=False)[0]
        coarse = mixed.transpose(1, 2).reshape(coarse.shape)
        wide = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        return (self.out(self.up(torch.cat([wide, fine], 1))) - x).float().square().mean()


def unet() -> Case:
    return Case(_UNet(), {"x": torch.randn(2, 3, 8, 8), "time": torch.randn(2, 16)}, _scalar)


class _Points(nn.Module):
    """Points to one vector by a greatest value, with batch norms over few."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 32, 1), nn.Conv1d(32, 64, 1)
        self.norms = nn.ModuleList([nn.BatchNorm1d(32), nn.BatchNorm1d(64), nn.BatchNorm1d(32)])
        self.dense, self.head = nn.Linear(64, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        x = self.norms[1](self.second(x)).amax(-1)
        return F.cross_entropy(self.head(F.relu(self.norms[2](self.dense(x)))).float(), torch.arange(4))


def points() -> Case:
    return Case(_Points(), {"x": torch.randn(4, 3, 16)}, _scalar)


MODELS = (
    llama,
    qwen3,
    gemma3,
    phi,
    gpt_neox,
    bloom,
    opt,
    gpt2,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
    deepseek_v3,
    mamba,
    mamba2,
    t5,
    bart,
    mbart,
    bert,
    vit,
    convnext,
    gated,
    residual,
    unet,
    points,
)
