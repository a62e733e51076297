"""What a finding does: raise, warn, record, fall back; and what misuse does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import calls, checked, found, gathered, same_bits, training_state

BOTH = ("python", "aot")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        return hidden * 2


def numcheck(function: Callable[..., Any], compiler: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, backend="numcheck", options={"compiler": compiler, "localize": False, **options})


def data() -> torch.Tensor:
    return torch.randn(6, 5)


# raise


@pytest.mark.parametrize("how", BOTH)
def test_raise_in_forward(how: Any) -> None:
    compiled = numcheck(Net(), faults.one_element(0, how))
    for _ in range(2):  # not only at the first call
        with pytest.raises(cb.DivergenceError) as caught:
            compiled(data())
        assert {subject for _detail, subject in found(caught.value.report)} == {"output[0]"}


@pytest.mark.parametrize("how", BOTH)
def test_raise_in_backward(how: Any) -> None:
    model = Net()
    compiled = numcheck(model, faults.scaled_gradient("layers.4.weight", how))
    for _ in range(2):
        loss = compiled(data()).square().sum()
        with pytest.raises(cb.DivergenceError) as caught:
            loss.backward()
        assert {subject for _detail, subject in found(caught.value.report)} == {"grad[layers.4.weight]"}


def test_the_error_says_what_where_and_how_much() -> None:
    compiled = numcheck(Net(), faults.one_element(0))
    with pytest.raises(cb.DivergenceError) as caught:
        compiled(data())
    text, [finding] = str(caught.value), caught.value.report.findings
    metrics = finding.metrics
    assert metrics is not None
    assert "output[0]" in text
    assert "FAIL" in text.splitlines()[0]
    assert "1 of 18 elements" in text
    assert "output[0][5, 2]" in text  # where: the last element
    assert f"{metrics.reference_value:.9g} in eager, {metrics.candidate_value:.9g} compiled" in text
    assert f"absolute {metrics.max_abs_diff:.4g}" in caught.value.report.to_text(verbose=True)
    assert "return hidden * 2" in text
    assert "test_reporter.py:" in text
    assert "Net [" in text  # the region


def test_the_error_in_backward_says_which_parameter() -> None:
    loss = numcheck(Net(), faults.zeroed_gradient("layers.0.weight", "aot"))(data()).square().sum()
    with pytest.raises(cb.DivergenceError, match=r"grad\[layers\.0\.weight\]") as caught:
        loss.backward()
    assert "primals" not in str(caught.value)
    assert "40 of 40 elements" in str(caught.value)
    assert "0 compiled" in str(caught.value)


def test_structure_says_expected_and_actual() -> None:
    with pytest.raises(cb.DivergenceError) as caught:
        numcheck(Net(), faults.wrong_dtype(0))(data())
    assert "expected    torch.float32" in str(caught.value)
    assert "actual      torch.float64" in str(caught.value)


# warn and record


def test_warn_says_it_once_and_goes_on() -> None:
    model = Net().eval()
    compiled = numcheck(model, faults.wrong_value(0, "aot"), on_divergence="warn")
    x = data()
    with pytest.warns(cb.errors.DivergenceWarning, match=r"output\[0\]") as caught, torch.no_grad():
        first = compiled(x)
    assert len(caught) == 1
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        second = compiled(x)
    assert torch.equal(first, second)
    assert torch.equal(first, model(x) * 1.5 + 0.25)  # the candidate's results are handed out


def test_warn_in_backward() -> None:
    loss = numcheck(Net(), faults.zeroed_gradient("layers.4.bias", "aot"), on_divergence="warn")(data()).sum()
    with pytest.warns(cb.errors.DivergenceWarning, match=r"grad\[layers.4.bias\]"):
        loss.backward()


def test_record_and_collect() -> None:
    compiled = numcheck(Net(), faults.scaled_gradient("layers.4.bias", "aot"), on_divergence="record")
    with cb.collect() as outer:
        compiled(data()).sum().backward()
        assert len(outer.report.findings) == 1  # may be read at any time
        with cb.collect() as inner:
            compiled(data()).sum().backward()
    compiled(data()).sum().backward()  # in no session
    assert found(outer.report) == found(inner.report)
    assert {subject for _detail, subject in found(outer.report)} == {"grad[layers.4.bias]"}
    assert outer.report.findings[0].evidence["seen_in_calls"] == 2
    assert (calls(outer.report), calls(inner.report)) == (2, 1)
    assert outer.report.verdict is cb.Verdict.FAIL
    with pytest.raises(cb.DivergenceError):
        outer.report.raise_for_verdict()


def test_nothing_checked_is_no_pass() -> None:
    with cb.collect() as session:
        Net()(data())
    assert session.report.verdict is cb.Verdict.INCONCLUSIVE


# fallback


def train(model: nn.Module, function: Callable[..., Any]) -> list[torch.Tensor]:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        out = function(data())
        out.square().sum().backward()
        optimizer.step()
        outputs.append(out.detach())
    return [*outputs, *training_state(model)]


WRONG = {
    "value": lambda how: faults.wrong_value(0, how),
    "value of one element": lambda how: faults.one_element(0, how),
    "stride": lambda how: faults.wrong_stride(0, how),
    "mutation": lambda how: faults.wrong_mutation("layers.1.running_var", how),
    "mutation dropped": lambda how: faults.dropped_mutation("layers.1.num_batches_tracked", how),
    "random numbers": faults.other_random_numbers,
    "random state": faults.too_many_random_numbers,
    "gradient": lambda how: faults.zeroed_gradient("layers.0.weight", how),
    "another gradient": lambda how: faults.scaled_gradient("layers.4.bias", how, factor=1.5),
    "crash": faults.crash_when_running,
    "crash when compiling": faults.crash_when_compiling,
}


@pytest.mark.parametrize(
    ("name", "reference", "how"),
    [
        *((name, "keep", BOTH[number % 2]) for number, name in enumerate(WRONG)),
        ("value", "recompute", "aot"),
        ("gradient", "recompute", "python"),
    ],
)
def test_fallback_trains_as_eager_does(name: str, reference: str, how: Any) -> None:
    """Whatever the compiler got wrong, three steps end where plain eager's end, bit for bit."""
    model = Net()
    twin = copy.deepcopy(model)
    expected = train(model, model)
    with cb.collect() as session:
        actual = train(
            twin, numcheck(twin, WRONG[name](how), on_divergence="fallback", reference=reference, layout="raise")
        )
    assert session.report.verdict is cb.Verdict.FAIL
    assert same_bits(actual, expected)


