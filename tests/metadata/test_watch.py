"""Custom operators that hand out memory which is not new, and those that rightly do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checked_backend.findings import Kind, Verdict
from checked_backend.metadata.watch import KnownStorages
from tests.support.lying_operators import NAME, QUIET, define, differentiated_by, local, record, run_alone, with_effect

pytestmark = QUIET
X = torch.randn(3, 4)


def told(report: Any) -> list[tuple[str, str, str]]:
    return [(f.node, f.detail, f.actual) for f in local(report)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_workspace_at_each_call(library: Any, dynamic: bool) -> None:
    workspace = torch.empty(3, 4)
    operator = define(library, "lie(Tensor x) -> Tensor", lambda x: workspace.copy_(x), torch.empty_like)
    assert told(record(lambda x: operator(x) + 1, (X,), dynamic=dynamic)) == []
    report = record(lambda x: operator(x) + 1, (X,), (X,), dynamic=dynamic)
    assert told(report) == [("lie", "alias", "the memory that lie returned before")]
    (finding,) = report.findings
    assert finding.kind is Kind.ALIAS
    assert "operator(x) + 1" in finding.source
    ended, printed = run_alone(finding)
    assert ended == "THEY DIFFER"
    assert "the same memory again" in printed


def test_one_workspace_for_two_nodes_two_operators_and_two_graphs(library: Any) -> None:
    workspace = torch.empty(3, 4)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return workspace.copy_(x)

    one = define(library, "one(Tensor x) -> Tensor", kernel, torch.empty_like)
    two = define(library, "two(Tensor x) -> Tensor", kernel, torch.empty_like)
    (again,) = told(record(lambda x: one(x).sum() + one(x * 2), (X,)))
    assert again == ("one_1", "alias", "the memory that one returned before")
    assert told(record(lambda x: one(x).sum() + two(x * 2), (X,)))[0][:2] == ("two", "alias")
    doubled = differentiated_by(two)
    program = lambda x: (one(x.detach()).sum() * doubled(x)).sin()  # noqa: E731
    (finding,) = record(program, (X.clone().requires_grad_(),)).findings
    assert (finding.graph, finding.detail) == ("backward", "alias")


def test_a_workspace_of_several_outputs_and_in_lists(library: Any) -> None:
    kept = torch.empty(3, 4)
    operator = define(
        library,
        "lie(Tensor x) -> (Tensor, Tensor?, Tensor[])",
        lambda x: (x.clone(), None, [x.clone(), kept.copy_(x)]),
        lambda x: (torch.empty_like(x), None, [torch.empty_like(x), torch.empty_like(x)]),
    )
    report = record(lambda x: (lambda a, b, c: a + c[0] + c[1])(*operator(x)), (X,), (X,))
    assert [(f.subject, f.detail) for f in report.findings] == [("node[lie][3]", "alias")]


def test_memory_of_a_parameter_and_of_an_argument_of_an_earlier_call(library: Any) -> None:
    model = torch.nn.Linear(4, 4)
    operator = define(library, "lie(Tensor x) -> Tensor", lambda x: model.weight.data, lambda x: x.new_empty(4, 4))
    ((node, detail, actual), *rest) = told(record(lambda x: (model(x) @ operator(x)).sum(), (X,)))
    assert (node, detail, rest) == ("lie", "alias", [])
    assert actual.startswith("the memory of the graph's input ")
    assert actual.endswith(", which it is not given")

    kept: list[torch.Tensor] = []
    keep = define(library, "keep(Tensor x) -> Tensor", lambda x: (kept.append(x), x + 1)[1], torch.empty_like)
    get = define(library, "get(Tensor x) -> Tensor", lambda x: kept[-1], torch.empty_like)
    expected = ("get", "alias", "the memory that keep was given before, as x, and is not given here")
    assert told(record(lambda x: keep(x.sin()) * get(x.cos()), (X,))) == [expected]


def writing(library: Any, returned: Callable[..., Any]) -> Any:
    """An operator that writes to its first argument."""
    schema, fake = "both(Tensor(a!) x, Tensor y) -> Tensor", lambda x, y: torch.empty_like(y)
    return define(library, schema, lambda x, y: (x.add_(1), returned(x, y))[1], fake)


def test_a_mutating_operator_and_one_with_an_effect(library: Any) -> None:
    workspace = torch.empty(3, 4)
    mutating = writing(library, lambda x, y: workspace.copy_(y))

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return mutating(y, x) + y  # type: ignore[no-any-return]

    report = record(program, (X,), (X,))
    found = [(f.op, f.detail, f.subject) for f in report.findings]
    assert found == [(f"{NAME}.both.default", "alias", "node[auto_functionalized_v2][0]")]
    assert run_alone(report.findings[0])[0] == "THEY DIFFER"
    effectful = define(library, "log(Tensor x) -> Tensor", lambda x: workspace.copy_(x), torch.empty_like)
    with with_effect(effectful):
        report = record(lambda x: effectful(x) + 1, (X,), (X,))
    assert [(f.op, f.detail) for f in report.findings] == [(f"{NAME}.log.default", "alias")]


@pytest.mark.parametrize(
    ("returned", "actual"),
    [
        (lambda x, y: y, "the memory of argument y"),
        (lambda x, y: x, "the memory of output 1"),  # of the copy that it writes to
    ],
    ids=["read", "written"],
)
def test_a_mutating_operator_that_returns_an_argument(library: Any, returned: Callable[..., Any], actual: str) -> None:
    operator = writing(library, returned)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return operator(y, x * 3) + y  # type: ignore[no-any-return]

    (finding,) = local(record(program, (X,)))
    assert (finding.op, finding.detail, finding.actual) == (f"{NAME}.both.default", "alias", actual)


def transpose_in_place(x: torch.Tensor) -> torch.Tensor:
    x.t_()
    return x.clone(memory_format=torch.contiguous_format).t().contiguous()


def resize_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    x.resize_(2)
    return y


@pytest.mark.parametrize("kernel", [transpose_in_place, resize_in_place])
def test_an_argument_whose_shape_or_strides_an_operator_changes(library: Any, kernel: Callable[..., Any]) -> None:
    operator = define(library, "lie(Tensor x) -> Tensor", kernel, torch.empty_like)
    (finding,) = local(record(lambda x: operator(x * 2), (X,)))
    assert (finding.node, finding.detail) == ("lie", "mutation")
    assert finding.expected == "argument x keeps its shape, strides and memory"
    assert run_alone(finding)[0] == "THEY DIFFER"


def honest(library: Any) -> dict[str, Callable[..., Any]]:
    """Operators whose outputs are their own, though they look like those that are not."""
    empty = torch.empty(0)
    nothing = define(library, "nothing(Tensor x) -> Tensor", lambda x: empty, lambda x: x.new_empty(0))
    fresh = define(library, "fresh(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
    write = define(library, "write(Tensor(a!) x) -> ()", lambda x: (x.add_(1), None)[1], lambda x: None)

    def written(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        write(y)
        write(y[1:])
        return y

    return {
        "empty": lambda x: nothing(x).sum() + x,
        "freed at once": lambda x: fresh(fresh(fresh(x))).sum(),
        "returned as it is given": lambda x: fresh(x),
        "written": written,
    }


@pytest.mark.parametrize("name", ["empty", "freed at once", "returned as it is given", "written"])
def test_honest_operators_are_clean(library: Any, name: str) -> None:
    report = record(honest(library)[name], *[(torch.randn(3, 4),) for _ in range(30)])
    assert (report.findings, report.verdict) == ((), Verdict.PASS)


def test_results_that_come_back_as_inputs_are_clean(library: Any) -> None:
    compiled = torch.compile(honest(library)["returned as it is given"], backend="debug_interpreter")
    x, kept = X, []
    for _ in range(20):
        x = compiled(x)
        kept.append(x)
    assert torch.equal(x, X + 20) or torch.allclose(x, X + 20)


def test_memory_is_known_by_itself_and_not_by_its_address() -> None:
    memory = KnownStorages()
    addresses = set()
    reused = 0
    for _ in range(3000):
        tensor = torch.empty(64)
        reused += tensor.data_ptr() in addresses
        addresses.add(tensor.data_ptr())
        assert memory.seen(tensor) is None
        memory.note([(tensor, "here")])
        assert memory.seen(tensor[3:]) == "here"
    assert reused > 0  # the allocator did hand out the same addresses
    assert len(memory._known) < 1500  # what was freed is forgotten
