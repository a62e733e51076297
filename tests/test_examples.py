"""The examples, each run as its first lines say, with a compiler that is quick."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import checked_backend as cb
from tests.support.started_programs import finished, needs

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name, raising=False)


def main_of(name: str) -> object:
    return runpy.run_path(str(EXAMPLES / name), run_name="example")["main"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "modules", "steps"),
    [
        ("trainer.py", ["transformers", "accelerate"], 1),  # Dynamo traces the model anew at the second step
        ("accelerate_train.py", ["accelerate"], 2),
        ("lightning_train.py", ["lightning"], 2),
    ],
)
def test_a_library_trains_checked(name: str, modules: list[str], steps: int) -> None:
    needs(*modules)
    report = main_of(name)(steps, "aot_eager")  # type: ignore[operator]
    assert isinstance(report, cb.Report)
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert sum(region.checked_backwards for region in report.coverage.regions) >= 1


@pytest.mark.slow
@pytest.mark.ci_sample
def test_accelerate_launches_the_example_checked(tmp_path: Path) -> None:
    needs("accelerate")
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
    script = (EXAMPLES / "accelerate_train.py", "4")
    code, out, err = finished((*launch, *script), tmp_path)
    assert code == 0, err
    assert out.startswith("PASS: the compiled program agrees with eager"), out
    assert "2 of 4 calls" in out  # every second one
    code, _, err = finished((*launch, script[0], "no number"), tmp_path)
    assert (code, "ValueError" in err) == (1, True)  # what the script ends with is handed on


@pytest.mark.process
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed")
def test_the_loop_with_fsdp2_trains_checked(tmp_path: Path) -> None:
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    words = (*run, EXAMPLES / "fsdp2_train.py", "--training.steps", "2", "--compile.backend")
    code, out, err = finished((*words, "numcheck"), tmp_path, {"CHECKED_BACKEND_COMPILER": "aot_eager"})
    assert code == 0, err
    assert "PASS: the compiled program agrees with eager" in out
    assert len(re.findall(r"rank 0, step \d+: loss \d+\.\d{6}", out)) == 2


def test_a_lying_fake_kernel_is_found() -> None:
    report = main_of("custom_operator.py")()  # type: ignore[operator]
    assert report.verdict is cb.Verdict.FAIL
    assert "example.swap" in str(report)


def test_a_compiler_with_a_bug_is_found(tmp_path: Path) -> None:
    report = main_of("compiler_author.py")()  # type: ignore[operator]
    assert report.verdict is cb.Verdict.FAIL
    assert {finding.kind for finding in report.findings} == {cb.Kind.LOGIC}
    lines = main_of("read_report.py")(tmp_path)  # type: ignore[operator]
    assert any("logic output[0]" in line for line in lines)


@pytest.mark.process
def test_the_tests_of_a_library(tmp_path: Path) -> None:
    suite = (EXAMPLES / "library", "-p", "no:cacheprovider", "--rootdir", tmp_path)
    code, out, err = finished((sys.executable, "-m", "pytest", "--numcheck=aot_eager", *suite), tmp_path)
    assert code == 0, out + err
    assert "2 passed" in out
    assert "numcheck" in out


@pytest.mark.process
def test_random_programs_in_a_test(tmp_path: Path) -> None:
    few = (EXAMPLES / "fuzz_in_a_test.py").read_text().replace("max_examples=25", "max_examples=4")
    (tmp_path / "fuzz_in_a_test.py").write_text(few)
    suite = ("fuzz_in_a_test.py", "-p", "no:cacheprovider", "--rootdir", tmp_path)
    code, out, err = finished((sys.executable, "-m", "pytest", *suite), tmp_path)
    assert code == 0, out + err
    assert "1 passed" in out


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_torch_upgrade(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\ntorch.manual_seed(0)\n"
        "f = torch.compile(lambda x: (x.softmax(0) * 3).sum(), backend='aot_eager')\n"
        "for _ in range(3):\n    f(torch.randn(9, requires_grad=True)).backward()\n"
    )
    words = ("sh", EXAMPLES / "torch_upgrade.sh", sys.executable, sys.executable, "train.py")
    code, out, err = finished(words, tmp_path)
    assert code == 0, out + err
    assert out.startswith("PASS")
    assert (tmp_path / "compare.html").exists()


@pytest.mark.process
def test_the_action_names_options_that_exist(tmp_path: Path) -> None:
    (run, report, _) = yaml.safe_load((EXAMPLES / "github-action" / "action.yml").read_text())["runs"]["steps"]
    (tmp_path / "p.py").write_text("import torch\ntorch.compile(torch.sin, backend='eager')(torch.ones(3))")
    command = f"{Path(sys.executable).parent}/python -m checked_backend"
    for step in (run, report):
        script = step["run"].replace("checked-backend ", f"{command} ")
        more = {"PROGRAM": "p.py", "OPTIONS": "--every 2", "REPORTS": "reports"}
        code, _, err = finished(("bash", "-e", "-c", script), tmp_path, more)
        assert code in (0, 2), err
    assert (tmp_path / "reports").is_dir()
