"""What is wrong already in Dynamo's graph: the operator, the user's line, and a script of the user's own source."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checked_backend as cb
from checked_backend.diagnose.repro.repro import write_source_repro
from checked_backend.report.write import read_reports
from checked_backend.scripts.values import Untranslatable
from tests.support.warm_process import WarmPython

SCALE = 2


def grown(x: Tensor) -> Tensor:
    return torch.cos(x) + SCALE


def differs_in_dynamo(x: Tensor) -> Tensor:
    y = torch.sin(grown(x))
    return torch.mul(y, 3 if torch.compiler.is_compiling() else 2)


@pytest.fixture
def doubled() -> Iterator[Callable[[Tensor], Tensor]]:
    """An operator whose fake kernel forgets that its result is twice as long."""
    with torch.library._scoped_library("checked_backend_tests", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: torch.cat([x, x]), "CPU")
        library.impl("doubled", torch.empty_like, "Meta")
        yield torch.ops.checked_backend_tests.doubled


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    return tmp_path / "reports"


@pytest.mark.process
@pytest.mark.usefixtures("warm_repros")
def test_a_call_that_dynamo_makes_otherwise(reports: Path, warm_python: WarmPython) -> None:
    x, before = torch.arange(4.0), torch.get_rng_state()
    report = cb.check(differs_in_dynamo, (x,), compiler="eager", gradients=False, localize=True)
    assert torch.equal(torch.get_rng_state(), before)
    [finding] = report.findings
    assert (finding.stage, finding.op) == ("eager", "aten.mul.Tensor")
    assert "test_dynamo_level.py:" in str(finding.source)
    assert "in differs_in_dynamo: return torch.mul(y, 3 if" in str(finding.source)
    assert "eager calls aten.mul.Tensor(float32[4], 2)" in finding.evidence["at_operator"]
    assert "Dynamo's graph calls aten.mul.Tensor(float32[4], 3)" in finding.evidence["at_operator"]
    assert "differs_in_dynamo = torch.compiler.disable(differs_in_dynamo)" in str(finding.workaround)
    assert "repro" not in finding.evidence  # it was confirmed
    assert Path(str(finding.repro)).parent == reports
    text = Path(str(finding.repro)).read_text(encoding="utf-8")
    assert "SCALE = 2" in text
    assert "def grown(" in text
    assert "checked_backend" not in text
    done = warm_python.run(str(finding.repro))
    assert done.returncode == 1, done.stdout + done.stderr
    Path(str(finding.repro)).write_text(text.replace("3 if", "2 if"), encoding="utf-8")
    done = warm_python.run(str(finding.repro))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.usefixtures("warm_repros")
def test_a_fake_kernel_that_is_wrong(doubled: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        y = doubled(torch.sin(x))
        return torch.cos(y) * y.shape[0]

    report = cb.check(function, (torch.randn(4),), compiler="eager", gradients=False, localize=True)
    finding = next(found for found in report.findings if found.kind.fails)
    assert (finding.stage, finding.op) == ("eager", "checked_backend_tests.doubled.default")
    assert finding.evidence["at_operator"] == "its fake kernel makes float32[4] where the real one makes float32[8]"
    assert "y = doubled(torch.sin(x))" in str(finding.source)
    assert "does not show it in a fresh process" in finding.evidence["repro"]  # which has no such operator


KILLED = """
import importlib, os, signal, sys
import torch
import checked_backend as cb
check = importlib.import_module("checked_backend.checking.check")
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(check, sys.argv[1], die)
def differs(x):
    return torch.mul(torch.sin(x), 3 if torch.compiler.is_compiling() else 2)
if __name__ == "__main__":
    cb.check(differs, (torch.arange(4.0),), compiler="eager", gradients=False, localize=True)
"""


@pytest.mark.process
@pytest.mark.parametrize("killed_in", ["with_levels", "with_dynamo_cause"])
def test_a_kill_before_the_operator_is_known_loses_no_finding(
    killed_in: str, reports: Path, tmp_path: Path, warm_python: WarmPython
) -> None:
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    assert warm_python.run(program, killed_in).returncode == -signal.SIGKILL
    [report] = read_reports(reports).reports
    assert report.verdict is cb.Verdict.FAIL
    [finding] = report.findings
    assert (finding.kind, finding.subject) == (cb.Kind.LOGIC, "output[0]")
    assert finding.evidence["localized"].startswith("not yet")


@pytest.mark.process
@pytest.mark.usefixtures("warm_repros")
def test_the_report_of_what_dynamo_did_is_completed_once_the_operator_is_known(reports: Path) -> None:
    report = cb.check(differs_in_dynamo, (torch.arange(4.0),), compiler="eager", gradients=False, localize=True)
    [written] = read_reports(reports).reports
    assert report.path == written.path
    assert written.findings[0].op == "aten.mul.Tensor"
    assert "localized" not in written.findings[0].evidence
    cb.check(grown, (torch.arange(4.0),), compiler="eager", gradients=False, localize=True)
    assert len(read_reports(reports).reports) == 1  # what passes leaves no file


def sized(x: Tensor) -> Tensor:
    y = x.view(2, 4)
    y.transpose_(0, 1)
    return y.contiguous() * y.shape[0]


def refused(x: Tensor) -> Tensor:
    y = x.view(2, 4)
    y.transpose_(0, 1)
    return y.contiguous() + torch.ones(y.shape[0], 1)


@pytest.mark.process
@pytest.mark.usefixtures("warm_repros")
@pytest.mark.parametrize(("function", "words"), [(sized, "calls aten.mul.Tensor"), (refused, "cannot trace aten.add")])
def test_a_shape_changed_in_place_that_dynamo_forgets(function: Callable[[Tensor], Tensor], words: str) -> None:
    stale = torch.compile(function, backend="eager")
    try:
        if stale(torch.arange(8.0)).sum() == function(torch.arange(8.0)).sum():
            pytest.skip("this torch knows the shape")
    except RuntimeError:
        pass  # wrong too
    [finding] = cb.check(function, (torch.arange(8.0),), compiler="eager", gradients=False, localize=True).findings
    assert (finding.stage, finding.op) == ("eager", "aten.transpose_.default")
    assert "y.transpose_(0, 1)" in str(finding.source)
    assert words in finding.evidence["at_operator"]


def test_without_localize_nothing_is_looked_for(reports: Path) -> None:
    [finding] = cb.check(differs_in_dynamo, (torch.randn(4),), compiler="eager", gradients=False).findings
    assert (finding.op, finding.repro) == (None, None)
    assert not list(reports.glob("repro*"))


def test_what_a_script_cannot_make_is_said(tmp_path: Path) -> None:
    def script(function: Any, *args: Any, **kwargs: Any) -> None:
        write_source_repro(function, args, kwargs, tmp_path, name="x", title="wrong", source=None)

    net = nn.Linear(2, 2)

    def calls_it(x: Tensor) -> Any:
        return net(x)

    with pytest.raises(Untranslatable, match="Linear, and no plain function"):
        script(net, torch.ones(2))
    with pytest.raises(Untranslatable, match="refers to net, a Linear"):
        script(calls_it, torch.ones(2))
    with pytest.raises(Untranslatable, match="keyword arguments"):
        script(grown, x=torch.ones(2))
    with pytest.raises(Untranslatable, match="input x0 is a"):
        script(grown, object())
    assert not list(tmp_path.iterdir())
