"""What a watched backward pass tells: the gradients from outside, and which autograd nodes are the candidate's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.autograd import forward_ad

import checked_backend as cb
from tests.support import faults
from tests.support.classifier import Classifier, Compile, data
from tests.support.region_tools import agreed, as_the_engine, audit, backwards, clean_reports, found

BOTH = ("python", "aot")


def root_and_product(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    root = x.sqrt()
    return root, root.pow(y)


@pytest.mark.parametrize("entering", [1.0, math.inf, -math.inf, math.nan])
def test_one_output_feeds_another_an_infinite_gradient(entering: float) -> None:
    """0 to the power of 1/2 has an infinite slope: what came to the root from outside cannot be had by subtraction."""

    def program(compile_: Compile) -> None:
        x = torch.tensor([0.0, 0.25, 4.0], requires_grad=True)
        results = compile_(root_and_product)(x, torch.tensor([0.5, 0.5, 2.0]))
        torch.autograd.backward(results, [torch.tensor([entering, 1.0, 1.0]), torch.ones(3)])

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 1
    for how in BOTH:
        assert found(audit(program, faults.scaled_gradient("x", how))) == {("logic", "grad[x]")}


@contextmanager
def in_another_thread() -> Iterator[Callable[[faults.Compiler], faults.Compiler]]:
    """Makes compilers whose compiled regions run in a thread of their own, which numbers its autograd nodes itself."""
    with ThreadPoolExecutor(1) as pool:

        def elsewhere(compiler: faults.Compiler) -> faults.Compiler:
            def compile_region(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
                region = compiler(gm, example_inputs)
                return lambda *args: pool.submit(_with_grad, torch.is_grad_enabled(), region, args).result()

            return compile_region

        yield elsewhere


def _with_grad(enabled: bool, region: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with torch.set_grad_enabled(enabled):
        return region(*args)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
def test_a_region_that_runs_in_another_thread() -> None:
    def program(compile_: Compile) -> None:
        x, labels = data()
        before = nn.Linear(*[x.shape[-1]] * 2)
        loss, logits = compile_(Classifier())(before(x).tanh(), labels)
        (loss + logits.square().sum()).backward()

    with in_another_thread() as elsewhere:
        report = audit(program, elsewhere(lambda gm, _inputs: gm.forward))
        assert agreed(report)
        assert report.coverage.checked["gradients"] == 5
        report = audit(program, elsewhere(faults.scaled_gradient("hidden.weight")))
        assert found(report) == {("logic", "grad[hidden.weight]")}


@pytest.mark.parametrize("results", [1, 2])
def test_a_backward_pass_in_a_thread_of_the_engine(results: int) -> None:
    """On a GPU the hooks run where no session of the caller's is active."""

    def program(compile_: Compile) -> None:
        x, y = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
        made = compile_(lambda x, y: (x.sin() * y, y.exp()))(x, y)
        as_the_engine(lambda: sum(one.sum() for one in made[:results]).backward())

    for report in clean_reports(program):
        assert backwards(report) == 1
    for how in BOTH:
        assert found(audit(program, faults.scaled_gradient("y", how))) == {("logic", "grad[y]")}


