from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import checked_backend as cb
from checked_backend.metadata.findings import metadata_error
from checked_backend.metadata.interpreter import MetadataInterpreter
from tests.support.lying_operators import define, transposed


def collected(gm: fx.GraphModule, *args: Any) -> list[cb.Finding]:
    found: list[cb.Finding] = []
    MetadataInterpreter(gm, "forward", found.extend)(list(args))
    return found


@pytest.fixture
def liar(library: Any) -> Any:
    """A custom operator whose fake implementation claims a contiguous result; the real one is transposed."""
    return define(library, "liar(Tensor x) -> Tensor", transposed, torch.empty_like)


def test_strides_of_size_one_and_of_empty_tensors_are_not_significant() -> None:
    gm = make_fx(lambda x: x.relu(), tracing_mode="fake")(torch.randn(1, 4))
    assert collected(gm, torch.randn(1, 4).as_strided((1, 4), (77, 1))) == []
    gm = make_fx(lambda x: x.relu(), tracing_mode="fake")(torch.randn(0, 4))
    assert collected(gm, torch.randn(0, 4).as_strided((0, 4), (1, 9))) == []


def test_a_wrong_input_is_found_and_what_follows_is_inherited() -> None:
    gm = make_fx(lambda x: x.relu().sin(), tracing_mode="fake")(torch.randn(3, 4))
    findings = collected(gm, torch.randn(4, 3).t())
    assert [(f.node, f.evidence["inherited"]) for f in findings] == [("x_1", False), ("relu", True), ("sin", True)]
    assert findings[0].op == "placeholder"
    error = metadata_error(findings)
    assert error.finding is findings[0]
    assert "node[x_1] (placeholder) in the forward graph: stride (4, 1), ran with (1, 3)" in str(error)


def test_outputs_of_a_multi_output_node_are_numbered() -> None:
    gm = make_fx(lambda x: torch.ops.aten.max.dim(x, 0)[0], tracing_mode="fake")(torch.randn(3, 4))
    node = next(node for node in gm.graph.nodes if node.name == "max_1")
    with FakeTensorMode():
        node.meta["val"] = (node.meta["val"][0], torch.empty(4, dtype=torch.int32))
    assert [f.subject for f in collected(gm, torch.randn(3, 4))] == ["node[max_1][1]"]


def test_the_mismatch_is_told_when_an_operator_after_it_fails() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2, 3)
    graph.output(graph.call_function(operator.matmul, (x, x)))
    gm = fx.GraphModule(nn.Module(), graph)

    def stop(findings: Any) -> None:
        raise metadata_error(findings)

    with pytest.raises(cb.MetadataError, match=r"shape \(2, 3\), ran with \(2, 4\)") as caught:
        MetadataInterpreter(gm, "forward", stop)([torch.ones(2, 4)])
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        MetadataInterpreter(gm, "forward", stop)([torch.ones(2, 3)])


def test_warn(liar: Callable[..., Any]) -> None:
    x = torch.randn(3, 4)
    compiled = torch.compile(lambda t: liar(t), backend=cb.debug_interpreter, options={"on_divergence": "warn"})
    with pytest.warns(UserWarning, match=r"stride \(4, 1\), ran with \(1, 3\)"):
        assert torch.equal(compiled(x), x)


def test_dynamic_shapes_bind_symbols_at_every_call() -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ w, x @ w]).view(-1, 2).transpose(0, 1).contiguous().relu()

    compiled = torch.compile(model, backend=cb.debug_interpreter, dynamic=True)
    for rows in (4, 6, 9):
        x, w = torch.randn(rows, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        out = compiled(x, w)
        assert torch.equal(out, model(x, w))
        out.sum().backward()


def test_a_wrong_symbolic_size_is_found() -> None:
    gm = make_fx(lambda x: torch.cat([x, x]).relu(), tracing_mode="symbolic")(torch.randn(3, 4))
    assert collected(gm, torch.randn(5, 6)) == []
    next(node for node in gm.graph.nodes if node.name == "relu").meta["val"] = next(iter(gm.graph.nodes)).meta["val"]
    (finding,) = collected(gm, torch.randn(5, 6))
    assert (finding.detail, finding.actual) == ("structure.shape", "(10, 6)")
    assert finding.expected.count("=") == 2
    assert "=5" in finding.expected
    assert f"shape {finding.expected}, ran with (10, 6)" in finding.message


def test_views_of_one_of_several_outputs() -> None:
    aten = torch.ops.aten
    gm = make_fx(lambda x: aten.view.default(aten.unbind.int(x)[1], [2, 2]), tracing_mode="fake")(torch.randn(3, 4))
    assert collected(gm, torch.randn(3, 4)) == []
    next(node for node in gm.graph.nodes if node.name == "view").target = torch.ops.aten.view_copy.default
    (finding,) = [f for f in collected(gm, torch.randn(3, 4)) if f.detail == "alias"]
    assert (finding.expected, finding.actual) == ("a view of getitem_1", "memory of its own")
    # a view that differs is not said to have taken memory that is not its own
    gm = make_fx(lambda x: torch.ops.aten.max.dim(x, 0)[0].t(), tracing_mode="fake")(torch.randn(3, 4))
    view = next(node for node in gm.graph.nodes if node.op == "call_function" and "t.default" in str(node.target))
    with FakeTensorMode():
        view.meta["val"] = torch.empty(4, dtype=torch.float64)
    assert [f.detail for f in collected(gm, torch.randn(3, 4))] == ["structure.dtype"]
