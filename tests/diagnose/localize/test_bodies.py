"""Bugs inside of what control flow calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from checked_backend.diagnose.localize.called import called_bodies, is_higher_order
from checked_backend.diagnose.localize.subgraph import calls_of
from tests.support import faults
from tests.support.locate_tools import calls, located, operator_of
from tests.support.region_tools import checked, gathered


def chosen(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: (torch.exp(y) * 2,), lambda y: (torch.cos(y) - 1,), (torch.sin(x),))[0] + 1


def looped(x: Tensor) -> Tensor:
    def body(count: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, torch.exp(-value * value)

    start = torch.zeros((), dtype=torch.int64)
    found: tuple[Tensor, Tensor]
    found = torch.ops.higher_order.while_loop(lambda count, _: count < 3, body, (start, torch.sin(x)), ())
    return found[1] * 2


@torch.compiler.nested_compile_region
def _region(x: Tensor) -> Tensor:
    return torch.exp(x) * 0.5


def nested(x: Tensor) -> Tensor:
    return _region(_region(torch.sin(x))) + 1


def attended(x: Tensor) -> Tensor:
    query = torch.sin(x).expand(1, 2, 4, 5).contiguous()
    return flex_attention(query, query, query, score_mod=lambda score, _b, _h, i, j: score + torch.exp(0.1 * (i - j)))


def checkpointed(x: Tensor) -> Tensor:
    def block(y: Tensor) -> Tensor:
        return torch.exp(torch.nn.functional.dropout(y, 0.1)) * 2

    found: Tensor = checkpoint(block, torch.sin(x), use_reentrant=False)
    return found + 1


def inference(compiled: Callable[..., Any]) -> None:
    with torch.no_grad():
        compiled(torch.rand(4, 5))


def train(compiled: Callable[..., Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        result = compiled(torch.rand(4, 5, requires_grad=True))
    result.sum().backward()


def wrong_everywhere(name: str) -> Any:
    """A compiler that spoils an operator in a graph, and in all that the graph calls."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for body in gm.modules():
            if isinstance(body, fx.GraphModule):
                for node in [one for one in body.graph.nodes if str(one.target) == name]:
                    with body.graph.inserting_after(node):
                        spoiled = body.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.5))
                    node.replace_all_uses_with(spoiled, delete_user_cb=lambda user, own=spoiled: user is not own)
                body.recompile()
        return gm.forward

    return faults.through_aot(compiler)


@pytest.mark.process
@pytest.mark.parametrize(
    ("function", "caller"),
    [(chosen, "cond"), (looped, "while_loop"), (nested, "invoke_subgraph"), (attended, "flex_attention")],
)
def test_the_operator_inside_is_named(function: Callable[[Tensor], Tensor], caller: str) -> None:
    location = located(inference, function, wrong_everywhere("aten.exp.default"))
    assert operator_of(location) == "aten.exp.default"
    assert calls(location.cut.case) == ["aten.exp.default"]
    assert any(f"({'torch.ops.higher_order.' + caller}) calls" in note for note in location.notes)


@pytest.mark.process
def test_the_operator_inside_of_a_checkpoint_that_draws_is_named() -> None:
    assert gathered(lambda: train(checked(checkpointed, faults.clean("aot")))).verdict is cb.Verdict.PASS
    torch._dynamo.reset()
    location = located(train, checkpointed, faults.wrong_operator("aten.exp.default", how="aot"))
    assert (location.graph, operator_of(location)) == ("forward", "aten.exp.default")
    assert calls(location.cut.case) == ["aten.exp.default"]
    assert not location.notes


@pytest.mark.process
def test_the_operator_inside_of_a_checkpoint_is_named_by_its_name_for_the_user() -> None:
    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for body in gm.modules():
            if isinstance(body, fx.GraphModule):
                for node in body.graph.find_nodes(op="call_function", target=torch.exp):
                    node.target = torch.exp2
                body.recompile()
        return gm.forward

    location = located(train, checkpointed, compiler)
    assert (location.graph, operator_of(location)) == ("dynamo", "torch.exp")
    assert any("tag_activation_checkpoint) calls" in note for note in location.notes)


@pytest.mark.process
def test_the_caller_is_named_where_nothing_inside_is_wrong() -> None:
    def result(node: fx.Node, value: Any) -> Any:
        return (value[0] + 1,) if node.name == "cond" else value

    location = located(inference, chosen, faults.interpreted(result, "aot"))
    assert location.node.name == "cond"
    assert "nothing that cond calls is wrong by itself" in location.notes


def test_the_calls_of_a_loop() -> None:
    x = torch.rand(4)
    gm = make_fx(looped, tracing_mode="fake")(x)
    [loop] = filter(is_higher_order, calls_of(gm))
    made = called_bodies(gm, [x], loop)
    assert [int(given[0]) for _, given in made] == [0, 3, 0, 2]  # the condition's first and last call, then the body's
    assert torch.equal(made[2][1][1], torch.sin(x))
    assert {id(body) for body, _ in made} == {id(child) for child in gm.children()}
