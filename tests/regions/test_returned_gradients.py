"""Gradients that the program holds are its own: a later backward pass sends no others in their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import checked_backend as cb
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.returned_tensors import ReturnedTensors
from tests.support import faults
from tests.support.check_tools import differentiated
from tests.support.region_tools import agreed, checked, found, gathered


def into_buffers(count: int) -> Callable[..., Any]:
    """A compiler whose gradients of matrices lie in buffers that take turns."""

    def compiler(gm: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        buffers: dict[tuple[int, torch.Size], torch.Tensor] = {}
        turns = iter(range(1000))

        def sent(gradient: torch.Tensor) -> torch.Tensor:
            buffer = buffers.setdefault((next(turns) % count, gradient.shape), torch.empty_like(gradient))
            return buffer.copy_(gradient).data

        def buffered(arg: Any) -> Any:
            wanted = isinstance(arg, torch.Tensor) and arg.requires_grad and arg.dim() == 2
            return faults.SpoilGradient.apply(arg, sent) if wanted else arg

        return lambda *args: gm.forward(*map(buffered, args))

    return compiler


def kept(compiled: Callable[..., Any]) -> None:
    held = []
    for _ in range(4):
        x = torch.randn(3, 4, requires_grad=True)
        held += torch.autograd.grad(compiled(x).sum(), x)


def accumulated(compiled: Callable[..., Any]) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(4):
        compiled(x).square().sum().backward()


def trained(compiled: Callable[..., Any]) -> None:
    x = torch.nn.Parameter(torch.randn(3, 4))
    optimizer = torch.optim.SGD([x], 0.1)
    for _ in range(4):
        compiled(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_one_incoming(compiled: Callable[..., Any]) -> None:
    """What arrives may be sent on."""
    x, gradient, held = torch.randn(3, 4, requires_grad=True), torch.ones(3, 4), []
    for _ in range(4):
        held += torch.autograd.grad(compiled(x), x, gradient)


@pytest.mark.parametrize("program", [kept, accumulated, with_one_incoming])
@pytest.mark.parametrize("buffers", [1, 2])
def test_gradients_in_memory_of_earlier_ones_are_found(program: Callable[..., None], buffers: int) -> None:
    compiled = checked(lambda x: x * 1 + 0, into_buffers(buffers))
    report = gathered(lambda: program(compiled))
    assert {detail for detail, _ in found(report)} == {"alias.overwritten"}
    assert f"call {1 + buffers} sent it in the memory of a gradient that call 1 of" in report.findings[0].message


def test_memory_of_gradients_that_nobody_holds_may_be_used_again() -> None:
    assert agreed(gathered(lambda: trained(checked(torch.sin, into_buffers(1)))))


CONSTANT = torch.ones(3, 4)
with_a_constant_gradient = differentiated(torch.clone, lambda _gradient: CONSTANT)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [torch.sin, lambda x: x * 1 + 0, lambda x: with_a_constant_gradient(x) * 2])
@pytest.mark.parametrize("program", [kept, accumulated, trained, with_one_incoming])
def test_clean_programs_agree(program: Callable[..., None], function: Callable[..., Any], compiler: str) -> None:
    assert agreed(gathered(lambda: program(checked(function, compiler))))


def test_check_finds_them() -> None:
    report = cb.check(torch.sin, (torch.randn(3, 4, requires_grad=True),), compiler=into_buffers(1), iterations=2)
    assert found(report) == {("alias.overwritten", "grad[args[0]]")}


@pytest.mark.parametrize("freed", [True, False])
def test_memory_that_was_freed_during_the_backward_pass_may_be_used_again(freed: bool) -> None:
    """Python's garbage collector may run at any time, and the allocator gives the memory to the next gradient."""
    memory = np.ones(6, np.float32)
    earlier = ReturnedTensors(GraphInfo("wave", (), (), (), (), 0), cast("Any", SimpleNamespace(skip=None)))
    first = torch.from_numpy(memory)
    assert not earlier.sent(1, {"grad[x]": first}, {}, (), earlier.look())
    held = earlier.look()
    if freed:
        del first
    second = torch.from_numpy(memory)
    assert bool(earlier.sent(2, {"grad[x]": second}, {}, (), held)) is not freed
