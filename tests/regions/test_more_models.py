"""Models of many kinds: each trains under the check with nothing found, nothing left out, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checked_backend as cb
from tests.support.models import Case
from tests.support.more_models import HUGGING_FACE, WRITTEN_HERE
from tests.support.region_tools import agreed, checked, gathered, same_bits, training_state

pytestmark = [
    # torch's and transformers' own warnings: none is about what is tested here
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Make = Callable[[], Case]
STEPS = 2

inductor = pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])
COMPILERS = ["aot_eager", inductor]


def named(makes: tuple[Make, ...]) -> list[Any]:
    return [pytest.param(make, id=make.__name__) for make in makes]


def train(make: Make, compile_model: Callable[[nn.Module], Any]) -> tuple[nn.Module, list[torch.Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    np.random.seed(0)  # wav2vec2 draws the times that it masks with NumPy
    case = make()
    case.model.train()
    compiled = compile_model(case.model)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        case.loss(compiled(**case.inputs)).backward()
        optimizer.step()
    return case.model, training_state(case.model)


def check_training(make: Make, compiler: str) -> None:
    runs: list[tuple[nn.Module, list[torch.Tensor]]] = []
    report = gathered(lambda: runs.append(train(make, lambda model: checked(model, compiler))))
    assert agreed(report)
    assert not report.coverage.skipped
    model, state = runs[0]
    with_gradients = [parameter for parameter in model.parameters() if parameter.grad is not None]
    assert with_gradients
    assert report.coverage.checked["gradients"] >= STEPS * len(with_gradients)
    options = {"fallback_random": True} if compiler == "inductor" else None
    _, unchecked = train(make, lambda model: torch.compile(model, backend=compiler, options=options))
    assert same_bits(state, unchecked)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("make", named(WRITTEN_HERE))
def test_models_written_here(make: Make, compiler: str) -> None:
    check_training(make, compiler)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("make", named(HUGGING_FACE))
def test_hugging_face_models(make: Make, compiler: str) -> None:
    check_training(make, compiler)


class Tagger(nn.Module):
    """Words through an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(words))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), torch.arange(words.numel()) % 5)


def tagger() -> Case:
    return Case(Tagger(), {"words": torch.randint(64, (2, 4))}, lambda returned: returned)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_lstm_where_dynamo_compiles_it(compiler: str) -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        check_training(tagger, compiler)


@pytest.mark.skipif(torch.__version__.startswith("2.15."), reason="there Dynamo compiles it with that option, too")
def test_an_lstm_that_dynamo_does_not_compile_is_no_pass() -> None:
    with torch._dynamo.config.patch(allow_rnn=False):  # the default before torch 2.15: such a frame stays in Python
        report = gathered(lambda: train(tagger, lambda model: checked(model, "aot_eager")))
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert not report.coverage.regions
