"""The code of a kernel by itself: it computes what it computed in the program, and its script shows what is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import checked_backend as cb
from checked_backend._torch.caches import without_compile_caches
from checked_backend.diagnose import kernel as module
from checked_backend.diagnose.kernel import kernel_code
from checked_backend.diagnose.localize.probe import faulty_operator
from checked_backend.diagnose.repro import write_kernel_repro
from checked_backend.options import CheckOptions
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.operator_check.in_place import CheckedModule, KernelCheck
from tests.support.planted import Fault, in_half_precision, planted

pytestmark = [pytest.mark.inductor]


def attention(x: Tensor, w: Tensor) -> Tensor:
    y = torch.layer_norm(x @ w, (24,)).tanh()
    return torch.softmax(y @ w.t(), -1) * y.sum(1, keepdim=True)


def variance(x: Tensor, w: Tensor) -> Tensor:
    """Kernels hand on sums that are no node's values."""
    y = x @ w
    return (y - y.float().mean(1, keepdim=True)) / (1 + y.float().var(0))


def joined(x: Tensor, w: Tensor) -> Tensor:
    """Several kernels write to parts of one buffer."""
    return torch.cat([x @ w, (x @ w.exp()).sin(), w[:16].cos()]) @ w.t()


def gathered(x: Tensor, w: Tensor) -> Tensor:
    """The kernel of the gradient fills a buffer, and adds to it. The places are a constant of the graph."""
    return torch.tanh(x @ w)[torch.tensor([1, 3, 1, 0] * 4)].exp()


STATE = torch.ones(16, 24, dtype=torch.bfloat16)


def kept(x: Tensor, w: Tensor) -> Tensor:
    """Kernels read an input that was written to before."""
    STATE.index_put_((torch.tensor([1, 3]),), (x @ w)[:2].detach())
    return (STATE @ w.t()).sin() * STATE.sum()


@torch.library.custom_op("test_kernel_code::double", mutates_args=("y",))
def double(x: Tensor, y: Tensor) -> None:
    y.copy_(x * 2)


def called(x: Tensor, w: Tensor) -> Tensor:
    """An operator of the user's own writes to a tensor that a kernel reads."""
    y = torch.zeros_like(x)
    double(x.detach(), y)
    return (y * x).sum(1)


def sine(x: Tensor, w: Tensor) -> Tensor:
    """Only its gradient calls ``cos``."""
    return torch.sin(x @ w) @ w.t()


def modules_of(function: Callable[..., Any], *, dynamic: bool | None = None) -> tuple[list[CheckedModule], cb.Report]:
    """What the kernels of one training step showed."""
    checked: list[CheckedModule] = []
    run = KernelCheck.run

    def noting(kernels: KernelCheck, *args: Any, **kwargs: Any) -> Any:
        found = run(kernels, *args, **kwargs)
        checked.extend(found)
        return found

    inputs = [torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in ((16, 32), (32, 24))]
    options = {"on_divergence": "record", "localize": False}
    torch._dynamo.reset()
    with mock.patch.object(KernelCheck, "run", noting), without_compile_caches(), cb.collect() as session:
        torch.compile(function, backend="numcheck", dynamic=dynamic, options=options)(*inputs).sum().backward()
    return checked, session.report


def call(lines: Sequence[str], inputs: Sequence[Any]) -> Tensor:
    names: dict[str, Any] = {"__name__": "__script__"}
    exec("import torch\n" + "\n".join(lines), names)
    with torch.no_grad():
        result: Tensor = names["compiled"](*copy_values(inputs))
    return result


@pytest.mark.parametrize(
    ("function", "dynamic"), [(attention, True), (variance, None), (joined, None), (gathered, True)]
)
def test_each_kernel_computes_alone_what_it_computed_in_the_program(
    function: Callable[..., Any], dynamic: bool | None
) -> None:
    checked, report = modules_of(function, dynamic=dynamic)
    assert report.verdict is cb.Verdict.PASS, report.to_text()
    assert {one.module.kind for one in checked} == {"forward", "backward"}
    for one in checked:
        for node in one.module.graph.graph.nodes:
            if node.name not in one.values:
                continue
            code = kernel_code(one, node, CheckOptions())
            assert code is not None, node
            found = call(code.lines, code.case.inputs)
            assert torch.equal(found, one.values[node.name]), "\n".join(code.lines)
            [eager] = code.case.graph(*copy_values(code.case.inputs))
            assert (eager.float() - found.float()).norm() <= 0.02 * eager.float().norm()
            text = "\n".join(code.lines)
            assert "benchmark" not in text  # nor anything else that it does not need
            assert f"return {next(name for name, held in one.module.held.items() if node in held)}" in text


def test_what_no_kernel_wrote_or_what_reads_too_much_has_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    [one, *_], _ = modules_of(attention)
    nodes = [*one.module.graph.graph.nodes]
    assert kernel_code(one, nodes[0], CheckOptions()) is None  # no kernel wrote an input
    node = next(node for node in nodes if node.name in one.values)
    assert kernel_code(one, node, CheckOptions()) is not None
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    assert kernel_code(one, node, CheckOptions()) is None


@pytest.mark.parametrize(("function", "operator"), [(kept, "aten.sum.default"), (called, "aten.sum.dim_IntList")])
def test_what_reads_what_others_wrote_in_place_has_no_code(function: Callable[..., Any], operator: str) -> None:
    [one, *_], _ = modules_of(function)
    node = next(node for node in one.module.graph.graph.nodes if str(node.target) == operator)
    assert node.name in one.values
    assert kernel_code(one, node, CheckOptions()) is None


@pytest.mark.process
@pytest.mark.parametrize(("operator", "kind"), [("sin", "forward"), ("cos", "backward")])
def test_the_script_of_a_wrong_kernel_calls_no_compiler_and_is_kept_only_if_it_shows_it(
    tmp_path: Path, operator: str, kind: str
) -> None:
    with planted(Fault(operator, "pointwise", "lowering", in_half_precision)):
        checked, report = modules_of(sine)
    assert report.verdict is cb.Verdict.FAIL
    one, wrong = next((one, wrong) for one in checked for wrong in one.checks.wrong)
    assert one.module.kind == kind
    code = kernel_code(one, wrong.node, CheckOptions())
    assert code is not None
    finding = faulty_operator(wrong).finding
    repro = write_kernel_repro(code, finding, tmp_path, name=operator)
    assert repro is not None
    text = repro.path.read_text()
    assert "torch.compile(" not in text
    assert "checked_backend" not in text
    assert f"torch.{operator}(" in text
    assert "void  kernel(" in text
    done = subprocess.run([sys.executable, str(repro.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    kept = {*tmp_path.iterdir()}
    right, _ = modules_of(sine)
    clean = next(other for other in right if other.module.kind == kind)
    node = next(node for node in clean.module.graph.graph.nodes if node.name == wrong.node.name)
    code = kernel_code(clean, node, CheckOptions())
    assert code is not None
    assert write_kernel_repro(code, finding, tmp_path, name=operator) is None
    assert {*tmp_path.iterdir()} == kept
