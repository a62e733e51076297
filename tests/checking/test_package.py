"""Packaged models against the modules that they were made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checked_backend as cb
from tests.support.raising import raising


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.linear(x)).sin()
        return {"hidden": hidden, "sum": hidden.sum() * scale}


@pytest.fixture
def net() -> Net:
    return Net().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


def test_an_exported_program_agrees_with_its_module(net: Net, x: torch.Tensor, tmp_path: Path) -> None:
    exported = torch.export.export(net, (x,))
    before = torch.random.get_rng_state()
    report = cb.check_package(exported, net, (x,))
    assert report.verdict is cb.Verdict.PASS
    assert report.coverage.checked["tensors"] == 3  # both results, and the argument afterwards
    torch.export.save(exported, tmp_path / "net.pt2")
    assert cb.check_package(tmp_path / "net.pt2", net, (x,)).verdict is cb.Verdict.PASS
    assert before.equal(torch.random.get_rng_state())


def test_a_package_that_computes_something_else_fails(net: Net, x: torch.Tensor) -> None:
    exported = torch.export.export(net, (x,))
    (sin,) = exported.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sin.target = torch.ops.aten.tanh.default
    exported.graph_module.recompile()
    report = cb.check_package(exported, net, (x,))
    assert {finding.subject for finding in report.findings} == {"output[hidden]", "output[sum]"}
    assert {finding.kind for finding in report.findings} == {cb.Kind.LOGIC}
    assert "other values" not in str(report)


def test_other_weights_other_structure_and_exceptions_are_found(net: Net, x: torch.Tensor) -> None:
    report = cb.check_package(torch.export.export(net, (x,)), Net().eval(), (x,))
    assert report.verdict is cb.Verdict.FAIL
    said = "The package has other values than the module in: linear.weight, linear.bias"
    assert said in " ".join(str(report).split())
    assert all(said in finding.message for finding in report.findings)

    assert cb.check_package(lambda x: tuple(net(x).values()), net, (x,)).verdict is cb.Verdict.FAIL
    assert cb.check_package(raising(ValueError("no")), net, (x,)).findings[0].kind is cb.Kind.CRASH


def test_what_a_package_hides_is_told(net: Net, x: torch.Tensor) -> None:
    net.train()
    report = cb.check_package(torch.export.export(net, (x,)), net, (x,))
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "norm.running_mean" in str(report)
    assert net.norm.num_batches_tracked == 0
    dropout = torch.nn.Dropout(0.5)
    report = cb.check_package(torch.export.export(dropout, (x,)), dropout, (x,))
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "draws random numbers" in str(report)


def test_a_file_that_is_no_package_is_an_error(net: Net, x: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "bad.pt2").write_text("nothing")
    with pytest.raises(cb.CheckedBackendError, match="no packaged model can be loaded"):
        cb.check_package(tmp_path / "bad.pt2", net, (x,))
    with pytest.raises(cb.CheckedBackendError, match="no packaged model"):
        cb.check_package(tmp_path / "absent.pt2", net, (x,))


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_aotinductor_compiled(net: Net, x: torch.Tensor, tmp_path: Path) -> None:
    exported = torch.export.export(net, (x,))
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "net.pt2"))
    assert cb.check_package(path, net, (x,)).verdict is cb.Verdict.PASS
    with torch.no_grad():
        net.linear.weight[0, 0] += 0.01
    report = cb.check_package(path, net, (x,))
    assert report.verdict is cb.Verdict.FAIL
    assert "AOTInductor" in str(report.findings[0].evidence)
    assert "or when this one had other weights" in " ".join(str(report).split())
