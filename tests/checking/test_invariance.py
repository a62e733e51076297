"""A program compared with itself, bit by bit: planted differences are named, clean programs keep their bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from checked_backend.checking.invariance import Invariance
from tests.checking.test_kernel_choices import right, tuned
from tests.support import faults
from tests.support.check_tools import Counting, agreed, batch, only, skips
from tests.support.raising import raising


def told(report: cb.Report) -> str:
    """The remark that has all answers: the first one."""
    return report.coverage.notes[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sin() + x


def for_one_row(wrong: faults.Compiler) -> faults.Compiler:
    """A compiler that is wrong where the batch has one row."""
    return faults.on_data(lambda args: any(len(arg) == 1 for arg in args if arg.dim() == 2), wrong)


BY_ROWS = for_one_row(faults.spoiled_output(faults.last_bit))


def test_a_program_that_computes_each_row_alike_keeps_its_bits() -> None:
    report = agreed(cb.check(Net(), (batch(grad=True),), compiler="eager", invariant=("batch", "runs", "choices")))
    assert told(report) == (
        "accurate: yes; batch-invariant: yes (dimension 0 of x; row 0, row 5, rows 0 to 2, rows 1 to 5, rows 0 to 4 "
        "alone); the same in each run: yes (3 runs); the same with other kernels: yes (the compiler measured no "
        "kernels, so there is one for each purpose)"
    )
    assert report.coverage.checked["tensors compared bit by bit"] > 3


def test_a_row_that_has_other_bits_alone_is_a_finding_beside_accuracy() -> None:
    report = cb.check(Net(), (batch(),), compiler=BY_ROWS, invariant=("batch",))
    finding = only(report)
    assert (finding.kind, finding.detail, finding.subject) == (cb.Kind.PRECISION, "precision.batch", "output[0]")
    assert finding.message == "row 0 of 6, alone, is not bit for bit what it is in the batch (dimension 0 of x)"
    assert finding.metrics.max_ulp == 1
    assert told(report) == "accurate: yes; batch-invariant: no, seen at output[0]"
    text = str(report)
    assert text.startswith("FAIL: output[0] has other bits alone than in a batch\n")
    for words in (" in the batch, ", " alone\n", "pad each batch to one size"):
        assert words in text
    assert "less precise" not in text
    assert cb.Report.from_json(report.to_json()).findings == report.findings


def test_without_the_question_nothing_is_compared_with_itself() -> None:
    report = agreed(cb.check(Net(), (batch(),), compiler=BY_ROWS))
    assert "tensors compared bit by bit" not in report.coverage.checked
    assert not any("invariant" in note for note in report.coverage.notes)


def test_a_gradient_that_has_other_bits_alone_is_found() -> None:
    """The gradients that enter at a row are the same alone and in the batch, so only the program can differ."""
    compiler = for_one_row(faults.spoiled_tangents(faults.last_bit))
    assert only(cb.check(Net(), (batch(grad=True),), compiler=compiler, invariant="batch")).subject == "grad[x]"
    agreed(cb.check(Net(), (batch(grad=True),), compiler=faults.clean(), invariant="batch"))


def test_rows_of_what_a_program_changes_in_place_are_compared() -> None:
    def cached(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[:, 0] = x.exp()
        return x + 1

    report = agreed(cb.check(cached, (torch.randn(4), torch.zeros(4, 3)), compiler="eager", invariant="batch"))
    assert report.coverage.checked["tensors compared bit by bit"] == 2


def test_a_program_that_writes_to_its_argument_has_it_anew_in_each_run() -> None:
    agreed(cb.check(lambda x: x.add_(1), (batch(),), compiler="eager", invariant=("batch", "runs")))


@pytest.mark.parametrize(
    ("function", "args", "why"),
    [
        (nn.BatchNorm1d(8), (batch(),), "output[0] depends on all rows, in eager and in float64 too"),
        (lambda x: x.cumsum(0), (batch(),), "name its dimension, as in batch=1"),
        (lambda x: nn.functional.dropout(x), (batch(),), "random numbers"),
        (lambda x: x.square().mean(), (batch(),), "no result has rows along dimension 0 of x"),
        (lambda x: x + 1, (batch(1, 8),), "the batch has 1 row: give one of at least two"),
        (lambda x: x + 1, (torch.tensor(2.0),), "no argument is a tensor that has a batch"),
        (lambda x: x.view(6, 8) + 1, (batch(),), "eager refuses each part of the batch, along dimension 0 of x"),
    ],
    ids=["batch_norm", "cumsum", "dropout", "loss", "one_row", "scalar", "fixed_size"],
)
def test_what_cannot_be_asked_is_no_pass(function: Callable[..., Any], args: Sequence[Any], why: str) -> None:
    report = cb.check(function, args, compiler="eager", invariant="batch")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert not report.findings
    assert why in skips(report)
    assert told(report) == "accurate: yes; batch-invariant: not known"


def test_a_result_that_depends_on_all_rows_hides_no_other() -> None:
    check = partial(cb.check, lambda x: (x.cumsum(0), x.sin()), (batch(),), invariant="batch")
    assert "alone; not asked of output[0], which depends on all rows)" in told(agreed(check(compiler="eager")))
    assert only(check(compiler=for_one_row(faults.spoiled_output(faults.last_bit, at=1)))).subject == "output[1]"


def test_the_batch_is_the_dimension_that_is_named_or_marked() -> None:
    report = agreed(cb.check(lambda x: x.cumsum(0), (batch(),), compiler="eager", invariant="batch=1"))
    assert "(dimension 1 of x; row 0, row 7" in told(report)
    marked, beside = batch(), batch(6, 1)
    torch._dynamo.mark_dynamic(marked, 1)
    report = agreed(cb.check(lambda x, y: x.cumsum(0) + y, (marked, beside), compiler="eager", invariant="batch"))
    assert "(dimension 1 of x; " in told(report)


def test_a_program_that_does_not_repeat_its_bits_is_a_finding() -> None:
    runs = itertools.count()
    changes = faults.every_output(lambda result: result if next(runs) % 2 else faults.last_bit(result))
    report = cb.check(Net(), (batch(),), compiler=changes, invariant="runs")
    finding = next(finding for finding in report.findings if finding.detail == "precision.runs")
    assert finding.subject == "output[0]"
    assert finding.message == "run 2 of the same call is not bit for bit what the first one is"
    assert finding.fails


@pytest.mark.usefixtures("quick_kernels")
def test_another_kernel_with_other_bits_is_a_finding() -> None:
    slow = faults.spoiled_output(faults.last_bit)
    finding = only(cb.check(Net(), (batch(),), compiler=tuned(right, slow), invariant="choices"))
    assert (finding.detail, finding.subject) == ("precision.choices", "output[0]")
    assert finding.message == "with the slowest kernels it is not bit for bit what it is with the fastest kernels"
    report = agreed(cb.check(Net(), (batch(),), compiler=tuned(right, right), invariant="choices"))
    assert told(report) == "accurate: yes; the same with other kernels: yes (2 sets of kernels)"


def kernel(x: torch.Tensor) -> torch.Tensor:
    """Sums of rows. Those of one row alone are of another order, as in a kernel that is chosen by size."""
    total = x.sum(1)
    return faults.last_bit(total) if len(x) == 1 else total


row_sums = torch.library.custom_op("checked_backend_tests::row_sums", kernel, mutates_args=())
row_sums.register_fake(lambda x: x.new_empty(len(x)))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Sums(), Sums()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second((self.first(x.relu()) + 1)[:, None] * x).abs()


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return row_sums(x)


@pytest.mark.process
def test_under_inductor_the_first_operator_with_other_bits_is_named() -> None:
    report = cb.check(Deep(), (batch(),), invariant="batch")
    finding, name = only(report), "checked_backend_tests.row_sums.default"
    assert (finding.op, finding.module) == (name, "first")
    assert finding.node is not None
    assert "return row_sums(x)" in (finding.source or "")
    assert told(report).startswith(f"accurate: yes; batch-invariant: no, first at {name} in first: kernel ")


def test_a_handwritten_candidate_is_compared_with_itself() -> None:
    report = cb.check(lambda x: x.sum(1), (batch(),), candidate=kernel, invariant="batch,runs")
    assert only(report).detail == "precision.batch"
    text = str(report).replace("\n   ", " ")
    assert "the candidate gives a row other bits" in text.lower()
    assert "pad each batch to one size" in text
    assert "Add up in float32" not in text
    agreed(cb.check(lambda x: x.sum(1), (batch(),), candidate=lambda x: x.sum(1), invariant="runs"))


def test_a_compiled_program_that_fails_on_some_rows_is_no_pass() -> None:
    one_row = for_one_row(faults.crash_when_running())
    report = cb.check(lambda x: x.sin(), (batch(),), compiler=one_row, invariant="batch")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "batch-invariant: the compiled program raises" in skips(report)


def test_a_fault_in_accuracy_is_told_apart() -> None:
    report = cb.check(Net(), (batch(),), compiler=faults.wrong_value(), invariant="batch")
    assert report.verdict is cb.Verdict.FAIL
    assert told(report).startswith("accurate: no; batch-invariant: yes (")


def test_what_goes_wrong_while_the_operator_is_looked_for_leaves_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checked_backend.checking.invariance._Question._seen", raising(RuntimeError("no kernels here")))
    finding = only(cb.check(Net(), (batch(),), compiler=BY_ROWS, invariant="batch"))
    assert finding.op is None
    assert finding.evidence["localized"] == "not localized: no kernels here"


@pytest.mark.parametrize("asked", ["rows", ("batch", 3), "batch=x", "runs=1", ("batch=-1",)])
def test_misuse_is_refused(asked: Any) -> None:
    with pytest.raises(cb.OptionError, match=r"check: invariant got .*; valid: batch, runs, choices; batch=1 if"):
        cb.check(Net(), (batch(),), invariant=asked)


def test_what_is_asked_twice_is_asked_once() -> None:
    assert Invariance.of("batch, runs,batch=1") == Invariance(("batch", "runs"), 1)
    assert Invariance.of(()) == Invariance()


def test_the_check_leaves_everything_as_it_was() -> None:
    model, x = Net(), batch(grad=True)
    before, state = x.detach().clone(), torch.get_rng_state()
    cb.check(model, (x,), compiler="eager", invariant=("batch", "runs"))
    assert torch.equal(x, before)
    assert x.grad is None
    assert model.scale.grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.process
def test_a_process_of_its_own_asks_too() -> None:
    report = cb.check(Net(), (batch(),), compiler=BY_ROWS, invariant="batch", isolate=True)
    assert only(report).detail == "precision.batch"


captured = nn.Linear(8, 4)


@pytest.mark.parametrize("what", [lambda x: captured(x), lambda x: x * captured.bias.sum()], ids=["module", "tensor"])
def test_a_function_with_captured_state_has_each_question_answered(what: Callable[..., Any]) -> None:
    report = cb.check(what, (batch(),), compiler=right, invariant=("runs", "batch"))
    assert "not known" not in told(report), str(report)
    assert "the same in each run: yes" in told(report)


def test_what_a_program_counts_in_python_is_no_difference() -> None:
    agreed(cb.check(Counting(), (batch(),), compiler="eager", invariant="batch"))


@pytest.mark.parametrize("candidate", [lambda x: (x * 2).detach(), lambda _x: None], ids=["detached", "None"])
def test_without_what_is_compared_the_answer_is_not_known(candidate: Callable[..., Any]) -> None:
    report = cb.check(lambda x: x * 2, (batch(grad=True),), candidate=candidate, invariant="batch")
    assert report.verdict is cb.Verdict.FAIL
    assert told(report) == "accurate: no; batch-invariant: not known"
    assert "batch-invariant: the candidate: a gradient enters at output[0], which has no history here" in skips(report)


def test_a_result_in_float32_of_a_narrower_program_is_asked_about() -> None:
    """In float64 it is rounded too, and the rounding is no influence of other rows."""
    report = cb.check(lambda x: x.float() / 3, (batch().double(),), compiler=BY_ROWS, invariant="batch")
    assert only(report).detail == "precision.batch"


def test_what_has_no_rows_is_told() -> None:
    class Stores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(64, 8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.kept[: len(x)] = x.exp()
            return x + 1, x.mean()

    report = agreed(cb.check(Stores(), (batch(),), compiler="eager", invariant="batch"))
    assert told(report).endswith(" alone; not asked of buffer[kept], output[1], which has no rows)")


@torch.library.custom_op("checked_backend_tests::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    """It knows float32 only, and a row of it depends on all rows."""
    if x.dtype is not torch.float32:
        raise NotImplementedError("float32 only")
    return x - x.mean(0)


centred.register_fake(torch.empty_like)


def test_rows_that_influence_one_another_are_seen_without_float64_too() -> None:
    report = cb.check(lambda x: centred(x), (batch(),), compiler="eager", invariant="batch")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "output[0] depends on all rows" in skips(report)


def test_dtypes_without_arithmetic_and_complex_gradients_are_compared() -> None:
    agreed(cb.check(lambda x: x.to(torch.float8_e4m3fn), (batch(),), compiler="eager", invariant="batch"))
    faulty = for_one_row(faults.spoiled_tangents(lambda grad: grad * (1 + 1e-6)))
    report = cb.check(lambda x: x * (2 + 1j), (batch(grad=True),), compiler=faulty, invariant="batch")
    assert only(report).subject == "grad[x]"


def test_a_batch_of_several_sizes_has_two_rows() -> None:
    report = cb.check(
        lambda x: x * 2, lambda size: (torch.randn(size, 4),), candidate=lambda x: x * 2, invariant="batch"
    )
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert "batch-invariant: yes (dimension 0 of x; row 0, " in told(report)


def test_runs_of_another_shape_are_no_pass() -> None:
    sizes = iter((3, 2, 1))
    report = cb.check(
        lambda x: x[:3], (torch.ones(4),), candidate=lambda x: x[: next(sizes, 3)].clone(), invariant="runs"
    )
    assert report.verdict is not cb.Verdict.PASS
    assert "the same in each run: yes" not in told(report)
