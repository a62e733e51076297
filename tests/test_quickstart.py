"""The README's first command: what a new user sees."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TORCHS_OWN = re.compile(r"[IWE]\d{4} .* torch/")
"""Lines of torch's own log, such as that a build for CUDA finds no device."""

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart.py"


@pytest.mark.process
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]
)
def test_the_quickstart_passes_clean_models_and_finds_the_planted_bug(compiler: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHECKED_BACKEND_")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1", "CHECKED_BACKEND_COMPILER": compiler},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    clean, planted = done.stdout.split("\n2. ")
    assert clean.count("PASS") == 2
    assert "27 gradients" in clean  # every parameter of the encoder
    assert "6 mutated inputs" in clean  # the running statistics of two BatchNorms
    assert "not checked" not in clean
    assert planted.count("FAIL") == 2
    assert "mutated[norm2.running_mean]" in planted  # the user's name
    assert "quickstart.py:" in planted  # the user's line
    assert len(list((tmp_path / "checked_backend_reports").glob("*.json"))) == 2
    told = "the compiled program is wrong; looking for the operator takes a minute or two"
    lines = done.stderr.splitlines()
    assert sum(line.startswith(told) for line in lines) == 2
    ours = [line for line in lines if not TORCHS_OWN.match(line)]
    assert all(line.startswith((told, "numcheck: ")) for line in ours), lines


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLE)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("broken", ["the planted bug is none", "a clean model fails"])
@pytest.mark.slow
@pytest.mark.ci_sample
def test_the_quickstart_exits_with_0_only_if_all_is_as_it_should_be(
    broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_COMPILER", "eager")  # Inductor is not the point here
    example: Any = load_example()
    wrong, train = example.wrong_compiler, example.train_checked
    if broken == "the planted bug is none":
        monkeypatch.setattr(example, "wrong_compiler", lambda gm, _example_inputs: gm.forward)
    if broken == "a clean model fails":
        monkeypatch.setattr(
            example, "train_checked", lambda *args, **options: train(*args, **{**options, "compiler": wrong})
        )
    code = example.main()
    printed = capsys.readouterr().out
    assert code == 1
    assert "NOT as it should be" in printed
    assert printed.count("went unnoticed") == (2 if broken == "the planted bug is none" else 0)
