"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from checked_backend.cli import verbs as cli
from checked_backend.findings import Coverage, Finding, Kind, Skip, Verdict
from checked_backend.report import Report
from checked_backend.report.write import read_reports, write_report
from tests.support.cli_tools import Run

PASS = Report((), Coverage(checked={"outputs": 1}), "fine")
FAIL = replace(PASS, findings=(Finding(Kind.LOGIC, "output[0]", "wrong"),), title="bad")
VAGUE = replace(PASS, coverage=Coverage(checked={"outputs": 1}, skipped=(Skip("x", "y", matters=True),)), title="vague")


@pytest.mark.parametrize(
    ("reports", "code"), [([PASS], 0), ([PASS, FAIL], 1), ([VAGUE, PASS], 2), ([VAGUE, FAIL], 1), ([], 3)]
)
def test_exit_code_is_the_worst_verdict(run: Run, tmp_path: Path, reports: list[Report], code: int) -> None:
    for report in reports:
        write_report(report, tmp_path)
    got, out, err = run("report", tmp_path)
    assert got == code
    for report in reports:
        assert str(report).partition("\n")[0] in out
    if not reports:
        assert err == f"checked-backend: no reports in {tmp_path}\n"


def test_one_file(run: Run, tmp_path: Path) -> None:
    path = write_report(FAIL, tmp_path)
    code, out, _ = run("report", path)
    assert (code, out) == (1, str(replace(FAIL, path=path)) + "\n")


def test_broken_file_is_said_and_is_not_a_pass(run: Run, tmp_path: Path) -> None:
    write_report(PASS, tmp_path)
    (tmp_path / "bad.json").write_text("{")
    code, _, err = run("report", tmp_path)
    assert code == 2
    assert err.startswith(f"checked-backend: {tmp_path / 'bad.json'}: not a report: not JSON: ")
    code, _, err = run("report", tmp_path / "bad.json")
    assert code == 3
    assert "no reports in" in err


@pytest.mark.parametrize("order", ["{path} --json", "--json {path}", "{path} --json -", "{path} --json=-"])
def test_json_to_stdout(run: Run, tmp_path: Path, order: str) -> None:
    path = write_report(FAIL, tmp_path)
    code, out, err = run("report", *order.format(path=tmp_path).split())
    assert (code, err) == (1, "")
    read = json.loads(out)
    assert (read["verdict"], read["broken"]) == ("fail", [])
    assert read["reports"][0]["path"] == str(path)
    assert Report.from_json(json.dumps(read["reports"][0]["report"])) == FAIL


def test_verbose_and_certificate_and_version(run: Run, tmp_path: Path) -> None:
    path = write_report(FAIL, tmp_path)
    _, short, _ = run("report", path)
    code, full, _ = run("report", path, "-v")
    assert code == 1
    assert "Finding 1 of 1: logic, output[0]" in full
    assert "Finding 1 of 1" not in short
    code, text, _ = run("report", path, "--certificate")
    assert code == 1
    assert "This is no certificate" in text
    code, text, _ = run("--version")
    assert (code, text.split()[0]) == (0, "checked-backend")


def test_files(run: Run, tmp_path: Path) -> None:
    write_report(FAIL, tmp_path / "in")
    html, junit, text = tmp_path / "r.html", tmp_path / "r.xml", tmp_path / "r.json"
    code, out, _ = run("report", tmp_path / "in", "--html", html, "--json", text, "--junit", junit)
    assert code == 1
    assert out.startswith("FAIL: ")
    assert "<!DOCTYPE html>" in html.read_text()
    assert ElementTree.parse(junit).getroot().tag == "testsuites"
    assert json.loads(text.read_text())["verdict"] == "fail"
    assert read_reports(tmp_path / "in").reports[0].title == "bad"


@pytest.mark.parametrize(
    "words", [[], ["nonsense"], ["report"], ["report", "--json"], ["report", "--bogus"], ["doctor", "extra"]]
)
def test_misuse(run: Run, words: list[str]) -> None:
    code, _, _ = run(*words)
    assert code == 3


