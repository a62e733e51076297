"""CUDA graphs, streams and memory: not disturbed, and not the checker's blind spot."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import calls, checked, found, gathered


def test_what_cuda_graphs_return_is_compared_before_it_is_overwritten(gpu: str) -> None:
    def program() -> None:
        compiled = checked(lambda x: (x * 2).sin(), "inductor", compiler_options={"triton.cudagraphs": True})
        for number in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(torch.full((64,), float(number), device=gpu))

    report = gathered(program)
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert calls(report) == 4


def test_a_result_that_the_next_call_overwrites_is_found(gpu: str) -> None:
    def program() -> None:
        compiled = checked(lambda x: x.sin(), faults.same_memory_for_all_calls)
        held = [compiled(torch.full((64,), float(number), device=gpu)) for number in range(2)]
        assert len(held) == 2

    assert ("alias.overwritten", "output[0]") in found(gathered(program))


def test_nothing_is_checked_while_a_graph_is_captured(gpu: str) -> None:
    compiled = checked(lambda x: x.sin() + 1, "inductor")
    x = torch.randn(64, device=gpu)

    def program() -> None:
        compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(x)
        x.fill_(0.5)
        graph.replay()
        torch.testing.assert_close(result, x.sin() + 1)

    report = gathered(program)
    assert report.verdict is not cb.Verdict.FAIL, str(report)
    assert any("captured" in skip.reason for skip in report.coverage.skipped)


def test_work_on_a_side_stream_is_checked(gpu: str) -> None:
    stream = torch.cuda.Stream()

    def program() -> None:
        compiled = checked(lambda x: (x @ x).relu(), "inductor")
        with torch.cuda.stream(stream):
            x = torch.randn(512, 512, device=gpu)
            compiled(x)
        torch.cuda.current_stream().wait_stream(stream)

    report = gathered(program)
    assert report.verdict is cb.Verdict.PASS, str(report)


def test_a_result_of_a_stream_that_nobody_waits_for_is_found(gpu: str) -> None:
    stream = torch.cuda.Stream()

    def compiler(gm: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            results = [torch.zeros_like(result) for result in gm.forward(*args)]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                for memory, result in zip(results, gm.forward(*args), strict=True):
                    memory.copy_(result)
            return results

        return run

    def report(compiler: Any) -> cb.Report:
        return cb.check(lambda x: x.sin(), (torch.randn(64, device=gpu),), compiler=compiler)

    assert report("eager").verdict is cb.Verdict.PASS  # the device waits for all streams when it loads a kernel
    late = report(compiler)
    assert late.verdict is cb.Verdict.FAIL, str(late)


def test_peak_memory_is_at_most_eagers_and_the_compiled_programs(gpu: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(gpu)
    x = torch.randn(4096, 1024, device=gpu)

    def peak(run: Callable[[torch.Tensor], torch.Tensor]) -> int:
        for _ in range(3):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            run(x).sum().backward()
        return torch.cuda.max_memory_allocated()

    eager, compiled = peak(model), peak(torch.compile(model))
    torch._dynamo.reset()
    assert peak(checked(model, "inductor")) <= eager + compiled


def test_a_check_gives_way_where_memory_is_short(gpu: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to(gpu)
    x = torch.randn(8192, 2048, device=gpu)

    def train(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        run(x).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    right = train(torch.compile(model))
    limit = 1.5 * torch.cuda.max_memory_reserved()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        kept: list[torch.Tensor] = []
        report = gathered(lambda: kept.extend(train(checked(model, "inductor"))))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for one, other in zip(kept, right, strict=True):
        torch.testing.assert_close(one, other)
    assert report.verdict is not cb.Verdict.FAIL, str(report)
    assert any("memory" in skip.reason for skip in report.coverage.skipped), str(report)


def test_a_checked_step_waits_for_the_device_a_few_times(gpu: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20))).to(gpu)
    x = torch.randn(32, 64, device=gpu)
    compiled = checked(model, "inductor")

    def step() -> None:
        model.zero_grad()
        compiled(x).sum().backward()

    for _ in range(5):
        step()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{one.filename}:{one.lineno}" for one in told if "synchroniz" in str(one.message))
    assert places.total() <= 10, places
