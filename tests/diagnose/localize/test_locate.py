"""From a failed call to the stage, the graph, the operator, and a small case of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from checked_backend.diagnose.localize.called import aten_name
from checked_backend.diagnose.localize.locate import Location
from tests.ledger.sources.localized import Net
from tests.support import faults
from tests.support.locate_tools import calls, inference, located, operator_of, oracle, training


def line_of(location: Location) -> str:
    trace = location.node.meta.get("stack_trace") or ""
    return [line.strip() for line in trace.splitlines() if line.strip() and "^^" not in line][-1]


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "operator", "line"),
    [
        (inference, "aten.tanh.default", "hidden = torch.tanh(self.first(x))"),
        (training, "aten.addmm.default", "hidden = torch.tanh(self.first(x))"),
        (inference, "aten.native_layer_norm.default", "hidden = self.norm(hidden)"),
        (training, "aten.native_layer_norm.default", "hidden = self.norm(hidden)"),
        (inference, "aten.mean.dim", "hidden = F.relu(hidden - hidden.mean(dim=1, keepdim=True))"),
        (training, "aten.gelu.default", "hidden = F.gelu(hidden)"),
    ],
)
def test_the_operator_that_is_wrong_is_named(program: Callable[..., Any], operator: str, line: str) -> None:
    def spoil(value: Any) -> Any:
        return tuple(map(faults.changed, value)) if isinstance(value, tuple) else faults.changed(value)

    location = located(program, Net(), faults.wrong_operator(operator, spoil, "aot"))
    assert operator_of(location) == operator
    assert line_of(location) == line
    assert (location.stage, location.graph) == ("compiled", "inference" if program is inference else "forward")
    assert calls(location.cut.case)[0] == operator  # besides it only the items of its tuple
    assert oracle(location.cut.case)


@pytest.mark.process
@pytest.mark.parametrize("operator", ["aten.tanh_backward.default", "aten.gelu_backward.default", "aten.mm.default"])
def test_in_the_backward_graph_too(operator: str) -> None:
    location = located(training, Net(), faults.wrong_operator(operator, how="aot"))
    assert operator_of(location) == operator
    assert (location.stage, location.graph) == ("compiled", "backward")


SINE, COSINE = "aten.sin.default", "aten.cos.default"


def slightly(value: Tensor) -> Tensor:
    return value * (1 + 1e-5) if value.dtype is torch.float32 else value


@pytest.mark.process
@pytest.mark.parametrize(
    ("function", "x", "operator", "spoil"),
    [
        # what inherits an error is not blamed
        (lambda x: torch.exp(100 * (torch.sin(x) - x)).cumsum(0), torch.rand(64), SINE, faults.changed),
        # nor is an ill-conditioned operator, for rounding
        (lambda x: (torch.relu(x - x.mean()) * 3).sum(0), 1e4 + torch.rand(64, 8), "aten.relu.default", faults.changed),
        # nor what magnifies a slight error
        (lambda x: ((torch.cos(x) - x.double().cos().float()) * 1e3).exp() * 2, torch.rand(64), COSINE, slightly),
        # nor what reads a wrong view
        (
            lambda x: torch.exp(x.permute(1, 0)) + 1,
            torch.randn(4, 4),
            "aten.permute.default",
            lambda view: view.flip(0),
        ),
        # nor dropout
        (lambda x: torch.sin(F.dropout(x, 0.5)) * torch.rand_like(x), torch.randn(16, 16), SINE, faults.changed),
        (lambda x: torch.sin(torch.cos(x) * 2), torch.randn(3, 4), SINE, Tensor.double),
    ],
    ids=["inherits", "ill-conditioned", "magnifies", "view", "dropout", "dtype"],
)
def test_nothing_else_is_blamed(
    function: Callable[[Tensor], Tensor], x: Tensor, operator: str, spoil: Callable[[Tensor], Tensor]
) -> None:
    wrong = faults.wrong_operator(operator, spoil, "aot")
    assert operator_of(located(lambda compiled: compiled(x), function, wrong)) == operator


@pytest.mark.process
def test_a_bug_that_hides_where_everything_is_returned() -> None:
    location = located(inference, Net(), faults.wrong_if_unseen("aten.tanh.default"))
    assert operator_of(location) == "torch.tanh"  # in Dynamo's graph, whose tensors are exposed as copies


@pytest.mark.process
def test_an_operator_that_is_wrong_because_of_what_follows_it() -> None:
    def result(node: fx.Node, value: Any) -> Any:
        followed = any(str(later.target) == "aten.flip.default" for later in node.graph.nodes)
        return faults.changed(value) if str(node.target) == "aten.exp.default" and followed else value

    x, wrong = torch.randn(6), faults.interpreted(result, "aot")
    location = located(lambda compiled: compiled(x), lambda x: torch.exp(x * 2).cumsum(0).flip(0) + 1, wrong)
    assert operator_of(location) == "aten.exp.default"
    assert location.cut is not None  # so there is something to reduce
    assert {"aten.exp.default", "aten.flip.default"} <= set(calls(location.cut.case))


@pytest.mark.process
def test_a_gross_bug_that_hides_behind_a_slight_one() -> None:
    def result(node: fx.Node, value: Any) -> Any:
        if str(node.target) == "aten.tanh.default":
            return value * (1 + 1e-5)  # shows everywhere, and does not explain what is found
        [output] = node.graph.find_nodes(op="output")
        few = len(output.args[0]) <= 2  # type: ignore[arg-type]
        return faults.changed(value) if str(node.target) == "aten.gelu.default" and few else value

    known: list[Location] = []
    location = located(inference, Net(), faults.interpreted(result, "aot"), known.append)
    assert operator_of(location) == "aten.gelu.default"
    assert calls(location.cut.case) == ["aten.gelu.default"]
    told = [one.notes[-1] for one in known if one.node is None and one.notes]  # by a search that ends there
    assert told[0] == "it ended in bisecting the inference graph"
    assert "is wrong up to addmm_1 (aten.addmm.default, tests/ledger/sources/localized.py:" in told[1]
    assert ": return self.last(hidden), last)" in told[1]
    assert ", and right up to relu (" in told[-1]
    assert "bisection" in location.notes[0]
    assert "far too slightly" in location.notes[1]


@pytest.mark.process
def test_a_slight_error_is_not_blamed_for_a_gross_one_that_no_part_shows() -> None:
    """Compiled anew the program may be right, and ``erf`` has a little less precision than eager's as ever."""
    first: list[fx.Graph] = []

    def result(node: fx.Node, value: Any) -> Any:
        if str(node.target) == "aten.tanh.default":
            return value * (1 + 1e-5)
        first.append(node.graph)
        return faults.changed(value) if str(node.target) == "aten.gelu.default" and node.graph is first[0] else value

    location = located(inference, Net(), faults.interpreted(result, "aot"))
    assert location.node is None
    assert location.notes[0].startswith("tanh (aten.tanh.default) is wrong too, but far too slightly")


