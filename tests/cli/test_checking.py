"""The verb ``check``, and ``localize`` of a graph that kills its process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from checked_backend import Report, Verdict
from checked_backend.checking import sizes
from tests.support.cli_tools import Run
from tests.support.dump_tools import dumping
from tests.support.started_programs import finished

REGISTERS = """
import os
import time

import torch


def changed(gm):
    for node in gm.graph.find_nodes(op="call_method", target="sin"):
        node.target = "cos"
    gm.recompile()
    return gm


def wrong(gm, example_inputs):
    return changed(gm).forward


def configured(gm, example_inputs, options=None):
    return (gm if options == {"level": 3, "kind": "right"} else changed(gm)).forward


def baked(gm, example_inputs):
    known = []

    def run(*args):
        known[:] = known or gm.forward(*args)
        return tuple(known)

    return run


def contiguous(gm, example_inputs):
    def run(*args):
        other = any(isinstance(arg, torch.Tensor) and not arg.is_contiguous() for arg in args)
        return tuple(out + other for out in gm.forward(*args))

    return run


def kills(gm, example_inputs):
    return lambda *args: os.kill(os.getpid(), 9)


def hangs(gm, example_inputs):
    return lambda *args: time.sleep(600)


for backend in (wrong, configured, baked, contiguous, kills, hangs):
    name = f"{backend.__name__}_of_the_cli_test"
    if name not in torch.compiler.list_backends(exclude_tags=()):  # there is no way to take one back
        torch._dynamo.register_backend(backend, name=name)
"""
CHECKED = """
import registers_of_the_cli_test
import torch

def make():
    return lambda x, scale: x.sin() * scale, (torch.arange(3.0),), {"scale": 2}

def layer():
    return torch.nn.Linear(4, 2), (torch.eye(3, 4),)

def leaves():
    raise SystemExit(0)

def talks():
    print("about itself")
    return make()

def ends():
    return lambda x: leaves(), (torch.arange(3.0),)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    modules, path = set(sys.modules), list(sys.path)
    file = tmp_path / "program_of_the_cli_test.py"
    file.write_text(CHECKED)
    (tmp_path / "registers_of_the_cli_test.py").write_text(REGISTERS)
    yield file
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.endswith("_of_the_cli_test"):
            del sys.modules[name]


@pytest.fixture
def checked(run: Run, program: Path) -> Callable[..., tuple[int, Report]]:
    """``check`` of a factory with some options: the exit code and the report."""

    def check(factory: str, *options: str) -> tuple[int, Report]:
        code, out, err = run("check", f"{program}:{factory}", *options, "--json")
        assert [line for line in err.splitlines() if not line.startswith("numcheck:")] == []  # a slow check is told
        return code, Report.from_json(out)

    return check


