"""A recording of the CPU against one of a GPU. No GPU is at hand: a stand-in computes as one does.

The stand-in is the CPU under a mode that cuts the factors of float32 products to the bits of TF32, where torch's
settings for CUDA say so, and adds up in another order. Its records name the device ``cuda``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from checked_backend import Kind, Report, Verdict
from checked_backend._torch.modes import TorchDispatchMode
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.program.compare import compare_recordings
from checked_backend.program.record import PRODUCTS, RecordedRegion, Recorder, coarsest, under_mode
from checked_backend.program.records import PLAIN, RecordFile
from checked_backend.regions.compile import copy_graph
from checked_backend.regions.graph_info import GraphInfo

Run = Callable[..., Any]


class OnGpu(TorchDispatchMode):
    """Computes as a GPU: products in TF32 where the settings say so, sums in another order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        kind = "conv" if "conv" in name else "matmul" if "mm" in name or "attention" in name else ""
        if kind and coarsest("cuda", [kind]):
            args = [cut(arg) for arg in args]
        if name in ("sum", "mean"):
            args = [args[0].flip(list(range(args[0].dim()))).contiguous().flip(list(range(args[0].dim()))), *args[1:]]
        return func(*args, **(kwargs or {}))


def cut(value: Any) -> Any:
    """Without the bits of the mantissa that TF32 lacks: 13 of them, cut off, as the coarsest hardware does it."""
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return value
    return (value.view(torch.int32) & ~0x1FFF).view(torch.float32)  # with the strides that it has


class GpuRegion(RecordedRegion):
    """A region whose records are those of a GPU."""

    def _precision(self, args: Sequence[Any]) -> dict[str, Any]:
        return {"products": coarsest("cuda", self._kinds), "products_outside": coarsest("cuda", PRODUCTS)}


class OnDevice(Recorder):
    """Records what it gets as tensors of a device."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__(folder)
        self.device = device
        self._files[os.getpid()] = RecordFile(folder, "0", {"environment": {"gpu": "H100"} if device == "cuda" else {}})

    def add(self, region: str, call: int, subject: str, tensor: torch.Tensor, **more: Any) -> None:
        super().add(region, call, subject, tensor, **more, device=self.device)


def recorded(
    folder: Path, program: Callable[[Run], None], compiler: Callable[[fx.GraphModule, Any], Run], device: str
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    recorder, kind = OnDevice(folder, device), GpuRegion if device == "cuda" else RecordedRegion
    number = itertools.count(1)

    def backend(gm: fx.GraphModule, inputs: Any) -> Run:
        graph = copy_graph(gm)
        return kind(
            recorder, f"region {next(number)}", graph, GraphInfo.of(gm).inputs, compiler(copy_graph(gm), inputs)
        )

    with contextlib.closing(recorder):
        program(lambda model: torch.compile(model, backend=backend))


def against_gpu(folder: Path, program: Callable[[Run], None], fault: Callable[[Run], Run] = lambda run: run) -> Report:
    """Record a program on the CPU with its noise, then on the stand-in, and compare."""
    recorded(folder / "cpu" / PLAIN, program, lambda gm, _inputs: gm.forward, "cpu")
    for seed in (1, 2):
        recorded(
            folder / "cpu" / f"noise-{seed}",
            program,
            lambda *graph, seed=seed: under_mode(*graph, MonteCarloMode(seed)),
            "cpu",
        )
    recorded(folder / "gpu" / PLAIN, program, lambda *graph: fault(under_mode(*graph, OnGpu())), "cuda")
    return compare_recordings(folder / "cpu", folder / "gpu")


def training(make: Callable[[], nn.Module], shape: tuple[int, ...], rate: float = 0.05) -> Callable[[Run], None]:
    def program(compiled: Run) -> None:
        model = make()
        step = compiled(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(4):
            step(torch.randn(shape)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


class Loop(nn.Module):
    """Makes tensors where its input is, and has constants that name a device."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 16, device=x.device)
        for one in x.unbind(1):
            state = torch.tanh(self.cell(torch.cat((one, state), -1)))
        return state + torch.arange(16, device=x.device)


PROGRAMS = {
    "net": training(
        lambda: nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8)), (64, 32)
    ),
    "convnet": training(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()),
        (4, 3, 10, 10),
    ),
    "attention": training(lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), (4, 12, 32)),
    "loop": training(Loop, (8, 5, 8)),
}


@pytest.fixture
def precision(request: pytest.FixtureRequest) -> str:
    torch.set_float32_matmul_precision(request.param)
    return str(request.param)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("net", "highest"),
        ("convnet", "highest"),
        pytest.param("net", "high", marks=SLOW),
        pytest.param("convnet", "high", marks=SLOW),
        *(pytest.param(name, one, marks=SLOW) for name in ("attention", "loop") for one in ("highest", "high")),
    ],
    indirect=["precision"],
)
def test_a_gpu_that_rounds_otherwise_is_not_accused(tmp_path: Path, name: str, precision: str) -> None:
    report = against_gpu(tmp_path, PROGRAMS[name])
    assert report.verdict is Verdict.PASS, str(report)
    assert f"device: cpu in {tmp_path / 'cpu'}, cuda in {tmp_path / 'gpu'}" in report.coverage.notes
    coarse = [note for note in report.coverage.notes if "more coarsely" in note]
    assert len(coarse) == (precision == "high" or name == "convnet"), report.coverage.notes


