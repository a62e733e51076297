"""After a failure: the whole way from numcheck's finding to a script on disk."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.inductor import heeds_annotations
from checked_backend.diagnose import investigate as module
from checked_backend.diagnose.localize.locate import Location
from checked_backend.diagnose.reduce.problem import Size
from checked_backend.findings import Finding
from checked_backend.regions.failure import Failure
from checked_backend.scripts.values import Untranslatable
from tests.support import faults
from tests.support.locate_tools import inference
from tests.support.planted import Fault, in_half_precision, planted
from tests.support.raising import raising
from tests.support.region_tools import checked, gathered

RELU_BUG = {"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}
relu_is_wrong = partial(faults.wrong_operator, "aten.relu.default", how="aot")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        hidden = torch.relu(hidden)
        return self.last(hidden)


def report_of(
    folder: Path, run: Callable[[Callable[..., Any]], Any], compiler: Any = "inductor", **options: Any
) -> cb.Report:
    return gathered(lambda: run(checked(Net(), compiler, **{"localize": True, "report_dir": folder, **options})))


def wrong_relu(folder: Path) -> Finding:
    """What is found where the compiler has a wrong relu."""
    [finding] = report_of(folder, inference, compiler=relu_is_wrong()).findings
    return finding


@pytest.mark.parametrize(("patience", "limits"), [(None, (315.0, 45.0)), (20.0, (20.0, 5.0)), (900.0, (315.0, 45.0))])
def test_it_takes_less_time_than_others_wait(patience: float | None, limits: tuple[float, float]) -> None:
    failure: Any = type("_Failed", (), {"patience": patience})
    assert module._limits(failure) == limits


@pytest.mark.process
def test_a_wrong_operator_in_python(tmp_path: Path) -> None:
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    x = torch.randn(5, 6)
    torch.set_rng_state(before[0])
    report = report_of(tmp_path, lambda compiled: compiled(x).sum().backward(), compiler=relu_is_wrong())
    first = report.findings[0]
    assert (str(first.kind), first.subject) == ("logic", "output[0]")
    assert (first.stage, first.graph, first.node, first.op) == ("compiled", "forward", "relu", "aten.relu.default")
    assert first.source.endswith("in forward: hidden = torch.relu(hidden)")
    assert first.source.startswith("tests/diagnose/test_investigate.py:")
    assert first.module is None  # it is the compiled module's own line
    assert str(first.evidence["reduced"]).startswith("to 1 call on 1 input")
    assert "torch.compiler.disable(torch.relu)" in first.workaround  # the last resort: the compiler has no settings
    assert "test_investigate.py:" in first.workaround
    assert "workaround" not in first.evidence  # it was tried on the region
    assert first.workaround_confirmed
    assert "repro" in first.evidence  # the compiler is a local function: a fresh process cannot import it
    assert not first.repro_confirmed
    assert first.searched
    assert max({node.name: node for node in first.flow}.values(), key=lambda node: node.own or 0.0).name == first.node
    assert next(node.name for node in first.flow if node.error) == first.node  # what is before it is right
    assert all(not finding.flow for finding in report.findings[1:])  # told once
    assert first.kernel is None
    assert first.evidence["generated_code"] == "none: only Inductor shows the code that it generates"
    assert all(finding.distribution is not None for finding in report.findings)
    later = [finding for finding in report.findings if finding.subject.startswith("grad[")]
    assert later
    assert all("localized" in finding.evidence for finding in later)
    assert "aten.relu.default" in str(report)
    # nothing of what was tried is counted as part of the program, and nothing of its state has changed
    assert [region.checked_calls for region in report.coverage.regions] == [1]
    assert torch.get_num_threads() == before[1]
    assert torch.get_default_dtype() == before[2]


def test_localize_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checked_backend.backends.investigate", raising(AssertionError("investigated")))
    report = report_of(tmp_path, inference, compiler=faults.one_element(0), localize=False)
    [finding] = report.findings
    assert finding.node is None
    assert not report.coverage.notes


@pytest.mark.process
def test_where_no_process_can_be_forked_it_happens_here_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("checked_backend.diagnose.investigate", "checked_backend.diagnose.oracle"):
        monkeypatch.setattr(f"{place}.cannot_fork", lambda: "no")
    states = []
    for localize in (True, False):
        torch.manual_seed(0)
        torch._dynamo.reset()
        report = report_of(tmp_path, inference, compiler=relu_is_wrong(), localize=localize)
        states.append(torch.get_rng_state())
        assert [finding.op for finding in report.findings] == ["aten.relu.default" if localize else None]
        assert [region.checked_calls for region in report.coverage.regions] == [1]
    assert torch.equal(*states)
    assert torch.is_grad_enabled()


def test_a_failing_investigation_leaves_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checked_backend.backends.investigate", raising(RuntimeError("no way")))
    report = report_of(tmp_path, inference, compiler=faults.one_element(0))
    assert report.verdict is cb.Verdict.FAIL
    assert any("could not be localized: RuntimeError: no way" in note for note in report.coverage.notes)


@pytest.mark.process
def test_what_fails_after_the_operator_was_named_does_not_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "reduce", raising(RuntimeError("no way to reduce it")))
    finding = wrong_relu(tmp_path)
    assert finding.op == "aten.relu.default"
    assert finding.evidence["stopped"] == "RuntimeError: no way to reduce it"


@pytest.mark.process
def test_an_investigation_that_dies_leaves_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIME_LIMIT", 0.01)
    report = report_of(tmp_path, inference, compiler=faults.one_element(0))
    assert report.verdict is cb.Verdict.FAIL
    assert any("died: still running after 0.01 s" in note for note in report.coverage.notes)


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.inductor
def test_a_bug_of_inductor_gets_a_script_that_shows_it(tmp_path: Path) -> None:
    [finding] = report_of(tmp_path, inference, compiler_options=RELU_BUG).findings
    assert (finding.stage, finding.graph, finding.op) == ("compiled", "inference", "aten.relu.default")
    assert "repro" not in finding.evidence  # it was confirmed
    alone = Path(finding.evidence["one_kernel"])
    assert alone.parent == Path(finding.repro).parent
    assert alone.stem.endswith("_kernel")
    assert "torch.relu(" in alone.read_text(encoding="utf-8")
    assert "void  kernel(" in alone.read_text(encoding="utf-8")
    unfused = heeds_annotations()
    seen = f"the {'small program' if unfused else 'region'} is right with eager's kernel for aten.relu.default"
    assert finding.evidence["broken_by"] == f"lowering of aten.relu.default: {seen}"
    assert finding.workaround.endswith("True}):\n    hidden = torch.relu(hidden)") is unfused
    script = Path(finding.repro).read_text(encoding="utf-8")
    assert "torch.relu(" in script
    assert "checked_backend" not in script
    assert "relu" in finding.kernel.computes
    assert "void  kernel(" in finding.kernel.code
    assert finding.kernel.code in Path(finding.repro).with_suffix(".md").read_text(encoding="utf-8")
    shown = subprocess.run([sys.executable, finding.repro], capture_output=True, text=True)
    assert shown.returncode == 1, shown.stdout + shown.stderr
    Path(finding.repro).write_text(script.replace("'accuracy'", "None"), encoding="utf-8")
    gone = subprocess.run([sys.executable, finding.repro], capture_output=True, text=True)
    assert gone.returncode == 0, gone.stdout + gone.stderr


@pytest.mark.process
@pytest.mark.inductor
def test_where_no_small_program_is_written_the_kernel_is_the_repro(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "write_repro", raising(Untranslatable("no script has such a thing")))
    [finding] = report_of(tmp_path, inference, compiler_options=RELU_BUG).findings
    assert Path(finding.repro).stem.endswith("_kernel")
    assert not {"repro", "one_kernel"} & finding.evidence.keys()


def wrong_in_half_precision(folder: Path, function: Callable[[Tensor], Tensor], operator: str, where: Any) -> Finding:
    """What is found where a kernel of a program at 16 bits is wrong."""
    inputs = [torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in ((16, 32), (32, 24))]
    fault = Fault(operator, "pointwise", where, in_half_precision)
    with planted(fault), without_compile_caches(), cb.collect() as session:
        compiled = checked(lambda x, w: function(x @ w) @ w.t(), "inductor", localize=True, report_dir=folder)
        compiled(*inputs).sum().backward()
    [finding] = session.report.findings
    return finding


@pytest.mark.process
@pytest.mark.inductor
def test_a_kernel_that_is_wrong_in_its_own_precision_alone_is_shown_without_a_search(tmp_path: Path) -> None:
    finding = wrong_in_half_precision(tmp_path, torch.sin, "cos", "lowering")  # cos: the gradient of sin
    assert (finding.detail, finding.op, finding.stage) == ("logic.this_dtype", "torch.sin", "compiled")
    assert Path(finding.repro).stem.endswith("_kernel")
    assert "torch.cos(" in Path(finding.repro).read_text(encoding="utf-8")
    assert "cos" in finding.kernel.computes
    assert "localization" not in finding.evidence


@pytest.mark.process
@pytest.mark.inductor
def test_a_right_kernel_of_a_wrong_decomposition_is_not_shown(tmp_path: Path) -> None:
    finding = wrong_in_half_precision(tmp_path, torch.tanh, "tanh_backward", "decomposition")
    assert (finding.detail, finding.op) == ("precision.operator", "torch.tanh")
    assert (finding.stage, finding.repro, finding.kernel) == (None, None, None)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("bug", [RELU_BUG, {}])
def test_a_bug_of_inductor_inside_of_a_checkpoint_that_draws_gets_its_line_and_a_script(
    tmp_path: Path, bug: dict[str, str]
) -> None:
    class Block(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :3] + checkpoint(self.drawn, x, use_reentrant=False)

        def drawn(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.1))

    with cb.collect() as session:
        compiled = checked(Block(), "inductor", localize=True, report_dir=tmp_path, compiler_options=bug)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                result = compiled(torch.randn(5, 6))
            result.float().sum().backward()
    if not bug:
        assert session.report.verdict is cb.Verdict.PASS
        return
    finding = session.report.findings[0]
    assert (finding.stage, finding.op, finding.repro_confirmed) == ("compiled", "aten.relu.default", True)
    assert "hidden = torch.relu(hidden)" in finding.source
    assert finding.repro is not None
    assert "stopped" not in finding.evidence


@pytest.mark.process
def test_ctrl_c_before_there_is_a_cut_keeps_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_args: Any, known: Callable[[Location], None], **_kwargs: Any) -> Location:
        known(Location("compiled"))
        known(Location("compiled", "forward", op="aten.relu.default", message="wrong"))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "locate", stopped)
    finding = wrong_relu(tmp_path)
    assert (finding.stage, finding.graph) == ("compiled", "forward")
    assert finding.evidence["stopped"] == "by the user"
    assert finding.evidence["at_operator"] == "wrong"


@pytest.mark.process
def test_ctrl_c_while_reducing_keeps_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "write_repro", raising(KeyboardInterrupt))
    finding = wrong_relu(tmp_path)
    assert finding.op == "aten.relu.default"
    assert str(finding.evidence["reduced"]).startswith("to 1 call on")
    assert finding.evidence["stopped"] == "by the user"


@pytest.mark.slow
@pytest.mark.ci_sample
def test_ctrl_c_that_was_swallowed_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it hits a destructor: the next step raises it again. No settings are tried after it."""
    original, shown = Size.__str__, count()

    def presses(size: Size) -> str:
        if next(shown) == 2:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return original(size)

    monkeypatch.setattr(Size, "__str__", presses)
    finding = wrong_relu(tmp_path)
    assert finding.op == "aten.relu.default"
    assert finding.repro is not None
    assert str(finding.evidence["reduced"]).endswith(", interrupted")
    assert finding.evidence["settings"] == "not tried: stopped by the user"
    assert finding.evidence["stopped"] == "by the user"


