"""The examples, each run as its first lines say, with a compiler that is quick."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import checked_backend as cb
from tests.cli.test_running import finished

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    torch._dynamo.reset()
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name, raising=False)
    torch._dynamo.reset()


def needs(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


def main_of(name: str) -> object:
    return runpy.run_path(str(EXAMPLES / name), run_name="example")["main"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("trainer.py", ["transformers", "accelerate"]),
        ("accelerate_train.py", ["accelerate"]),
        ("lightning_train.py", ["lightning"]),
    ],
)
def test_a_library_trains_checked(name: str, modules: list[str]) -> None:
    needs(*modules)
    report = main_of(name)(2, "aot_eager")  # type: ignore[operator]
    assert isinstance(report, cb.Report)
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert sum(region.checked_backwards for region in report.coverage.regions) >= 1


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.ci_sample])], ids=["one rank", "two ranks"]
)
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed")
def test_the_loop_with_fsdp2_trains_checked(tmp_path: Path, ranks: int) -> None:
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    words = (*run, EXAMPLES / "fsdp2_train.py", "--training.steps", "2", "--compile.backend")
    code, out, err = finished((*words, "numcheck"), tmp_path, {"CHECKED_BACKEND_COMPILER": "aot_eager"})
    assert code == 0, err
    assert out.count("PASS: the compiled program agrees with eager") == ranks
    plain = finished((*words, "aot_eager"), tmp_path)[1]
    assert losses(plain) == losses(out)


def losses(printed: str) -> list[str]:
    found = sorted(line for line in printed.splitlines() if "loss" in line)
    assert found
    return found
