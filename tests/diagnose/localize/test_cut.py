"""Small cases cut out of a graph, also with a gradient that is wrong only where both passes are compiled together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from checked_backend.diagnose.localize.cut import Parts
from checked_backend.diagnose.localize.probe import probe, segments, share_of
from checked_backend.diagnose.localize.subgraph import calls_of, part_of, tensors_made
from checked_backend.findings import Finding
from checked_backend.graphs.nodes import recorded_value
from checked_backend.options import CheckOptions
from checked_backend.regions.graph_case import GraphCase
from tests.support import faults
from tests.support.locate_tools import inference, located, operator_of, oracle, traced, training


def chain(x: Tensor) -> tuple[Tensor, ...]:
    for _ in range(4):
        x = torch.sin(x) * 2
    x = torch.tanh(x)
    for _ in range(4):
        x = torch.cos(x) + 1
    return (x.sum(1),)


def traced_chain() -> tuple[Tensor, fx.GraphModule]:
    x = torch.randn(4, 8)
    return x, traced(chain, x)


def named(gm: fx.GraphModule, name: str) -> fx.Node:
    [node] = [node for node in gm.graph.nodes if str(node.target) == name]
    return node


def test_the_shortest_wrong_prefix_ends_where_the_bug_shows() -> None:
    x, gm = traced_chain()
    tried: list[int] = []

    def counted(case: GraphCase) -> Sequence[Finding]:
        tried.append(len(calls_of(case.graph)))
        return oracle(case)

    options = CheckOptions(compiler=faults.wrong_if_unseen("aten.tanh.default"))
    found = Parts(gm, (x,), options, counted).shortest_wrong_prefix()
    assert str(found.node.target) == "aten.cos.default"  # tanh is seen as long as it is the last one
    assert found.node.args[0] is named(gm, "aten.tanh.default")
    assert found.finding.kind.fails
    assert oracle(found.case)
    assert len(tried) <= 6  # 18 calls


def test_a_cut_is_as_wide_as_the_bug_needs() -> None:
    x, gm = traced_chain()
    options = CheckOptions(compiler=faults.wrong_if_unseen("aten.tanh.default"))
    reader = next(iter(named(gm, "aten.tanh.default").users))
    cut = Parts(gm, (x,), options, oracle).cut_out(reader)
    assert [str(node.target) for node in calls_of(cut.case.graph)] == ["aten.tanh.default", "aten.cos.default"]
    assert cut.finding.kind.fails


def test_the_recorded_values_are_eagers() -> None:
    x, gm = traced_chain()
    options = CheckOptions(compiler=faults.wrong_operator("aten.tanh.default"))
    cut = Parts(gm, (x,), options, oracle).cut_out(named(gm, "aten.tanh.default"))
    expected = x
    for _ in range(4):
        expected = torch.sin(expected) * 2
    assert torch.equal(cut.case.inputs[0], expected)


def test_a_size_is_read_from_the_tensor_that_has_it() -> None:
    """A compiler that is given it apart does not know that both are one, and makes other code."""

    def flat(x: Tensor) -> Tensor:
        return (x.sin() * 2).reshape(x.shape[0] * x.shape[1]).flip(0)

    x = torch.randn(3, 5)
    gm = make_fx(flat, tracing_mode="symbolic")(x)
    first, *others = [node for node in calls_of(gm) if isinstance(recorded_value(node), Tensor)]
    numbers = [node for node in calls_of(gm) if not isinstance(recorded_value(node), Tensor)]
    products = [node for node in numbers if "sym_size" not in str(node.target)]
    part, sources = part_of(gm, [*products, *others], [others[-1]])
    assert sources == [first]
    [found] = part(x.sin())
    assert torch.equal(found, flat(x))


def test_what_is_right_has_no_wrong_prefix_and_nothing_is_cut_out_of_it() -> None:
    x, gm = traced_chain()
    parts = Parts(gm, (x,), CheckOptions(compiler="eager"), oracle)
    assert parts.shortest_wrong_prefix() is None
    assert parts.cut_out(named(gm, "aten.tanh.default")) is None


@pytest.mark.parametrize("limit", [1, 128, 300, 1 << 20])
def test_segments_name_the_same_operator(limit: int) -> None:
    x, gm = traced_chain()
    parts = list(segments(gm, limit))
    assert [node for part in parts for node in part] == calls_of(gm)
    sizes = [sum(128 for node in part for made in tensors_made(node) if made.meta["val"].dim() == 2) for part in parts]
    assert all(size <= limit or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    compilers = []

    def counted(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compilers.append(len(calls_of(graph)))
        return faults.wrong_operator("aten.tanh.default")(graph, example_inputs)

    assert probe(gm, (x,), counted, limit=limit).node is named(gm, "aten.tanh.default")
    assert sum(compilers) <= len(calls_of(gm))
    assert probe(gm, (x,), faults.wrong_operator("aten.none.default"), limit=limit) is None


def test_the_probe_leaves_inputs_alone() -> None:
    def mutating(x: Tensor) -> tuple[Tensor, ...]:
        noise = torch.rand_like(x)
        x.copy_(x * 2)
        return (x + noise,)

    x = torch.ones(4)
    gm = traced(mutating, torch.ones(4))
    assert probe(gm, (x,), faults.wrong_operator("aten.none.default"), limit=1 << 20) is None
    assert torch.equal(x, torch.ones(4))


def writing(x: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    y = torch.sin(x) * 2
    total.copy_(total + y)
    return (torch.cos(y),)


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_what_is_not_written_to_an_input_is_found(limit: int) -> None:
    inputs = (torch.randn(4, 8), torch.randn(4, 8))
    gm = traced(writing, *(value.clone() for value in inputs))
    dropped = faults.left_out("aten.copy_.default", "python")
    faulty = probe(gm, inputs, dropped, limit=limit)
    assert faulty.node is named(gm, "aten.copy_.default")
    assert share_of(faulty.finding) > 0.1
    cut = Parts(gm, inputs, CheckOptions(compiler=dropped), oracle).cut_out(faulty.node)
    assert [str(node.target) for node in calls_of(cut.case.graph)] == ["aten.copy_.default"]
    assert oracle(cut.case)


def test_what_is_wrongly_computed_before_it_is_written_is_found_there() -> None:
    inputs = (torch.randn(4, 8), torch.randn(4, 8))
    gm = traced(writing, *(value.clone() for value in inputs))
    faulty = probe(gm, inputs, faults.wrong_operator("aten.add.Tensor"), limit=1 << 20)
    assert faulty.node is named(gm, "aten.add.Tensor")


def test_a_little_less_precision_is_not_blamed_for_what_is_grossly_wrong() -> None:
    def result(node: fx.Node, value: Any) -> Any:
        if str(node.target) == "aten.sin.default":
            return value + 1e-5
        return value * 1.5 if str(node.target) == "aten.tanh.default" else value

    x = torch.randn(32, 8)
    gm = traced(lambda x: (torch.cos(torch.tanh(torch.sin(x)) * 2),), x)
    assert str(probe(gm, (x,), faults.interpreted(result, "python"), limit=1 << 30).node.target) == "aten.tanh.default"
    alone = faults.interpreted(lambda node, value: value + 1e-5 if "sin." in str(node.target) else value, "python")
    assert str(probe(gm, (x,), alone, limit=1 << 30).node.target) == "aten.sin.default"


def test_bisection_names_what_feeds_an_operator_with_several_results() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.relu(x)
        return (torch.tanh(torch.ops.aten.native_layer_norm(y, [8], None, None, 1e-5)[0]),)

    x = torch.randn(4, 8)
    gm = traced(program, x)
    options = CheckOptions(compiler=faults.wrong_operator("aten.relu.default"))
    assert Parts(gm, (x,), options, oracle).shortest_wrong_prefix().node is named(gm, "aten.relu.default")


class ConvNet(nn.Module):
    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 3)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        x = F.relu(self.norm(self.first(x / scale)))
        x = self.pool(x)
        x = F.gelu(self.second(x)) + torch.sigmoid(x)
        x = x * torch.tanh(x)
        return self.last(x.mean((2, 3))).log_softmax(-1)


def trained(compiled: Callable[..., Any]) -> None:
    compiled(torch.randn(2, 3, 9, 9)).square().sum().backward()


@pytest.mark.process
@pytest.mark.parametrize(
    ("pool", "forward", "backward"),
    [
        (lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True), "avg_pool2d", "avg_pool2d_backward"),
        pytest.param(
            lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
            "max_pool2d_with_indices",
            "max_pool2d_with_indices_backward",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda x: F.adaptive_avg_pool2d(x, 4),
            "_adaptive_avg_pool2d",
            "_adaptive_avg_pool2d_backward",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_pooling_in_a_network_whose_gradient_is_wrong(
    pool: Callable[[Tensor], Tensor], forward: str, backward: str
) -> None:
    wrong = faults.wrong_if_compiled_together(f"aten.{forward}.default", f"aten.{backward}.default")
    location = located(trained, ConvNet(pool), wrong)
    assert (location.op or "").removeprefix("aten.").removesuffix(".default") == forward
    assert location.graph == "dynamo"
    assert location.cut.finding.subject.startswith("grad[")
    assert len([node for node in location.cut.case.graph.graph.nodes if node.op == "call_function"]) == 1
    assert any("forward and backward are compiled together" in note for note in location.notes)


class Siblings(nn.Module):
    def __init__(self, part: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(4, 3)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * 2
        x = x + F.gelu(x).cos()
        one, other, *_ = self.part(x)
        product = one * other
        return self.last(F.silu(product) + torch.sin(product)).softmax(-1)


def second_detached(name: str) -> Callable[..., Any]:
    """An operator with several outputs hands on the gradient of the first alone."""

    def result(node: fx.Node, value: Any) -> Any:
        if str(node.target) == name and isinstance(value, tuple):
            return (value[0], value[1].detach(), *value[2:])
        return value

    return faults.interpreted(result, "python")


@pytest.mark.process
@pytest.mark.parametrize(
    ("part", "target", "name"),
    [
        (lambda x: x.chunk(2, 1), "chunk", "Tensor.chunk"),
        pytest.param(
            lambda x: torch.split(x, 4, 1), str(torch.split), "torch.functional.split", marks=pytest.mark.slow
        ),
        pytest.param(lambda x: x.unflatten(1, (2, 4)).unbind(1), "unbind", "Tensor.unbind", marks=pytest.mark.slow),
        (lambda x: torch.var_mean(x.unflatten(1, (2, 4)), 1), str(torch.var_mean), "torch.var_mean"),
    ],
    ids=["chunk", "split", "unbind", "var_mean"],
)
def test_a_gradient_that_is_lost_between_sibling_outputs(part: Callable[[Tensor], Any], target: str, name: str) -> None:
    location = located(training, Siblings(part), second_detached(target))
    assert operator_of(location) == name
    assert location.graph == "dynamo"


@pytest.mark.process
def test_siblings_of_which_one_is_lost_in_the_backward_graph() -> None:
    """The product that reads both is right: stored, both parts are right, and so is the product."""

    def halved(value: Tensor) -> Tensor:
        return torch.cat([value[:, :4], torch.zeros_like(value[:, 4:])], 1)

    wrong = faults.wrong_if_compiled_together("aten.split.Tensor", "aten.cat.default", halved)
    assert operator_of(located(training, Siblings(lambda x: x.chunk(2, 1)), wrong)) == "Tensor.chunk"


@pytest.mark.process
def test_gradients_that_are_right_are_not_accused() -> None:
    """Only the forward pass is wrong."""
    wrong = faults.wrong_operator("aten.gelu.default", how="aot")
    location = located(trained, ConvNet(lambda x: F.avg_pool2d(x, 2)), wrong)
    assert location.op == "aten.gelu.default"
    assert not any("compiled together" in note for note in location.notes)


class Net(nn.Module):
    """More than twenty nodes around a piece of integer arithmetic."""

    def __init__(self, piece: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
        self.norm = nn.LayerNorm(12)
        self.piece = piece

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.first(x)) * 2
        hidden = self.norm(hidden) + torch.tanh(hidden)
        hidden = hidden + self.piece(hidden)
        hidden = torch.sigmoid(hidden) * hidden.cos()
        hidden = hidden - hidden.mean(1, keepdim=True)
        return self.last(torch.nn.functional.relu(hidden)).softmax(-1)


def positions(x: Tensor) -> Tensor:
    return (x.new_zeros(12, dtype=torch.int64) + torch.arange(12) * 3).to(x.dtype) * 0.1


def bytes_(x: Tensor) -> Tensor:
    small = (x * 10).clamp(0, 200).to(torch.uint8)
    return (small * 2 + 1).to(x.dtype) * 0.01


def booleans(x: Tensor) -> Tensor:
    return ((x > 0) & (x < 0.5)).to(x.dtype)


def floors(x: Tensor) -> Tensor:
    whole = (x * 100).to(torch.int32)
    return (torch.div(whole, 7, rounding_mode="floor") * 2).to(x.dtype) * 0.01


def looked_up(x: Tensor) -> Tensor:
    place = torch.remainder((x * 10).to(torch.int64), 12)
    return x.gather(1, place)


def one_further(value: Tensor) -> Tensor:
    """Another index that exists."""
    return (value + 1) % 12


@pytest.mark.process
@pytest.mark.parametrize(
    ("piece", "operator", "spoil", "program"),
    [
        (positions, "aten.mul.Tensor", lambda value: value + 1 if value.dtype is torch.int64 else value, inference),
        pytest.param(
            bytes_,
            "aten.mul.Tensor",
            lambda value: value + 1 if value.dtype is torch.uint8 else value,
            training,
            marks=pytest.mark.slow,
        ),
        pytest.param(booleans, "aten.bitwise_and.Tensor", torch.logical_not, inference, marks=pytest.mark.slow),
        (floors, "aten.div.Tensor_mode", lambda value: value + 1, training),
        pytest.param(looked_up, "aten.remainder.Scalar", one_further, inference, marks=pytest.mark.slow),
    ],
)
def test_an_integer_operator_that_only_its_readers_show_is_named(
    piece: Callable[[Tensor], Tensor], operator: str, spoil: Callable[[Tensor], Tensor], program: Callable[..., Any]
) -> None:
    location = located(program, Net(piece), faults.wrong_for_readers(operator, spoil))
    assert location.op == operator
    assert location.node is not None
    assert location.cut is not None
    assert any("shows it and is right by itself" in note for note in location.notes)


@pytest.mark.process
def test_a_reader_that_is_wrong_is_named_and_not_what_it_reads() -> None:
    """Wrong only where it is fused with what computes its input; that is right for other readers."""

    def floors_then_sine(x: Tensor) -> Tensor:
        return torch.sin((x * 100).to(torch.int32) // 7)

    location = located(inference, Net(floors_then_sine), faults.wrong_if_fused("aten.sin.default"))
    assert location.op == "aten.sin.default"
    assert not any("shows it and is right" in note for note in location.notes)


@pytest.mark.process
def test_an_operator_of_floats_that_only_its_readers_show_is_named() -> None:
    assert located(inference, Net(booleans), faults.wrong_for_readers("aten.tanh.default")).op == "aten.tanh.default"
