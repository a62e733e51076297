"""A long checked run: memory, file descriptors and what is alive stay as they are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import checked_backend as cb

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_long_run.py"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "how", [pytest.param({"every": 1}, marks=pytest.mark.ci_sample), {"budget": 0.2}], ids=["every call", "budget"]
)
def test_nothing_grows_with_the_steps(how: dict[str, float]) -> None:
    with cb.collect() as session:
        _, early, *_, last = runpy.run_path(str(BENCHMARK))["samples"](1500, compiler="aot_eager", **how)
    assert session.report.coverage.regions[0].calls == 1500
    assert last.descriptors == early.descriptors
    assert last.tensors <= early.tensors + 16  # with a budget, a check may be under way
    assert last.objects - early.objects < 600  # less than one in two steps
    assert last.resident - early.resident < 8 * 2**20
