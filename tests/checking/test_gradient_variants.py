"""Backward passes that are wrong for some incoming gradients alone: little precision, a layout, one of many outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from checked_backend.checking import program_run
from tests.support import faults
from tests.support.check_tools import Net, agreed, batch, differentiated, found, rounding_otherwise, skips


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("narrow", [torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_incoming_gradients_that_are_cast_are_found(narrow: torch.dtype) -> None:
    wrong = faults.spoiled_tangents(lambda gradient: gradient.to(narrow).to(gradient.dtype))
    subjects = {subject for _, subject in found(cb.check(nn.Linear(8, 4), (batch(),), compiler=wrong))}
    assert {"grad[weight]", "grad[bias]"} <= subjects


def test_a_backward_pass_that_is_wrong_for_what_a_loss_sends_alone_is_found() -> None:
    """``loss.backward()`` sends 1."""
    wrong = faults.spoiled_tangents(lambda gradient: gradient * 2 if bool((gradient == 1).all()) else gradient)
    report = cb.check(lambda x: x.square().sum(), (batch().requires_grad_(),), compiler=wrong)
    assert found(report) == {("logic", "grad[x]")}


def test_a_bias_gradient_that_is_accumulated_in_half_precision_is_found() -> None:
    def summed_in_half(results: list[Any], args: Sequence[Any]) -> Any:
        (tangent,) = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.shape == (16, 4)]
        summed = tangent.bfloat16().sum(0).float()
        return tuple(summed if getattr(value, "shape", None) == (4,) else value for value in results)

    compiler = faults.compiled_by_aot(backward=lambda _gm: summed_in_half)
    report = cb.check(nn.Linear(8, 4), (batch(16, 8),), compiler=compiler)
    assert {subject for _, subject in found(report)} == {"grad[bias]"}


@pytest.mark.more
def test_every_one_of_many_scalar_outputs_has_a_gradient() -> None:
    compiler = faults.spoiled_output(lambda value: faults.SpoilGradient.apply(value, lambda sent: sent * 3), 49)
    x = batch(60, grad=True)
    report = cb.check(lambda x: tuple(part * 2 for part in x.unbind()), (x,), compiler=compiler)
    assert {subject for _, subject in found(report)} == {"grad[x]"}


@pytest.mark.more
def test_every_step_has_a_gradient() -> None:
    passes, step = iter(range(1000)), 26
    wrong = faults.spoiled_tangents(lambda gradient: gradient * 3 if next(passes) == step else gradient)
    (finding,) = cb.check(lambda x: x.sum(), (batch(3, grad=True),), compiler=wrong, iterations=28).findings
    assert finding.evidence["step"] == f"{step + 1} of 28"


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], bool], str]] = {
    "expanded": (lambda g: g.numel() > 1 and not any(g.stride()), "expanded"),
    "transposed": (lambda g: g.stride(-1) > g.stride(-2) > 0 and g.stride(1) > 1, "transposed with gaps at an offset"),
    "offset": (lambda g: g.storage_offset() > 0, "transposed with gaps at an offset"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backward_pass_that_is_wrong_for_one_layout_is_found_and_the_layout_told(layout: str) -> None:
    condition, words = LAYOUTS[layout]
    wrong = faults.spoiled_tangents(lambda gradient: gradient * 1.01 if condition(gradient) else gradient)
    report = cb.check(nn.Conv2d(3, 4, 3), (batch(2, 3, 6, 6),), compiler=wrong)
    assert report.verdict is cb.Verdict.FAIL
    for finding in report.findings:
        assert finding.subject.startswith("grad[")
        assert finding.evidence["failing_calls"] == f"with incoming gradients {words}"
        assert f"with incoming gradients {words}" in finding.message


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("silent", "words"), [(1, "at the first output alone"), (0, "at all outputs but the first")])
def test_a_backward_pass_that_is_wrong_where_an_output_gets_no_gradient_is_found(silent: int, words: str) -> None:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *both: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.set_materialize_grads(False)
            return tuple(one.view_as(one) for one in both)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            factor = 1 if gradients[silent] is not None else 2
            return tuple(None if gradient is None else gradient * factor for gradient in gradients)

    check = partial(cb.check, lambda x: (x.sin(), x.cos()), (batch(grad=True),))
    (finding,) = check(compiler=lambda gm, _: lambda *args: Pair.apply(*gm.forward(*args))).findings
    assert (finding.detail, finding.subject) == ("logic", "grad[x]")
    assert finding.evidence["failing_calls"] == f"with incoming gradients {words}"
    for compiler in ("eager", "aot_eager"):
        assert words in str(agreed(check(compiler=compiler)).coverage.notes)


@pytest.mark.more
def test_it_is_found_beside_training_and_beside_other_variants() -> None:
    wrong = faults.spoiled_tangents(lambda gradient: gradient if gradient.is_contiguous() else gradient * 1.01)
    for how in ({"optimizer": torch.optim.SGD, "iterations": 2}, {"vary_layout": True}):
        report = cb.check(nn.Linear(8, 4), (batch(),), compiler=wrong, **how)  # type: ignore[arg-type]
        assert {subject for _, subject in found(report)} == {"grad[weight]", "grad[bias]"}, how
        assert all("incoming gradients" in finding.evidence["failing_calls"] for finding in report.findings)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda g: torch.where(g.isinf(), 0.0, g), "infinite"),
        (lambda g: torch.where(g.isnan(), 0.0, g), "NaN"),
        (lambda g: torch.where(g.isnan(), g.nan_to_num(0.0, 0.0, 0.0).abs().max(), g), "NaN"),
    ],
)
def test_a_backward_pass_that_hides_an_overflow_from_a_loss_scaler_is_found(fault: faults.Spoil, words: str) -> None:
    report = cb.check(mlp(), (batch(),), compiler=faults.spoiled_tangents(fault))
    assert found(report) == {("nonfinite", f"grad[{name}]") for name, _ in mlp().named_parameters()}
    for finding in report.findings:
        assert finding.evidence["failing_calls"] == f"with incoming gradients of which some are {words}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_where_an_overflow_shows_is_free(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas that are equal for numbers, as ``x * mask`` and ``where(mask, x, 0)``, make NaN of different ones."""
    looked_into: list[Any] = []
    monkeypatch.setattr(program_run, "investigate", lambda _failure, found: [*found, looked_into.append(found)])
    spread = faults.spoiled_tangents(lambda g: g if bool(g.isfinite().all()) else torch.full_like(g, number))
    agreed(cb.check(mlp(), (batch(),), compiler=spread, localize=True))
    assert not looked_into


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))


