"""Real models from tiny configurations, with random weights: nothing is downloaded.

Each factory returns a `Case`: a model whose ``forward`` takes the case's inputs as keywords, and a way to its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

Attention = Literal["sdpa", "eager"]
VOCABULARY = 64


@dataclass(frozen=True)
class Case:
    """A model, the keywords of its ``forward``, and what makes a scalar of what that returns."""

    model: nn.Module
    inputs: Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor]

    def to(self, device: str, dtype: torch.dtype | None) -> Case:
        """The same on a device, in a precision."""

        def there(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else None)

        return Case(self.model.to(device, dtype), pytree.tree_map(there, dict(self.inputs)), self.loss)


def of_transformers(name: str, **settings: Any) -> nn.Module:
    """A model of transformers, from the configuration that goes with it."""
    cls = getattr(transformers, name)
    return cls(cls.config_class(**settings))


def _words(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def padding(batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length // 2 :] = 0
    return mask


def _encoder(
    name: str, inputs: Mapping[str, Any], attention: Attention, dropout: float, layers: int, **settings: Any
) -> Case:
    model = of_transformers(
        name,
        attn_implementation=attention,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **settings,
    )
    return Case(model, inputs, lambda returned: returned.loss)


BERT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}


def bert_masked_lm(attention: Attention = "sdpa", dropout: float = 0.1, layers: int = 2) -> Case:
    """Hugging Face BERT that fills in masked words, with padding."""
    words = _words(2, 16)
    inputs = {"input_ids": words, "attention_mask": padding(2, 16), "labels": words}
    return _encoder("BertForMaskedLM", inputs, attention, dropout, layers, **BERT)


def bert_classifier(attention: Attention = "sdpa", dropout: float = 0.1, layers: int = 2) -> Case:
    """Hugging Face BERT that classifies sequences, with padding."""
    inputs = {"input_ids": _words(2, 16), "attention_mask": padding(2, 16), "labels": torch.tensor([0, 1])}
    return _encoder("BertForSequenceClassification", inputs, attention, dropout, layers, **BERT)


def vit_classifier(attention: Attention = "sdpa", dropout: float = 0.1, layers: int = 2) -> Case:
    """Hugging Face ViT that classifies images."""
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
    sizes = {"image_size": 16, "patch_size": 4, "num_labels": 3}
    return _encoder("ViTForImageClassification", inputs, attention, dropout, layers, **sizes)


def gpt2_lm(attention: Attention = "sdpa", dropout: float = 0.1, layers: int = 2) -> Case:
    """Hugging Face GPT-2; its output embedding shares the input embedding's weight."""
    words = _words(2, 16)
    model = of_transformers(
        "GPT2LMHeadModel",
        attn_implementation=attention,
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=layers,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return Case(model, {"input_ids": words, "labels": words}, lambda returned: returned.loss)


class Residual(nn.Module):
    """A residual block: two convolutions with BatchNorm, and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inside == outside
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x), inplace=True)


class _ResNet(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = Residual(width, width, 1)
        self.layer2 = Residual(width, 2 * width, 2)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.bn1(self.conv1(x)), inplace=True)
        hidden = F.max_pool2d(self.layer1(hidden), 2)
        hidden = self.layer2(hidden)
        scores = self.fc(F.adaptive_avg_pool2d(hidden, 1).flatten(1))
        return F.cross_entropy(scores, labels)


def resnet() -> Case:
    """A small ResNet with BatchNorm; ``forward`` returns the loss."""
    inputs = {"x": torch.randn(4, 3, 16, 16), "labels": torch.arange(4) % 3}
    return Case(_ResNet(8, 3), inputs, lambda returned: returned)


class _DropoutMlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(dropout)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def dropout_mlp(dropout: float = 0.3) -> Case:
    """An MLP with dropout; its loss is outside of ``forward``."""
    return Case(_DropoutMlp(dropout), {"x": torch.randn(8, 16)}, lambda returned: returned.square().mean())
