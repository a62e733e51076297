"""Real models and whole runs: a clean one passes, with full coverage and the bits of the unchecked run.

And a run that goes wrong is found, under the user's own parameter name.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from tests.support import faults
from tests.support.models import VOCABULARY, Case, bert_classifier, bert_masked_lm, dropout_mlp, resnet
from tests.support.more_models import HUGGING_FACE, WRITTEN_HERE
from tests.support.ranks import run_ranks, values_of
from tests.support.region_tools import agreed, backwards, checked, gathered, same_bits, training_state

Compile = Callable[[Any], Any]
Left = list[torch.Tensor]

STEPS = 6


class Blocks(nn.Module):
    """Blocks with dropout. Each may be computed again in the backward pass, in a compiled program or around it."""

    def __init__(self, run: Callable[..., Any] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 12), nn.LayerNorm(12))
            for _ in range(2)
        )
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.run(block, x)
        return x


def _recomputed(block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def _data(number: int) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(number))


def _left(model: nn.Module, optimizer: torch.optim.Optimizer) -> Left:
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, torch.Tensor)]
    return [*(parameter.detach() for parameter in model.parameters()), *tensors, torch.get_rng_state()]


def _trained(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], *, micro: int = 1) -> Left:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(STEPS):
        for part in range(micro):
            loss = run(_data(number * micro + part)).square().mean() / micro
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return _left(model, optimizer)


def checkpoint_inside(compiled: Compile) -> Left:
    """Activation checkpointing inside of the compiled program."""
    model = Blocks(_recomputed)
    return _trained(model, compiled(model))


def checkpoint_around(compiled: Compile) -> Left:
    """Activation checkpointing around compiled blocks."""
    model = Blocks(_recomputed)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = compiled(block)
    return _trained(model, model)


def accumulation(compiled: Compile) -> Left:
    """Gradients of several small batches are added up before a step."""
    model = Blocks()
    return _trained(model, compiled(model), micro=3)


def scaled(compiled: Compile) -> Left:
    """A loss scaler in float16, with steps that overflow and are left out."""
    model = Blocks()
    run = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    scales = []
    for number in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run(_data(number)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    if len(set(scales)) < 2:
        raise AssertionError(f"nothing overflowed: {scales}")
    return [*_left(model, optimizer), torch.tensor(scales)]


def compiled_optimizer(compiled: Compile) -> Left:
    """A compiled optimizer step beside a compiled model."""
    model = Blocks()
    run = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = compiled(lambda: optimizer.step())
    for number in range(STEPS):
        optimizer.zero_grad()
        run(_data(number)).square().mean().backward()
        step()
    return _left(model, optimizer)


def compiled_backward(compiled: Compile) -> Left:
    """Compiled autograd: a whole training step, backward pass included, is compiled."""
    model = Blocks()

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    run = compiled(step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch._dynamo.config.patch(compiled_autograd=True):
        for number in range(STEPS):
            run(_data(number))
            optimizer.step()
            optimizer.zero_grad()
    return _left(model, optimizer)


RUNS = (checkpoint_inside, checkpoint_around, accumulation, scaled, compiled_optimizer, compiled_backward)
Make = Callable[[], Case]

pytestmark = [
    # Dynamo looks at `.grad` of every tensor that enters a region after a graph break
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # torch's and transformers' own warnings: none is about what is tested here
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.timeout(600),
]


def unchecked(model: nn.Module, compiler: str = "inductor") -> Any:
    """A compiler as numcheck runs it, without numcheck."""
    return torch.compile(model, backend=compiler, options={"fallback_random": True} if compiler == "inductor" else None)


def train(make: Make, compile_model: Compile, steps: int) -> tuple[Case, list[torch.Tensor]]:
    """Train a new model from a fixed seed: the case, and losses, weights, buffers, gradients and random state."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    np.random.seed(0)  # wav2vec2 draws the times that it masks with NumPy
    case = make()
    case.model.train()
    compiled = compile_model(case.model)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = case.loss(compiled(**case.inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return case, [*losses, *training_state(case.model)]


def covered(report: cb.Report) -> bool:
    """Whether the check passed, every call of every region was checked, and nothing at all was skipped.

    In half precision a kernel's tensor of a few numbers may be, since the region's results are compared all the same.
    """
    assert agreed(report)
    for skip in report.coverage.skipped:
        assert (skip.subject, skip.matters) == ("operators by themselves", False)
        assert "too few of its elements" in skip.reason
    assert all(region.calls == region.checked_calls > 0 for region in report.coverage.regions)
    return True


def check_training(make: Make, steps: int, compiler: str = "inductor") -> cb.Report:
    """Train unchecked and checked; the runs must agree bit for bit, and the check must have seen every gradient."""
    with cb.collect() as session:
        case, state = train(make, lambda model: checked(model, compiler), steps)
    report = session.report
    _, unchecked_state = train(make, partial(unchecked, compiler=compiler), steps)
    assert covered(report)
    assert backwards(report) >= steps
    trained = [parameter for parameter in case.model.parameters() if parameter.grad is not None]
    assert trained
    assert report.coverage.checked["gradients"] >= steps * len(trained)
    assert same_bits(state, unchecked_state)
    assert not torch.equal(state[0], state[steps - 1])  # it did train
    return report


# what every change is tested with


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("make", "steps"),
    [(partial(bert_masked_lm, layers=1), 2), (resnet, 5), (dropout_mlp, 5)],
    ids=["bert", "resnet", "dropout"],
)
def test_models_train_under_inductor(make: Make, steps: int) -> None:
    report = check_training(make, steps)
    statistics = [name for name, _ in make().model.named_buffers() if "running" in name or "batches" in name]
    assert report.coverage.checked.get("mutated inputs", 0) == steps * len(statistics)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_wrong_gradient_in_bert_has_the_users_parameter_name(dropout: float) -> None:
    name = "bert.encoder.layer.0.output.dense.weight"

    def program() -> None:
        case = bert_masked_lm(dropout=dropout, layers=1)
        case.loss(checked(case.model, faults.scaled_gradient(name, how="aot"))(**case.inputs)).backward()

    report = gathered(program)
    (finding,) = report.findings
    assert finding.subject == f"grad[{name}]"
    assert finding.kind.fails
    assert finding.kind is cb.Kind.LOGIC or dropout  # 1% of a gradient; dropout can keep float64 from showing it
    assert f"grad[{name}]" in " ".join(report.to_text(verbose=True).split())
    assert finding.metrics.max_rel_diff == pytest.approx(0.01, rel=1e-3)


# of many kinds

COMPILERS = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", WRITTEN_HERE)
def test_models_written_here(name: str, compiler: str) -> None:
    check_training(WRITTEN_HERE[name], 2, compiler)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models(name: str, compiler: str) -> None:
    check_training(HUGGING_FACE[name], 2, compiler)


class Tagger(nn.Module):
    """Words through an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(words))
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), torch.arange(words.numel()) % 5)


def tagger() -> Case:
    return Case(Tagger(), {"words": torch.randint(64, (2, 4))}, lambda returned: returned)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_lstm_where_dynamo_compiles_it(compiler: str) -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        check_training(tagger, 2, compiler)


@pytest.mark.skipif(torch.__version__.startswith("2.15."), reason="there Dynamo compiles it with that option, too")
def test_an_lstm_that_dynamo_does_not_compile_is_no_pass() -> None:
    with torch._dynamo.config.patch(allow_rnn=False):  # the default before torch 2.15: such a frame stays in Python
        report = gathered(lambda: train(tagger, lambda model: checked(model, "aot_eager"), 2))
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert not report.coverage.regions


# Hugging Face Trainer


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Synthetic sentences with labels."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words[0] % 2}


def train_with_trainer(folder: Path, prepare: Callable[[nn.Module], Any]) -> tuple[nn.Module, float]:
    """Train BERT for 3 steps with Hugging Face's Trainer: the trained model, and the mean loss."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = bert_classifier(layers=1).model
    prepare(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    result = transformers.Trainer(model=model, args=arguments, train_dataset=Sentences()).train()
    assert result.global_step == 3
    return model, result.training_loss


def compiled_in_place(backend: str, **options: Any) -> Callable[[nn.Module], None]:
    """`nn.Module.compile`: the model stays the same object, and Trainer needs no ``torch_compile``."""
    return lambda model: model.compile(backend=backend, options=options or None)


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.inductor
def test_hugging_face_trainer_with_a_model_compiled_in_place(tmp_path: Path) -> None:
    with cb.collect() as session:
        model, loss = train_with_trainer(tmp_path, compiled_in_place("numcheck", on_divergence="record"))
    unchecked_model, unchecked_loss = train_with_trainer(tmp_path, compiled_in_place("inductor", fallback_random=True))
    report = session.report
    assert covered(report)
    assert backwards(report) == 3
    assert report.coverage.checked["gradients"] >= 3 * len(list(model.parameters()))
    assert same_bits(list(model.state_dict().values()), list(unchecked_model.state_dict().values()))
    assert loss == unchecked_loss


@pytest.mark.slow
@pytest.mark.ci_sample
def test_hugging_face_trainer_stops_at_a_wrong_compiler(tmp_path: Path) -> None:
    wrong = faults.scaled_gradient("classifier.weight", how="aot")
    with pytest.raises(cb.DivergenceError, match=r"grad\[.*classifier\.weight\]"):
        train_with_trainer(tmp_path, lambda model: model.compile(backend="numcheck", options={"compiler": wrong}))


# whole programs


def _both(run: Callable[[Compile], Left], compiler: str) -> tuple[Left, Left, cb.Report]:
    """What a run leaves, unchecked and checked, and what the check says."""
    torch.manual_seed(3)
    plain = run(lambda function: torch.compile(function, backend=compiler))
    torch._dynamo.reset()
    torch.manual_seed(3)
    with cb.collect() as session:
        watched = run(lambda function: checked(function, compiler))
    return plain, watched, session.report


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_checked_run_leaves_the_same_bits(run: Callable[[Compile], Left]) -> None:
    plain, watched, report = _both(run, "aot_eager")
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert report.coverage.checked["outputs"] + report.coverage.checked.get("mutated inputs", 0) > 0
    assert report.coverage.checked["tensors"] > 6
    assert same_bits(plain, watched)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_pipelines_and_split_graphs_leave_the_same_weights_on_each_rank(tmp_path: Path) -> None:
    programs: list[tuple[str, dict[str, Any]]] = [
        ("piped", {"handmade": True}),
        ("piped", {"handmade": False}),
        ("alike", {"kind": "split ddp", "steps": 4}),
    ]
    ranks = values_of(run_ranks("tests.support.rank_programs:several", tmp_path, programs=programs))
    for told in [told for rank in ranks for told in rank]:
        assert told["verdict"] == "pass", told["text"]
        assert told["equal"]
        assert told["checked"]["gradients"] > 0
    assert all(rank[2]["regions"] > 1 for rank in ranks)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "how", [pytest.param({"every": 1}, marks=pytest.mark.ci_sample), {"budget": 0.2}], ids=["every call", "budget"]
)
def test_nothing_grows_with_the_steps(how: dict[str, float]) -> None:
    benchmark = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_long_run.py"
    with cb.collect() as session:
        _, early, *_, last = runpy.run_path(str(benchmark))["samples"](1500, compiler="aot_eager", **how)
    assert session.report.coverage.regions[0].calls == 1500
    assert last.descriptors == early.descriptors
    assert last.tensors <= early.tensors + 16  # with a budget, a check may be under way
    assert last.objects - early.objects < 600  # less than one in two steps
    assert last.resident - early.resident < 8 * 2**20
