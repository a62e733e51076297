"""Several threads at once, each with its own compiled model or with a shared one.

Each program runs in a process of its own: torch's tracer patches the whole process, and two traces at once would leave
their patches behind for every later test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, backwards, calls, checked, found, gathered, meanwhile
from tests.support.warm_process import WarmPython


def in_threads(work: Callable[[int], Any], count: int = 4) -> list[Any]:
    """Run something in several threads that start together."""
    torch._dynamo.lookup_backend("numcheck")  # torch loads an entry point once, and two threads at once trip over it
    barrier = threading.Barrier(count)

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def each_with_its_own_model() -> None:
    """Threads 0 and 2 have a wrong compiler; each sees its own findings and nothing of the others'."""
    models = [nn.Sequential(nn.Linear(4, 4 + number), nn.Tanh()) for number in range(4)]

    def work(number: int) -> cb.Report:
        compiler = faults.scaled_gradient("0.weight", "aot") if number % 2 == 0 else "aot_eager"
        compiled = checked(models[number], compiler)
        x = torch.full((3, 4), 0.1 * (number + 1))
        return gathered(lambda: [compiled(x).square().sum().backward() for _ in range(3)])

    for number, report in enumerate(in_threads(work)):
        assert calls(report) == backwards(report) == 3
        assert found(report) == ({("logic", "grad[0.weight]")} if number % 2 == 0 else set())


def sharing_a_model(compiler: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled = checked(model, compiler)

    def work(number: int) -> tuple[cb.Report, torch.Tensor, torch.Tensor]:
        x = torch.full((3, 4), 0.1 * (number + 1), requires_grad=True)
        with cb.collect() as session:
            for _ in range(5):
                y = compiled(x)
                torch.autograd.grad(y.square().sum(), [x])
        return session.report, x, y

    for report, x, y in in_threads(work):
        assert agreed(report)
        assert calls(report) == backwards(report) == 5
        assert torch.equal(y, model(x))


def sharing_a_wrong_model() -> None:
    compiled = checked(nn.Linear(4, 2), faults.one_element(0, "aot"))

    for report in in_threads(lambda _number: gathered(lambda: [compiled(torch.full((3, 4), 0.3)) for _ in range(3)])):
        assert found(report) == {("logic", "output[0]")}, str(report)
        # threads that compile at the same time may each get a region of their own
        assert sum(finding.evidence.get("seen_in_calls", 1) for finding in report.findings) == 3


def drawing_meanwhile() -> None:
    """The random generator is the whole process's: what a data loader's thread draws is nobody's fault."""
    right = checked(nn.Linear(4, 2), "aot_eager")
    wrong = checked(nn.Linear(4, 2), faults.too_many_random_numbers())
    with meanwhile(lambda: torch.randn(3)):
        report = gathered(lambda: [right(torch.ones(3, 4)) for _ in range(40)])
    assert found(report) == set()
    assert calls(report) == 40
    assert found(gathered(lambda: wrong(torch.ones(3, 4)))) == {("rng.state", "rng state")}


def watching_the_default_dtype() -> None:
    """The default dtype is the whole process's: a data loader's thread must not make float64 meanwhile."""
    compiled = checked(nn.Linear(4, 2), faults.one_element(0, "aot"))
    seen: set[torch.dtype] = set()
    with meanwhile(lambda: seen.add(torch.ones(1).dtype)):
        report = gathered(lambda: compiled(torch.randn(3, 4)))
    assert found(report) == {("logic", "output[0]")}
    assert seen == {torch.float32}


def wrong_in_a_worker() -> None:
    """A worker's calls are a part of what runs inside of the block that waits for it."""
    right, wrong = checked(nn.Linear(4, 2), "aot_eager"), checked(nn.Linear(4, 2), faults.one_element(0, "aot"))

    def work() -> None:
        right(torch.ones(3, 4))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(wrong, torch.ones(3, 4)).result()

    report = gathered(work)
    assert found(report) == {("logic", "output[0]")}
    assert calls(report) == 2


@pytest.mark.process
@pytest.mark.parametrize(
    "program",
    [
        "wrong_in_a_worker()",
        "each_with_its_own_model()",
        "sharing_a_model('eager')",
        "sharing_a_model('aot_eager')",
        "sharing_a_wrong_model()",
        "drawing_meanwhile()",
        "watching_the_default_dtype()",
    ],
)
def test_threads(program: str, tmp_path: Path, warm_python: WarmPython) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"""
import sys, warnings
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
warnings.simplefilter("error", RuntimeWarning)
import torch
torch.set_num_threads(1)
from tests.regions import test_threads
test_threads.{program}
print("done")
""")
    done = warm_python.run(script, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "done\n"
