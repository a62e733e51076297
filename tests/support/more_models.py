"""More models with random weights, chosen for what they do that those of `models` do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import (
    VOCABULARY,
    Case,
    bert_classifier,
    of_transformers,
    padding,
    vit_classifier,
)

Make = Callable[[], Case]

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
DECODER = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
CLASSES = torch.tensor([0, 1])


def _words(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _case(model: nn.Module, **inputs: Any) -> Case:
    return Case(model, inputs, lambda returned: returned.loss)


def _loss(model: Callable[[], nn.Module], **shapes: Sequence[int]) -> Make:
    """A model that returns its loss, with random inputs."""

    def make() -> Case:
        built = model()
        return Case(built, {name: torch.randn(shape) for name, shape in shapes.items()}, lambda returned: returned)

    return make


def _language(name: str, length: int = 12, *, padded: bool = False, use_cache: bool = False, **settings: Any) -> Make:
    def make() -> Case:
        words = _words(2, length)
        mask = {"attention_mask": padding(2, length)} if padded else {}
        return _case(of_transformers(name, **settings, use_cache=use_cache), input_ids=words, **mask, labels=words)

    return make


def _classifier(name: str, **settings: Any) -> Make:
    """Of sentences, or of pictures."""

    def make() -> Case:
        model = of_transformers(name, **settings)
        if "image_size" in settings:
            return _case(model, pixel_values=torch.randn(2, 3, 16, 16), labels=CLASSES)
        return _case(model, input_ids=_words(), attention_mask=padding(2, 12), labels=CLASSES)

    return make


def _t5() -> Case:
    settings = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = of_transformers("T5ForConditionalGeneration", **settings, decoder_start_token_id=0, use_cache=False)
    return _case(model, input_ids=_words(), attention_mask=padding(2, 12), labels=_words(2, 8))


def _whisper() -> Case:
    model = of_transformers(
        "WhisperForConditionalGeneration",
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        max_source_positions=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        max_target_positions=16,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        dropout=0.1,
    )
    return _case(model, input_features=torch.randn(2, 8, 32), labels=_words(2, 8))


def _clip() -> Case:
    words = _words(2, 8)
    words[:, -1] = 2
    pixels = torch.randn(2, 3, 16, 16)
    half = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**half, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 2}
    model = of_transformers(
        "CLIPModel",
        text_config={**text, "pad_token_id": 1},
        vision_config={**half, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    return _case(model, input_ids=words, attention_mask=torch.ones_like(words), pixel_values=pixels, return_loss=True)


def _wav2vec2() -> Case:
    """Many graph breaks; one region writes where a mask is true, which compilers refuse: Dynamo then breaks there."""
    labels = torch.randint(1, 16, (2, 5))
    model = of_transformers(
        "Wav2Vec2ForCTC",
        **{**SMALL, "vocab_size": 16, "num_attention_heads": 2, "layerdrop": 0.0},
        conv_dim=(16, 16),
        conv_stride=(4, 2),
        conv_kernel=(8, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.3,
        mask_time_length=2,
    )
    return _case(model, input_values=torch.randn(2, 400), labels=labels)


HUGGING_FACE: dict[str, Make] = {
    "t5": _t5,
    "llama": _language("LlamaForCausalLM", padded=True, **DECODER),
    # a sliding window, and logits that are capped
    "gemma2": _language("Gemma2ForCausalLM", padded=True, **DECODER, head_dim=8, sliding_window=4),
    # a mixture of experts: each token takes another way
    "mixtral": _language(
        "MixtralForCausalLM", **DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    ),
    "mamba": _language(
        "MambaForCausalLM",
        length=6,
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=1,
        time_step_rank=2,
    ),
    "whisper": _whisper,
    "clip": _clip,
    "distilbert": _classifier(
        "DistilBertForSequenceClassification",
        vocab_size=VOCABULARY,
        dim=32,
        hidden_dim=64,
        n_layers=1,
        n_heads=2,
        max_position_embeddings=32,
    ),
    # attention to relative positions, gathered by index
    "deberta": _classifier(
        "DebertaV2ForSequenceClassification",
        **{**SMALL, "num_attention_heads": 2, "max_position_embeddings": 32, "norm_rel_ebd": "layer_norm"},
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
    ),
    # shifted windows, and paths dropped at random
    "swin": _classifier(
        "SwinForImageClassification",
        image_size=16,
        patch_size=2,
        window_size=2,
        drop_path_rate=0.2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
    ),
    "convnext": _classifier(
        "ConvNextForImageClassification",
        image_size=16,
        patch_size=2,
        num_stages=2,
        drop_path_rate=0.2,
        hidden_sizes=[8, 16],
        depths=[1, 1],
    ),
    "wav2vec2": _wav2vec2,
}


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, padded: torch.Tensor, weights: bool) -> Any:
        future = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        out, shares = self.attention(x, x, x, key_padding_mask=padded, attn_mask=future, need_weights=weights)
        return self.norm(x + out).square().mean() + (shares.square().sum() if weights else 0)


def _masked_attention(*, weights: bool) -> Case:
    padded = torch.zeros(2, 8, dtype=torch.bool)
    padded[1, 5:] = True
    return Case(
        _Attention(), {"x": torch.randn(2, 8, 16), "padded": padded, "weights": weights}, lambda returned: returned
    )


class _UNet(nn.Module):
    """Two scales of a diffusion model, told the time."""

    def __init__(self) -> None:
        super().__init__()

        def block(inside: int, outside: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU())

        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down, self.middle, self.up = block(3, 16), block(16, 16), block(32, 3 * 4)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.transposed = nn.ConvTranspose2d(16, 16, 2, 2)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        fine = self.down(x) + self.time(time)[:, :, None, None]
        coarse = self.middle(F.avg_pool2d(fine, 2))
        words = coarse.flatten(2).transpose(1, 2)
        mixed = words + self.attention(words, words, words, need_weights=False)[0]
        coarse = mixed.transpose(1, 2).reshape(coarse.shape)
        wide = self.transposed(coarse) + F.interpolate(coarse, scale_factor=2.0, mode="bilinear")
        large = F.pixel_shuffle(self.up(torch.cat([wide, fine], 1)), 2)
        return (large - F.interpolate(x, scale_factor=2.0, mode="nearest")).float().square().mean()


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.greatest = (nn.EmbeddingBag(VOCABULARY, 8, mode=mode) for mode in ("mean", "max"))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        scores = self.head(torch.cat([self.mean(x, offsets), self.greatest(x, offsets)], 1))
        return F.cross_entropy(scores, torch.tensor([0, 1, 2, 1]))


def embedding_bag() -> Case:
    """The second bag is empty."""
    inputs = {"x": torch.randint(VOCABULARY, (20,)), "offsets": torch.tensor([0, 5, 5, 12])}
    return Case(_Bag(), inputs, lambda returned: returned)


class _Fourier(nn.Module):
    """A complex parameter, with its complex gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, 8, dtype=torch.complex64) * 0.1)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho") * self.filter
        filtered = torch.fft.irfft(spectrum, n=16, dim=1, norm="ortho")
        return (F.gelu(self.mix(filtered)) + x).square().mean() + spectrum.abs().mean()