@pytest.mark.process
def test_what_is_known_outlives_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_args: Any, **_kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(module, "reduce", dies)
    finding = wrong_relu(tmp_path)
    assert finding.op == "aten.relu.default"
    assert "killed by SIGKILL" in finding.evidence["stopped"]


@pytest.mark.process
@pytest.mark.parametrize("hangs", [True, False])
def test_a_search_ends_at_its_deadline_with_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    def narrowed(*_args: Any, known: Callable[[Location], None], **_kwargs: Any) -> Location:
        known(Location("compiled", "forward", notes=("the forward graph is wrong up to relu",)))
        time.sleep(600 if hangs else 0)
        return Location("compiled", "forward", notes=("nothing was found",))

    monkeypatch.setattr(module, "locate", narrowed)
    monkeypatch.setattr(module, "TIME_LIMIT", 8.0)
    begun = time.monotonic()
    finding = wrong_relu(tmp_path)
    assert (finding.stage, finding.graph) == ("compiled", "forward")
    if hangs:
        assert finding.evidence["localization"] == "the forward graph is wrong up to relu"
        assert finding.evidence["stopped"] == "at its deadline, after 7 s"
        assert time.monotonic() - begun >= 7
    else:
        assert finding.evidence["localization"] == "nothing was found"
        assert "stopped" not in finding.evidence