def at_call(number: int, change: Callable[[Any], Any]) -> Callable[[Run], Run]:
    def wrong(run: Run) -> Run:
        calls = itertools.count(1)

        def called(*args: Any) -> Any:
            returned = run(*args)
            return change((args, returned)) if next(calls) == number else returned

        return called

    return wrong


def row_scaled(call: Any) -> Any:
    return [
        value * torch.where(torch.arange(len(value)) == 1, 1.5, 1.0).view(-1, *[1] * (value.dim() - 1))
        for value in call[1]
    ]


def statistics_scaled(call: Any) -> Any:
    args, returned = call
    for value in args:
        if value.is_floating_point() and not value.requires_grad and value.dim() == 1:
            value.data.mul_(1.5)
    return returned


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("net", "high"),
        pytest.param("net", "highest", marks=SLOW),
        pytest.param("convnet", "high", marks=SLOW),
        *(pytest.param("attention", one, marks=SLOW) for one in ("highest", "high")),
    ],
    indirect=["precision"],
)
def test_a_fault_of_the_gpu_is_named_where_it_arises(tmp_path: Path, name: str, precision: str) -> None:
    first = against_gpu(tmp_path, PROGRAMS[name], at_call(3, row_scaled)).findings[0]
    assert (first.subject, first.kind) == ("output[0]", Kind.LOGIC)
    assert "first in call 3 of region 1" in first.message
    assert "arises in this region" in first.message


def test_what_a_region_changes_in_place_is_named_in_the_call_that_does_it(tmp_path: Path) -> None:
    first = against_gpu(tmp_path, PROGRAMS["net"], at_call(2, statistics_scaled)).findings[0]
    assert first.subject.startswith("mutated[1.running_"), first
    assert "first in call 2 of region 1" in first.message
    assert "arises in this region" in first.message


def test_random_numbers_of_another_device_are_no_finding_and_no_pass(tmp_path: Path) -> None:
    def program(compiled: Run) -> None:
        clean = compiled(lambda x: x.exp())
        noisy = compiled(lambda x: nn.functional.dropout(x) + 1)
        for _ in range(2):
            clean(noisy(clean(torch.ones(40))))

    def other_numbers(run: Run) -> Run:
        def called(*args: Any) -> Any:
            before = torch.get_rng_state()
            torch.rand(3)
            changed = not torch.equal(torch.get_rng_state(), before)
            assert changed
            return run(*args)

        return called

    report = against_gpu(tmp_path, program, other_numbers)
    assert (report.findings, report.verdict) == ((), Verdict.INCONCLUSIVE)
    assert "each device draws others" in str(report)


def test_data_that_the_device_draws_is_told_as_such(tmp_path: Path) -> None:
    def program(compiled: Run) -> None:
        step = compiled(lambda x: x * 2)
        torch.manual_seed(len(list(tmp_path.glob("gpu"))))
        step(torch.randn(30))

    finding = against_gpu(tmp_path, program).findings[0]
    assert finding.subject == "input[x]"
    assert "from outside" in finding.message
    assert "random numbers, of which each device draws others" in finding.message


def test_products_of_code_between_the_regions_are_not_accused_and_no_pass(tmp_path: Path) -> None:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))

    def program(compiled: Run) -> None:
        step = compiled(lambda x: x.sin() + 1)
        for _ in range(2):
            x = torch.randn(8, 32)
            step(cut(x) @ cut(weight) if (tmp_path / "gpu").exists() else x @ weight)

    report = against_gpu(tmp_path, program)
    assert (report.findings, report.verdict) == ((), Verdict.INCONCLUSIVE), str(report)
    assert "code outside of the regions" in str(report)


def test_the_same_code_on_another_device_has_the_same_region_and_names() -> None:
    class Net(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3, device=device))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu"):
                x = x @ self.weight
            return x + torch.zeros(3, device=x.device)

    def seen(device: str) -> tuple[GraphInfo, str]:
        torch._dynamo.reset()
        found = []

        def backend(gm: fx.GraphModule, _inputs: Any) -> Run:
            found.append((GraphInfo.of(gm), gm.code))
            return gm.forward

        torch.compile(Net(device), backend=backend)(torch.ones(2, 3, device=device))
        return found[0]

    (one, code), (other, elsewhere) = seen("cpu"), seen("meta")
    assert (one.name, one.inputs) == (other.name, other.inputs)
    assert code != elsewhere  # the graph names the device


@pytest.mark.parametrize(
    ("precision", "kinds", "expected"),
    [("highest", ["matmul"], 0.0), ("high", ["matmul"], 2**-11), ("highest", ["conv"], 2**-11), ("high", [], 0.0)],
    indirect=["precision"],
)
@pytest.mark.usefixtures("precision")
def test_the_settings_say_how_a_gpu_multiplies(kinds: list[str], expected: float) -> None:
    assert coarsest("cuda", kinds) == expected
    assert coarsest("meta", kinds) == 0.0