class _Autoencoder(nn.Module):
    """Normal random numbers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 16), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return F.binary_cross_entropy_with_logits(self.decode(sample), x.sigmoid()) + divergence


class _Mixture(nn.Module):
    """Buffers changed in place by the user, by spectral norm and by instance norm; topk, scatter, where, cumsum."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.weight = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.slope = nn.PReLU()
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.slope(self.spectral(x))
        self.average.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
        hidden = self.norm(hidden)
        values, places = hidden.topk(3, -1)
        hidden = hidden.scatter(-1, places, values * 2)
        hidden = torch.where(hidden > 0, hidden, hidden.exp() - 1)
        return (self.weight(hidden.cumsum(1)).logsumexp(-1) - self.average.sum()).square().mean()


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(target))).clamp(min=1)
        for layer in self.layers:
            hidden = layer(x)
            x = F.elu(torch.zeros_like(hidden).index_add_(0, target, hidden[source]) / degree[:, None])
        return F.cross_entropy(x, torch.arange(len(x)) % 4)


def graph_network() -> Case:
    inputs = {"x": torch.randn(10, 8), "source": torch.randint(10, (30,)), "target": torch.randint(10, (30,))}
    return Case(_Graph(), inputs, lambda returned: returned)


class _Policy(nn.Module):
    """A branch on data, which breaks the graph, and a sample from a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(x))
        hidden = hidden * 2 if hidden.sum() > 0 else hidden + 1
        choice = torch.distributions.Categorical(logits=self.head(hidden))
        return -(choice.log_prob(choice.sample()) * torch.arange(5.0)).mean() - 0.01 * choice.entropy().mean()


class _Checkpointed(nn.Module):
    """Dropout that backward computes again, and must get the same masks for; one checkpoint inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2))
        self.outer = nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 2)

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.utils.checkpoint.checkpoint(self._block, x, use_reentrant=False)
        return self.head(hidden + x).square().mean()


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


