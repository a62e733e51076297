from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from checked_backend import aot_compilers as aot
from checked_backend.aot.backend import compile_with
from checked_backend.aot.decompositions import DecompositionName, decomposition_table
from checked_backend.aot.partition import partition_function
from checked_backend.errors import OptionError
from checked_backend.options import AotOptions

TABLES: tuple[DecompositionName, ...] = ("none", "default", "core_aten", "inductor")


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 3)), torch.randn(5, 6)


def convolution() -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    return layers, torch.randn(4, 3, 6, 6)


def backend(**options: Any) -> Callable[..., Any]:
    parsed = AotOptions(**options)
    return lambda gm, inputs: compile_with(gm, inputs, options=parsed, fw_compiler=aot.nop)


def train(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        out = call(x)
        out.softmax(-1).square().sum().backward()
        optimizer.step()
        outputs.append(out.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*outputs, *gradients, *model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize("partition", ["min_cut", "default"])
@pytest.mark.parametrize("table", TABLES)
def test_every_decomposition_table_runs(table: str, partition: str) -> None:
    model, x = convolution()
    twin = copy.deepcopy(model)
    reference = train(model, model, x)
    candidate = train(twin, torch.compile(twin, backend=backend(partition=partition, decompositions=table)), x)
    for expected, actual in zip(reference, candidate, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("table", TABLES)
def test_dynamic_shapes_compile_once(table: str) -> None:
    graphs: list[str] = []

    def forward(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append("forward")
        return aot.nop(gm, inputs)

    options = AotOptions(decompositions=table)  # type: ignore[arg-type]
    model, _ = mlp()
    compiled = torch.compile(
        model.eval(),
        backend=lambda gm, i: compile_with(gm, i, options=options, fw_compiler=forward, bw_compiler=aot.nop),
        dynamic=True,
    )
    for rows in (4, 7, 9):
        x = torch.randn(rows, 6)
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        out = compiled(x)
        torch.testing.assert_close(out, model(x))
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), list(model.parameters())), expected)
    assert graphs == ["forward"]


def test_each_graph_kind_goes_to_its_compiler() -> None:
    seen: list[str] = []

    def recorded(kind: str) -> Any:
        def compile_graph(gm: fx.GraphModule, inputs: Any) -> Any:
            seen.append(kind)
            return aot.nop(gm, inputs)

        return compile_graph

    def run(gm: fx.GraphModule, inputs: Any) -> Any:
        return compile_with(
            gm,
            inputs,
            options=AotOptions(),
            fw_compiler=recorded("forward"),
            bw_compiler=recorded("backward"),
            inference_compiler=recorded("inference"),
            on_joint=lambda _gm, _inputs: seen.append("joint"),
        )

    model, x = mlp()
    compiled = torch.compile(model, backend=run)
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(x)
    assert seen == ["joint", "forward", "backward", "inference"]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference_equals_eager(guard: Callable[[], Any]) -> None:
    model, x = convolution()
    model.eval()
    with guard():
        assert torch.equal(torch.compile(model, backend=backend())(x), model(x))


def test_mutated_inputs_and_aliases_survive() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x[1:], x * 2

    x = torch.arange(4.0)
    view, product = torch.compile(function, backend=backend())(x)
    assert torch.equal(x, torch.arange(4.0) + 1)
    assert view._base is x
    assert torch.equal(product, x * 2)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_copies(name: DecompositionName) -> None:
    table = decomposition_table(name)
    size = len(table)
    table.clear()
    assert len(decomposition_table(name)) == size
    assert (size == 0) == (name == "none")


def test_default_table_is_functorchs_list() -> None:
    from torch._functorch.compilers import default_decompositions

    assert decomposition_table("default") == default_decompositions


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(OptionError, match=r"'all'.*none, default, core_aten, inductor"):
        decomposition_table("all")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"'max_cut'.*min_cut, default"):
        partition_function("max_cut")  # type: ignore[arg-type]