class Tagger(nn.Module):
    """Words in, a loss and the scores out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, words: torch.Tensor, tags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.norm(self.words(words)))
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten()), scores.softmax(-1)


CLEAN: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "mlp": lambda: (mlp(), (batch(),)),
    "mlp in bfloat16": lambda: (mlp().bfloat16(), (batch().bfloat16(),)),
    "batch norm": lambda: (Net(0.0), (batch(),)),
    "layer norm": lambda: (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), (batch(2, 3, 8),)),
    "conv in float16": lambda: (conv_net().half(), (batch(2, 3, 6, 6).half(),)),
    "softmax in float16": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).half(), (batch(64, 8).half(),)),
    "tagger in bfloat16": lambda: (Tagger().bfloat16(), (torch.randint(11, (2, 6)), torch.randint(5, (2, 6)))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CLEAN)
def test_clean_programs_agree_with_gradients_of_every_layout(name: str) -> None:
    model, args = CLEAN[name]()
    report = agreed(cb.check(model, args, compiler=rounding_otherwise))
    assert "gradients were also compared with incoming ones transposed with gaps" in str(report.coverage.notes)
    agreed(cb.check(model, args, compiler="aot_eager"))


@pytest.mark.parametrize("iterations", [1, 2])
def test_counts_are_those_of_the_users_own_calls(iterations: int) -> None:
    coverage = agreed(cb.check(nn.Linear(8, 4), (batch(),), compiler="aot_eager", iterations=iterations)).coverage
    assert coverage.checked["gradients"] == 2 * iterations
    assert coverage.checked["kinds of incoming gradients"] == 4
    (region,) = coverage.regions
    assert (region.calls, region.checked_calls, region.checked_backwards) == (iterations, iterations, iterations)


def turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.t_()
    x.select(0, 7)  # which every second call cannot do
    return y * 2


without_gaps = differentiated(lambda x: x * 2, lambda gradient: gradient.view(-1).mul(2).view(gradient.shape))
"""Takes no gradient whose memory has gaps."""


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return without_gaps(self.norm(x) + self.norm.running_mean)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_after_a_call_that_eager_refuses_both_go_on_from_the_same(compiler: str) -> None:
    x, y = torch.ones(2, 8), torch.ones(2, 2, requires_grad=True)
    assert agreed(cb.check(turned, (x, y), compiler=compiler, gradients=True))
    torch._dynamo.reset()
    report = agreed(cb.check(Running(), (torch.randn(6, 8, requires_grad=True),), compiler=compiler))
    told = "with incoming gradients transposed with gaps at an offset: eager refuses it: RuntimeError: view"
    assert told in skips(report)


def test_no_call_goes_on_with_a_history_that_the_first_one_has_written() -> None:
    """Compiled, it is a part of what is differentiated."""

    def kept(last: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        last.add_(w.sum())
        return w * 1

    for given in (torch.randn(2, 3), torch.randn(2, 3).t(), torch.randn(2, 3, requires_grad=True) * 1):
        report = cb.check(kept, (given, torch.randn(2, 3, requires_grad=True)), compiler="aot_eager")
        assert skips(agreed(report)).count("left out: the call before it gave what it wrote to a history") == 4


def test_calls_for_which_there_is_no_time_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_run, "LEAST_SECONDS", -1.0)
    monkeypatch.setattr(program_run, "SHARE", -1.0)
    report = agreed(cb.check(nn.Linear(8, 4), (batch(),), compiler="eager"))
    assert skips(report).count("with incoming gradients") == skips(report).count("left out: those before it") == 4
