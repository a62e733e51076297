"""Regions with collectives, in a group of one rank in this process: what a compiled program does to its exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

import checked_backend as cb
from checked_backend._torch import collectives
from checked_backend.ranks import tape
from checked_backend.regions import observers
from tests.support import faults
from tests.support.rank_programs import reordered
from tests.support.region_tools import agreed, checked, found, gathered

pytestmark = pytest.mark.usefixtures("one_rank")


def exchanged(x: torch.Tensor) -> torch.Tensor:
    total = functional.all_reduce(x.sin(), "sum", dist.group.WORLD)
    return functional.all_reduce(torch.tanh(total), "sum", dist.group.WORLD) * 2


def broken_between(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiled program that raises when it has begun an exchange, and does not wait for the result."""

    class Broken(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if "wait_tensor" in str(target):
                raise RuntimeError("the kernel could not be launched")
            return super().call_function(target, args, kwargs)

    return lambda *args: Broken(gm).run(*args)


@pytest.mark.parametrize("policy", ["record", "fallback"])
def test_a_compiled_program_that_raises_between_two_exchanges_ends_the_call(policy: str) -> None:
    """Nothing may be exchanged twice, and the other ranks may have ended."""

    def run() -> None:
        with pytest.raises(RuntimeError, match="the kernel could not be launched"):
            checked(exchanged, broken_between, on_divergence=policy)(torch.ones(4))

    report = gathered(run)
    assert found(report) == {("crash.running", "candidate")}
    assert any("eager did not go on with the exchanges" in note for note in report.coverage.notes)


def raising_at(name: str) -> Callable[..., Any]:
    """A compiler whose programs raise at an operator."""

    def compiler(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        class Raising(fx.Interpreter):
            def run_node(self, node: fx.Node) -> Any:
                if name in node.name:
                    raise faults.PlantedError("a kernel is missing")
                return super().run_node(node)

        return lambda *args: Raising(gm).run(*args)

    return compiler


def test_eager_goes_on_where_the_compiled_program_raises_before_all_exchanges() -> None:
    x = torch.randn(4, generator=torch.Generator().manual_seed(0))
    kept: list[torch.Tensor] = []
    report = gathered(lambda: kept.append(checked(exchanged, raising_at("sin"), on_divergence="fallback")(x)))
    assert found(report) == {("crash.running", "candidate")}
    assert torch.equal(kept[0], torch.tanh(x.sin()) * 2)


def test_collectives_that_send_nearly_the_same_may_be_reordered() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        one = functional.all_reduce(x * 1.01, "sum", dist.group.WORLD)
        return one - 3 * functional.all_reduce(x * 1.02, "sum", dist.group.WORLD)

    report = gathered(lambda: checked(program, reordered)(torch.randn(4)))
    assert report.coverage.checked["tensors sent to other ranks"] == 2
    assert agreed(report)


def stopped_between(gm: fx.GraphModule) -> Callable[..., Any]:
    """A compiled program that turns the order of two exchanges round, and raises before the second."""
    first, second = (node.name for node in gm.graph.nodes if "all_reduce" in str(node.target))

    class Stopped(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            if node.name == first:
                raise faults.PlantedError("a kernel is missing")
            return super().run_node(node)

    reordered(gm, ())
    assert [node.name for node in gm.graph.nodes if "all_reduce" in str(node.target)] == [second, first]
    return lambda *args: Stopped(gm).run(*args)


@pytest.mark.parametrize("policy", ["record", "fallback"])
@pytest.mark.parametrize("backward", [False, True])
def test_eager_does_not_go_on_with_exchanges_that_the_compiled_program_made_in_another_order(
    policy: str, backward: bool
) -> None:
    """The other ranks would take what this one sends for something else, or wait for it."""

    def program(x: torch.Tensor) -> torch.Tensor:
        one = functional.all_reduce(x.sin(), "sum", dist.group.WORLD)
        return one - 3 * functional.all_reduce(x.exp(), "sum", dist.group.WORLD)

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if not backward:
            return stopped_between(gm)
        forward = lambda gm, _inputs: make_boxed_func(gm.forward)  # noqa: E731
        return aot_autograd(fw_compiler=forward, bw_compiler=lambda gm, _inputs: make_boxed_func(stopped_between(gm)))(
            gm, inputs
        )

    def run() -> None:
        x = torch.randn(4, generator=torch.Generator().manual_seed(0), requires_grad=backward)
        with pytest.raises(faults.PlantedError, match="a kernel is missing"):
            checked(program, compiler, on_divergence=policy)(x).square().sum().backward()
        assert x.grad is None

    report = gathered(run)
    assert found(report) == {("crash.backward" if backward else "crash.running", "candidate")}
    assert any("eager did not go on with the exchanges" in note for note in report.coverage.notes)


@pytest.mark.parametrize("reference", ["keep", "recompute"])
def test_a_backward_pass_with_exchanges_that_eager_refuses_too_accuses_nobody(reference: str) -> None:
    linear = torch.nn.Linear(4, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(linear(x), "sum", dist.group.WORLD).tanh()

    def run() -> None:
        x = torch.randn(2, 4)
        result = checked(program, "aot_eager", reference=reference)(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()

    assert not found(gathered(run))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_input_that_is_still_under_way_is_no_input_that_the_program_writes_to(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group of one rank a result is there at once, so the wait itself writes it here."""
    arriving: list[torch.Tensor] = []
    wait = collectives.wait_for_result

    def arrives(tensor: torch.Tensor) -> None:
        for one in arriving:
            one.copy_(torch.full((4,), 3.0))
        arriving.clear()
        wait(tensor)

    monkeypatch.setattr(observers, "wait_for_result", arrives)

    def run() -> None:
        compiled = checked(lambda buffer, x: torch.ops._c10d_functional.wait_tensor(buffer).sin() + x, compiler)
        for _ in range(3):
            buffer = torch.zeros(4)
            arriving.append(buffer)
            assert torch.equal(compiled(buffer, torch.ones(4)), torch.full((4,), 3.0).sin() + 1)

    with torch.no_grad():
        assert agreed(gathered(run))


def overwriting(held: list[torch.Tensor]) -> Callable[..., Any]:
    """A compiler whose program writes to a tensor, as a collective that is under way may do at any time."""

    @faults.runs
    def compiler(forward: Callable[..., Any], *args: Any) -> Any:
        held[0].numpy()[:] = 7.0  # torch counts no such write
        return forward(*args)

    return compiler


@pytest.mark.parametrize("reduced", [False, True])
def test_an_earlier_result_that_a_collective_may_have_written_to_accuses_no_compiler(reduced: bool) -> None:
    held: list[torch.Tensor] = []

    def run() -> None:
        held.append(checked(torch.sin, "aot_eager")(torch.ones(4)))
        if reduced:
            dist.all_reduce(held[0], async_op=True)
        checked(torch.cos, overwriting(held))(torch.ones(4))

    report = gathered(run)
    assert found(report) == (set() if reduced else {("alias.overwritten", "output[0]")})
    assert any("a collective of the program's" in skip.reason and skip.matters for skip in report.coverage.skipped) == (
        reduced
    )


@pytest.mark.parametrize("reduced", [False, True])
def test_a_result_that_the_program_has_reduced_is_explained_where_calls_ran_unchecked(reduced: bool) -> None:
    def run() -> None:
        compiled = checked(torch.sin, "aot_eager", every=2)
        first = compiled(torch.ones(4))
        if reduced:
            dist.all_reduce(first)
        first.numpy()[:] = 7.0
        compiled(torch.ones(4))
        compiled(torch.ones(4))

    report = gathered(run)
    assert any("while calls ran unchecked" in skip.reason for skip in report.coverage.skipped) != reduced
    assert not found(report)


def begun(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops._c10d_functional.all_reduce(x.sin(), "sum", dist.group.WORLD.group_name), x.cos()


def finished(compiled: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        under_way, other = compiled(x)
        return [torch.ops._c10d_functional.wait_tensor(under_way), other]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_no_check_waits_for_what_the_program_waits_for_itself(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may come only after a message that this one sends after the region."""

    def waits(_result: torch.Tensor) -> None:
        raise AssertionError("the check waits for another rank")

    monkeypatch.setattr(tape, "wait_for_result", waits)

    def run() -> None:
        compiled = checked(begun, compiler)
        for seed in range(3):
            x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
            assert all(map(torch.equal, finished(compiled, x), (x.sin(), x.cos())))

    report = agreed(gathered(run))
    assert report.coverage.checked["tensors sent to other ranks"] == 3
    assert any(skip.subject == "output[0]" and "after the region has ended" in skip.reason for skip in skips(report))


def skips(report: cb.Report) -> tuple[cb.Skip, ...]:
    return report.coverage.skipped


@pytest.mark.parametrize("operator", ["aten.sin.default", "aten.cos.default"])
def test_an_error_is_found_where_the_program_waits_itself_and_eager_goes_on(operator: str) -> None:
    x = torch.randn(4, generator=torch.Generator().manual_seed(0))
    kept: list[list[torch.Tensor]] = []
    compiler = faults.wrong_operator(operator, how="aot")
    report = gathered(lambda: kept.append(finished(checked(begun, compiler, on_divergence="fallback"), x)))
    subject = "sent[all_reduce_0]" if operator == "aten.sin.default" else "output[1]"
    assert found(report) == {("logic", subject)}
    assert torch.equal(kept[0][1], x.cos())
    if operator == "aten.cos.default":
        assert torch.equal(kept[0][0], x.sin())
