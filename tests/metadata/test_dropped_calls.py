"""Calls of custom operators that AOT autograd drops: found, made alone, and told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from tests.support.lying_operators import NAME, define, record, run_alone
from tests.support.region_tools import agreed

X = torch.randn(3, 4)


def writes(library: Any) -> Any:
    return define(library, "write(Tensor x) -> ()", lambda x: (x.add_(1), None)[1], lambda x: None)


def reads(library: Any) -> tuple[Any, list[torch.Tensor]]:
    seen: list[torch.Tensor] = []
    return define(library, "log(Tensor x) -> ()", lambda x: (seen.append(x), None)[1], lambda x: None), seen


def notes(report: cb.Report) -> list[str]:
    return [note for note in report.coverage.notes if "compiled graph" in note]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("free", [False, True])
def test_an_undeclared_write_of_an_operator_that_returns_nothing(library: Any, dynamic: bool, free: bool) -> None:
    operator = writes(library)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        operator(y)
        return y.sin()

    x = X.clone().requires_grad_(free)
    report = record(program, (x,), (x,), dynamic=dynamic)
    (finding,) = report.findings
    assert (finding.detail, finding.op, finding.graph) == ("mutation", f"{NAME}.write.default", "dynamo")
    assert finding.source.endswith("operator(y)")
    assert "compilation dropped this call" in finding.message
    assert report.verdict is cb.Verdict.FAIL
    assert run_alone(finding)[0] == "THEY DIFFER"
    (note,) = notes(report)
    assert f"{NAME}.write at tests/metadata/test_dropped_calls.py:" in note
    assert "by its schema it does nothing" in note


def test_the_users_tensors_and_random_numbers_stay_as_they_are(library: Any) -> None:
    operator = writes(library)

    def program(x: torch.Tensor) -> torch.Tensor:
        operator(x)
        return torch.rand(3) + x.sum()

    x, kept = X.clone(), X.clone()
    expected = torch.rand(3) + X.sum()
    torch.manual_seed(0)
    compiled = torch.compile(program, backend=cb.debug_interpreter, options={"on_divergence": "record"})
    assert torch.equal(compiled(x), expected)
    assert torch.equal(x, kept)
    raising = torch.compile(program, backend=cb.debug_interpreter)
    for _ in range(2):
        with pytest.raises(cb.MetadataError, match="argument x is not written to, ran with it was changed in place"):
            raising(x)
    assert torch.equal(x, kept)


def test_a_wrong_number_and_a_wrong_number_beside_a_tensor_that_nobody_takes(library: Any) -> None:
    single = define(library, "single(Tensor x) -> float", lambda x: 1.5, lambda x: 2.5)
    both = define(library, "both(Tensor x) -> (Tensor, int)", lambda x: (x.clone(), 7), lambda x: (x.clone(), 3))
    for program in (lambda x: x * single(x), lambda x: x * both(x)[1]):
        (finding,) = record(program, (X,)).findings
        assert finding.detail == "structure.value"
        assert "given these inputs it says something else" in finding.evidence["at_fault"]
    schema = "sizes(Tensor x) -> (Tensor, SymInt)"
    sizes = define(library, schema, lambda x: (x.clone(), 9), lambda x: (x.clone(), x.shape[0]))
    (finding,) = record(lambda x: x * sizes(x)[1], (X,), dynamic=True).findings
    assert "is 3 with" in finding.expected
    assert finding.actual == "9"


def test_dropped_calls_that_are_right_are_noted_and_pass(library: Any) -> None:
    operator, seen = reads(library)
    pure = define(library, "pure(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)

    def program(x: torch.Tensor) -> torch.Tensor:
        operator(x.sin())
        pure(x)
        return pure(x * 2)

    report = agreed(record(program, (X,), (X,)))
    assert len(seen) == 1  # it was made once, at the first call
    assert torch.equal(seen[0], X.sin())
    logged, made = notes(report)
    assert f"{NAME}.log at" in logged
    assert "operator(x.sin())" in logged
    assert f"{NAME}.pure at" in made
    assert "does nothing" not in made
    assert report.coverage.checked["calls that compilation dropped"] == 4


def test_what_was_written_before_and_modes_are_as_in_the_program(library: Any) -> None:
    operator, seen = reads(library)
    double = define(library, "double(Tensor(a!) x) -> ()", lambda x: (x.mul_(2), None)[1], lambda x: None)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(3, 4)
        memory.fill_(3)
        double(memory[1:])
        operator(memory)
        x.add_(1)
        operator(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            operator(x @ w)
        return x * 2

    x, w = torch.ones(3, 4), torch.ones(4, 4)
    agreed(record(program, (x, w)))
    assert torch.equal(seen[0][:, 0], torch.tensor([3.0, 6, 6]))
    assert torch.equal(seen[1], torch.full((3, 4), 2.0))
    assert seen[2].dtype is torch.bfloat16
    assert torch.equal(x, torch.full((3, 4), 2.0))
    assert not torch.is_autocast_enabled("cpu")


def test_calls_that_cannot_be_made_alone_are_told(library: Any) -> None:
    operator = writes(library)
    fails = define(library, "fails(Tensor x) -> ()", lambda x: [][0], lambda x: None)

    def inside(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > -100, lambda x: (operator(x * 2), x.sin())[1], lambda x: x.cos(), (x,))

    for program, name, why in (
        (inside, "write", "it lies in a graph that a higher-order operator runs"),
        (lambda x: (fails(x), x.sin())[1], "fails", "IndexError"),
    ):
        report = record(program, (X,))
        (skip,) = report.coverage.skipped
        assert f"the call of {NAME}.{name} at tests/metadata/test_dropped_calls.py:" in skip.subject
        assert why in skip.reason
        assert report.verdict is cb.Verdict.INCONCLUSIVE


def test_operators_that_are_kept_or_rightly_taken_apart_are_not_reported(library: Any) -> None:
    library.define("composite(Tensor x) -> Tensor")
    library.impl("composite", lambda x: x.sin() + 1, "CompositeImplicitAutograd")
    composite = getattr(torch.ops, NAME).composite
    pure = define(library, "pure(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
    mutating = define(library, "both(Tensor(a!) x) -> ()", lambda x: (x.add_(1), None)[1], lambda x: None)
    torch.library.register_autograd(f"{NAME}::pure", lambda ctx, grad: pure(grad), lib=library)
    torch.library.register_vmap(f"{NAME}::pure", lambda info, dims, x: (x + 1, dims[0]), lib=library)

    def written(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        mutating(y)
        return y

    programs: dict[str, Callable[[torch.Tensor], Any]] = {
        "composite": lambda x: composite(x),
        "twice": lambda x: pure(x) * pure(x),  # of which AOT autograd makes one
        "mutating": written,
        "checkpoint": lambda x: checkpoint(lambda x: pure(x).sin(), x, use_reentrant=False),
        "cond": lambda x: torch.cond(x.sum() > 0, lambda x: pure(x), lambda x: x.cos(), (x,)),
        "vmap": lambda x: torch.vmap(lambda row: pure(row))(x),
    }
    for free in (False, True):
        for name, program in programs.items():
            report = record(program, (X.clone().requires_grad_(free),))
            assert (report.findings, report.verdict) == ((), cb.Verdict.PASS), (name, str(report))


def test_an_ignored_operator_is_ignored_here_too(library: Any) -> None:
    operator = writes(library)
    report = agreed(record(lambda x: (operator(x), x + 1)[1], (X,), ignore_ops=(f"{NAME}::write",)))
    assert not [note for note in report.coverage.notes if "entry" in note]


def test_of_a_tensor_that_wraps_others_each_has_its_call(library: Any) -> None:
    pure = define(library, "pure(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
    pair = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
    for program, dropped in ((lambda x: pure(x) * 2, 0), (lambda x: (pure(x), pure(x * 2))[1], 1)):
        report = record(program, (pair,))
        told = notes(report) + [skip.subject for skip in report.coverage.skipped if "compiled graph" in skip.reason]
        assert (report.findings, len(told)) == ((), dropped)