@pytest.mark.process
@pytest.mark.parametrize("hangs", [True, False])
def test_a_part_that_took_too_long_is_not_called_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    def asked(_failure: Failure, _findings: Sequence[Finding], oracle: Any, *_args: Any, **_kwargs: Any) -> Location:
        oracle(None)
        return Location("compiled", notes=("nothing was found",))

    hung = Finding(cb.Kind.CRASH, "candidate", "the process died", "crash.hang")
    monkeypatch.setattr(module, "locate", asked)
    monkeypatch.setattr(module, "verdict_oracle", lambda _case, _limit: (hung,) if hangs else ())
    finding = wrong_relu(tmp_path)
    note = "; 1 of the parts that were tried took longer than 60 s and could not be judged"
    assert finding.evidence["localization"] == "nothing was found" + (note if hangs else "")


@pytest.mark.process
def test_an_operator_of_which_no_part_could_be_cut_out_has_a_workaround_a_flow_and_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    located = module.locate
    monkeypatch.setattr(module, "locate", lambda *args, **kwargs: replace(located(*args, **kwargs), cut=None))
    finding = wrong_relu(tmp_path)
    assert (finding.op, finding.repro) == ("aten.relu.default", None)
    assert finding.evidence["repro"] == "none: no part of the region was found to be wrong by itself"
    assert finding.evidence["generated_code"] == "none: only Inductor shows the code that it generates"
    assert "torch.compiler.disable(torch.relu)" in finding.workaround
    assert any(node.own for node in finding.flow)


