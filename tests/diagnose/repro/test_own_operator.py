"""A user's own operator goes along with a script: its kernel, its fake, its gradient."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from checked_backend._torch.operators import fake_kernel, operator_definition, registering_module
from checked_backend.diagnose.repro.compile_code import Source
from checked_backend.diagnose.repro.translate import GraphWriter
from checked_backend.scripts.values import Untranslatable

FACTOR = 3.0


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR + math.tau


@torch.library.custom_op("checked_backend_own::cubed", mutates_args=())
def cubed(x: torch.Tensor, power: float = 3.0) -> torch.Tensor:
    """A comment stays."""
    return helper(x) ** power


@cubed.register_fake
def _(x, power=3.0):
    return torch.empty_like(x)


def keeps(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.power = inputs[1]


def slope(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad * ctx.power * FACTOR * helper(ctx.saved_tensors[0]) ** (ctx.power - 1), None


cubed.register_autograd(slope, setup_context=keeps)


@torch.library.custom_op("checked_backend_own::counted", mutates_args=("count",))
def counted(count: torch.Tensor) -> None:
    count.add_(1)


@torch.library.custom_op("checked_backend_own::two_kernels", mutates_args=(), device_types="cpu")
def two_kernels(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@two_kernels.register_kernel("cuda")
def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def again(name: str) -> dict[str, Any]:
    """What a script has that registers an operator anew, under a namespace of its own."""
    source, definition = Source(), operator_definition(f"checked_backend_own::{name}")
    assert source.add_operator(definition) == name
    text = "\n".join(["from __future__ import annotations", "import torch, typing", *source.imports, *source.lines])
    made: dict[str, Any] = {"Any": Any}
    exec(text.replace("checked_backend_own::", "checked_backend_again::"), made)
    return made


def test_kernel_fake_and_gradient_go_along() -> None:
    made = again("cubed")
    x = torch.rand(5, requires_grad=True)
    for run in (made["cubed"], torch.compile(made["cubed"], backend="aot_eager", fullgraph=True)):
        one, other = cubed(x), run(x)
        assert torch.equal(one, other)
        assert torch.equal(*(torch.autograd.grad(result.sum(), x)[0] for result in (one, other)))


def test_arguments_that_it_writes_to() -> None:
    made, count = again("counted"), torch.zeros(2)
    made["counted"](count)
    assert count.tolist() == [1.0, 1.0]


def test_what_a_script_cannot_repeat_is_told() -> None:
    with pytest.raises(Untranslatable, match="kernels for several devices"):
        Source().add_operator(operator_definition(two_kernels))
    assert operator_definition("aten::sin") is None
    assert operator_definition(helper) is None


def test_a_function_that_refers_to_one_takes_it_along() -> None:
    source = Source()

    def calls(x: torch.Tensor) -> torch.Tensor:
        return cubed(x) + 1

    source.add(calls)
    assert "torch.library.custom_op('checked_backend_own::cubed'" in "\n".join(source.lines)


def test_the_module_of_operators_registered_in_other_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_library.py").write_text(
        "import torch\n"
        "library = torch.library.Library('checked_backend_library', 'DEF')\n"
        "library.define('without_fake(Tensor x) -> Tensor')\n"
        "library.impl('without_fake', torch.clone, 'CPU')\n"
        "torch.library.define('checked_backend_library::with_fake', '(Tensor x) -> Tensor')\n"
        "torch.library.impl('checked_backend_library::with_fake', 'CPU', torch.clone)\n"
        "@torch.library.register_fake('checked_backend_library::with_fake')\n"
        "def _(x):\n"
        "    return torch.empty_like(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    home = importlib.import_module("own_library")
    own = torch.ops.checked_backend_library
    assert [registering_module(op.default) for op in (own.without_fake, own.with_fake)] == ["own_library"] * 2
    graph = torch.fx.Graph()
    graph.output(graph.call_function(own.with_fake.default, (graph.placeholder("x"),)))
    gm = torch.fx.GraphModule({}, graph)
    assert list(GraphWriter(gm, {}).imports) == ["own_library"]
    fake, _ = fake_kernel(own.with_fake.default)
    monkeypatch.setattr(fake, "__module__", "__main__")
    with pytest.raises(Untranslatable, match="registered by the program itself"):
        GraphWriter(gm, {})
    home.library._destroy()
