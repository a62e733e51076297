"""Modes around a region and in it, and activation checkpointing: each passes when clean and is caught when wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from tests.support import faults
from tests.support.classifier import Classifier, Compile, data
from tests.support.region_tools import agreed, audit, backwards, calls, clean_reports, found

BOTH = ("python", "aot")

# modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    def program(compile_: Compile) -> None:
        with mode():
            loss, _ = compile_(Classifier())(*data())
        if loss.requires_grad:
            raise AssertionError

    for report in clean_reports(program):
        assert report.coverage.checked["outputs"] == 2
        assert backwards(report) == 0
    for how in BOTH:
        assert found(audit(program, faults.one_element(1, how))) == {("logic", "output[1]")}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_mutation_without_gradients(mode: Callable[[], Any]) -> None:
    def program(compile_: Compile) -> None:
        with mode():
            compile_(lambda x: x.mul_(2))(torch.randn(3))

    for report in clean_reports(program):
        assert report.coverage.checked["mutated inputs"] == 1
    for how in BOTH:
        assert ("mutation.wrong", "mutated[x]") in found(audit(program, faults.wrong_mutation("x", how)))


def test_a_parameter_without_gradients_where_effects_are_unknown() -> None:
    """What a cond mutates is not known, so eager gets copies of the parameters, which never require grad."""
    layer = nn.Linear(4, 4)

    def program(compile_: Compile) -> Any:
        def branch(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda t: layer(t).sin(), lambda t: layer(t).cos(), (x,))

        with torch.no_grad():
            return compile_(branch)(torch.randn(2, 4))

    clean_reports(program)


def test_no_grad_inside_the_region() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            scale = x.exp()
        return x * scale, scale

    def program(compile_: Compile) -> None:
        compile_(run)(torch.randn(5, requires_grad=True))[0].sum().backward()

    for report in clean_reports(program):
        assert backwards(report) == 1
    for how in BOTH:
        assert found(audit(program, faults.scaled_gradient("x", how))) == {("logic", "grad[x]")}


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool) -> None:
    """bfloat16 on the CPU; the backward pass runs outside of the autocast block."""

    class Autocast(Classifier):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x, target)

    def program(compile_: Compile) -> None:
        model = compile_(Autocast() if inside else Classifier())
        with nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
            loss, logits = model(*data())
        if logits.dtype is not torch.bfloat16:
            raise AssertionError
        loss.backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 4
    assert ("logic", "output[1]") in found(audit(program, faults.wrong_value(1, "python")))
    assert found(audit(program, faults.scaled_gradient("hidden.weight", "aot"))) == {("logic", "grad[hidden.weight]")}


# activation checkpointing


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_activation_checkpointing(dropout: float) -> None:
    """The block runs again in the backward pass, from the same random state.

    With dropout only through AOT autograd: where a region runs as it is, torch runs the block again from another
    random state, so that `backend="eager"` itself is wrong.
    """

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout))
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    def program(compile_: Compile) -> None:
        compiled = compile_(Checkpointed())
        for _ in range(2):
            compiled(torch.randn(5, 6)).square().sum().backward()

    for report in clean_reports(program) if not dropout else [audit(program, "aot_eager")]:
        assert agreed(report)
        assert backwards(report) == 2
        assert report.coverage.checked["gradients"] == 8
    for how in BOTH if not dropout else ("aot",):
        assert {subject for _, subject in found(audit(program, faults.wrong_value(0, how)))} >= {"output[0]"}
        report = audit(program, faults.zeroed_gradient("block.0.weight", how))
        assert {subject for _, subject in found(report)} == {"grad[block.0.weight]"}
        assert report.verdict is cb.Verdict.FAIL


def test_checkpoint_around_a_compiled_block() -> None:
    """The block is compiled, its checkpoint is not: the region runs again in the backward pass, until that has all."""

    def program(compile_: Compile) -> None:
        block = compile_(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
        x = torch.randn(5, 6, requires_grad=True)
        checkpoint(block, x, use_reentrant=False).square().sum().backward()

    for report in clean_reports(program):
        assert [region.calls for region in report.coverage.regions] == [2]
        assert calls(report) == backwards(report) == 1
    assert ("logic", "grad[2.weight]") in found(audit(program, faults.scaled_gradient("2.weight", "aot")))
