"""A script of one generated kernel: what stands in it, and programs that are no such kernel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checked_backend.diagnose.repro import repro as module
from checked_backend.diagnose.repro import write_repro
from checked_backend.diagnose.repro.kernel_code import kernel_code
from checked_backend.findings import Kind
from checked_backend.regions.graph_case import GraphCase
from tests.support.planted import planted
from tests.support.reduce_tools import case_of

aten = torch.ops.aten


def minus_relu(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (aten.sub.Tensor(aten.relu.default(y), x),)


def two_results(x: Tensor) -> tuple[Tensor, Tensor]:
    return aten.exp.default(x), aten.sin.default(x)


def product(x: Tensor) -> tuple[Tensor]:
    return (aten.mm.default(x, x),)


def reduced_and_product(x: Tensor) -> tuple[Tensor]:
    return (aten.mm.default(aten.exp.default(x), x),)


def written(x: Tensor) -> tuple[Tensor]:
    return (aten.add_.Tensor(x, 1),)


MATRIX = torch.arange(9.0).reshape(3, 3)


def run(lines: list[str], *inputs: Tensor) -> Any:
    names: dict[str, Any] = {"__name__": "__script__"}
    exec("import torch\n" + "\n".join(lines), names)
    return names["compiled"](*inputs)


def case_in(function: Callable[..., Any], *inputs: Tensor) -> GraphCase:
    return case_of(function, *inputs, compiler="inductor")


@pytest.mark.inductor
def test_the_code_runs_without_the_compiler_and_is_as_wrong() -> None:
    x, y = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-5.0, 7.0, 11.0])
    with planted("inject_relu"):
        wrong = kernel_code(case_in(minus_relu, x, y), 60)
    right = kernel_code(case_in(minus_relu, x, y), 60)
    torch.testing.assert_close(run(right, x, y), torch.relu(y) - x)
    assert not torch.allclose(run(wrong, x, y), torch.relu(y) - x)
    text = "\n".join(right)
    assert "void  kernel(" in text
    assert "def compiled(*inputs):" in text
    assert "benchmark" not in text
    assert "extern_kernels" not in text  # nor anything else that it does not need


@pytest.mark.inductor
def test_several_results_come_in_the_programs_order() -> None:
    exp, sin = run(kernel_code(case_in(two_results, MATRIX), 60), MATRIX)
    torch.testing.assert_close((exp, sin), (MATRIX.exp(), MATRIX.sin()))


@pytest.mark.inductor
@pytest.mark.parametrize("function", [product, reduced_and_product, written])
def test_what_is_not_one_kernel_on_the_programs_inputs_has_no_code(function: Callable[..., Any]) -> None:
    assert kernel_code(case_in(function, MATRIX), 60) == []


@pytest.mark.process
def test_only_inductor_has_such_code_and_only_without_gradients() -> None:
    case = case_of(two_results, MATRIX)
    assert kernel_code(case, 60) == []
    assert kernel_code(replace(case_in(two_results, MATRIX), cotangents=(None, None)), 60) == []


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("shows", [True, False])
def test_a_script_of_the_kernel_lies_beside_the_repro_if_it_shows_the_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shows: bool
) -> None:
    x, y = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-5.0, 7.0, 11.0])
    case = case_in(minus_relu, x, y)
    options = {"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}
    wrong = replace(case, options=case.options.model_copy(update={"compiler_options": options}))
    if not shows:  # as if the kernel alone were right
        right = kernel_code(case, 60)
        monkeypatch.setattr(module, "kernel_code", lambda *_: right)
    repro = write_repro(wrong, tmp_path, name="relu", subject="output[0]", kind=Kind.LOGIC, kernel=True)
    assert repro.confirmed, repro.output
    names = {path.name for path in tmp_path.iterdir()}
    if not shows:
        assert (repro.kernel, names) == (None, {"repro_relu.py"})
        return
    assert names == {"repro_relu.py", "repro_relu_kernel.py"}
    assert repro.kernel == tmp_path / "repro_relu_kernel.py"
    text = repro.kernel.read_text()
    assert "torch.compile(" not in text
    assert "checked_backend" not in text
    done = subprocess.run([sys.executable, str(repro.kernel)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