def test_check_writes_what_a_pass_is_worth_and_a_page(run: Run, program: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ("check", f"{program}:make", "--compiler", "eager", "--no-gradients", "--static")
    code, out, _ = run(*words, "--certificate", "--html", str(page))
    assert (code, out[:25]) == (0, "## checked_backend: PASS ")
    assert "<h1>" in page.read_text()


def test_check_has_colours_at_a_terminal(run: Run, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    _, out, _ = run("check", f"{program}:make", "--compiler", "eager", "--no-gradients", "--static")
    assert out.startswith("\x1b[1;32mPASS\x1b[0m: ")


def test_a_program_that_exits_is_no_pass(run: Run, program: Path) -> None:
    code, out, err = run("check", f"{program}:leaves", "--compiler", "eager")
    assert (code, out) == (3, "")
    assert "raised:" in err
    assert "SystemExit: 0" in err
    code, out, err = run("check", f"{program}:ends", "--compiler", "eager")
    assert (code, out) == (3, "")
    assert err == "checked-backend: the program called sys.exit(0); it was not checked\n"


def test_json_is_all_that_is_printed(run: Run, program: Path) -> None:
    code, out, err = run("check", f"{program}:talks", "--compiler", "eager", "--json")
    assert (code, Report.from_json(out).verdict, err) == (0, Verdict.PASS, "about itself\n")


Checked = Callable[..., tuple[int, Report]]


def test_check_hands_options_to_the_compiler(checked: Checked) -> None:
    configured = ("--compiler", "configured_of_the_cli_test")
    options = ("--compiler-option", "level=3", "--compiler-option", "kind=right")
    assert checked("make", *configured, *options)[0] == 0
    assert checked("make", *configured, *options[:2])[0] == 1


def test_check_of_several_steps(checked: Checked) -> None:
    three = ("--iterations", "3", "--optimizer", "SGD:lr=0.1,momentum=0.9")
    code, report = checked("layer", "--compiler", "eager", *three)
    assert (code, report.coverage.checked["program runs"]) == (0, 3)
    _, without = checked("layer", "--compiler", "eager", "--iterations", "3")
    assert report.coverage.checked["tensors"] == without.coverage.checked["tensors"] + 2 * 3  # momenta


@pytest.mark.parametrize(
    ("option", "fault", "detail", "call"),
    [
        ("--vary-data", "baked", "logic.baked", "on fresh data (1)"),
        ("--vary-layout", "contiguous", "logic", "with input transposed"),
        ("--dynamic", "baked", "structure.shape", "with input 4x4"),
    ],
)
def test_check_with_variants(
    checked: Checked, option: str, fault: str, detail: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "TILE_SIZES", (17,))
    code, report = checked("layer", "--compiler", "eager", option)
    assert code == 0
    assert report.coverage.checked["program runs"] > 2
    code, report = checked("layer", "--compiler", f"{fault}_of_the_cli_test", option, "--no-gradients")
    finding = report.findings[0]
    assert (code, finding.detail) == (1, detail)
    # what is baked in is the same memory each time
    assert {other.detail for other in report.findings[1:]} <= {"alias.overwritten"}
    assert call in finding.evidence["failing_calls"]


def test_check_compares_a_program_with_itself(checked: Checked, run: Run, program: Path) -> None:
    code, report = checked("layer", "--compiler", "eager", "--no-gradients", "--invariant", "runs")
    assert (code, report.coverage.notes[0]) == (0, "accurate: yes; the same in each run: yes (3 runs)")
    code, _, err = run("check", f"{program}:layer", "--compiler", "eager", "--invariant", "rows")
    assert (code, "invariant got 'rows'; valid: batch, runs, choices" in err) == (3, True)


@pytest.mark.forks
def test_check_in_isolation(checked: Checked) -> None:
    assert checked("make", "--compiler", "eager", "--isolate")[0] == 0
    code, report = checked("make", "--compiler", "kills_of_the_cli_test", "--isolate")
    assert (code, [finding.detail for finding in report.findings]) == (1, ["crash.memory"])


@pytest.mark.forks
@pytest.mark.slow
def test_check_of_a_program_that_hangs(checked: Checked) -> None:
    code, report = checked("make", "--compiler", "hangs_of_the_cli_test", "--isolate", "--timeout", "15")
    assert (code, [finding.actual for finding in report.findings]) == (1, ["still running after 15 s"])


@pytest.mark.slow
def test_check_localizes(checked: Checked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_REPORT_DIR", str(tmp_path))
    code, report = checked("make", "--compiler", "wrong_of_the_cli_test", "--localize")
    assert (code, [finding.op for finding in report.findings]) == (1, ["aten.sin.default"])
    assert len(list(tmp_path.glob("*.json"))) == 1, "the region's own report says the same"
    code, report = checked("make", "--compiler", "wrong_of_the_cli_test")
    assert (code, [finding.op for finding in report.findings]) == (1, [None])


KILLING = """
import os
from torch._dynamo import register_backend


@register_backend
def kills_on_relu(gm, example_inputs):
    relu = any("relu" in str(node.target) for node in gm.graph.nodes)
    return lambda *args: os.kill(os.getpid(), 11) if relu else gm.forward(*args)
"""


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_dump_of_which_the_process_dies_is_localized(tmp_path: Path) -> None:
    (tmp_path / "killing.py").write_text(KILLING)
    dumping(lambda x: torch.relu(x.sin()).cos(), tmp_path / "dump", values=False)(torch.randn(4))
    [dump] = tmp_path.glob("dump/*/*_dynamo_0")
    words = ("localize", dump, "--compiler", "kills_on_relu", "--import", "killing", "--json")
    code, out, err = finished((sys.executable, "-m", "checked_backend", *words), tmp_path)
    assert code == 1, err
    [finding] = Report.from_json(out).findings
    assert (finding.detail, finding.actual, finding.op) == ("crash.signal", "killed by SIGSEGV", "aten.relu.default")
    assert finding.repro is not None
    assert "repro" not in finding.evidence  # a fresh process dies of it too


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--iterations", "0"), "iterations got 0"),
        (("--optimizer", "Adam:lr"), "give KEY=VALUE"),
        (("--optimizer", "Adam:lr=-1"), "the optimizer could not be made: ValueError: Invalid learning rate: -1"),
        (("--optimizer", "Adam", "--no-gradients"), "optimizer needs gradients"),
        (("--compiler-option", "level"), "give KEY=VALUE"),
        (("--isolate", "--timeout", "-1"), "a number of seconds greater than 0"),
    ],
)
def test_misuse_of_check(run: Run, program: Path, options: tuple[str, ...], words: str) -> None:
    code, _, err = run("check", f"{program}:layer", "--compiler", "eager", *options)
    assert code == 3
    assert words in err