@pytest.mark.parametrize("on_divergence", ["record", "fallback"])
def test_an_input_that_is_cut_off(on_divergence: str) -> None:
    """A backward pass does not come to it, which does not say that nobody needs its gradient."""
    x, y, z = (torch.randn(2, 3, requires_grad=True) for _ in "xyz")

    def program(compile_: Compile) -> None:
        compile_(lambda x, y, z: x.sin() * y * z.detach())(x, y, z).sum().backward()

    def cut_off(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda x, y, z: gm(x, y.detach(), z)

    assert found(audit(program, cut_off, on_divergence=on_divergence)) == {("structure.type", "grad[y]")}
    assert (y.grad is None) == (on_divergence == "record")
    assert z.grad is None
    assert agreed(audit(program, "eager", on_divergence=on_divergence))


def wrong_in(run: Callable[[fx.GraphModule, torch.Tensor, torch.Tensor], Any]) -> faults.Compiler:
    """A compiler whose programs are a function of the graph and its two inputs."""
    return lambda gm, _inputs: lambda x, y: run(gm, x, y)


def two_results(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.tanh() * y, (x * y).sum(-1)


@pytest.mark.parametrize("reference", ["keep", "recompute"])
@pytest.mark.parametrize("used", [[0], [1], [0, 1]])
def test_a_result_that_is_a_new_leaf(used: list[int], reference: str) -> None:
    """It requires grad as eager's does, but no backward pass that begins at it comes to the region."""

    def program(compile_: Compile) -> None:
        results = compile_(two_results)(*(torch.randn(2, 3, requires_grad=True) for _ in "xy"))
        sum(results[number].sum() for number in used).backward()

    def leaf(gm: fx.GraphModule, x: torch.Tensor, y: torch.Tensor) -> Any:
        first, second = gm(x, y)
        return first, second.detach().requires_grad_()

    options = {"on_divergence": "record", "reference": reference}
    assert found(audit(program, wrong_in(leaf), **options)) == {("structure.requires_grad", "output[1]")}
    assert agreed(audit(program, "eager", **options))


def test_an_input_that_is_cut_off_from_one_result() -> None:
    """A pass that begins at that result alone does not come to the input; one for the other input need not."""

    def program(compile_: Compile, only: bool = False) -> None:
        x, y = (torch.randn(2, 3, requires_grad=True) for _ in "xy")
        _, result = compile_(two_results)(x, y)
        torch.autograd.grad(result.sum(), [x] if only else [x, y], allow_unused=True)

    cut = wrong_in(lambda gm, x, y: (gm(x, y)[0], gm(x, y.detach())[1]))
    assert found(audit(program, cut, on_divergence="record")) == {("structure.type", "grad[y]")}
    for clean in ("eager", "aot_eager"):
        assert agreed(audit(partial(program, only=True), clean))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("reference", ["keep", "recompute"])
def test_gradients_that_lead_past_a_write(reference: str) -> None:
    """The input is written to with grad mode off: its gradient goes where it went before, and no pass shows that."""

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return y.sin()

    def program(compile_: Compile) -> None:
        x, y = (torch.randn(2, 3, requires_grad=True) for _ in "xy")
        given = x * 1
        (compile_(written)(given, y) + given).sum().backward()

    @wrong_in
    def without_grad(gm: fx.GraphModule, x: torch.Tensor, y: torch.Tensor) -> Any:
        results = gm(x.clone(), y)
        with torch.no_grad():
            x.add_(y)
        return results

    options = {"on_divergence": "record", "reference": reference}
    assert found(audit(program, without_grad, **options)) == {("structure.requires_grad", "mutated[x]")}
    for clean in ("eager", "aot_eager"):
        assert agreed(audit(program, clean, **options))


def test_a_backward_pass_that_writes_to_an_input() -> None:
    def program(compile_: Compile) -> None:
        x, y = (torch.randn(2, 3, requires_grad=True) for _ in "xy")
        compile_(torch.mul)(x, y).sum().backward()

    def writes(results: list[Any], saved: Sequence[torch.Tensor]) -> Any:
        results = [one.clone() for one in results]
        saved[0].data.mul_(1.5)
        return results

    report = audit(program, faults.compiled_by_aot(backward=lambda _gm: writes), on_divergence="record")
    assert found(report) == {("mutation.unexpected", "mutated[args[0]]")}
    assert "backward pass" in report.findings[0].message


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's rules of forward-mode AD
def test_tangents_of_forward_mode_ad_are_in_the_coverage() -> None:
    def program(compile_: Compile) -> None:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.randn(3), torch.randn(3))
            assert forward_ad.unpack_dual(compile_(torch.sin)(x)).tangent is not None

    report = audit(program, "eager")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    [skip] = report.coverage.skipped
    assert skip.subject in ("tangents of forward-mode AD", "the compiled code")  # torch 2.15 compiles nothing there


def test_many_gradients_at_once_are_in_the_coverage() -> None:
    def program(compile_: Compile) -> None:
        x = torch.randn(3, requires_grad=True)
        rows = torch.autograd.grad(compile_(torch.sin)(x), x, torch.eye(3), is_grads_batched=True)
        torch.testing.assert_close(rows[0], x.detach().cos().diag())

    report = audit(program, "eager")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    [skip] = report.coverage.skipped
    assert skip.subject == "gradients"
    assert skip.reason.startswith("unsupported: many gradients come at once")


def test_gradients_of_gradients_accuse_nobody() -> None:
    """They come to what the first pass has saved inside of the region, as a gradient penalty's do."""

    def program(compile_: Compile) -> None:
        x = torch.randn(3, requires_grad=True)
        loss = compile_(lambda x: x.tanh().sin())(x).sum()
        [slope] = torch.autograd.grad(loss, x, create_graph=True)
        (slope.square().sum() + loss).backward()

    report = audit(program, "eager")
    assert report.verdict is cb.Verdict.PASS
    assert any("gradients of gradients come to tensors inside" in skip.reason for skip in report.coverage.skipped)
    assert found(audit(program, faults.scaled_gradient("x", "python"))) == {("logic", "grad[x]")}
