"""Fresh data, other sizes and other layouts through one compiled program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn

import checked_backend as cb
from checked_backend.checking.variants import fresh_data, other_layouts
from checked_backend.report.ledger import Ledger
from tests.support.check_tools import agreed, batch, only, program_of, skips, wrong_where


@pytest.fixture(autouse=True)
def _few_large_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have tests of their own, and take long."""
    monkeypatch.setattr("checked_backend.checking.sizes.TILE_SIZES", (17,))


def baking(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that takes its first input for a constant."""
    kept: list[torch.Tensor] = []

    def run(*args: Any) -> Any:
        kept[:] = kept or [args[0].detach().clone()]
        return gm.forward(kept[0], *args[1:])

    return run


# fresh data


def test_a_value_that_is_baked_in_is_found_and_called_so() -> None:
    x, y = batch(4), batch(4)
    agreed(cb.check(lambda x, y: x.sin() + y, (x, y), compiler=baking))
    finding = only(cb.check(lambda x, y: x.sin() + y, (x, y), compiler=baking, vary_data=True))
    assert (finding.kind, finding.detail, finding.subject) == (cb.Kind.LOGIC, "logic.baked", "output[0]")
    assert "fresh data (1)" in finding.message
    assert "fresh data (2)" in finding.evidence["failing_calls"]


def test_a_branch_on_data_is_compiled_anew_and_agrees() -> None:
    def branch(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool(n > 2) else x + 1

    report = agreed(cb.check(branch, (batch(4), torch.tensor(3)), compiler="eager", vary_data=True), program_runs=4)
    assert "compiled anew on other values of n" in report.coverage.notes


def test_a_branch_that_tracing_lost_is_found_at_dynamos_level() -> None:
    def branch(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_compiling() or bool(n > 2) else x + 1

    finding = only(cb.check(branch, (batch(4), torch.tensor(3)), compiler="eager", vary_data=True))
    assert finding.evidence["failing_calls"] == "on other values of n"
    assert finding.stage == "eager"


def test_data_that_break_a_precondition_are_skipped() -> None:
    def picky(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if index.numel() == 1 and int(index) != 3:
            raise ValueError("the index must be 3")
        return x[index]

    report = agreed(cb.check(picky, (batch(4), torch.tensor(3)), compiler="eager", vary_data=True), program_runs=3)
    assert "on other values of index: eager refuses it: ValueError: the index must be 3" in skips(report)


def test_fresh_data_keeps_metadata_and_the_arguments() -> None:
    x = batch(3, 4, grad=True).t()
    before, given = x.clone(), (x, {"index": torch.arange(4)}, torch.tensor(True), "name")
    calls = list(fresh_data(program_of(lambda *_: None, *given, gradients=False), Ledger()))
    assert len(calls) == 3
    assert calls[0].label == "on fresh data (1)"
    assert calls[2].label.startswith("on other values of ")
    assert torch.equal(x, before)
    new = calls[0].args[0]
    assert (new.shape, new.stride(), new.dtype, new.requires_grad) == (x.shape, x.stride(), x.dtype, True)
    assert not torch.equal(new, x)
    last = calls[2].args
    assert last[1]["index"].max() < 4
    assert not bool(last[2])
    assert last[3] == "name"


# sizes


def test_the_size_at_which_it_fails_is_told() -> None:
    wrong = wrong_where(lambda tensors: tensors[0].shape[0] == 7)
    finding = only(cb.check(lambda x: x * 2, (batch(3, 5),), compiler=wrong, dynamic=True))
    assert finding.evidence["failing_calls"] == "with x 7x5"


def test_sizes_vary_consistently_and_one_compiled_program_serves_them() -> None:
    report = cb.check(lambda x, y: x @ y, (batch(3, 5), batch(5, 4)), compiler="aot_eager", dynamic=True)
    agreed(report, program_runs=16)
    assert "eager refuses" not in skips(report)
    regions = sorted(report.coverage.regions, key=lambda region: -region.checked_calls)
    assert regions[0].checked_calls >= 10
    (note,) = [note for note in report.coverage.notes if note.startswith("compiled anew")]
    assert "with x 0x5" in note
    assert "with x 4x5" not in note


def test_sizes_at_a_guards_boundary_are_tried() -> None:
    wrong = wrong_where(lambda tensors: tensors[0].shape[0] == 10)
    finding = only(cb.check(lambda x: x * 2 if x.shape[0] > 9 else x + 1, (batch(4, 5),), compiler=wrong, dynamic=True))
    assert finding.evidence["failing_calls"] == "with x 10x5"


def test_after_a_size_that_eager_refuses_gradients_are_compared() -> None:
    """Both sides and every control run are given the same gradients, however many calls were refused before."""

    def even(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 2:
            raise ValueError("an odd batch")
        return x.square()

    report = agreed(cb.check(even, (batch(4, 3, grad=True),), compiler="aot_eager", dynamic=True))
    assert "eager refuses it: ValueError: an odd batch" in skips(report)
    assert report.coverage.checked["gradients"] > 4
    assert not report.coverage.detection_limit  # all are equal bit for bit


def test_integers_stay_valid_indices_when_sizes_shrink() -> None:
    report = cb.check(lambda x, i: x[i], (batch(6, 2), torch.tensor([5, 0, 3])), compiler="eager", dynamic=True)
    agreed(report)
    assert "with x 5x2" not in skips(report)


def test_inputs_that_alias_are_tried() -> None:
    def aliased(tensors: Sequence[torch.Tensor]) -> bool:
        return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < 2

    check = partial(cb.check, lambda x, y: x + y * 2, (batch(3, 4), batch(3, 4)), dynamic=True)
    assert agreed(check(compiler="aot_eager")).coverage.checked["program runs"] > 8
    shown = [finding.evidence["failing_calls"] for finding in check(compiler=wrong_where(aliased)).findings]
    assert shown
    assert all("y the same tensor as x" in calls or "y on the memory of x" in calls for calls in shown)


def test_a_program_without_dynamic_sizes_says_so() -> None:
    report = agreed(cb.check(lambda x: x + 1, (torch.tensor(1.0),), compiler="eager", dynamic=True))
    assert "takes no size of an argument as dynamic" in skips(report)


# layouts


def test_the_layout_at_which_it_fails_is_told() -> None:
    wrong = wrong_where(lambda tensors: not tensors[0].is_contiguous())
    finding = only(cb.check(lambda x: x * 2 + 1, (batch(3, 5),), compiler=wrong, vary_layout=True))
    assert finding.evidence["failing_calls"] == "with x transposed; with x expanded; with x with gaps"


def test_layouts_that_eager_refuses_are_skipped() -> None:
    report = agreed(cb.check(lambda x: x.view(-1) * 2, (batch(3, 5),), compiler="eager", vary_layout=True))
    assert "with x transposed: eager refuses it" in skips(report)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_layouts_of_an_image(requires_grad: bool) -> None:
    image = batch(2, 3, 4, 5, grad=requires_grad)
    calls = {call.label: call for call in other_layouts(program_of(torch.relu, image), Ledger())}
    assert len(calls) == 5
    for label, call in calls.items():
        tensor = call.args[0]
        assert (tensor.shape, tensor.is_leaf, tensor.requires_grad) == (image.shape, True, requires_grad)
        assert "expanded" in label or torch.equal(tensor, image)


def test_layouts_of_parameters_keep_gradients() -> None:
    report = cb.check(lambda x: x.exp().sum(), (batch(3, 4, grad=True),), compiler="aot_eager", vary_layout=True)
    agreed(report, program_runs=4, gradients=4)


@pytest.mark.slow
@pytest.mark.inductor
def test_one_inductor_program_over_sizes_data_and_layouts() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    agreed(cb.check(model, (batch(3, 8),), dynamic=True, vary_data=True, vary_layout=True), program_runs=12)
