"""Models that people train in 16 bits: mixtures of experts, state spaces, SiLU nets, decoders that return their cache.

Random weights from tiny configurations, as in `models`. Each is run in bfloat16 and under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import VOCABULARY, Case, of_transformers

Make = Callable[[], Case]

_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
_BART = {
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 0,
}


def _words(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _language(name: str, **settings: Any) -> Make:
    def make() -> Case:
        model, words = of_transformers(name, **settings), _words()
        return Case(model, {"input_ids": words, "labels": words}, lambda returned: returned.loss)

    return make


def _encoder_decoder(name: str, **settings: Any) -> Make:
    """Without ``labels``, with which some of these models return no cache."""

    def make() -> Case:
        model = of_transformers(name, **settings)
        inputs = {"input_ids": _words(), "decoder_input_ids": _words(2, 8), "use_cache": True}
        return Case(model, inputs, lambda returned: returned.logits.float().logsumexp(-1).mean())

    return make


def _pictures(name: str, **settings: Any) -> Make:
    def make() -> Case:
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
        return Case(of_transformers(name, image_size=16, **settings), inputs, lambda returned: returned.loss)

    return make


def _mamba() -> Case:
    words = _words(2, 6)
    settings = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "time_step_rank": 2}
    model = of_transformers("MambaForCausalLM", vocab_size=VOCABULARY, **settings)
    return Case(model, {"input_ids": words, "labels": words}, lambda returned: returned.loss)


def _bert() -> Case:
    settings = {**_SMALL, "num_attention_heads": 4, "max_position_embeddings": 32}
    model = of_transformers("BertForSequenceClassification", **settings)
    return Case(model, {"input_ids": _words(), "labels": torch.tensor([0, 1])}, lambda returned: returned.loss)


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


def _loss(model: Callable[[], nn.Module], **shapes: Sequence[int]) -> Make:
    """A model that returns its loss, with random inputs."""

    def make() -> Case:
        built = model()
        return Case(built, {name: torch.randn(shape) for name, shape in shapes.items()}, lambda returned: returned)

    return make


WRITTEN_HERE: dict[str, Make] = {
    "gated": _loss(_Gated, x=(4, 8, 32)),
    "residual": _loss(_Residual, x=(4, 3, 8, 8)),
    "unet": _loss(_UNet, x=(2, 3, 8, 8), time=(2, 16)),
    "points": _loss(_Points, x=(4, 3, 16)),
}
MODELS: dict[str, Make] = {
    "llama": _language("LlamaForCausalLM", **_SMALL, **_HEADS),
    "gemma3": _language("Gemma3ForCausalLM", **_SMALL, **_HEADS, head_dim=8, sliding_window=4),
    "bloom": _language("BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "gpt2": _language("GPT2LMHeadModel", vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4),
    "mixtral": _language("MixtralForCausalLM", **_SMALL, **_HEADS, num_local_experts=4, num_experts_per_tok=2),
    "mamba": _mamba,
    "mamba2": _language(
        "Mamba2ForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=8,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    "t5": _encoder_decoder(
        "T5ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "bart": _encoder_decoder("BartForConditionalGeneration", **_BART),
    "bert": _bert,
    "vit": _pictures(
        "ViTForImageClassification",
        patch_size=4,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
    "convnext": _pictures(
        "ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2
    ),
    **WRITTEN_HERE,
}
