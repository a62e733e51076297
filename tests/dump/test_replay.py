"""``checked-backend replay`` and ``show``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from checked_backend.checking.replay import replay, replay_of_death
from checked_backend.process.job import JobEnd
from checked_backend.regions.failure import Failure
from tests.support import faults
from tests.support.cli_tools import Run
from tests.support.dump_tools import Squared, dumping, dumps, python


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Path]:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2))
    dumping(net, tmp_path / "dump", dynamic=True)(torch.randn(5, 3)).sum().backward()
    return {name.split("_")[1]: path for name, path in dumps(tmp_path / "dump").items()}


def break_relu(gm: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
    for node in gm.graph.nodes:
        if "relu" in str(node.target):
            node.target = torch.ops.aten.gelu.default
            node.args = node.args[:1]
            node.kwargs = {}
    gm.recompile()
    return gm.forward


@pytest.mark.process
def test_every_kind_replays_and_a_clean_compiler_passes(run: Run, found: dict[str, Path]) -> None:
    assert set(found) == {"dynamo", "joint", "forward", "backward"}
    for kind, path in found.items():
        report = replay(cb.load_dump(path), compiler="aot_eager")
        assert report.verdict is cb.Verdict.PASS
        assert f"replay Sequential_{kind}" in str(report)
    code, out, err = run("replay", found["dynamo"], "--compiler", "eager", "--json")
    said = [line for line in err.splitlines() if "wrote the graph" not in line]  # when it was dumped
    assert (code, said) == (0, []), out
    data = json.loads(out)
    assert data["verdict"] == "pass"
    assert data["coverage"]["checked"]["gradients"] == 6


@pytest.mark.process
def test_a_wrong_compiler_fails(run: Run, found: dict[str, Path]) -> None:
    for kind in ("dynamo", "forward"):
        assert replay(cb.load_dump(found[kind]), compiler=break_relu).verdict is cb.Verdict.FAIL
    code, out, _ = run("replay", found["dynamo"], "--compiler", f"{__file__}:break_relu")
    assert code == 1
    assert out.startswith("FAIL")


wrong_tanh = faults.wrong_operator("aten.tanh.default", how="aot")


@pytest.mark.inductor
def test_inductor_replays_a_training_graph(found: dict[str, Path]) -> None:
    assert replay(cb.load_dump(found["dynamo"])).verdict is cb.Verdict.PASS


@pytest.mark.process
def test_misuse_is_3(run: Run, found: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run("replay", found["dynamo"], "--compiler", "nonsense")
    assert code == 3
    assert "'nonsense'" in err
    code, _, err = run("show", tmp_path)
    assert code == 3
    assert "graph.json: missing" in err
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    for module, why in (("no_such_module_here", "ModuleNotFoundError"), ("exits", "SystemExit: 0")):
        code, _, err = run("replay", found["forward"], "--import", module)
        assert code == 3
        assert f"--import {module}: {why}" in err
        assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_what_dynamo_cannot_trace_again_is_checked_nevertheless(tmp_path: Path) -> None:
    def own(x: torch.Tensor) -> torch.Tensor:  # Dynamo refuses its own operator for Squared
        return Squared.apply(x.sin())  # type: ignore[no-any-return]

    def checkpointed(x: torch.Tensor) -> torch.Tensor:  # and AOT autograd the one that keeps random states
        inner = nn.Sequential(nn.ReLU(), nn.Dropout(0.3))
        return torch.utils.checkpoint.checkpoint(inner, x * 2, use_reentrant=False)  # type: ignore[no-any-return]

    for program, kind, skipped in ((own, "dynamo", "dynamic shapes"), (checkpointed, "forward", "some operators")):
        dumping(program, tmp_path)(torch.randn(4, requires_grad=True)).sum().backward()
        report = replay(cb.load_dump(dumps(tmp_path)[f"{program.__name__}_{kind}_0"]), compiler="aot_eager")
        assert report.verdict is cb.Verdict.PASS
        assert report.coverage.checked["outputs"] > 0
        assert skipped in [skip.subject for skip in report.coverage.skipped]


def test_show(run: Run, found: dict[str, Path]) -> None:
    code, out, _ = run("show", found["forward"])
    assert code == 0
    for text in (
        "aten.relu.default(",
        "saves for the backward:",
        "bytes",
        "args[0]",
        "with values",
        "requires grad",
        "backward: Sequential_backward_",
    ):
        assert text in out
    code, out, _ = run("show", found["backward"], "--json")
    assert code == 0
    data = json.loads(out)
    assert data["kind"] == "backward"
    assert sum(entry["bytes"] or 0 for entry in data["saved"]) > 0


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_custom_op_replays_in_a_fresh_process_that_imports_it(tmp_path: Path) -> None:
    (tmp_path / "my_ops.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('my_ops::double', mutates_args=())\n"
        "def double(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x * 2\n"
        "@double.register_fake\n"
        "def _(x):\n"
        "    return torch.empty_like(x)\n"
    )
    program = (
        "import torch, my_ops\n"
        "torch.compile(lambda x: my_ops.double(x) + 1, backend='nop', options={'dump': 'd'})(torch.ones(3))\n"
    )
    assert python("-c", program, folder=tmp_path).returncode == 0
    for path in dumps(tmp_path / "d").values():
        words = ("-m", "checked_backend", "replay", path, "--compiler", "eager")
        done = python(*words, folder=tmp_path)
        assert done.returncode == 3
        assert "needs: my_ops" in done.stderr
        done = python(*words, "--import", "my_ops", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        done = python("repro.py", folder=path, module_path=tmp_path)
        assert done.returncode == 0, done.stderr


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * 2


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    dumping(Net(), tmp_path / "dump")(torch.randn(5, 3))
    return dumps(tmp_path / "dump")["Net_forward_0"]


@pytest.mark.process
def test_localize_names_the_operator_and_the_users_line(tmp_path: Path, run: Run, dumped: Path) -> None:
    words = ("--compiler", f"{__file__}:wrong_tanh", "--out", tmp_path / "out", "--json")
    code, out, _ = run("localize", dumped, *words)
    assert code == 1
    [first, *_] = json.loads(out)["findings"]
    assert (first["op"], first["stage"]) == ("aten.tanh.default", "compiled")
    assert "in forward: return torch.tanh(self.linear(x)) * 2" in first["source"]


@pytest.mark.process
def test_localize_has_nothing_to_do_with_a_right_compiler(tmp_path: Path, run: Run, dumped: Path) -> None:
    code, out, _ = run("localize", dumped, "--compiler", "aot_eager", "--out", tmp_path / "out")
    assert code == 0
    assert out.startswith("PASS")


def test_a_backward_pass_that_raises_is_a_finding(found: dict[str, Path]) -> None:
    report = replay(cb.load_dump(found["dynamo"]), compiler=faults.crash_in_backward())
    assert "crash" in [str(finding.kind) for finding in report.findings]


def test_the_compiler_that_killed_a_process_is_not_tried_in_this_one(found: dict[str, Path]) -> None:
    def dies(_gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        os._exit(1)

    seen: list[Any] = []

    def note(failure: Failure, findings: Sequence[cb.Finding]) -> Sequence[cb.Finding]:
        seen.append(failure)
        return findings

    report = replay_of_death(cb.load_dump(found["dynamo"]), JobEnd("", "", 1), compiler=dies, investigator=note)
    [finding] = [finding for finding in report.findings if str(finding.kind) == "crash"]
    assert (finding.detail, finding.actual) == ("crash.exit", "exited with status 1")
    [failure] = seen
    assert failure.options.compiler is dies
