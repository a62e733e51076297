"""What a finding does: raise, warn, record, fall back; and what misuse does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import checked_backend as cb
from checked_backend.findings.paths import shown_path
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


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize(
    ("make", "subject"),
    [
        (partial(faults.one_element, 0), "output[0]"),
        (partial(faults.scaled_gradient, "layers.4.weight"), "grad[layers.4.weight]"),
    ],
)
def test_it_raises_at_each_call(make: Callable[[Any], Any], subject: str, how: Any) -> None:
    compiled = numcheck(Net(), make(how))
    for _ in range(2):
        with pytest.raises(cb.DivergenceError) as caught:
            compiled(data()).square().sum().backward()
        assert {about for _detail, about in found(caught.value.report)} == {subject}


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
    assert "output[0] in Net\n" in text  # the region, without Dynamo's number for it


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
    options = {"on_divergence": "fallback", "reference": reference, "layout": "raise"}
    with cb.collect() as session:
        actual = train(twin, numcheck(twin, WRONG[name](how), **options))
    assert session.report.verdict is cb.Verdict.FAIL
    assert same_bits(actual, expected)


def test_fallback_stops_using_the_region() -> None:
    runs: list[int] = []

    @faults.runs
    def wrong(forward: Callable[..., Any], *args: Any) -> Any:
        runs.append(1)
        return tuple(value + 1 for value in forward(*args))

    compiled = numcheck(Net().eval(), wrong, on_divergence="fallback")
    with torch.no_grad():
        compiled(data())
        used = len(runs)
        compiled(data())
    assert len(runs) == used >= 1


# what is reported, and how often


def test_ignore_hides_nothing_else() -> None:
    wrong = faults.every_output(lambda output: faults.restrided(faults.changed(output)))
    compiled = numcheck(Net(), wrong, ignore=("structure.stride", "grad[layers.0.weight]"))
    with pytest.raises(cb.DivergenceError) as caught:
        compiled(data())
    assert found(caught.value.report) == {("logic", "output[0]")}


def test_every_finds_what_is_wrong_in_a_checked_call() -> None:
    compiled = numcheck(Net(), faults.from_call(4, faults.wrong_value()), every=3)
    [region] = gathered(lambda: [compiled(data()).sum().backward() for _ in range(3)]).coverage.regions
    assert (region.calls, region.checked_calls, region.checked_backwards) == (3, 1, 1)
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
    assert shown_path(str(file)) in str(caught.value)
    assert (report.findings, report.verdict) == (caught.value.report.findings, cb.Verdict.FAIL)


def test_a_pass_writes_nothing(tmp_path: Path) -> None:
    numcheck(Net(), report_dir=str(tmp_path / "reports"))(data()).sum().backward()
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compiler": "inductr"}, r"option 'compiler' got 'inductr'.*Valid: .*aot_eager.*inductor"),
        (
            {"compiler": "inductor", "compiler_options": {"force_disable_caches": True, "cpp.simdlens": 1}},
            r"'compiler_options' got 'cpp.simdlens', which Inductor does not have. Near it: cpp.simdlen",
        ),
        ({"bogus": 1}, r"has no option 'bogus'. Valid options: .*compiler.*reference"),
    ],
)
def test_bad_options_are_an_error_at_the_first_call(options: dict[str, Any], message: str, suppress: bool) -> None:
    with torch._dynamo.config.patch(suppress_errors=suppress):
        compiled = torch.compile(Net(), backend="numcheck", options=options)
        for _ in range(2):
            with pytest.raises(cb.OptionError, match=message):
                compiled(data())


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize(
    ("compiler", "kind", "text"),
    [
        (faults.crash_when_compiling("aot"), cb.Kind.CRASH, "PlantedError: the compiler crashed"),
        (faults.crash_when_running(), cb.Kind.CRASH, "PlantedError: the compiled region crashed"),
        (faults.not_a_function(), cb.Kind.CRASH, "is a `return` missing?"),
        (faults.extra_output(), cb.Kind.STRUCTURE, "wrong number of outputs"),
    ],
)
def test_broken_compilers_are_typed_errors(compiler: Any, kind: cb.Kind, text: str, suppress: bool) -> None:
    with torch._dynamo.config.patch(suppress_errors=suppress):
        compiled = numcheck(Net(), compiler)
        for _ in range(2):
            with pytest.raises(cb.DivergenceError) as caught:
                compiled(data())
            assert {finding.kind for finding in caught.value.report.findings} == {kind}
            assert text in " ".join(str(caught.value).split())


def test_the_compilers_own_exception_is_the_cause() -> None:
    with pytest.raises(cb.DivergenceError) as caught:
        numcheck(Net(), faults.crash_when_running())(data())
    assert isinstance(caught.value.__cause__, faults.PlantedError)


@pytest.mark.parametrize("on_divergence", ["record", "warn", "fallback"])
@pytest.mark.parametrize("make", [faults.crash_when_running, faults.crash_when_compiling, faults.returns_none])
def test_the_program_goes_on_in_eager_after_a_crash(make: Callable[[], Any], on_divergence: str) -> None:
    model = Net().eval()
    x = data()
    compiled = numcheck(model, make(), on_divergence=on_divergence)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cb.errors.DivergenceWarning)
        for _ in range(2):
            assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("on_divergence", ["record", "fallback"])
@pytest.mark.parametrize("when", ["compiling", "running"])
def test_gradients_are_eagers_after_a_crash_in_backward(when: Any, on_divergence: str) -> None:
    model, x = Net().eval(), data()
    compiled = numcheck(model, faults.crash_in_backward(when), on_divergence=on_divergence)
    wanted = [*model.parameters()]
    with cb.collect() as session:
        actual = torch.autograd.grad(compiled(x).square().sum(), wanted)
    torch.testing.assert_close(actual, torch.autograd.grad(model(x).square().sum(), wanted), rtol=0, atol=0)
    assert [finding.detail for finding in session.report.findings] == ["crash.backward"]
    assert "gradients" not in session.report.coverage.checked  # there was nothing to compare


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("on_divergence", ["raise", "record", "fallback"])
@pytest.mark.parametrize(
    ("function", "x"),
    [(partial(torch.embedding, torch.ones(3, 2)), torch.tensor([7])), (torch.linalg.cholesky, -torch.eye(2))],
    ids=["out_of_range-x0", "not_positive_definite-x1"],
)
def test_eagers_own_exception_is_raised(
    function: Callable[..., Any], x: torch.Tensor, on_divergence: str, compiler: str
) -> None:
    if (function, compiler) == (torch.linalg.cholesky, "aot_eager") and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 loses the exception, which is a finding")
    with pytest.raises(Exception) as expected:  # noqa: PT011  compared below
        function(x)
    compiled = numcheck(function, compiler, on_divergence=on_divergence)
    with pytest.raises(type(expected.value)) as actual:
        compiled(x)
    assert (type(actual.value), str(actual.value)) == (type(expected.value), str(expected.value))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = F.dropout(torch.tanh(self.first(x)), 0.5)
        return hidden, self.second(hidden), torch.sin(x)


def test_what_follows_from_other_random_numbers_is_one_finding() -> None:
    compiled = checked(Dropping(), faults.other_random_numbers("aot"))
    with cb.collect() as session:
        for _ in range(2):
            hidden, result, _ = compiled(torch.ones(6, 5))
            (hidden.square().sum() + result.square().sum()).backward()
    report = session.report
    [finding] = [one for one in report.findings if one.detail == "rng.stream"]
    explained = {finding.subject, *finding.explains}
    assert finding.evidence["explains"] == finding.explains
    assert {"output[0]", "output[1]", "grad[second.weight]", "grad[first.weight]"} <= explained
    assert "output[2]" not in explained
    assert {detail for detail, _ in found(report)} <= {"rng.stream", "rng.state"}
    assert "grad[second.weight]" in " ".join(report.to_text(verbose=True).split())


def test_an_error_beside_other_random_numbers_is_not_folded() -> None:
    def wrong(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        run = faults.other_random_numbers()(gm, example_inputs)
        return lambda *args: (*(made := run(*args))[:2], made[2] * 1.01)

    report = gathered(lambda: checked(Dropping(), wrong)(torch.ones(6, 5)))
    assert {subject for detail, subject in found(report) if not detail.startswith("rng")} == {"output[2]"}, str(report)
