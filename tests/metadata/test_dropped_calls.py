"""Calls of custom operators that AOT autograd drops: found, and told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from tests.support.lying_operators import NAME, define, record
from tests.support.region_tools import agreed

X = torch.randn(3, 4)


def writes(library: Any) -> Any:
    return define(library, "write(Tensor x) -> ()", lambda x: (x.add_(1), None)[1], lambda x: None)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("free", [False, True])
def test_an_operator_that_does_nothing_by_its_schema(library: Any, dynamic: bool, free: bool) -> None:
    operator = writes(library)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        operator(y)
        return y.sin()

    x = X.clone().requires_grad_(free)
    report = record(program, (x,), (x,), dynamic=dynamic)
    assert (report.findings, report.verdict) == ((), cb.Verdict.INCONCLUSIVE)
    (skip,) = report.coverage.skipped
    assert f"the call of {NAME}.write at tests/metadata/test_dropped_calls.py:" in skip.subject
    assert "operator(y)" in skip.subject
    assert "by its schema it does nothing" in skip.reason


def test_whatever_a_call_returns_that_nobody_takes_it_is_no_pass(library: Any) -> None:
    number = define(library, "number(Tensor x) -> float", lambda x: 1.5, lambda x: 2.5)
    both = define(library, "both(Tensor x) -> (Tensor, int)", lambda x: (x.clone(), 7), lambda x: (x.clone(), 3))
    writing = define(library, "writing(Tensor x) -> Tensor", lambda x: x.add_(1).clone(), torch.empty_like)
    for program in (lambda x: x * number(x), lambda x: x * both(x)[1], lambda x: (writing(x * 2), x * 3)[1]):
        report = record(program, (X,))
        (skip,) = report.coverage.skipped
        assert (report.findings, report.verdict) == ((), cb.Verdict.INCONCLUSIVE)
        assert "nothing takes its results" in skip.reason


def test_a_call_inside_of_another_graph(library: Any) -> None:
    operator = writes(library)

    def inside(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > -100, lambda x: (operator(x * 2), x.sin())[1], lambda x: x.cos(), (x,))

    report = record(inside, (X,))
    (skip,) = report.coverage.skipped
    assert "it lies in a graph that a higher-order operator runs" in skip.reason
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
    agreed(record(lambda x: (operator(x), x + 1)[1], (X,), ignore_ops=(f"{NAME}::write",)))


def test_of_a_tensor_that_wraps_others_each_has_its_call(library: Any) -> None:
    pure = define(library, "pure(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
    pair = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
    for program, dropped in ((lambda x: pure(x) * 2, 0), (lambda x: (pure(x), pure(x * 2))[1], 1)):
        report = record(program, (pair,))
        told = [skip for skip in report.coverage.skipped if "compiled graph" in skip.reason]
        assert (report.findings, len(told)) == ((), dropped)
