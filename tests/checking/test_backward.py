"""Outputs of any layout get a gradient of their own: its numbers, and their places in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import checked_backend as cb
from checked_backend.checking.backward import Incoming, Objective, draw, laid_out, run_backward, variants_of
from checked_backend.errors import CheckedBackendError
from tests.support.check_tools import agreed, batch, undecided
from tests.support.raising import raising

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
    assert len(x.grad.to_dense().unique()) > 5


def test_what_enters_at_a_nested_result_is_random() -> None:
    leaves = [batch(2, 3, grad=True), batch(4, 3, grad=True)]
    run_backward({"output": torch.nested.as_nested_tensor(leaves, layout=torch.jagged) * 1}, leaves, OBJECTIVE)
    for leaf in leaves:
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
    assert not report.findings
    assert "eager has none: RuntimeError: one of the variables" in undecided(report)


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_what_else_compiling_such_a_program_raises_is_told() -> None:
    lacking = raising(NotImplementedError("no lowering for relu_"))
    report = cb.check(scaled_after_relu, (batch(3, 4, grad=True),), compiler=lacking)
    assert {finding.detail for finding in report.findings} == {"crash.compiling"}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_full_mantissas_are_exact_in_their_dtype_and_in_no_narrower_one(dtype: torch.dtype) -> None:
    numbers = draw((5000,), dtype, generator())
    assert torch.equal(numbers.to(dtype).double(), numbers)
    assert numbers.abs().min() >= 0.5
    assert numbers.abs().max() < 2
    assert numbers.min() < 0 < numbers.max()
    for narrow in (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32):
        if torch.finfo(narrow).eps > 2 * torch.finfo(dtype).eps:
            lost = (numbers.to(narrow).double() - numbers).abs() / numbers.abs()
            assert lost.min() > torch.finfo(narrow).eps / 8, narrow


def test_layouts_have_the_values_which_are_exact_in_half_precision() -> None:
    for layout in Incoming:
        values = draw((2, 3, 4, 5), torch.float32, generator(), layout)
        made = laid_out(values, layout)
        assert (made.stride() == values.stride()) == (layout not in (Incoming.STRIDED, Incoming.EXPANDED))
        assert made.shape == values.shape
        if layout is Incoming.EXPANDED:
            assert made.stride() == (0, 0, 0, 0)
            assert made.count_nonzero() == 120
        else:
            torch.testing.assert_close(made, values, rtol=0, atol=0, equal_nan=True)
        if layout.is_laid_out:
            assert torch.equal(values.half().bfloat16().double(), values)
            assert (values == 0).any()
            assert float(draw((), torch.float32, generator(), layout)) == 1  # as `loss.backward()` sends


def test_conjugated_ones_have_the_values_and_a_bit_that_says_so() -> None:
    values = torch.complex(*(draw((2, 3), torch.float32, generator(), Incoming.CONJUGATED) for _ in range(2)))
    made = laid_out(values, Incoming.CONJUGATED)
    assert made.is_conj()
    assert torch.equal(made.resolve_conj(), values)


@pytest.mark.parametrize("incoming", [Incoming.INFINITE, Incoming.NAN])
def test_some_overflow_and_the_others_are_numbers(incoming: Incoming) -> None:
    made = draw((8, 8), torch.float32, generator(), incoming)
    wrong = made.isinf() if incoming is Incoming.INFINITE else made.isnan()
    assert wrong[0, 0]
    assert 1 < int(wrong.sum()) < 32
    assert bool(made[~wrong].isfinite().all())
    assert not draw((), torch.float32, generator(), incoming).isfinite()
    assert draw((0, 3), torch.float32, generator(), incoming).shape == (0, 3)


def test_each_of_several_outputs_gets_gradients_alone_or_with_others() -> None:
    outputs = {"a": 1, "b": 2, "c": 3}
    assert Incoming.FIRST_OUTPUT_ONLY.at(outputs) == {"a": 1}
    assert Incoming.ALL_BUT_FIRST.at(outputs) == {"b": 2, "c": 3}
    assert Incoming.CONTIGUOUS.at(outputs) == Incoming.EXPANDED.at(outputs) == outputs


def test_only_kinds_that_some_output_can_have() -> None:
    assert variants_of([]) == []
    overflows = [Incoming.INFINITE, Incoming.NAN]
    assert variants_of([torch.ones(())]) == [Incoming.STRIDED, *overflows]
    assert variants_of([torch.ones(3)]) == [Incoming.STRIDED, Incoming.EXPANDED, *overflows]
    assert {*variants_of([torch.ones(3), torch.ones(2) * 1j])} == {*Incoming} - {Incoming.CONTIGUOUS}
