"""`memory_efficient_fusion`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import checked_backend as cb
from checked_backend.aot.partition import partition_function

aot = cb.aot_compilers


def chain(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().tanh().cos().sigmoid()


def saved_by(**overrides: Any) -> int:
    """How many values the forward graph keeps."""
    seen: list[int] = []

    def count(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        (output,) = gm.graph.find_nodes(op="output")
        seen.append(len(output.args[0]) - 1)
        return aot.nop(gm, example_inputs)

    x = torch.randn(4, requires_grad=True)
    cb.memory_efficient_fusion(chain, fw_compiler=count, bw_compiler=aot.nop, **overrides)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])
    return seen[0]


def test_it_saves_less_than_autograd_would() -> None:
    assert saved_by() < saved_by(partition_fn=partition_function("default"))


def test_a_module_keeps_its_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.GELU())
    run = cb.memory_efficient_fusion(module, fw_compiler=aot.nop)
    assert isinstance(run, nn.Module)
    x = torch.randn(2, 3)
    torch.testing.assert_close(run(x), module(x))
    run(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_one_compiler_serves_all_graphs_and_decompositions_follow_it() -> None:
    targets: set[Any] = set()

    def watch(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        targets.update(node.target for node in gm.graph.find_nodes(op="call_function", target=gelu_backward))
        graphs.append(1)
        return aot.nop(gm, example_inputs)

    gelu_backward, graphs = torch.ops.aten.gelu_backward.default, []
    x = torch.randn(3, requires_grad=True)
    cb.memory_efficient_fusion(nn.functional.gelu, fw_compiler=watch)(x).sum().backward()
    assert (len(graphs), targets) == (2, set())
    cb.memory_efficient_fusion(nn.functional.gelu, fw_compiler=watch, decompositions={})(x).sum().backward()
    assert (len(graphs), targets) == (4, {gelu_backward})


def test_misuse() -> None:
    with pytest.raises(cb.OptionError, match=r"no override .backend.\. Valid: bw_compiler, decompositions"):
        cb.memory_efficient_fusion(chain, backend="inductor")
    with pytest.raises(cb.OptionError, match=r"fw_compiler got 'inductor'\. It is a compiler"):
        cb.memory_efficient_fusion(chain, fw_compiler="inductor")
    with pytest.raises(cb.OptionError, match="got 3, which cannot be called"):
        cb.memory_efficient_fusion(3)


@pytest.mark.inductor
def test_inductor_is_the_default() -> None:
    x = torch.randn(8, requires_grad=True)
    run = cb.memory_efficient_fusion(chain)
    torch.testing.assert_close(run(x), chain(x))
    (gradient,) = torch.autograd.grad(run(x).sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(chain(x).sum(), x)[0])
