"""A report says which part of a program Dynamo did not compile, and why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import checked_backend as cb
from tests.support.check_tools import Counting, agreed, batch, skips, undecided
from tests.support.raising import raising
from tests.support.region_tools import checked, gathered


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x: len(torch.argwhere(x)),
            "Operator `aten.nonzero.default`'s output shape depends on input Tensor data",
        ),
        (lambda x: x.tolist(), "does not support tracing `tolist()` on non-integer tensors"),
    ],
)
def test_why_no_region_was_compiled(function: Callable[..., Any], reason: str) -> None:
    told = undecided(cb.check(function, (batch(),), compiler="eager"))
    assert "the compiled program: Dynamo compiled no region of it: " in told
    assert reason in told
    assert "Developer debug context" not in told


def test_why_a_compiled_function_was_not_compiled_under_vmap() -> None:
    """Dynamo lists reasons there; the first is the user's."""
    report = gathered(lambda: torch.vmap(checked(torch.sin, "eager"))(batch()))
    assert "torch.func.vmap(compiled_fn) function from eager mode is not supported" in skips(report)


def test_the_compiler_is_named_where_dynamo_goes_on_without_it() -> None:
    """AOT autograd must know a number that a tensor holds; Dynamo then runs the code in eager."""
    start = torch.tensor(1)
    told = undecided(cb.check(lambda x: torch.narrow(x, 0, start, 1).sin(), (batch(),), compiler="aot_eager"))
    assert "Backend compiler `aot_eager` failed with aten._local_scalar_dense.default" in told


@pytest.mark.parametrize("function", [lambda x: x, lambda x: (x, 3, "text"), lambda x: len(x.shape), abs])
def test_where_nothing_is_compiled_nothing_passes(function: Callable[..., Any]) -> None:
    argument = -3 if function is abs else batch(grad=True)
    report = cb.check(function, (argument,), compiler="eager")
    assert "there is no tensor operation in it" in skips(report)
    assert str(report).startswith("INCONCLUSIVE: nothing was compiled\n")
    assert "'Not checked' says why Dynamo made no graph of the program" in " ".join(str(report).split())
    assert "Call the compiled function" not in str(report)


@torch.compiler.disable
def left_out(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class WithDisabled(torch.nn.Module):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.compiler.disable
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@pytest.mark.parametrize(
    "function",
    [
        left_out,
        lambda x: left_out(x),
        functools.partial(left_out),
        WithDisabled(),
        WithDisabled().method,
        torch.compiler.disable(torch.nn.Linear(8, 8)),
        torch.compiler.disable(lambda x: x + 1, recursive=False),
    ],
)
def test_what_is_disabled_is_not_compiled_and_does_not_pass(function: Callable[..., Any]) -> None:
    report = cb.check(function, (batch(),), compiler="eager")
    assert not report.coverage.regions
    assert "`torch.compiler.disable" in undecided(report)


def test_what_the_user_compiles_all_the_same_is_compiled() -> None:
    assert len(agreed(cb.check(torch.compile(left_out), (batch(),), compiler="eager")).coverage.regions) == 1


def test_calls_that_ran_in_eager_because_of_the_recompile_limit_do_not_pass() -> None:
    compiled = checked(lambda x, number: x * number, "eager", dynamic=False)
    with cb.collect() as session:
        with torch._dynamo.config.patch(recompile_limit=2):
            for number in range(5):
                compiled(batch(), number)
        torch._dynamo.reset()
    assert "Dynamo recompile limit exceeded" in undecided(session.report)
    assert gathered(lambda: [compiled(batch(), number) for number in range(5)]).verdict is cb.Verdict.PASS
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):  # `check` compiles as often as the program asks for it
        agreed(cb.check(Counting(), (batch(),), compiler="eager", iterations=12))


def test_a_session_in_which_nothing_was_compiled_says_why() -> None:
    with cb.collect() as session:
        torch.compile(left_out, backend="eager")(batch())  # no numcheck
        checked(lambda x: left_out(x), "eager")(batch())
    assert "Skip calling `torch.compiler.disable()`d function" in undecided(session.report)
    before = str(session.report)
    torch.compile(lambda x: x.tolist(), backend="eager")(batch())
    assert str(session.report) == before


def test_an_error_that_dynamo_hides_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = raising(RuntimeError("inside of Dynamo"))
    with torch._dynamo.config.patch(suppress_errors=True), monkeypatch.context() as patch:
        patch.setattr("torch._dynamo.symbolic_convert.InstructionTranslator.run", inside)
        report = cb.check(lambda x: x.sin(), (batch(),), compiler="eager")
    assert "suppress_errors" in undecided(report)


@pytest.mark.parametrize(
    "switched_off", [lambda: torch._dynamo.config.patch(disable=True), lambda: torch.compiler.set_stance("force_eager")]
)
def test_where_dynamo_does_not_look_nothing_passes(switched_off: Callable[[], AbstractContextManager[Any]]) -> None:
    with switched_off():
        assert "it is switched off" in undecided(cb.check(torch.sin, (batch(),), compiler="eager"))


def test_a_graph_break_between_two_regions_is_a_note() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        scale = x.sin().sum().item()
        return x.cos() * scale

    before = counters["graph_break"].total()
    report = agreed(cb.check(program, (batch(),), compiler="eager"))
    assert counters["graph_break"].total() > before
    with cb.collect() as session:
        torch.compile(program, backend="numcheck", options={"compiler": "eager"})(batch())
    for one in (report, session.report):
        assert len(one.coverage.regions) == 2
        (note,) = one.coverage.notes
        assert note.startswith("graph breaks, around which the program runs in eager: ")
        assert "`Tensor.item()`" in note
    assert agreed(cb.check(lambda x: x.cos(), (batch(),), compiler="eager")).coverage.notes == ()


def test_many_graph_breaks_are_cut_short() -> None:
    def program(x: torch.Tensor) -> Any:
        return [x.sum().item(), x.tolist(), torch.argwhere(x), torch.allclose(x, x), torch.unique(x)], x.sin()

    (note,) = cb.check(program, (batch(2, 2),), compiler="eager").coverage.notes
    assert note.endswith("more")
    assert note.count(";") == 3


def test_an_error_that_dynamo_hides_in_one_of_several_functions_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = torch._dynamo.symbolic_convert.InstructionTranslator.run

    def run(translator: Any) -> Any:
        if translator.f_code.co_name == "second":
            raise RuntimeError("inside of Dynamo")
        return original(translator)

    def second(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    monkeypatch.setattr("torch._dynamo.symbolic_convert.InstructionTranslator.run", run)
    with torch._dynamo.config.patch(suppress_errors=True), cb.collect() as session:
        for function in (lambda x: x.sin(), second):
            checked(function, "eager")(batch())
    assert len(session.report.coverage.regions) == 1
    assert "a function ran in eager" in undecided(session.report)
