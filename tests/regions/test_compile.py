"""A region that is compiled once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo import lookup_backend
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.exc import CppCompileError

from checked_backend.regions.compile import compile_again, copy_graph
from tests.support.region_tools import agreed, checked, gathered


def test_it_keeps_for_its_backward_pass_what_the_candidate_keeps() -> None:
    """AOT autograd keeps a parameter itself, and of other inputs the view that the backward pass needs."""
    kept: list[list[str]] = []
    traced: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def forward(gm: fx.GraphModule, _inputs: Any) -> Any:
        kept.append([node.name for node in gm.graph.find_nodes(op="output")[0].all_input_nodes])
        return make_boxed_func(gm.forward)

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=forward,
            bw_compiler=lambda gm, _inputs: make_boxed_func(gm.forward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        traced.append((copy_graph(gm), inputs))
        return compiler(gm, inputs)

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    torch.compile(model, backend=backend)(torch.ones(2, 3)).sum().backward()
    [(graph, inputs)] = traced
    real = [torch.ones(tuple(fake.shape)).requires_grad_(fake.requires_grad) for fake in inputs]
    compile_again(compiler, graph, inputs, real)
    first, again = kept
    assert first == again


def test_the_guards_of_a_second_try_are_about_inputs_that_there_are() -> None:
    """Dynamo evaluates what AOT autograd notes about inputs in one memory while a region is first compiled."""
    tries: list[fx.GraphModule] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        tries.append(gm)
        if len(tries) == 1:
            raise CppCompileError(["g++"], "garbage")
        return lookup_backend("aot_eager")(gm, list(inputs))

    def written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * 2 + b

    base = torch.arange(24.0)
    agreed(gathered(lambda: checked(written, compiler, dynamic=True)(base[:8], base[4:12])))
    assert len(tries) == 2