@pytest.mark.process
def test_a_compiler_that_knows_the_operators_of_dynamo() -> None:
    location = located(training, Net(), faults.wrong_operator(str(F.gelu)))
    assert operator_of(location) == "torch._C._nn.gelu"
    assert location.op == "aten.gelu.default"
    assert (location.stage, location.graph) == ("compiled", "dynamo")
    assert line_of(location) == "hidden = F.gelu(hidden)"


@pytest.mark.process
def test_operators_in_place_and_several_results() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.relu(self.norm(x), inplace=True)
            values, _ = hidden.max(dim=1)
            return torch.sin(values) * 2

    for name, expected in ((str(torch.sin), "torch.sin"), (str(F.relu), "torch.nn.functional.relu")):
        assert operator_of(located(training, InPlace(), faults.wrong_operator(name))) == expected


@pytest.mark.process
def test_dynamic_sizes() -> None:
    net = Net()
    compiler = faults.wrong_operator("aten.tanh.default", how="aot")
    location = located(inference, lambda x: net(torch.cat([x, x[: x.shape[0] // 2]])), compiler)
    assert operator_of(location) == "aten.tanh.default"


def test_the_compiler_refuses_an_operator() -> None:
    assert operator_of(located(inference, Net(), faults.refuses("aten.gelu.default"))) == "aten.gelu.default"


@pytest.mark.process
def test_a_wrong_result_that_no_operator_has() -> None:
    location = located(inference, Net(), faults.one_element(0, "aot"))
    # the compiler spoils the first result of whatever it is given
    assert location.stage == "compiled"


@pytest.mark.process
def test_aot_autograd_is_wrong_already(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = faults.wrong_operator("aten.tanh.default", how="aot")
    monkeypatch.setattr("checked_backend.diagnose.localize.stages.aot_autograd", lambda *_args, **_kwargs: wrong)
    location = located(inference, Net(), wrong)
    assert (location.stage, location.graph) == ("aot", "dynamo")  # below it there is Dynamo's graph alone
    assert operator_of(location) == "torch.tanh"


def test_a_result_that_is_laid_out_otherwise() -> None:
    x, wrong = torch.randn(3, 4), faults.wrong_operator(SINE, faults.restrided, "aot")
    location = located(lambda compiled: compiled(x), lambda x: torch.sin(torch.cos(x) * 2), wrong)
    assert operator_of(location) == SINE
    assert location.cut.finding.detail == "structure.stride"
    assert calls(location.cut.case) == [SINE]


def test_a_result_that_should_be_a_copy() -> None:
    x, wrong = torch.randn(4), faults.left_out("aten.clone.default", "aot")
    location = located(lambda compiled: compiled(x), lambda x: (torch.sin(x), x.clone()), wrong)
    assert operator_of(location) == "aten.clone.default"
    assert str(location.cut.finding.kind) == "alias"


@pytest.mark.process
def test_a_bug_that_only_dynamic_sizes_have() -> None:
    def program(compiled: Callable[..., Any]) -> None:
        x = torch.randn(5, 6)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x)

    location = located(program, lambda x: torch.cos(torch.sin(x) * 2), faults.wrong_if_symbolic("aten.sin.default"))
    assert operator_of(location) == "aten.sin.default"
    assert location.cut.case.dynamic
    assert calls(location.cut.case) == ["aten.sin.default"]


def factored(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(torch.sin(x) - 10) * 2


def test_an_operator_that_should_have_raised() -> None:
    wrong = faults.left_out(str(torch.linalg.cholesky), "python")
    location = located(lambda compiled: compiled(torch.eye(3)), factored, wrong)
    alone = torch.__version__.startswith("2.11.")  # there AOT autograd, too, loses what raises
    assert location.stage == ("aot" if alone else "compiled")
    assert operator_of(location) == "torch._C._linalg.linalg_cholesky"
    assert (location.op or "").startswith("aten.linalg_cholesky")
    assert line_of(location) == "return torch.linalg.cholesky(torch.sin(x) - 10) * 2"
    assert calls(location.cut.case) == [str(torch.linalg.cholesky)]  # alone, on the values that eager had there
    assert torch.equal(location.cut.case.inputs[0], torch.sin(torch.eye(3)) - 10)


def test_the_stage_that_does_not_raise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = faults.left_out(str(torch.linalg.cholesky), "python")
    monkeypatch.setattr("checked_backend.diagnose.localize.stages.aot_autograd", lambda **_how: wrong)
    assert located(lambda compiled: compiled(torch.eye(3)), factored, wrong).stage == "aot"


def test_the_name_is_that_of_what_the_call_comes_down_to() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.multilabel_margin_loss(x, torch.zeros(2, 3, dtype=torch.long)),
            torch.ldexp(x, x),
            F.layer_norm(x, (3,)),
            x.expand(2, 3).clone().mul_(2),
            x.to(torch.float64),
        )

    names: dict[str, str] = {}

    def backend(gm: fx.GraphModule, _examples: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            names.update({node.name: aten_name(gm, inputs, node) for node in gm.graph.nodes if "call" in node.op})
            return gm(*inputs)

        return run

    torch.compile(function, backend=backend)(torch.rand(2, 3))
    for node, name in {
        "multilabel_margin_loss": "multilabel_margin_loss_forward.default",
        "ldexp": "ldexp.Tensor",
        "layer_norm": "native_layer_norm.default",
        "mul_": "mul_.Tensor",
        "to": "_to_copy.default",
    }.items():
        assert names[node] == f"aten.{name}"