@pytest.mark.process
def test_a_failure_of_which_nothing_could_be_found_says_why_there_is_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "locate", lambda *_args, **_kwargs: Location("compiled", notes=("nothing was found",)))
    finding = wrong_relu(tmp_path)
    assert (finding.op, finding.workaround, finding.stage) == (None, None, "compiled")
    assert finding.evidence["localization"] == "nothing was found"
    assert str(finding.evidence["generated_code"]).startswith("none: ")


@pytest.mark.process
def test_it_is_silent_where_that_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "reduce", lambda *_args, **_more: 1 / 0)  # what comes after it takes long
    for progress in (True, False):
        torch._dynamo.reset()
        caplog.clear()
        report_of(tmp_path, inference, compiler=relu_is_wrong(), progress=progress)
        told = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert any("looking for the operator" in line for line in told) is progress
        assert ("numcheck: " in capfd.readouterr().err) is progress


@pytest.mark.process
def test_what_no_setting_and_no_line_mends_has_no_workaround(tmp_path: Path) -> None:
    # the compiler spoils what it is given, wherever the region is cut
    [finding] = report_of(tmp_path, inference, compiler=faults.wrong_operator("aten.addmm.default", how="aot")).findings
    assert (finding.op, finding.workaround) == ("aten.addmm.default", None)
    assert "that line outside of the compiler too" in finding.evidence["workaround"]


@pytest.mark.process
def test_an_operator_that_was_found_in_another_region_is_tried_first(tmp_path: Path) -> None:
    def run(function: Callable[[Tensor], Tensor], wrong: str) -> None:
        compiler = faults.wrong_operator(f"aten.{wrong}.default", how="aot")
        checked(function, compiler, localize=True, report_dir=tmp_path)(torch.randn(4, 4))

    with cb.collect() as session:
        run(lambda x: (x + 1).sin().sum(), "sin")
        run(lambda x: x.exp().sin().tanh(), "sin")
        run(lambda x: x.sin() + x.cos(), "cos")  # here the known operator is right
    first, again, other = session.report.findings
    assert [finding.op for finding in (first, again, other)] == [f"aten.{op}.default" for op in ("sin", "sin", "cos")]
    assert "was found in another region" in str(again.evidence["localization"])
    assert again.repro is None
    assert all("another region" not in str(one.evidence.get("localization")) for one in (first, other))
    assert "x.exp().sin()" in again.source
