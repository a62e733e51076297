"""Results that the program holds are its own: a later call that writes to them is found, a user who does is not."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend._torch.inductor import cuda_graph_results
from checked_backend.regions import returned_tensors
from checked_backend.regions.returned_tensors import Results, Returned, Snapshot
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered, meanwhile

OVERWRITTEN = {("alias.overwritten", "output[0]")}


def wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


def x(number: int = 0) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(number))


class Reused:
    """Ways to hand a result out in memory that a later call writes to; torch counts none of these writes."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.buffers: list[torch.Tensor] = []
        self.calls = 0

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        rotating = 2 if self.how == "rotating" else 1
        if len(self.buffers) < rotating:
            self.buffers.append(torch.empty_like(result))
        buffer = self.buffers[(self.calls - 1) % rotating]
        if self.how == "wiped":
            self.buffers[0].data.zero_()
            self.buffers = [result.clone()]
            return self.buffers[0].detach()
        if self.how == "numpy":
            buffer.numpy()[...] = result.detach().numpy()
            return torch.from_numpy(buffer.numpy())
        buffer.data.copy_(result.detach())
        return buffer if self.how == "same object" else buffer.data


@pytest.mark.parametrize("how", ["python", "aot"])
@pytest.mark.parametrize("way", ["same object", "data", "numpy", "rotating", "wiped"])
def test_a_result_that_a_later_call_overwrites(way: str, how: faults.How) -> None:
    compiled = checked(wave, faults.spoiled_output(Reused(way), how=how))
    held: list[torch.Tensor] = []
    report = gathered(lambda: held.extend(compiled(x(number)) for number in range(3)))
    assert found(report) == OVERWRITTEN, str(report)
    finding = report.findings[0]
    assert "call 1 of this region returned it, the program still holds it, and" in finding.message
    assert "test_returned_tensors.py" in finding.source


HOLDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "detached": lambda y: y.detach(),
    "data": lambda y: y.data,
    "row": lambda y: y.detach()[0],
    "transposed": lambda y: y.t(),
    "array": lambda y: y.detach().numpy(),
    "for a gradient": lambda y: y * torch.ones((), requires_grad=True),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", ["data", "numpy", "rotating"])
@pytest.mark.parametrize("hold", HOLDS)
def test_a_result_of_which_the_memory_is_held_and_overwritten(hold: str, way: str) -> None:
    compiled = checked(wave, faults.spoiled_output(Reused(way)))
    held: list[Any] = []
    report = gathered(lambda: held.extend(HOLDS[hold](compiled(x(number))) for number in range(4)))
    assert found(report) == OVERWRITTEN, str(report)


@pytest.mark.parametrize("hold", ["detached", "row", "transposed", "array"])
def test_a_result_of_which_the_memory_is_held_and_left_alone(hold: str) -> None:
    compiled = checked(wave, faults.clean("aot"))
    held: list[Any] = []

    def run() -> None:
        for number in range(4):
            held.append(HOLDS[hold](compiled(x(number))))
            held[0][...] = 0.0  # the program may write to it

    assert agreed(gathered(run))


@pytest.mark.parametrize("use", [lambda y: None, lambda y: y.sum(), lambda y: y.clone()])
@pytest.mark.parametrize("way", ["data", "rotating"])
def test_memory_that_nobody_holds_may_be_used_again(way: str, use: Callable[[torch.Tensor], Any]) -> None:
    compiled = checked(wave, faults.spoiled_output(Reused(way)))
    held: list[Any] = []
    assert agreed(gathered(lambda: held.extend(use(compiled(x(number))) for number in range(4))))


