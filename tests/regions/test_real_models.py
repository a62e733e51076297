"""Real models under Inductor: a clean run passes, with full coverage and the bits of the unchecked run.

And a run that goes wrong is found, under the user's own parameter name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.models import (
    VOCABULARY,
    Case,
    bert_classifier,
    bert_masked_lm,
    dropout_mlp,
    gpt2_lm,
    resnet,
    vit_classifier,
)
from tests.support.region_tools import agreed, backwards, calls, checked, gathered, same_bits, training_state

pytestmark = [
    # Dynamo looks at `.grad` of every tensor that enters a region after a graph break
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.timeout(600),
]

Make = Callable[[], Case]
Compile = Callable[[nn.Module], Any]


def unchecked(model: nn.Module) -> Any:
    """Inductor as numcheck runs it, without numcheck."""
    return torch.compile(model, backend="inductor", options={"fallback_random": True})


def under_inductor(model: nn.Module) -> Any:
    return checked(model, "inductor")


def train(
    make: Make,
    compile_model: Compile,
    steps: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Case, list[torch.Tensor]]:
    """Train a new model from a fixed seed.

    Returns:
        The case, and all that can be seen of the run: losses, weights, buffers, gradients, the random state.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = make()
    compiled = compile_model(case.model)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with around():
            loss = case.loss(compiled(**case.inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return case, [*losses, *training_state(case.model)]


def infer(make: Make, compile_model: Compile) -> list[torch.Tensor]:
    """The tensors that a new model in inference returns, from a fixed seed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = make()
    case.model.eval()
    with torch.no_grad():
        returned = compile_model(case.model)(**case.inputs)
    values = returned.values() if isinstance(returned, dict) else [returned]
    return [value for value in values if isinstance(value, torch.Tensor)]


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


def check_training(
    make: Make,
    steps: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> cb.Report:
    """Train unchecked and checked; the runs must agree bit for bit, and the check must have seen every gradient."""
    runs: list[list[torch.Tensor]] = []
    cases: list[Case] = []

    def program() -> None:
        case, state = train(make, under_inductor, steps, around)
        cases.append(case)
        runs.append(state)

    report = gathered(program)
    runs.append(train(make, unchecked, steps, around)[1])
    assert covered(report)
    assert backwards(report) >= steps
    trained = [parameter for parameter in cases[0].model.parameters() if parameter.grad is not None]
    assert trained
    assert report.coverage.checked["gradients"] >= steps * len(trained)
    assert same_bits(*runs)
    assert not torch.equal(runs[0][0], runs[0][steps - 1]) or steps == 1  # it did train
    return report


def check_inference(make: Make) -> cb.Report:
    """Infer unchecked and checked; the results must agree bit for bit."""
    runs: list[list[torch.Tensor]] = []
    report = gathered(lambda: runs.append(infer(make, under_inductor)))
    runs.append(infer(make, unchecked))
    assert covered(report)
    assert calls(report) >= 1
    assert report.coverage.checked["outputs"] >= len(runs[0])
    assert "gradients" not in report.coverage.checked
    assert same_bits(*runs)
    return report


# what every change is tested with


@pytest.mark.inductor
def test_bert_trains() -> None:
    check_training(partial(bert_masked_lm, layers=1), steps=2)


@pytest.mark.inductor
def test_gpt2_infers() -> None:
    check_inference(partial(gpt2_lm, layers=1))


@pytest.mark.inductor
def test_a_resnet_with_batchnorm_trains_5_steps() -> None:
    report = check_training(resnet, steps=5)
    case = resnet()
    statistics = [name for name, _ in case.model.named_buffers()]
    assert report.coverage.checked["mutated inputs"] == 5 * len(statistics)


@pytest.mark.inductor
def test_a_model_with_dropout_trains_5_steps() -> None:
    # dropout matters here: without it the same weights would give another loss
    torch.manual_seed(0)
    case = dropout_mlp()
    assert not torch.equal(case.model(**case.inputs), case.model(**case.inputs))
    check_training(dropout_mlp, steps=5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_wrong_gradient_in_bert_has_the_users_parameter_name(dropout: float) -> None:
    name = "bert.encoder.layer.0.output.dense.weight"

    def program() -> None:
        torch.manual_seed(0)
        case = bert_masked_lm(dropout=dropout, layers=1)
        compiled = checked(case.model, faults.scaled_gradient(name, how="aot"))
        case.loss(compiled(**case.inputs)).backward()

    report = gathered(program)
    (finding,) = report.findings
    assert finding.subject == f"grad[{name}]"
    assert finding.kind.fails
    assert finding.kind is cb.Kind.LOGIC or dropout  # 1% of a gradient; dropout can keep float64 from showing it
    assert f"grad[{name}]" in " ".join(report.to_text(verbose=True).split())
    assert finding.metrics is not None
    assert finding.metrics.max_rel_diff == pytest.approx(0.01, rel=1e-3)


# at length

TEXT_MODELS = [
    pytest.param(bert_masked_lm, id="bert masked lm"),
    pytest.param(bert_classifier, id="bert classifier"),
    pytest.param(gpt2_lm, id="gpt2"),
]


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "make",
    [*TEXT_MODELS, pytest.param(vit_classifier, id="vit")],
)
def test_transformers_train(make: Callable[..., Case], attention: str) -> None:
    check_training(partial(make, attention=attention), steps=3)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "make",
    [*TEXT_MODELS, pytest.param(vit_classifier, id="vit")],
)
def test_transformers_infer(make: Callable[..., Case], attention: str) -> None:
    check_inference(partial(make, attention=attention))


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("make", [resnet, dropout_mlp])
def test_nets_infer(make: Make) -> None:
    check_inference(make)


def in_bfloat16(make: Make) -> Case:
    """The case with weights and floating-point inputs in bfloat16."""
    case = make()
    inputs = {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in case.inputs.items()
    }
    return Case(case.model.bfloat16(), inputs, case.loss)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(bert_classifier, layers=1), id="bert", marks=pytest.mark.ci_sample),
        pytest.param(resnet, id="resnet"),
    ],
)
def test_bfloat16_is_no_false_alarm(make: Make) -> None:
    check_training(partial(in_bfloat16, make), steps=3)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(bert_classifier, layers=1), id="bert"),
        pytest.param(resnet, id="resnet"),
    ],
)
def test_autocast_is_no_false_alarm(make: Make) -> None:
    check_training(make, 3, partial(torch.autocast, "cpu", dtype=torch.bfloat16))


# Hugging Face Trainer


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Synthetic sentences with labels."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words[0] % 2}


def train_with_trainer(
    folder: Path, compiler: str | None, prepare: Callable[[nn.Module], Any] = lambda _model: None
) -> tuple[nn.Module, float]:
    """Train BERT for 3 steps with Hugging Face's Trainer.

    Args:
        folder: Where Trainer writes to.
        compiler: Its ``torch_compile_backend``; None for no ``torch_compile``.
        prepare: Called with the model before Trainer gets it.

    Returns:
        The trained model, and the mean loss.
    """
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
        torch_compile=compiler is not None,
        torch_compile_backend=compiler,
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


def check_trainer(train_checked: Callable[[], tuple[nn.Module, float]], folder: Path) -> None:
    runs: list[tuple[nn.Module, float]] = []
    report = gathered(lambda: runs.append(train_checked()))
    runs.append(train_with_trainer(folder, None, compiled_in_place("inductor", fallback_random=True)))
    assert covered(report)
    assert backwards(report) == 3
    (model, loss), (unchecked_model, unchecked_loss) = runs
    assert report.coverage.checked["gradients"] >= 3 * len(list(model.parameters()))
    assert same_bits(list(model.state_dict().values()), list(unchecked_model.state_dict().values()))
    assert loss == unchecked_loss


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.inductor
@pytest.mark.xfail(
    raises=ValueError, strict=True, reason="accelerate's DynamoBackend is a closed list of the backends it knows"
)
def test_hugging_face_trainer_with_the_backends_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_ON_DIVERGENCE", "record")  # Trainer passes a backend's name and no options
    check_trainer(lambda: train_with_trainer(tmp_path, "numcheck"), tmp_path)


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.inductor
def test_hugging_face_trainer_with_a_model_compiled_in_place(tmp_path: Path) -> None:
    prepare = compiled_in_place("numcheck", on_divergence="record")
    check_trainer(lambda: train_with_trainer(tmp_path, None, prepare), tmp_path)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_hugging_face_trainer_stops_at_a_wrong_compiler(tmp_path: Path) -> None:
    wrong = faults.scaled_gradient("classifier.weight", how="aot")
    with pytest.raises(cb.DivergenceError, match=r"grad\[.*classifier\.weight\]"):
        train_with_trainer(tmp_path, None, lambda model: model.compile(backend="numcheck", options={"compiler": wrong}))