def _encoder_decoder(name: str, **settings: Any) -> Make:
    """Without ``labels``, with which some of these models return no cache."""

    def make() -> Case:
        model = of_transformers(name, vocab_size=VOCABULARY, d_model=32, decoder_start_token_id=0, **settings)
        inputs = {"input_ids": _words(), "decoder_input_ids": _words(2, 8), "use_cache": True}
        return Case(model, inputs, lambda returned: returned.logits.float().logsumexp(-1).mean())

    return make


WRITTEN_HERE: dict[str, Make] = {
    "attention_with_weights": partial(_masked_attention, weights=True),
    "attention_without_weights": partial(_masked_attention, weights=False),
    "unet": _loss(_UNet, x=(2, 3, 8, 8), time=(2, 16)),
    "embedding_bag": embedding_bag,
    "fourier": _loss(_Fourier, x=(2, 16, 8)),
    "autoencoder": _loss(_Autoencoder, x=(6, 12)),
    "mixture": _loss(_Mixture, x=(3, 4, 8)),
    "graph_network": graph_network,
    "policy": _loss(_Policy, x=(5, 4)),
    "checkpointed_dropout": _loss(_Checkpointed, x=(4, 8)),
}

HALF_WRITTEN_HERE: dict[str, Make] = {
    "gated": _loss(_Gated, x=(4, 8, 32)),
    "residual": _loss(_Residual, x=(4, 3, 8, 8)),
    "unet": WRITTEN_HERE["unet"],
    "points": _loss(_Points, x=(4, 3, 16)),
}
TWO_LAYERS = {**DECODER, "num_hidden_layers": 2, "use_cache": True}
HALF: dict[str, Make] = {
    "llama": _language("LlamaForCausalLM", **TWO_LAYERS),
    "gemma3": _language("Gemma3ForCausalLM", **TWO_LAYERS, head_dim=8, sliding_window=4),
    "bloom": _language("BloomForCausalLM", use_cache=True, vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "gpt2": _language(
        "GPT2LMHeadModel", use_cache=True, vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4
    ),
    "mixtral": _language("MixtralForCausalLM", **TWO_LAYERS, num_local_experts=4, num_experts_per_tok=2),
    "mamba2": _language(
        "Mamba2ForCausalLM",
        use_cache=True,
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=8,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    "t5": _encoder_decoder("T5ForConditionalGeneration", d_kv=8, d_ff=64, num_layers=1, num_heads=4),
    "bart": _encoder_decoder(
        "BartForConditionalGeneration",
        encoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
    ),
    "bert": bert_classifier,
    "vit": vit_classifier,
    **HALF_WRITTEN_HERE,
}
"""More that people train in 16 bits: state spaces, SiLU nets, decoders that return their cache."""
