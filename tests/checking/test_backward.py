"""Outputs of any layout get a gradient of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import checked_backend as cb
from checked_backend.checking.backward import Objective, run_backward
from checked_backend.errors import CheckedBackendError
from tests.support.check_tools import agreed, batch

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")

OBJECTIVE = Objective()

SPARSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
}


@pytest.mark.parametrize("layout", SPARSE)
def test_gradients_through_sparse_results(layout: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return SPARSE[layout](torch.relu(x)), x * 2

    agreed(cb.check(program, (batch(3, 4, grad=True),), compiler="eager"), gradients=1, outputs=1)


@pytest.mark.parametrize("layout", SPARSE)
def test_what_enters_at_a_sparse_result_is_random(layout: str) -> None:
    x = batch(4, 4, grad=True)
    run_backward({"output": SPARSE[layout](x)}, [x], OBJECTIVE)
    assert x.grad is not None
    assert len(x.grad.to_dense().unique()) > 5


def test_what_enters_at_a_nested_result_is_random() -> None:
    leaves = [batch(2, 3, grad=True), batch(4, 3, grad=True)]
    nested = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
    run_backward({"output": nested * 1}, leaves, OBJECTIVE)
    for leaf in leaves:
        assert leaf.grad is not None
        assert len(leaf.grad.unique()) > 2


def test_where_no_gradient_can_be_made_it_is_said_in_one_line() -> None:
    class NoMethods(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: object, *_: object) -> object:
            raise TypeError(f"not {func}\nmore")

    root = (batch(2, grad=True) * 2).as_subclass(NoMethods)
    with pytest.raises(CheckedBackendError, match=r"no gradient could be made for an output: .*gradients=False") as got:
        run_backward({"output": root}, [], OBJECTIVE)
    assert "\n" not in str(got.value)


def scaled_after_relu(x: torch.Tensor) -> torch.Tensor:
    """Eager refuses to differentiate it: the gradient of ``relu_`` needs its result."""
    made = x * 2
    made.relu_()
    made.mul_(0.5)
    return made


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_what_eager_refuses_to_differentiate_is_no_fault_of_the_compiler() -> None:
    """Compiling raises it, because a compiler traces the backward pass; eager does when it runs it."""
    report = cb.check(scaled_after_relu, (batch(3, 4, grad=True),), compiler="aot_eager")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert not report.findings
    assert any("eager has none: RuntimeError: one of the variables" in skip.reason for skip in report.coverage.skipped)


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_what_else_compiling_such_a_program_raises_is_told() -> None:
    def refusing(_gm: object, _given: object) -> None:
        raise NotImplementedError("no lowering for relu_")

    report = cb.check(scaled_after_relu, (batch(3, 4, grad=True),), compiler=refusing)
    assert {finding.detail for finding in report.findings} == {"crash.compiling"}
