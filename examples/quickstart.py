"""Train two small models for one step under `torch.compile`, checked; then again with a compiler that is wrong.

    python examples/quickstart.py

Takes about a minute, nearly all of it Inductor compiling. Exits with 0 if the two correct models pass and the wrong
compiler is found out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

import checked_backend as cb


class Encoder(nn.Module):
    """A transformer encoder with dropout that classifies sequences of words."""

    def __init__(self, vocabulary: int = 100, width: int = 32, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Score each sequence."""
        hidden = self.encoder(self.embedding(words))
        return self.head(hidden.mean(dim=1))


class ConvNet(nn.Module):
    """A convolutional net with BatchNorm, whose running statistics each training step changes."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Score each image."""
        hidden = F.relu(self.norm1(self.conv1(images)))
        hidden = F.relu(self.norm2(self.conv2(hidden)))
        return self.head(hidden.mean(dim=(2, 3)))


def wrong_compiler(gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
    """A compiler with a bug: its relu lets 1% of a negative number through."""
    for node in gm.graph.nodes:
        if node.target is F.relu:
            node.target, node.args, node.kwargs = F.leaky_relu, node.args[:1], {"negative_slope": 0.01}
    gm.recompile()
    return gm.forward


def train_one_step(
    model: Callable[..., torch.Tensor], parameters: Iterable[nn.Parameter], inputs: torch.Tensor
) -> None:
    """One training step, as in any program. It does not know that it is checked."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    targets = torch.arange(len(inputs)) % 5
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()


def train_checked(make: Callable[[], nn.Module], inputs: torch.Tensor, **options: Any) -> None:
    """Compile a new model with the checked backend, and train it for one step. Options may be left out altogether."""
    torch.manual_seed(0)
    model = make()
    compiled = torch.compile(model, backend="numcheck", options=options)
    train_one_step(compiled, model.parameters(), inputs)


def main() -> int:
    """Run the example and return its exit code."""
    torch.manual_seed(0)
    models: tuple[tuple[str, Callable[[], nn.Module], torch.Tensor], ...] = (
        ("a transformer encoder with dropout", Encoder, torch.randint(100, (8, 16))),
        ("a convolutional net with BatchNorm", ConvNet, torch.randn(8, 3, 16, 16)),
    )
    as_expected = True

    print("1. Inductor, PyTorch's own compiler. Everything that it computes is compared with eager.")
    for name, make, inputs in models:
        began = time.perf_counter()
        # "record" does not stop at a difference; everything seen inside of collect() is in its report
        with cb.collect(closing=False) as session:
            train_checked(make, inputs, on_divergence="record")
        report = session.report
        print(f"\n   {name} ({time.perf_counter() - began:.0f} s with compiling):\n     {report.headline}")
        for skip in report.coverage.skipped:
            print(f"     not checked: {skip.subject}: {skip.reason}")
        if report.verdict is not cb.Verdict.PASS or not report.coverage.checked.get("gradients"):
            as_expected = False
            print(f"\n{report}")

    print("\n2. The same models with `wrong_compiler` of this file. By default a difference raises. The message:")
    for name, make, inputs in models:
        try:
            train_checked(make, inputs, compiler=wrong_compiler)
        except cb.DivergenceError as error:
            print(f"\n   {name}:\n\n{error}")
        else:
            as_expected = False
            print(f"\n   {name}: the wrong compiler went unnoticed")

    if as_expected:
        print("\nAs it should be: both models pass under Inductor, and the wrong compiler was found out in both.")
        print('Your own model: torch.compile(model, backend="numcheck")')
    else:
        print("\nNOT as it should be: see above.")
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