def test_missing_path_and_unwritable_file(run: Run, tmp_path: Path) -> None:
    code, _, err = run("report", tmp_path / "nowhere")
    assert (code, err) == (3, f"checked-backend: {tmp_path / 'nowhere'}: No such file or directory\n")
    write_report(PASS, tmp_path)
    code, _, err = run("report", tmp_path, "--html", tmp_path / "no" / "page.html")
    assert code == 3
    assert "No such file or directory" in err


def test_internal_error(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr(cli, "read_reports", broken)
    code, _, err = run("report", tmp_path)
    assert code == 3
    assert "RuntimeError: oops" in err
    assert "internal error: this is a bug in checked_backend" in err


def test_help(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "doctor" in out
    assert run("report", "-h")[0] == 0


def test_doctor(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    read = json.loads(out)
    assert code == {"pass": 0, "fail": 1}[read["verdict"]]
    assert "inductor" in read["backends"]
    assert "torch" in read["environment"]
    names = {capability["name"] for capability in read["capabilities"]}
    assert {"torch version", "backends by name", "Inductor on the CPU", "a process of its own"} <= names
    assert "pytest --numcheck" in names
    assert not [name for name in read["backends"] if name.endswith("_TESTING_ONLY") or "minifier" in name]
    assert "aot_eager" in read["backends"]
    code, out, _ = run("doctor")
    assert out.startswith("Versions\n  python ")
    assert "\nWhat can be checked here\n" in out


def test_doctor_without_a_compiler(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    _, out, _ = run("doctor")
    assert "Inductor on the CPU: no-such-compiler is not on the PATH; install one or set CXX." in out


def test_python_m_and_a_reader_that_leaves(tmp_path: Path) -> None:
    for _ in range(30):
        write_report(FAIL, tmp_path)
    command = [sys.executable, "-m", "checked_backend", "report", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("FAIL: ")
        process.stdout.close()
        assert process.stderr.read() == ""


def test_output_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    write_report(replace(PASS, title="naïve ∑"), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "checked_backend", "report", str(tmp_path)],
        env={"PYTHONIOENCODING": "ascii", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "na\\xefve \\u2211" in done.stdout


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
    return torch.nn.Linear(4, 2), (torch.arange(12.0).view(3, 4),)

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
        assert err == ""
        return code, Report.from_json(out)

    return check


def test_check(run: Run, program: Path) -> None:
    code, out, _ = run("check", f"{program}:make", "--compiler", "eager", "--no-gradients", "--static")
    assert (code, out.partition(":")[0]) == (0, "PASS")
    code, out, _ = run("check", f"{program}:make", "--compiler", "wrong_of_the_cli_test", "--json")
    read = Report.from_json(out)
    assert (code, [finding.kind for finding in read.findings]) == (1, [Kind.LOGIC])
    code, _, err = run("check", f"{program}:make", "--compiler", "nonsense")
    assert code == 3
    assert "nonsense" in err
    code, _, err = run("check", f"{program}:missing")
    assert (code, err) == (3, f"checked-backend: {program} has no function 'missing'\n")


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
def test_check_with_variants(checked: Checked, option: str, fault: str, detail: str, call: str) -> None:
    code, report = checked("layer", "--compiler", "eager", option)
    assert code == 0
    assert report.coverage.checked["program runs"] > 2
    code, report = checked("layer", "--compiler", f"{fault}_of_the_cli_test", option, "--no-gradients")
    finding = report.findings[0]
    assert (code, finding.detail) == (1, detail)
    # what is baked in is the same memory each time
    assert {other.detail for other in report.findings[1:]} <= {"alias.overwritten"}
    assert call in finding.evidence["failing_calls"]


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
    torch.compile(lambda x: torch.relu(x.sin()).cos(), backend="graph_dumper", options={"dump": tmp_path / "dump"})(
        torch.randn(4)
    )
    [dump] = tmp_path.glob("dump/*/*_dynamo_0")
    words = ["localize", str(dump), "--compiler", "kills_on_relu", "--import", "killing", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "checked_backend", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    [finding] = Report.from_json(done.stdout).findings
    assert (finding.detail, finding.actual, finding.op) == ("crash.signal", "killed by SIGSEGV", "aten.relu.default")
    assert finding.repro is not None
    assert "repro" not in finding.evidence  # a fresh process dies of it too


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--iterations", "0"), "iterations got 0"),
        (("--optimizer", "Nonsense"), "which torch.optim does not have"),
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
