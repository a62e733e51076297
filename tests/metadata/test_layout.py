"""Strides and storage offsets that were traced wrongly: told once where nothing depends on them, else an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import checked_backend as cb
from checked_backend.errors import DivergenceWarning
from checked_backend.findings import Finding, Severity, Verdict
from checked_backend.metadata.interpreter import MetadataInterpreter
from tests.support.lying_operators import NAME, QUIET, define, record, shifted, transposed
from tests.support.region_tools import warned

pytestmark = QUIET
Program = Callable[..., Any]

HERE = "tests/metadata/test_layout.py:"


KERNELS = {"structure.stride": transposed, "structure.offset": shifted}


def liar(library: Any, kernel: Program) -> Any:
    """An operator that returns what it is given, in a layout of which its fake kernel does not know."""
    return define(library, "lie(Tensor x) -> Tensor", kernel, torch.empty_like)


def x() -> torch.Tensor:
    return torch.randn(3, 4)


def interpreted(program: Program, **options: Any) -> Program:
    torch._dynamo.reset()
    return torch.compile(program, backend=cb.debug_interpreter, options=options)


@pytest.mark.parametrize("detail", KERNELS)
@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_layout_that_is_only_read_is_warned_of_once_and_the_program_goes_on(
    library: Any, detail: str, policy: str
) -> None:
    operator = liar(library, KERNELS[detail])
    compiled = interpreted(lambda x: operator(x * 2).sin().sum(), on_divergence=policy)
    [text] = warned(lambda: [compiled(x()) for _ in range(3)])
    said, node, fault, *_ = text.splitlines()
    if detail == "structure.stride":
        assert said == "2 nodes have other strides than were traced, on which nothing depends."
        assert f"node[lie] ({NAME}.lie.default): stride (4, 1) traced, (1, 3) ran; your line: {HERE}" in node
    else:
        assert said == "1 node begins elsewhere in memory than was traced, on which nothing depends."
        assert f"node[lie] ({NAME}.lie.default): offset 0 traced, 3 ran; your line: {HERE}" in node
    assert "likely at fault: the register_fake of the custom operator" in fault
    assert 'options={"layout": "raise"}' in text
    given = x()
    torch.testing.assert_close(compiled(given), (given * 2).sin().sum())


def test_what_is_recorded_is_not_warned_of_and_the_session_passes(library: Any) -> None:
    operator = liar(library, shifted)
    report = record(lambda x: operator(x) + 1, (x(),), (x(),))
    (finding,) = report.findings
    assert (finding.subject, finding.detail, finding.severity) == ("node[lie]", "structure.offset", Severity.WARNING)
    told = "PASS: 1 node begins elsewhere in memory than was traced, on which nothing depends (6 nodes of the"
    assert str(report).startswith(told)
    assert "Warning 1 of 1: structure.offset, node[lie]" in " ".join(report.to_text(verbose=True).split())
    assert cb.Report.from_json(report.to_json()).verdict is Verdict.PASS


DEPENDENTS: dict[str, tuple[str, Program, str]] = {
    "returned": ("structure.stride", lambda y: y, "the graph returns it"),
    "returned, at an offset": ("structure.offset", lambda y: y, "the graph returns it"),
    "viewed": ("structure.stride", lambda y: y.t().sin().sum(), "makes a view of it"),
    "viewed, at an offset": ("structure.offset", lambda y: y.view(-1).sum(), "makes a view of it"),
    "reshaped": ("structure.stride", lambda y: y.reshape(-1).sin().sum(), "makes a view of it"),
    "restrided": ("structure.offset", lambda y: y.as_strided((2,), (1,), 1).sum(), "makes a view of it"),
    "scattered by strides": (
        "structure.offset",
        lambda y: y.as_strided_scatter(torch.ones(2), (2,), (1,), 1).sum(),
        "goes by where it lies in memory",
    ),
}


@pytest.mark.parametrize("name", DEPENDENTS)
def test_a_layout_that_a_later_node_depends_on_is_an_error(library: Any, name: str) -> None:
    detail, then, reason = DEPENDENTS[name]
    operator = liar(library, KERNELS[detail])
    compiled = interpreted(lambda x: then(operator(x * 2)))
    with pytest.raises(cb.MetadataError, match=r"what ran does not have") as caught:
        compiled(x())
    assert (caught.value.finding.node, caught.value.finding.detail) == ("lie", detail)
    assert reason in caught.value.finding.evidence["depended_on"]
    assert f"it matters: {caught.value.finding.evidence['depended_on']}" in str(caught.value)
    with cb.collect() as session, suppress(RuntimeError):  # a view that these strides do not allow
        interpreted(lambda x: then(operator(x * 2)), on_divergence="record")(x())
    assert session.report.verdict is Verdict.FAIL


@pytest.mark.parametrize("mutates", [False, True])
def test_a_custom_operator_depends_on_strides(library: Any, mutates: bool) -> None:
    operator = liar(library, transposed)
    if mutates:
        other = define(library, "other(Tensor(a!) x) -> ()", lambda x: None, lambda x: None)
    else:
        other = define(library, "other(Tensor x) -> Tensor", torch.sum, lambda x: x.new_empty(()))

    def program(x: torch.Tensor) -> Any:
        y = operator(x * 2)
        result = other(y)
        return y.sum() if result is None else result

    with pytest.raises(cb.MetadataError, match="not one of torch's operators that take any strides"):
        interpreted(program)(x())


def test_strides_that_travel_to_a_result_name_the_operator_that_made_them(library: Any) -> None:
    operator = liar(library, transposed)
    harmless = define(library, "harmless(Tensor x) -> Tensor", shifted, torch.empty_like)
    program = lambda x: (harmless(x).sum(), operator(x * 2).sin().cos())  # noqa: E731
    with pytest.raises(cb.MetadataError) as caught:
        interpreted(program)(x())
    assert (caught.value.finding.node, caught.value.finding.detail) == ("lie", "structure.stride")
    assert caught.value.finding.evidence["depended_on"] == "node[cos] follows from it"
    assert "node[harmless]" not in str(caught.value)
    told = [(finding.node, finding.fails) for finding in record(program, (x(),)).findings]
    assert told == [("harmless", False), ("lie", True), ("sin", True), ("cos", True)]


def test_what_goes_to_the_backward_graph_is_depended_on(library: Any) -> None:
    operator = liar(library, transposed)
    with pytest.raises(cb.MetadataError, match=r"node\[lie\].* in the forward graph: stride"):
        interpreted(lambda x: (operator(x.detach()) * x).sum())(x().requires_grad_())


def test_what_was_warned_of_is_no_part_of_a_later_error(library: Any) -> None:
    operator = liar(library, transposed)
    wrong = define(library, "wrong(Tensor x) -> Tensor", lambda x: x.double(), torch.empty_like)
    with pytest.raises(cb.MetadataError) as caught:
        interpreted(lambda x: (operator(x).sum(), wrong(x).sum()))(x())
    assert caught.value.finding.node == "wrong"
    assert "node[lie]" not in str(caught.value)


def test_each_of_several_results_is_looked_at_by_itself(library: Any) -> None:
    schema = "lie(Tensor x) -> (Tensor, Tensor)"
    operator = define(library, schema, lambda x: (x.clone(), transposed(x)), lambda x: (x.clone(), x.clone()))

    def program(x: torch.Tensor, returned: int) -> Any:
        results = operator(x * 2)
        return results[returned], results[1 - returned].sum()

    assert record(program, (x(), 0)).verdict is Verdict.PASS
    assert record(program, (x(), 1)).verdict is Verdict.FAIL


@pytest.mark.parametrize("depended", [False, True])
def test_layouts_inside_of_a_branch(library: Any, depended: bool) -> None:
    operator = liar(library, transposed)

    def branch(x: torch.Tensor) -> torch.Tensor:
        return operator(x).sin() if depended else operator(x).sin().sum()

    compiled = interpreted(lambda x: torch.cond(x.sum() > -100, branch, branch, (x,)) * 2)
    if depended:
        with pytest.raises(cb.MetadataError, match=r"true_graph_0 of cond: lie\]"):
            compiled(torch.ones(3, 4))
    else:
        [text] = warned(lambda: compiled(torch.ones(3, 4)))
        assert "of cond: lie]" in text


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_the_option_makes_it_a_finding_like_others(library: Any, policy: str) -> None:
    operator = liar(library, shifted)
    compiled = interpreted(lambda x: operator(x * 2).sum(), layout="raise", on_divergence=policy)
    if policy == "warn":
        [text] = warned(lambda: [compiled(x()) for _ in range(2)])
        assert text.startswith("what ran does not have the metadata")
    else:
        with pytest.raises(cb.MetadataError) as caught:
            compiled(x())
        assert caught.value.finding.severity is Severity.ERROR
    assert record(lambda x: operator(x * 2).sum(), (x(),), layout="raise").verdict is Verdict.FAIL


def test_the_option_keeps_it_in_the_coverage(library: Any) -> None:
    operator = liar(library, shifted)
    compiled = interpreted(lambda x: operator(x * 2).sum(), layout="ignore")
    with cb.collect() as session:
        assert warned(lambda: compiled(x())) == []
    assert session.report.findings == ()
    assert [finding.detail for finding in session.report.coverage.ignored] == ["structure.offset"]
    assert session.report.verdict is Verdict.PASS
    with pytest.raises(cb.MetadataError):
        interpreted(lambda x: operator(x * 2), layout="ignore")(x())


def test_the_programs_own_error_is_not_hidden_by_a_layout(library: Any) -> None:
    operator = liar(library, shifted)
    compiled = interpreted(lambda x, index: (operator(x).sum(), x[index]))
    with pytest.warns(DivergenceWarning, match="on which nothing depends"), pytest.raises(IndexError):
        compiled(x(), torch.tensor([7]))


def test_shifting_tokens_trains_on() -> None:
    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        moved = x.new_zeros(x.shape)
        moved[..., 1:] = x[..., :-1].clone()
        moved[..., 0] = 1
        return (moved * weight).sum()

    weight, given = x().requires_grad_(), x()
    compiled = interpreted(program)
    texts = warned(lambda: [compiled(given, weight).backward() for _ in range(2)])
    assert all("aten.copy.default" in text for text in texts)
    assert len(texts) <= 1  # a torch without the mistake says nothing
    torch.testing.assert_close(weight.grad, 2 * torch.cat([torch.ones(3, 1), given[:, :-1]], 1))


def test_a_write_depends_on_the_layout() -> None:
    found: list[Finding] = []
    gm = make_fx(lambda x: x.relu().add_(1).sum(), tracing_mode="fake")(torch.randn(3, 4))
    assert any("add_" in str(node.target) for node in gm.graph.nodes)
    MetadataInterpreter(fx.GraphModule(nn.Module(), gm.graph), "inference", found.extend)([torch.randn(4, 3).t()])
    evidence = {finding.node: finding.evidence.get("depended_on") for finding in found}
    assert "writes to it" in str(evidence["relu"])
    assert evidence["x_1"] == "node[relu] follows from it"


def test_who_is_at_fault_is_worked_out_once(library: Any) -> None:
    calls: list[int] = []
    operator = define(library, "lie(Tensor x) -> Tensor", lambda x: (calls.append(1), shifted(x))[1], torch.empty_like)
    compiled = interpreted(lambda x: operator(x * 2).sum(), on_divergence="record")
    compiled(x())
    first = len(calls)
    compiled(x())
    assert len(calls) == first + 1  # the program's own call