def test_memory_that_training_has_finished_with_may_be_used_again() -> None:
    buffer = torch.empty_like(x())

    class Into(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
            buffer.data.copy_(result)
            return buffer.data

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    compiled = checked(wave, faults.spoiled_output(Into.apply))

    def train() -> None:
        for number in range(4):
            (compiled(x(number).requires_grad_()) ** 2).sum().backward()

    assert agreed(gathered(train))


@pytest.mark.parametrize("way", ["data", "numpy"])
def test_a_result_that_another_region_overwrites(way: str) -> None:
    reused = Reused(way)
    one, other = (checked(function, faults.spoiled_output(reused)) for function in (wave, lambda x: torch.cos(x) * 3))
    held: list[torch.Tensor] = []
    report = gathered(lambda: held.extend(function(x()) for function in (one, other)))
    assert found(report) == OVERWRITTEN
    assert "of region wave [0/0] returned it" in report.findings[0].message


def test_a_result_that_the_backward_pass_overwrites() -> None:
    kept: list[torch.Tensor] = []

    def forward(results: list[Any], _args: Sequence[Any]) -> Any:
        kept.append(results[0].detach())
        return tuple(results)

    def backward(results: list[Any], _args: Sequence[Any]) -> Any:
        kept[0].data.zero_()
        return tuple(results)

    compiled = checked(wave, faults.compiled_by_aot(forward=lambda _gm: forward, backward=lambda _gm: backward))

    def train() -> torch.Tensor:
        y: torch.Tensor = compiled(x().requires_grad_())
        y.sum().backward()
        return y

    held: list[torch.Tensor] = []
    assert found(gathered(lambda: held.append(train()))) == OVERWRITTEN


def test_check_finds_overwritten_results() -> None:
    report = cb.check(wave, (x(),), compiler=faults.spoiled_output(Reused("data")), iterations=3)
    assert ("alias.overwritten", "output[0]") in found(report), str(report)


def test_a_result_that_was_overwritten_is_not_reported_again() -> None:
    results, held = Results(), torch.zeros(3)
    results.add([Returned(held, (held.data_ptr(), held.data_ptr() + 12), "output[0]", "wave", 1)])
    for findings in (1, 0):
        before = Snapshot((results,), (), lambda _skip: None)
        held.data.add_(1)
        assert len(before.overwritten(2, "wave")) == findings


def test_an_unchecked_call_that_overwrites_is_no_pass() -> None:
    compiled = checked(wave, faults.spoiled_output(Reused("data")), every=2)
    held: list[torch.Tensor] = []
    report = gathered(lambda: held.extend(compiled(x(number)) for number in range(2)))
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "while calls ran unchecked" in " ".join(report.to_text(verbose=True).split())


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda y: y.detach().add_(1),
    "data": lambda y: y.data.mul_(2),
    "view": lambda y: y.detach()[0].zero_(),
    "numpy": lambda y: y.detach().numpy().fill(0),
    "set_": lambda y: y.detach().set_(torch.zeros(6, 5)),
    "resize": lambda y: y.data.resize_(2, 2),
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_users_may_write_to_results(write: str, every: int) -> None:
    compiled = checked(wave, faults.clean("aot"), every=every)
    held: list[torch.Tensor] = []

    def program() -> None:
        for number in range(4):
            held.append(compiled(x(number)))
            if every == 1 or number % 2 == 1:
                WRITES[write](held[0])

    report = gathered(program)
    assert not report.findings
    if every == 1:
        assert agreed(report)


@pytest.mark.parametrize("write", ["in place", "view"])
def test_another_thread_may_write_to_a_result_while_a_later_call_runs(write: str) -> None:
    held: list[torch.Tensor] = []

    def written_meanwhile(result: torch.Tensor) -> torch.Tensor:
        if held:
            thread = threading.Thread(target=WRITES[write], args=(held[0],))
            thread.start()
            thread.join()
            held.append(result)
        return result

    with meanwhile():  # the consumer stays
        compiled = checked(wave, faults.spoiled_output(written_meanwhile))
        report = gathered(lambda: held.extend(compiled(x(number)) for number in range(3)))
    assert not report.findings
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "another thread of the program's may have written to it" in " ".join(report.to_text().split())


def test_a_region_may_write_to_results_that_it_is_given() -> None:
    def step(cache: torch.Tensor) -> torch.Tensor:
        cache.add_(1)
        return cache * 2

    def program() -> None:
        cache = made(x())
        held = [cache, cache[0], cache.data]
        for _ in range(3):
            held.append(stepped(cache))
            held.append(stepped(cache.data))

    made, stepped = checked(wave, faults.clean("aot")), checked(step, faults.clean("aot"))
    assert agreed(gathered(program))


def test_results_that_eager_shares_too() -> None:
    constant, given = torch.ones(6, 5), x()
    compiled = checked(lambda x: (x.view(-1), constant), faults.clean())
    held: list[Any] = []

    def run() -> None:
        for _ in range(3):
            held.append(compiled(given))
            given.data.add_(1)

    assert agreed(gathered(run))


def test_gradients_that_accumulate_in_a_result() -> None:
    """A program may use what a compiled function returns as a parameter's gradient."""
    weight = torch.nn.Parameter(x())
    compiled = checked(wave, faults.clean("aot"))

    def program() -> None:
        weight.grad = compiled(x())
        (compiled(x(1).requires_grad_()) * weight).sum().backward()

    assert agreed(gathered(program))


def test_results_are_not_kept_alive() -> None:
    compiled = checked(wave, faults.clean("aot"))
    with cb.collect():
        y = compiled(x())
        gone = weakref.ref(y)
        del y
        gc.collect()
        assert gone() is None


def test_memory_of_inductors_cuda_graphs_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph writes to its results each time it is replayed, and torch raises where a program reads them later."""
    given: list[int] = []
    reused = Reused("same object")

    def replayed(result: torch.Tensor) -> torch.Tensor:
        buffer = reused(result)
        given.append(buffer.data_ptr())
        return buffer

    node = SimpleNamespace(outputs_weakrefs=[None, SimpleNamespace(data_ptr=lambda: given[-1])])
    manager = SimpleNamespace(current_node=node)
    trees = SimpleNamespace(get_manager=lambda _index, create_if_none_exists: manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(returned_tensors, "cuda_graph_results", lambda _device: cuda_graph_results(cuda))
    compiled = checked(wave, faults.every_output(replayed))
    held: list[torch.Tensor] = []
    report = gathered(lambda: held.extend(compiled(x(number)) for number in range(3)))
    assert found(report) == set(), str(report)
