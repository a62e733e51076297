"""Programs compiled with other kernels than the fastest: the wrong one among them is found and named."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.select_algorithm import get_algorithm_selector_cache

import checked_backend as cb
from checked_backend._torch.autotuning import watch_autotuning
from checked_backend.checking.kernel_choices import kernel_choices
from tests.support import faults
from tests.support.check_tools import agreed, batch, only, skips
from tests.support.raising import raising

Compiled = Callable[..., Any]


@dataclass(eq=False)
class Kernel:
    name: str
    description: str = ""

    def get_dtype(self) -> torch.dtype:
        return torch.float32

    def get_size(self) -> list[int]:
        return [4]


FASTER, SLOWER = Kernel("faster", "BLOCK=64"), Kernel("slower")


def tuned(fast: Compiled, slow: Compiled) -> Compiled:
    """A compiler that measures what two others make, as Inductor does, and takes the faster."""

    def compiler(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        measure: Any = benchmarker.benchmark_cpu
        savers: Any = get_algorithm_selector_cache().feedback_saver_fns
        timings = {FASTER: measure(2.0), SLOWER: measure(7.0)}
        for saver in savers:
            saver(timings, "mm", [FASTER], [*timings], None, {})
        return (fast if min(timings, key=lambda kernel: timings[kernel]) is FASTER else slow)(gm, example_inputs)

    return compiler


right, WRONG = faults.clean(), faults.wrong_value()


def product(x: torch.Tensor) -> torch.Tensor:
    return x.sin() @ x.t()


@pytest.mark.usefixtures("quick_kernels")
def test_a_kernel_that_is_not_the_fastest_is_found_and_named() -> None:
    agreed(cb.check(product, (batch(3, 4),), compiler=tuned(right, WRONG)))
    report = cb.check(product, (batch(3, 4),), compiler=tuned(right, WRONG), choices=2)
    finding = only(report)
    assert (finding.kind, finding.subject) == (cb.Kind.LOGIC, "output[0]")
    slowest = "kernel choice 2 of 2, the slowest kernels: mm of float32 4: slower"
    assert finding.message.endswith(f"; only with {slowest}")
    assert finding.evidence["kernels"] == slowest
    fastest = "kernel choice 1 of 2, the fastest kernels: mm of float32 4: faster (BLOCK=64)"
    assert finding.evidence["other_kernels"] == fastest
    assert "mm of float32 4: slower" in str(report)


@pytest.mark.usefixtures("quick_kernels")
def test_what_all_kernels_show_is_told_once_and_localized_once() -> None:
    report = cb.check(product, (batch(3, 4),), compiler=tuned(WRONG, WRONG), choices=3)
    finding = only(report)
    assert "only" not in finding.message
    assert len(finding.evidence["kernels"].splitlines()) == 3
    assert "other_kernels" not in finding.evidence
    assert report.coverage.checked["kernel choices"] == 3


@pytest.mark.usefixtures("quick_kernels")
def test_regions_that_are_wrong_with_different_kernels_are_told_apart() -> None:
    def only_of(name: str) -> Compiled:
        def compiler(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
            return (WRONG if any(name in str(node.target) for node in gm.graph.nodes) else right)(gm, example_inputs)

        return compiler

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() @ x.t()
        torch._dynamo.graph_break()
        return y.cos() + 1

    report = cb.check(broken, (batch(3, 4),), compiler=tuned(only_of("sin"), only_of("cos")), choices=2)
    told = {finding.region: finding.message for finding in report.findings if finding.region}
    assert len(told) == 2
    assert ["choice 1 of 2" in message for message in told.values()] == [True, False]
    assert ["choice 2 of 2" in message for message in told.values()] == [False, True]


@pytest.mark.usefixtures("quick_kernels")
def test_choices_of_one_purpose_are_all_told() -> None:
    def twice(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        tuned(right, right)(gm, example_inputs)
        for saver in get_algorithm_selector_cache().feedback_saver_fns:
            told: Any = saver
            told({Kernel("another"): 1.0}, "mm", [FASTER], [], None, {})
        return gm.forward

    report = cb.check(product, (batch(3, 4),), compiler=twice, choices=2)
    note = next(note for note in report.coverage.notes if note.startswith("kernel choice 1"))
    assert note.endswith("mm of float32 4: faster (BLOCK=64); mm of float32 4 (2): another")


dies = faults.instead(lambda *_args: os.abort())
hangs = faults.instead(lambda *_args: time.sleep(60))


@pytest.mark.process
@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize(
    ("fault", "detail"), [(dies, "crash.signal"), (hangs, "crash.hang")], ids=["dies-crash.signal", "hangs-crash.hang"]
)
def test_a_kernel_that_ends_its_process_is_named(fault: Compiled, detail: str) -> None:
    compiler = tuned(right, fault)
    report = cb.check(product, (batch(3, 4),), compiler=compiler, choices=2, isolate=True, timeout=6, gradients=False)
    finding = only(report)
    assert (finding.kind, finding.detail) == (cb.Kind.CRASH, detail)
    assert "test_kernel_choices.py" in finding.evidence["where"]
    assert finding.message.endswith("; only with kernel choice 2 of 2, the slowest kernels")
    assert "faster" in finding.evidence["other_kernels"]


@pytest.mark.process
@pytest.mark.usefixtures("quick_kernels")
def test_where_the_fastest_kernels_end_the_process_it_is_not_said_that_none_were_measured() -> None:
    report = cb.check(product, (batch(3, 4),), compiler=tuned(dies, right), choices=2, isolate=True, gradients=False)
    assert only(report).detail == "crash.signal"
    (skip,) = [skip for skip in report.coverage.skipped if skip.subject == "kernel choice 2"]
    assert "ended before it told" in skip.reason


@pytest.mark.usefixtures("quick_kernels")
def test_a_compiler_that_fails_before_it_measures_is_not_said_to_measure_nothing() -> None:
    report = cb.check(product, (batch(3, 4),), compiler=raising(RuntimeError("no")), choices=2)
    assert only(report).kind is cb.Kind.CRASH
    assert "failed before any kernel was measured" in str([skip.reason for skip in report.coverage.skipped])


@pytest.mark.usefixtures("quick_kernels")
def test_right_kernels_are_not_accused_and_are_told() -> None:
    report = agreed(cb.check(product, (batch(3, 4, grad=True),), compiler=tuned(right, right), choices=4))
    kernels = [note for note in report.coverage.notes if note.startswith("kernel choice ")]
    assert len(kernels) == 4
    assert kernels[1] == "kernel choice 2 of 4, the slowest kernels: mm of float32 4: slower"


@pytest.mark.usefixtures("quick_kernels")
def test_where_nothing_is_measured_there_is_one_choice_and_the_coverage_says_so() -> None:
    report = agreed(cb.check(product, (batch(3, 4),), compiler="eager", choices=3))
    assert "kernel choices 2 to 3" in skips(report)
    assert "kernel choice 1 of 3, the fastest kernels: none measured" in str(report)
    assert report.coverage.checked["kernel choices"] == 1
    assert "kernel choices" not in agreed(cb.check(product, (batch(3, 4),), compiler="eager")).coverage.checked


def test_choices_that_are_no_number_are_refused() -> None:
    refused: tuple[Any, ...] = (0, True, 2.0)
    for choices in refused:
        with pytest.raises(cb.OptionError, match=f"choices got {choices}; valid: 1, 2, 3"):
            cb.check(product, (batch(3, 4),), choices=choices)


def test_any_kernels_are_the_same_for_each_compilation_and_others_for_each_choice() -> None:
    before = torch.get_rng_state()
    times = [[choice.retime(2.0, kernel) for kernel in "abc"] for choice in kernel_choices(5)]
    assert times[0] == [2.0] * 3
    assert times[1] == [0.5] * 3
    assert times[2:] == [[choice.retime(9.0, kernel) for kernel in "abc"] for choice in kernel_choices(5)][2:]
    assert len({time for told in times[2:] for time in told}) == 9
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("quick_kernels")
def test_times_are_told_otherwise_once_and_not_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    measure: Any = benchmarker
    monkeypatch.setattr(benchmarker, "benchmark", lambda ms, **_more: measure.benchmark_cpu(ms))
    with watch_autotuning(lambda ms, _kernel: 1 / ms) as seen:
        assert measure.benchmark(4.0) == 0.25  # measured by another way of measuring, and turned over once
        assert measure.benchmark_cpu([2.0, 4.0]) == [0.5, 0.25]
        assert measure.benchmark_cpu(float("inf")) == float("inf")  # it cannot run
        assert measure.benchmark_cpu(0.0) > 1e6
    assert seen.measured == 4
    assert measure.benchmark(4.0) == 4.0


def test_what_is_watched_is_afterwards_as_it_was() -> None:
    before = vars(benchmarker).copy(), get_algorithm_selector_cache().feedback_saver_fns[:]
    methods, settings = vars(CachingAutotuner).copy(), config.save_config()

    def raises() -> None:
        with watch_autotuning():
            assert vars(benchmarker) != before[0]
            raise RuntimeError("amid")

    with pytest.raises(RuntimeError, match="amid"):
        raises()
    assert (vars(benchmarker), get_algorithm_selector_cache().feedback_saver_fns) == before
    assert (dict(vars(CachingAutotuner)), config.save_config()) == (methods, settings)


def test_the_configuration_of_a_triton_kernel_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launcher:
        config = "XBLOCK: 32, num_warps: 4"

    class Tuner:
        launchers = (Launcher(),)
        inductor_meta = {"kernel_name": "triton_poi_fused_sin_0"}  # noqa: RUF012

    monkeypatch.setattr(CachingAutotuner, "autotune_to_one_config", lambda _self, *_args: None)
    with watch_autotuning() as seen:
        CachingAutotuner.autotune_to_one_config(Tuner())
        CachingAutotuner.autotune_to_one_config(None)  # what is not as expected is not told, and ends nothing
        for saver in get_algorithm_selector_cache().feedback_saver_fns:
            saver({}, "mm", [], [], None, {})
    assert seen.chosen == {"triton_poi_fused_sin_0": "XBLOCK: 32, num_warps: 4"}


@pytest.mark.slow
@pytest.mark.ci_sample
def test_inductor_chooses_among_templates_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1)  # what is measured first is the fastest
    monkeypatch.setattr(benchmarker, "benchmark_cpu", lambda _run, **_more: float(next(numbers)))
    options = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    x, y = batch(4, 32, 64), batch(4, 64, 48)
    report = agreed(cb.check(torch.bmm, (x, y), compiler_options=options, choices=2))
    first, second = [note for note in report.coverage.notes if note.startswith("kernel choice ")]
    assert first == "kernel choice 1 of 2, the fastest kernels: bmm of float32 4x32x64, 4x64x48: bmm"
    assert "the slowest kernels: bmm of float32 4x32x64, 4x64x48: cpp_CppMicroGemm" in second