def test_fallback_stops_using_the_region() -> None:
    runs: list[int] = []

    def wrong(gm: Any, _inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(1)
            return tuple(value + 1 for value in gm.forward(*args))

        return run

    compiled = numcheck(Net().eval(), wrong, on_divergence="fallback")
    with torch.no_grad():
        compiled(data())
        used = len(runs)
        compiled(data())
    assert used >= 1
    assert len(runs) == used


def test_fallback_leaves_a_right_region_alone() -> None:
    report = gathered(lambda: train(net := Net(), numcheck(net, "aot_eager", on_divergence="fallback")))
    assert report.verdict is cb.Verdict.PASS
    assert calls(report) == 3


# what is reported, and how often


@pytest.mark.parametrize("word", ["structure", "structure.stride", "output[0]"])
def test_ignore(word: str) -> None:
    compiled = numcheck(Net(), faults.wrong_stride(0), ignore=(word,))
    report = gathered(lambda: compiled(data()))
    assert report.verdict is cb.Verdict.PASS
    assert [finding.detail for finding in report.coverage.ignored] == ["structure.stride"]
    assert "structure.stride" in report.to_text(verbose=True)


def test_ignore_hides_nothing_else() -> None:
    def wrong(gm: Any, _inputs: Any) -> Callable[..., Any]:
        return lambda *args: (faults.restrided(faults.changed(gm.forward(*args)[0])),)

    compiled = numcheck(Net(), wrong, ignore=("structure.stride", "grad[layers.0.weight]"))
    with pytest.raises(cb.DivergenceError) as caught:
        compiled(data())
    assert found(caught.value.report) == {("logic", "output[0]")}


def test_every() -> None:
    compiled = checked(Net(), "aot_eager", every=3)
    report = gathered(lambda: [compiled(data()).sum().backward() for _ in range(7)])
    [region] = report.coverage.regions
    assert (region.calls, region.checked_calls, region.checked_backwards) == (7, 3, 3)


def test_every_finds_what_is_wrong_in_a_checked_call() -> None:
    count: list[int] = []

    def late(tensor: torch.Tensor) -> torch.Tensor:
        count.append(1)
        return tensor * (1.1 if len(count) >= 4 else 1.0)

    compiled = numcheck(Net(), faults.spoiled_output(late), every=3)
    for _ in range(3):
        compiled(data())
    with pytest.raises(cb.DivergenceError):
        compiled(data())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", BOTH)
def test_recomputed_reference_finds_the_same(how: Any) -> None:
    wrong = {
        ("logic", "grad[layers.4.weight]"): faults.scaled_gradient("layers.4.weight", how),
        ("structure.stride", "output[0]"): faults.wrong_stride(0, how),
        ("mutation.wrong", "mutated[layers.1.running_mean]"): faults.wrong_mutation("layers.1.running_mean", how),
    }
    for expected, compiler in wrong.items():
        reports = []
        for reference in ("keep", "recompute"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = Net()
            model.layers[2].p = 0.0
            compiled = checked(model, compiler, reference=reference)
            reports.append(gathered(lambda compiled=compiled: compiled(data()).square().sum().backward()))
        assert found(reports[0]) == found(reports[1])
        assert expected in found(reports[0])
        assert reports[0].coverage.checked == reports[1].coverage.checked


def test_gradients_off() -> None:
    compiled = numcheck(Net(), faults.zeroed_gradient("layers.0.weight", "aot"), gradients=False)
    report = gathered(lambda: compiled(data()).square().sum().backward())
    assert report.verdict is cb.Verdict.PASS
    assert "gradients" not in report.coverage.checked
    assert report.coverage.regions[0].checked_backwards == 0


# the report on disk


def test_report_is_written_and_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "reports"
    compiled = numcheck(Net(), faults.wrong_value(0, "aot"), report_dir=str(folder))
    with pytest.raises(cb.DivergenceError) as caught:
        compiled(data())
    [file] = folder.iterdir()
    report = cb.Report.from_json(file.read_text())
    assert caught.value.report.path == file
    assert str(file) in str(caught.value)
    assert report.findings == caught.value.report.findings
    assert report.verdict is cb.Verdict.FAIL


def test_report_dir_that_cannot_be_written_hides_no_finding(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compiled = numcheck(Net(), faults.wrong_value(0), report_dir=str(tmp_path / "file"))
    with pytest.raises(cb.DivergenceError):
        compiled(data())


def test_a_pass_writes_nothing(tmp_path: Path) -> None:
    numcheck(Net(), report_dir=str(tmp_path / "reports"))(data()).sum().backward()
    assert not (tmp_path / "reports").exists()
