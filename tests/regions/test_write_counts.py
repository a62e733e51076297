"""Writes to inputs that autograd is not told of are found; how often a compiler counts a write is its own affair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import faults
from tests.support.faults import forgets_to_count, from_call
from tests.support.region_tools import agreed, audit, clean_reports, found


def doubles(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


def twice(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    x.mul_(2)
    return x.sum()


def without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x + 1


def hidden(x: torch.Tensor) -> torch.Tensor:
    x.data.mul_(2)
    return x + 1


def to_what_it_was(x: torch.Tensor) -> torch.Tensor:
    x.mul_(1)
    return x + 1


def a_row(x: torch.Tensor) -> torch.Tensor:
    x[0].add_(1)
    return x + 1


def on(make: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[[Any], None]]:
    """Programs that call a function twice, each time on a new tensor."""

    def program(function: Callable[..., Any]) -> Callable[[Any], None]:
        def run(compile_it: Any) -> None:
            compiled = compile_it(function)
            for _ in range(2):
                compiled(make())

        return run

    return program


plain = on(lambda: torch.rand(4, 3) + 1)
parameter = on(lambda: torch.nn.Parameter(torch.rand(4, 3) + 1))
not_a_leaf = on(lambda: torch.rand(4, 3, requires_grad=True) + 1)


@pytest.mark.parametrize("function", [doubles, twice, without_grad, a_row])
def test_a_write_that_is_not_counted(function: Callable[..., Any]) -> None:
    report = audit(plain(function), forgets_to_count)
    assert found(report) == {("mutation.uncounted", "mutated[x]")}, str(report)
    assert "increment_version" in str(report)


def test_a_parameter_that_is_updated_without_a_count() -> None:
    assert ("mutation.uncounted", "mutated[x]") in found(audit(parameter(without_grad), forgets_to_count))


def test_it_shows_in_any_call() -> None:
    report = audit(plain(doubles), from_call(2, forgets_to_count))
    assert found(report) == {("mutation.uncounted", "mutated[x]")}


@pytest.mark.parametrize("function", [hidden, to_what_it_was])
def test_what_eager_does_not_count_and_what_changes_nothing_need_no_count(function: Callable[..., Any]) -> None:
    agreed(audit(plain(function), forgets_to_count))


def test_tensors_in_one_memory_have_a_count_each_or_together() -> None:
    def program(compile_it: Any) -> None:
        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return y + 1

        x = torch.rand(6)
        compile_it(function)(x, x.data[:3])  # `.data` has a count of its own

    agreed(audit(program, "eager"))


def test_inference_mode_counts_nothing() -> None:
    def program(compile_it: Any) -> None:
        with torch.inference_mode():
            compile_it(doubles)(torch.rand(4, 3))

    for compiler in ("eager", "aot_eager", forgets_to_count):
        agreed(audit(program, compiler))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("function", [doubles, twice, a_row, without_grad, hidden, to_what_it_was])
@pytest.mark.parametrize("kind", [plain, not_a_leaf], ids=["plain", "not a leaf"])
def test_right_compilers_count(kind: Any, function: Callable[..., Any]) -> None:
    clean_reports(kind(function))


def test_a_write_that_is_left_out_is_no_uncounted_one() -> None:
    assert found(audit(plain(doubles), faults.dropped_mutation("x"))) == {("mutation.dropped", "mutated[x]")}
