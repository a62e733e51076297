"""Inputs that a backward pass writes to are the user's still, and what is not compared is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from checked_backend._torch.dynamo import lookup_backend
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered


class Counting(torch.autograd.Function):
    """Adds up its gradients in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.seen = seen
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.seen.view(-1).add_(gradients[0].sum())
        return gradients[0] * x.cos(), None


class Scratch(torch.autograd.Function):
    """Writes to its own tensors only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _seen: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        own = gradients[0].clone()
        own.mul_(x.cos())
        return own, None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("kind", "verdict"), [(Counting, cb.Verdict.INCONCLUSIVE), (Scratch, cb.Verdict.PASS)])
def test_it_is_written_to_once_and_said_not_to_be_compared(kind: Any, verdict: cb.Verdict) -> None:
    seen = []
    for backend, options in (("eager", None), ("numcheck", {"compiler": "eager", "on_divergence": "record"})):
        torch._dynamo.reset()
        buffer = torch.zeros(1)
        run = torch.compile(lambda x, buffer: kind.apply(x * 2, buffer) + 1, backend=backend, options=options)
        with cb.collect() as session:
            run(torch.ones(4, requires_grad=True), buffer).sum().backward()
        seen.append(buffer.tolist())
    assert seen[0] == seen[1]
    assert session.report.verdict is verdict
    assert [skip.subject for skip in session.report.coverage.skipped] == ["inputs"] * (kind is Counting)


@torch.compiler.nested_compile_region
def nested(x: Tensor) -> Tensor:
    return torch.relu(x).cos()


def test_gradients_of_a_nested_region_are_checked() -> None:
    """Eager cannot differentiate the operator that stands for it."""
    x = torch.randn(5, requires_grad=True)
    clean = agreed(cb.check(lambda x: nested(nested(x)) * 2, (x,), compiler="aot_eager"))
    assert clean.coverage.checked["gradients"] == 1
    wrong = cb.check(lambda x: nested(nested(x)) * 2, (x,), compiler=faults.scaled_gradient("x", how="aot"))
    assert "grad[x]" in [finding.subject for finding in wrong.findings]


def scaled_gradient_of_aot_eager(name: str) -> Any:
    """Scale the gradient that goes to an input of what the backend ``aot_eager`` makes."""

    def compiler(gm: fx.GraphModule, example_inputs: Any) -> Any:
        place, run = faults.input_position(gm, name), lookup_backend("aot_eager")(gm, example_inputs)

        def scaled(tensor: Tensor) -> Any:
            return faults.SpoilGradient.apply(tensor, lambda gradient: gradient * 1.01)  # type: ignore[no-untyped-call]

        return lambda *args: run(*args[:place], scaled(args[place]), *args[place + 1 :])

    return compiler


def test_statistics_of_a_checkpointed_batch_norm() -> None:
    """Eager updates them once more when it recomputes, compiled programs do not; the gradients are compared."""

    def report_of(compiler: Any) -> cb.Report:
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
        model = checked(lambda x: checkpoint(block, x, use_reentrant=False), compiler)
        return gathered(lambda: model(torch.randn(6, 4)).square().sum().backward())

    report = report_of("aot_eager")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert not found(report)
    assert report.coverage.checked["gradients"] == 4
    [skip] = [skip for skip in report.coverage.skipped if skip.matters]
    assert skip.reason == "written to in the backward pass, of which gradients alone are compared"
    [finding] = report_of(scaled_gradient_of_aot_eager("1.weight")).findings
    assert (finding.detail, finding.subject) == ("logic", "grad[1.weight]")


def _recomputed(gm: fx.GraphModule, _example_inputs: Any) -> Any:
    """The backward pass computes from the inputs as they are by then what eager has kept."""

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            ctx.inputs = inputs
            return gm.forward(*inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            with torch.enable_grad():
                leaves = [one.detach() for one in ctx.inputs]
                for leaf, wanted in zip(leaves, ctx.needs_input_grad, strict=True):
                    leaf.requires_grad_(wanted)
                results = gm.forward(*leaves)
            made = iter(torch.autograd.grad(results, [one for one in leaves if one.requires_grad], gradients))
            return tuple(next(made) if leaf.requires_grad else None for leaf in leaves)

    return Late.apply


def _scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (x * weight * (scale + 1).sin().exp()).sum(0)


@pytest.mark.parametrize("reference", ["keep", "recompute"])
@pytest.mark.parametrize(("compiler", "wrong"), [(faults.clean("aot"), False), (_recomputed, True)])
def test_inputs_that_are_written_to_before_the_backward_pass(compiler: Any, wrong: bool, reference: Any) -> None:
    """Autograd counts no writes through ``.data``. All further runs start from what is there by then."""
    weight, scale = torch.randn(8, requires_grad=True), torch.ones(8)
    run = checked(_scaled, compiler, reference=reference)

    def step() -> None:
        total = run(torch.randn(4, 8), weight, scale).square().sum()
        scale.data.mul_(1.5)
        total.backward()

    report = gathered(lambda: [step() for _ in range(3)])
    if reference == "recompute":
        assert report.verdict is cb.Verdict.INCONCLUSIVE
        assert any("wrote to scale after the forward pass" in skip.reason for skip in report.coverage.skipped)
        return
    assert not report.findings
    assert report.verdict is (cb.Verdict.INCONCLUSIVE if wrong else cb.Verdict.PASS)
    told = [skip.subject for skip in report.coverage.skipped if "the program wrote to scale between" in skip.reason]
    assert told == (["grad[weight]"] if wrong else [])


@pytest.mark.parametrize("factor", [1.001, 1 + 2e-7])
@pytest.mark.parametrize(
    "write",
    [
        lambda scale: scale.data.mul_(1.5),
        lambda scale: scale.data.fill_(float("nan")),
        lambda scale: scale.untyped_storage().resize_(0),
    ],
)
def test_no_noise_is_taken_from_what_was_written_since(write: Any, factor: float) -> None:
    """To run a region on memory that was freed would end the process."""
    weight, scale = torch.randn(8, requires_grad=True), torch.ones(8)
    run = checked(_scaled, faults.spoiled_gradient("weight", lambda gradient: gradient * factor, "aot"))

    def step() -> None:
        total = run(torch.randn(4, 8), weight, scale).sum()
        write(scale)
        total.backward()

    report = gathered(step)
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert not found(report)
