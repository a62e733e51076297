"""Custom operators whose fake kernel or schema lies, one for each way to lie, as a user would meet them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import checked_backend as cb
from checked_backend import Finding, Kind, Verdict, debug_interpreter
from checked_backend.findings.paths import shown_path
from tests.support.lying_operators import (
    NAME,
    QUIET,
    define,
    differentiated_by,
    local,
    record,
    run_alone,
    shifted,
    transposed,
    with_effect,
)
from tests.support.region_tools import as_the_engine

pytestmark = QUIET


def written_behind(x: torch.Tensor) -> torch.Tensor:
    x.numpy()[...] += 1  # as C++ would: the version counter does not see it
    return x.clone()


def made(count: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """A fake kernel that makes some tensors."""
    return lambda x: [torch.empty_like(x) for _ in range(count)]


ONE, TWO, LIST = "(Tensor x) -> Tensor", "(Tensor x) -> (Tensor, Tensor)", "(Tensor x) -> Tensor[]"


# the operator's schema, kernel and fake kernel, and what is found
LIES: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], str]] = {
    "dtype": (ONE, lambda x: x.double(), torch.empty_like, "structure.dtype"),
    "shape": (ONE, lambda x: x[:-1].clone(), torch.empty_like, "structure.shape"),
    "rank": (ONE, lambda x: x[0].clone(), torch.empty_like, "structure.shape"),
    "stride": (ONE, transposed, torch.empty_like, "structure.stride"),
    "offset": (ONE, shifted, torch.empty_like, "structure.offset"),
    "layout": (ONE, lambda x: x.to_sparse(), torch.empty_like, "structure.layout"),
    "bits": (ONE, lambda x: torch._neg_view(x.clone()), torch.empty_like, "structure.bits"),
    "alias": (ONE, lambda x: x, torch.empty_like, "alias"),
    "view": (ONE, lambda x: x.view_as(x), torch.empty_like, "alias"),
    "mutation": (ONE, lambda x: x.add_(1).clone(), torch.empty_like, "mutation"),
    "mutation in C": (ONE, written_behind, torch.empty_like, "mutation"),
    "more outputs": (LIST, lambda x: [x + 1, x + 2, x + 3], made(2), "structure"),
    "fewer outputs": (LIST, lambda x: [x + 1, x + 2], made(3), "structure"),
    "second output": (TWO, lambda x: (x.clone(), x.clone().long()), made(2), "structure.dtype"),
    "outputs share memory": (TWO, lambda x: (lambda y: (y, y.view_as(y)))(x.clone()), made(2), "alias"),
    "requires_grad": (ONE, lambda x: x.detach().clone().requires_grad_(), torch.empty_like, "structure.requires_grad"),
    "none, which nobody takes": (
        "(Tensor x) -> (Tensor, Tensor?, Tensor)",
        lambda x: (x.clone(), None, x.clone()),
        made(3),
        "structure",
    ),
    "none": ("(Tensor x) -> Tensor?", lambda x: None, torch.empty_like, "structure"),
}


def found(operator: Any, *, dynamic: bool, **options: Any) -> tuple[list[Finding], Verdict]:
    def model(x: torch.Tensor) -> Any:
        values = operator(x * 2)
        first = values[0] if isinstance(values, (list, tuple)) else values
        last = values[-1] if isinstance(values, (list, tuple)) else values
        return (first, last) if first is not last else first

    options = {"on_divergence": "record", **options}
    compiled = torch.compile(model, backend=debug_interpreter, dynamic=dynamic, options=options)
    with cb.collect() as session, torch.no_grad(), suppress(IndexError):  # the graph takes an output that is not there
        compiled(torch.randn(4, 5))
    return local(session.report), session.report.verdict


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_on_its_node(library: Any, lie: str, dynamic: bool) -> None:
    if lie == "none" and dynamic:
        pytest.skip("Dynamo itself fails on a None where it traced a tensor")
    schema, kernel, fake, detail = LIES[lie]
    findings, verdict = found(define(library, f"lie{schema}", kernel, fake), dynamic=dynamic)
    kind = Kind(detail.partition(".")[0])
    assert [(f.kind, f.detail, f.op) for f in findings] == [(kind, detail, f"{NAME}.lie.default")]
    assert verdict is Verdict.FAIL
    (finding,) = findings
    assert finding.graph == "inference"
    assert "operator(x * 2)" in finding.source
    assert "test_lies.py:" in finding.source
    assert f"{NAME}.lie.default" in finding.evidence["at_fault"]
    if lie != "requires_grad":  # which autograd takes off where an operator is called from Python
        assert run_alone(finding)[0] == "THEY DIFFER"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("lie", LIES)
def test_the_same_operators_told_truly_are_clean(library: Any, lie: str) -> None:
    schema = LIES[lie][0]
    if "[]" in schema:
        operator = define(library, f"lie{schema}", lambda x: [x + 1, x + 2], made(2))
    elif "Tensor?, " in schema:
        operator = define(library, f"lie{schema}", lambda x: (x + 1, x + 2, x + 3), made(3))
    elif "Tensor, " in schema:
        operator = define(library, f"lie{schema}", lambda x: (x + 1, x + 2), made(2))
    else:
        operator = define(library, f"lie{schema}", lambda x: x + 1, torch.empty_like)
    findings, verdict = found(operator, dynamic=True)
    assert (findings, verdict) == ([], Verdict.PASS)


def test_a_declared_write_is_no_finding_and_an_undeclared_one_beside_it_is(library: Any) -> None:
    library.define("both(Tensor(a!) x, Tensor y) -> ()")

    def kernel(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(1)
        y.mul_(factor)

    library.impl("both", kernel, "CPU")
    torch.library.register_fake(f"{NAME}::both", lambda x, y: None, lib=library)

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x * 2, y * 2
        getattr(torch.ops, NAME).both(x, y)
        return x + y

    details = []
    for factor in (1, 3):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=debug_interpreter, options={"on_divergence": "record"})
        with cb.collect() as session:
            assert torch.equal(compiled(torch.ones(3), torch.ones(3)), torch.full((3,), 3.0 + 2 * factor))
        details.append([(f.detail, f.op, f.expected) for f in session.report.findings])
    assert details == [[], [("mutation", f"{NAME}.both.default", "argument y is not written to")]]


def test_all_mismatches_are_told_in_order_and_what_follows_is_marked(library: Any) -> None:
    operator = define(library, f"lie{ONE}", lambda x: x.double().clone(), torch.empty_like)
    with torch.no_grad():
        report = record(lambda x: operator(operator(x).sin().float()), (torch.randn(3),))
    told = [(f.node, f.evidence["inherited"]) for f in report.findings]
    # .float() was traced away: by its trace the value is float32 already
    assert told == [("lie", False), ("sin", True), ("lie_1", True)]


def test_raise_stops_at_the_first(library: Any) -> None:
    ran: list[int] = []
    operator = define(library, "lie(Tensor x) -> Tensor", lambda x: x.double(), torch.empty_like)
    later = define(library, "later(Tensor x) -> Tensor", lambda x: (ran.append(1), x.clone())[1], torch.empty_like)
    compiled = torch.compile(lambda x: later(operator(x)), backend=debug_interpreter)
    with pytest.raises(cb.MetadataError, match=r"dtype torch\.float32, ran with torch\.float64") as caught:
        compiled(torch.randn(3))
    assert ran == []
    assert caught.value.finding.node == "lie"
    assert caught.value.finding.source in str(caught.value)
    assert "register_fake" in str(caught.value)


@pytest.mark.parametrize("returned", [True, False])
def test_raise_tells_all_that_is_wrong_with_the_first(library: Any, returned: bool) -> None:
    operator = define(library, "both(Tensor x) -> Tensor", lambda x: x.t().double(), torch.empty_like)
    program = operator if returned else lambda x: operator(x).sum()
    compiled = torch.compile(lambda x: program(x), backend=debug_interpreter)
    with pytest.raises(cb.MetadataError, match=r"dtype torch\.float32, ran with torch\.float64") as caught:
        compiled(torch.randn(3, 3))
    assert "stride (3, 1), ran with (1, 3)" in str(caught.value)
    assert caught.value.finding.detail == "structure.dtype"


def test_the_backward_graph_names_the_users_line_and_module(library: Any) -> None:
    operator = define(library, "grad(Tensor x) -> Tensor", transposed, torch.empty_like)
    doubled = differentiated_by(operator)

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return doubled(x)

    model = torch.nn.ModuleDict({"inner": Inner()})
    compiled = torch.compile(lambda x: model["inner"](x.sin()).cos(), backend=debug_interpreter)
    out = compiled(torch.randn(3, 4, requires_grad=True))
    with pytest.raises(cb.MetadataError) as caught:
        out.sum().backward()
    finding = caught.value.finding
    assert (finding.graph, finding.op, finding.detail) == ("backward", f"{NAME}.grad.default", "structure.stride")
    assert finding.source.endswith("in backward: return operator(gradients[0])")


def test_symbolic_and_concrete_expectation(library: Any) -> None:
    operator = define(library, "lie(Tensor x) -> Tensor", transposed, torch.empty_like)
    compiled = torch.compile(lambda x: operator(x), backend=debug_interpreter, dynamic=True)
    with pytest.raises(cb.MetadataError, match=r"stride \((s\d+), 1\) is \(8, 1\) with \1=8, ran with \(1, 3\)"):
        compiled(torch.randn(3, 8))


def test_ignored_operators_graphs_and_checks_are_not_checked(library: Any) -> None:
    operator = define(library, "lie(Tensor x) -> Tensor", lambda x: x.double(), torch.empty_like)
    names = [f"{NAME}::lie", f"{NAME}.lie", f"{NAME}.lie.default"]
    everything: list[dict[str, Any]] = [{"ignore_ops": (name,)} for name in names]
    everything += [{"graphs": ("forward", "backward")}, {"checks": "shape,stride"}, {"ignore": "structure"}]
    for options in everything:
        torch._dynamo.reset()
        assert found(operator, dynamic=False, **options)[0] == [], options
    torch._dynamo.reset()
    assert found(operator, dynamic=False, ignore_ops="aten.relu", graphs="inference", checks="dtype")[0] != []


def test_the_users_own_fake_kernel_is_named(library: Any) -> None:
    @torch.library.custom_op(f"{NAME}_own::lie", mutates_args=())
    def own(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()

    @own.register_fake
    def own_fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    defined = define(library, "lie(Tensor x) -> Tensor", transposed, fake)
    for operator, function in ((own, own_fake), (defined, fake)):
        torch._dynamo.reset()
        ((finding, *_), _) = found(operator, dynamic=False)
        assert f"({shown_path(__file__)}:{function.__code__.co_firstlineno})" in finding.evidence["at_fault"]


def told(program: Callable[..., Any], *args: Any) -> list[tuple[str, str, str | None]]:
    """Graph, detail and operator of what is wrong of itself, after a step of training where there is one."""
    return [(f.graph or "", f.detail, f.op) for f in local(record(program, args))]


def test_a_lie_about_the_tensors_inside_of_a_subclass_is_found(library: Any) -> None:
    operator = define(library, "lie(Tensor x) -> Tensor", transposed, torch.empty_like)
    pair = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
    lie = ("inference", "structure.stride", f"{NAME}.lie.default")
    with torch.no_grad():
        assert told(lambda x: operator(x * 2) + 1, pair) == [lie, lie]  # one for each tensor of the pair
    backward = ("backward", "structure.stride", f"{NAME}.lie.default")
    doubled = differentiated_by(operator)
    free = TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_()
    assert told(lambda x: doubled(x).sin(), free) == [backward, backward]


@pytest.mark.parametrize("lie", ["stride", "mutation", "outputs share memory"])
def test_a_lie_of_an_operator_with_an_effect_is_found(library: Any, lie: str) -> None:
    schema, kernel, fake, detail = LIES[lie]
    operator = define(library, f"lie{schema}", kernel, fake)
    with with_effect(operator):
        findings, verdict = found(operator, dynamic=False)
    ((got, op),) = {(finding.detail, finding.op) for finding in findings}
    assert (got, op, verdict) == (detail, f"{NAME}.lie.default", Verdict.FAIL)
    assert f"{NAME}.lie.default" in findings[0].evidence["at_fault"]
    assert run_alone(findings[0])[0] == "THEY DIFFER"


def test_an_operator_of_torch_that_returns_its_argument_by_design_is_not_reported() -> None:
    assert told(lambda x: torch.ops._c10d_functional.wait_tensor(x * 2) + 1, torch.randn(3)) == []


def test_a_backward_graph_in_a_thread_of_the_engine() -> None:
    """A GPU's gradients are computed where no session of the caller's is active."""
    compiled = torch.compile(torch.sin, backend=debug_interpreter, options={"on_divergence": "record"})
    with cb.collect() as session:
        as_the_engine(compiled(torch.randn(3, requires_grad=True)).sum().backward)
    assert session.report.coverage.checked["nodes of the backward graph"] > 0
