"""``ignore`` and ``ignore_ops``: what they hide, and findings that it must not cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop

import checked_backend as cb
from tests.support.lying_operators import NAME, QUIET, define, local, record, transposed
from tests.support.region_tools import agreed

pytestmark = QUIET


def liar(library: Any) -> Any:
    return define(library, "lie(Tensor x) -> Tensor", transposed, torch.empty_like)


IGNORED: list[dict[str, Any]] = [{"ignore_ops": (f"{NAME}::lie",)}, {"ignore": ("node[lie]",)}]


@pytest.mark.parametrize("options", IGNORED, ids=lambda options: next(iter(options)))
def test_what_follows_from_an_ignored_node_is_not_reported(library: Any, options: dict[str, Any]) -> None:
    operator = liar(library)
    report = agreed(record(lambda x: operator(x).sin().cos()[1:] * 2, (torch.randn(3, 4),), **options))
    told = [(f.node, f.evidence["inherited"], f.evidence["ignored"]) for f in report.coverage.ignored]
    follows = "it follows from a node that is ignored"
    assert told[0] == ("lie", False, *options.get("ignore_ops", ("node[lie]",)))
    # a slice has another stride, and another offset
    assert list(dict.fromkeys(told[1:])) == [(name, True, follows) for name in ("sin", "cos", "slice_1", "mul")]
    assert any("ignore_ops" in skip.reason for skip in report.coverage.skipped) is ("ignore_ops" in options)


@pytest.mark.parametrize("options", IGNORED, ids=lambda options: next(iter(options)))
def test_an_ignored_node_of_the_forward_excuses_what_the_backward_gets_from_it(
    library: Any, options: dict[str, Any]
) -> None:
    operator = liar(library)
    x = torch.randn(3, 4, requires_grad=True)
    report = agreed(record(lambda x: (operator(x.detach()) * x).sin(), (x,), **options))
    assert {f.graph for f in report.coverage.ignored} == {"forward", "backward"}


def test_raise_is_not_stopped_by_what_is_ignored(library: Any) -> None:
    operator, x = liar(library), torch.randn(3, 4)
    compiled = torch.compile(lambda x: operator(x).sin(), backend=cb.debug_interpreter, options=IGNORED[0])
    assert torch.equal(compiled(x), x.sin())


@pytest.mark.parametrize("lie", ["dtype", "mutation", "alias"])
def test_an_operator_that_lies_of_itself_behind_an_ignored_one_is_reported(library: Any, lie: str) -> None:
    kernels = {"dtype": lambda x: x.double(), "mutation": lambda x: x.add_(1).clone(), "alias": lambda x: x}
    details = {"dtype": "structure.dtype", "mutation": "mutation", "alias": "alias"}
    first = liar(library)
    second = define(library, "second(Tensor x) -> Tensor", kernels[lie], torch.empty_like)
    report = record(lambda x: second(first(x * 2)), (torch.randn(3, 4),), ignore_ops=(f"{NAME}.lie",))
    first_of_all = local(report)[0]
    assert (first_of_all.node, first_of_all.detail) == ("second", details[lie])
    assert report.verdict is cb.Verdict.FAIL


def test_an_ignored_operator_inside_of_a_branch_excuses_the_branch(library: Any) -> None:
    operator = liar(library)

    def program(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > -100, lambda x: operator(x).sin(), lambda x: x.cos(), (x,)) * 2

    x = torch.ones(3, 4)
    assert record(program, (x,)).verdict is cb.Verdict.FAIL
    report = agreed(record(program, (x,), ignore_ops=(f"{NAME}.lie",)))
    hidden = [f.subject for f in report.coverage.ignored]
    assert "node[true_graph_0 of cond: lie]" in hidden
    assert record(program, (x,), ignore=(hidden[0],)).findings == ()


def loop(x: torch.Tensor) -> Any:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x))


INSIDE: dict[str, Any] = {
    "cond": lambda x: torch.cond(x.sum() > -100, lambda x: x.sin(), lambda x: x.cos(), (x,)),
    "nested cond": lambda x: torch.cond(x.sum() > -100, INSIDE["cond"], lambda x: x.cos(), (x,)),
    "while_loop": loop,
}


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("name", INSIDE)
def test_a_graph_inside_is_not_reported_for_what_it_is_given(library: Any, name: str, ignored: bool) -> None:
    operator = liar(library)
    options = {"ignore_ops": (f"{NAME}.lie",)} if ignored else {}
    report = record(lambda x: INSIDE[name](operator(x)), (torch.ones(3, 4),), **options)
    assert [f.node for f in local(report)] == ([] if ignored else ["lie"])
    assert report.verdict is (cb.Verdict.PASS if ignored else cb.Verdict.FAIL)
    findings = report.coverage.ignored if ignored else report.findings
    assert any("sin" in str(f.node) and "of " in f.subject for f in findings)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("checks", (), "nothing is compared"),
        ("checks", ",", "nothing is compared"),
        ("checks", "strides", "'stride'"),
        ("graphs", (), "no graph is checked"),
        ("graphs", ",", "no graph is checked"),
        ("graphs", "joint", "'forward'"),
    ],
)
def test_no_and_unknown_checks_and_graphs_are_refused(key: str, value: Any, said: str) -> None:
    compiled = torch.compile(lambda x: x + 1, backend=cb.debug_interpreter, options={key: value})
    with pytest.raises(cb.OptionError, match=f"option '{key}' got .*{said}"):
        compiled(torch.ones(2))


def test_the_hunt_for_nan_needs_no_other_check() -> None:
    report = record(lambda x: x.log(), (torch.tensor([-1.0, 2.0]),), checks=(), nonfinite=True)
    assert [f.detail for f in report.findings] == ["nonfinite"]


@pytest.mark.parametrize("checks", ["assert", "mutation", "requires_grad", "value"])
def test_checks_that_have_nothing_to_compare_do_not_pass(checks: str) -> None:
    report = record(lambda x: x.relu() * 2, (torch.randn(3),), checks=checks)
    assert (report.findings, report.verdict) == ((), cb.Verdict.INCONCLUSIVE)


def test_a_graph_that_is_left_out_is_told() -> None:
    report = record(lambda x: x.relu(), (torch.randn(3, requires_grad=True),), graphs="forward")
    assert report.verdict is cb.Verdict.PASS
    assert "the backward graph" in [skip.subject for skip in report.coverage.skipped]
    assert record(lambda x: x.relu(), (torch.randn(3),), graphs="backward").verdict is cb.Verdict.INCONCLUSIVE
