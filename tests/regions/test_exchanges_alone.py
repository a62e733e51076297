"""Regions with collectives, in a group of one rank in this process: what a compiled program does to its exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx

from tests.support.region_tools import agreed, checked, found, gathered


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
def test_what_was_begun_to_be_exchanged_arrives_also_if_the_compiled_program_raises(policy: str) -> None:
    x = torch.randn(4, generator=torch.Generator().manual_seed(0))
    kept: list[torch.Tensor] = []
    report = gathered(lambda: kept.append(checked(exchanged, broken_between, on_divergence=policy)(x)))
    assert found(report) == {("crash.running", "candidate")}
    assert torch.equal(kept[0], torch.tanh(x.sin()) * 2)


def reordered(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that issues the second of two independent collectives first."""
    first, second = (node for node in gm.graph.nodes if "all_reduce" in str(node.target))
    for node in (*second.all_input_nodes, second):
        if node.op != "placeholder":
            first.prepend(node)
    gm.graph.lint()
    gm.recompile()
    return gm.forward


def test_collectives_that_send_nearly_the_same_may_be_reordered() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        one = functional.all_reduce(x * 1.01, "sum", dist.group.WORLD)
        other = functional.all_reduce(x * 1.02, "sum", dist.group.WORLD)
        return one - 3 * other

    report = gathered(lambda: checked(program, reordered)(torch.randn(4)))
    assert report.coverage.checked["sent to other ranks"] == 2
    assert agreed(report)
