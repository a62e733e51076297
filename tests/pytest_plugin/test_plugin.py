"""The pytest plugin, in pytest runs of its own."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from checked_backend import pytest_plugin
from tests.support.program_texts import COMPILER_WITH_COSINE_FOR_SINE

pytestmark = pytest.mark.process

INSTALLED = any(point.name == "numcheck" for point in importlib.metadata.entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "checked_backend.pytest_plugin")

HEAD = f"""
import logging, pytest, threading, torch
from torch._dynamo.backends.common import aot_autograd
import checked_backend as cb

{COMPILER_WITH_COSINE_FOR_SINE}
def f(x):
    return x.sin() + 1

x = torch.arange(4.0)

@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
"""


@dataclass(frozen=True)
class Result:
    """One run of pytest: its exit code, all that it printed, and outcome and properties by test."""

    code: int
    output: str
    outcomes: dict[str, str]
    properties: dict[str, dict[str, str]]

    def section(self) -> list[str]:
        """The lines of the section ``numcheck``."""
        lines = self.output.splitlines()
        start = next((place for place, line in enumerate(lines) if line.strip("=") == " numcheck "), len(lines))
        end = next((place for place in range(start + 1, len(lines)) if lines[place].startswith("==")), len(lines))
        return lines[start + 1 : end]

    def of(self, test: str) -> str:
        """What was printed of one test's failure."""
        parts = self.output.split(f"_ {test} _")
        assert len(parts) > 1, self.output
        return parts[1].partition("\n___")[0]


def run(folder: Path, files: dict[str, str], *words: str) -> Result:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CHECKED_B", "PYTEST_"))}
    environment.pop("CI", None)  # pytest says things twice where it is set
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]),
        "CHECKED_BACKEND_REPORT_DIR": str(folder / "reports"),
        "OMP_NUM_THREADS": "1",
    }
    junit = folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", f"--junitxml={junit}", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    cases = list(ElementTree.parse(junit).getroot().iter("testcase")) if junit.exists() else []
    ends = ("failure", "error", "skipped")
    outcomes = {str(case.get("name")): next((p.tag for p in case if p.tag in ends), "passed") for case in cases}
    properties = {
        str(case.get("name")): {str(one.get("name")): str(one.get("value")) for one in case.iter("property")}
        for case in cases
    }
    return Result(done.returncode, done.stdout + done.stderr, outcomes, properties)


FORMS = {
    "decorator": "@torch.compile\ndef g(x):\n    return f(x)",
    "decorator_with_arguments": "@torch.compile(dynamic=True, fullgraph=True)\ndef g(x):\n    return f(x)",
    "call": "g = torch.compile(f)",
    "keyword": "g = torch.compile(model=f, options={'epilogue_fusion': True})",
    "mode": "g = torch.compile(f, mode='default')",
    "module_method": "class M(torch.nn.Module):\n    forward = staticmethod(f)\ng = M()\ng.compile()",
    "module": "class M(torch.nn.Module):\n    forward = staticmethod(f)\ng = torch.compile(M())",
    "imported": "from torch import compile\ng = compile(f)",
}


def test_every_form_is_checked_also_where_it_is_compiled_at_import(tmp_path: Path) -> None:
    files = {f"test_{name}.py": f"{HEAD}\n{form}\n\ndef test_{name}():\n    g(x)\n" for name, form in FORMS.items()}
    files["conftest.py"] = f"{HEAD}\ntorch._dynamo.register_backend(wrong, name='wrong_by_name')\n"
    result = run(tmp_path, files, "--numcheck=wrong_by_name")
    assert result.outcomes == {f"test_{name}": "failure" for name in FORMS}
    assert result.output.count("wrong       logic, output[0]") == len(FORMS)


SUITE = """
def test_wrong():
    torch.compile(f, backend=wrong)(x)

@pytest.mark.parametrize("number", range(2))
def test_right(number):
    torch.compile(f)(x)

def test_plain():
    f(x)

seen = []

def mine(gm, example_inputs, *, options=None, mode=None):
    seen.append((options, mode))
    return gm.forward

def test_options_and_mode():
    filtered = []
    keep_all = lambda guards: filtered.append(1) or [True] * len(guards)
    torch.compile(f, backend=mine, options={"a": 1, "guard_filter_fn": keep_all})(x)
    assert filtered
    torch._dynamo.reset()
    torch.compile(f, backend=mine, mode="fast")(x)
    assert seen == [({"a": 1}, None), (None, "fast")]

def test_disabled_and_checking_itself():
    assert torch.compile(f, disable=True)(x).equal(f(x))
    torch.compile(f, backend="numcheck", options={"compiler": mine})(x)
    assert seen[-1] == (None, None)

def replace(gm, inputs):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default):
        node.target = torch.ops.aten.sin.default
    gm.recompile()
    return gm.forward

def test_backward():
    y = torch.ones(3, requires_grad=True)
    torch.compile(lambda t: t.sin(), backend=aot_autograd(fw_compiler=replace))(y).sum().backward()

@pytest.fixture
def before():
    return torch.compile(f, backend=wrong)(x)

@pytest.fixture
def after():
    yield
    torch.compile(f, backend=wrong)(x)

def test_before(before): pass

def test_after(after): pass

def test_thread():
    g = torch.compile(f, backend=wrong)
    thread = threading.Thread(target=g, args=(x,))
    thread.start()
    thread.join()

def test_own_failure():
    logging.getLogger("mine").warning("my own record")
    torch.compile(f, backend=wrong)(x)
    raise ValueError("mine")

@pytest.mark.numcheck(enabled=False)
def test_off():
    torch.compile(f, backend=wrong)(x)

@pytest.mark.numcheck(compiler=wrong)
def test_other_compiler():
    torch.compile(f)(x)

@pytest.mark.xfail(strict=True)
def test_expected():
    torch.compile(f, backend=wrong)(x)
"""

OUTCOMES = {
    "test_wrong": "failure",
    "test_right[0]": "passed",
    "test_right[1]": "passed",
    "test_plain": "passed",
    "test_options_and_mode": "passed",
    "test_disabled_and_checking_itself": "passed",
    "test_backward": "failure",
    "test_before": "failure",
    "test_after": "error",
    "test_thread": "failure",
    "test_own_failure": "failure",
    "test_off": "passed",
    "test_other_compiler": "failure",
    "test_expected": "skipped",  # JUnit's word for an expected failure
}


SLOW = (pytest.mark.slow, pytest.mark.ci_sample)


@pytest.fixture(scope="module", params=["one process", pytest.param("xdist", marks=SLOW)])
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Result:
    words = ["--numcheck=eager", "--continue-on-collection-errors"]
    if request.param == "xdist":
        pytest.importorskip("xdist")
        words.append("-n2")
    at_import = f"{HEAD}\ntorch.compile(f, backend=wrong)(x)\n\ndef test_of_import(): pass\n"
    return run(tmp_path_factory.mktemp("suite"), {"test_suite.py": HEAD + SUITE, "test_import.py": at_import}, *words)


def test_outcomes(suite: Result) -> None:
    assert {name: suite.outcomes.get(name) for name in OUTCOMES} == OUTCOMES, suite.output
    assert "test_of_import" not in suite.outcomes
    assert "ERROR collecting test_import.py" in suite.output


def test_a_failure_is_the_report(suite: Result) -> None:
    told = suite.of("test_wrong")
    assert "FAIL: f: output[0] is wrong" in told
    assert "FAILED test_suite.py::test_wrong - Failed: FAIL: f: output[0] is wrong" in suite.output
    assert "wrong       logic, output[0]" in told
    assert "in f: return x.sin() + 1" in told
    assert "Traceback" not in told
    assert "torch.__trace" not in suite.output  # hundreds of records of torch's own
    assert "my own record" in suite.of("test_own_failure")
    assert "wrong       logic, grad[t]" in suite.of("test_backward")
    own = suite.of("test_own_failure")
    assert own.index("ValueError: mine") < own.index("- numcheck -") < own.index("FAIL: f: output[0] is wrong")


def test_properties(suite: Result) -> None:
    properties = suite.properties
    assert properties["test_plain"] == properties["test_off"] == {}
    assert properties["test_right[0]"]["numcheck.verdict"] == "pass"
    assert properties["test_backward"] == {
        "numcheck.verdict": "fail",
        "numcheck.report": "FAIL: <lambda>: grad[t] is wrong",
        "numcheck.regions": "1",
        "numcheck.calls": "1",
        "numcheck.backwards": "1",
        "numcheck.findings": "1",
    }
    for name in ("test_before", "test_after", "test_thread", "test_own_failure", "test_expected"):
        assert properties[name]["numcheck.verdict"] == "fail"


def test_summary(suite: Result) -> None:
    lines = suite.section()
    failing = [line for line in lines if line.startswith("FAIL ")]
    verdicts = {name: suite.properties.get(name, {}).get("numcheck.verdict") for name in OUTCOMES}
    assert failing == sorted(f"FAIL test_suite.py::{name}" for name, verdict in verdicts.items() if verdict == "fail")
    assert len(failing) == 8
    totals = {
        name: sum(int(one.get(f"numcheck.{name}", 0)) for one in suite.properties.values())
        for name in ("regions", "calls", "backwards")
    }
    counts = ", ".join(f"{number} {name if number != 1 else name[:-1]}" for name, number in totals.items())
    assert lines[-1] == f"12 tests ran compiled code: 4 pass, 8 fail ({counts} checked)"
    assert totals["calls"] >= 12


MARKED = """
@pytest.mark.numcheck(compiler=wrong)
def test_wrong():
    torch.compile(f)(x)

@pytest.mark.numcheck(compiler="eager", gradients=False)
def test_right():
    torch.compile(f)(x)

@pytest.mark.numcheck(bogus=1)
def test_misuse(): pass

@pytest.mark.numcheck("eager")
def test_misuse_by_place(): pass

@pytest.mark.numcheck(compiler=wrong)
class TestClass:
    def test_of_class(self):
        torch.compile(f)(x)

def test_not_asked():
    assert not hasattr(torch.compile, "__wrapped__")
    torch.compile(f, backend=wrong)(x)

def test_check(numcheck):
    assert numcheck(f, (x,), compiler="eager").verdict is cb.Verdict.PASS

def test_check_wrong(numcheck):
    numcheck(f, (x,), compiler=wrong)

@pytest.mark.numcheck(compiler=wrong)
def test_caught(numcheck):
    with pytest.raises(cb.DivergenceError):
        numcheck(f, (x,))

def test_collect(numcheck):
    with numcheck.collect(compiler=wrong) as session:
        torch.compile(f)(x)
    assert [finding.kind for finding in session.report.findings] == [cb.Kind.LOGIC]
    assert numcheck.report.findings == ()
    assert not hasattr(torch.compile, "__wrapped__")

@pytest.mark.numcheck(compiler="eager")
def test_report(numcheck):
    torch.compile(f)(x)
    assert len(numcheck.report.coverage.regions) == 1
    with pytest.raises(cb.OptionError, match="on_divergence"), numcheck.collect(on_divergence="warn"):
        pass

def test_of_the_backend():
    torch.compile(f, backend="numcheck", options={"compiler": wrong, "localize": False})(x)
"""


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("marked"), {"test_it.py": HEAD + MARKED}, "--strict-markers")


def test_marker_and_fixture_without_the_option(marked: Result) -> None:
    wrong = {
        f"test_{name}" for name in ("wrong", "misuse", "misuse_by_place", "of_class", "check_wrong", "of_the_backend")
    }
    assert {name for name, outcome in marked.outcomes.items() if outcome != "passed"} == wrong, marked.output
    assert len(marked.outcomes) == 12
    assert "no option 'bogus'" in marked.of("test_misuse")
    assert "got ('eager',); it takes enabled=" in marked.of("test_misuse_by_place")
    assert "DivergenceError: FAIL: " in marked.of("test_check_wrong")
    assert "FAILED test_it.py::test_check_wrong - numcheck: f: output[0] is wrong" in marked.output
    failing = [line.removeprefix("FAIL test_it.py::") for line in marked.section() if line.startswith("FAIL ")]
    assert failing == ["TestClass::test_of_class", "test_caught", "test_check_wrong", "test_wrong"]


def test_a_bare_option_takes_no_path_for_a_compiler(tmp_path: Path) -> None:
    text = "def test(request):\n    assert request.config.option.numcheck == 'inductor'\n\ndef test_other(): pass\n"
    result = run(tmp_path, {"test_it.py": text}, "--numcheck", "test_it.py::test")
    assert result.outcomes == {"test": "passed"}
    assert result.section() == ["nothing was checked: no test ran a compiled region"]


def test_an_unknown_compiler_is_misuse(tmp_path: Path) -> None:
    result = run(tmp_path, {"test_it.py": "def test(): pass\n"}, "--numcheck=nonsense")
    assert result.code == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: backend 'numcheck': option 'compiler' got 'nonsense'" in result.output


def test_without_the_option_nothing_is_imported(tmp_path: Path) -> None:
    text = """
import sys

def test():
    assert "checked_backend.pytest_plugin" in sys.modules
    assert not {"torch", "numpy", "pydantic", "checked_backend.pytest_plugin.watch"} & sys.modules.keys()
"""
    result = run(tmp_path, {"test_it.py": text})
    assert result.outcomes == {"test": "passed"}, result.output
    assert result.section() == []


def test_an_error_of_a_check_is_not_buried_by_frames_of_torch(marked: Result) -> None:
    told = marked.of("test_of_the_backend")
    assert "_dynamo" not in told
    assert "FAIL: f: output[0] is wrong" in told
    assert len(told.partition("FAIL: ")[0].splitlines()) < 20


def test_a_report_that_the_failure_shows_already_is_not_told_again() -> None:
    text = "FAIL: Net: output[0] is wrong\nNet: 1 finding\n\n1. output[0] in Net\n   The program is wrong."
    raised = "E   " + text.replace("Net: 1", "Net [0/0]: 1").replace("\n", "\nE   ")
    for said, shown in ((text, True), (raised, True), ("E   FAIL: Net: output[0] is wrong", False), (None, False)):
        given: Any = types.SimpleNamespace(longrepr=said)
        assert pytest_plugin._shown(given, text) is shown


DYING = """
import os
from checked_backend import backends

backends.investigate = lambda *_: os.abort()

@pytest.mark.numcheck(localize=True)
def test_sine():
    torch.compile(f, backend=wrong)(x)

@pytest.mark.numcheck(localize=True)
def test_right():
    torch.compile(torch.tanh, backend=wrong)(x)
"""


def test_what_was_found_is_told_of_a_worker_that_dies_while_the_operator_is_looked_for(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    found = run(tmp_path, {"test_suite.py": HEAD + DYING}, "--numcheck", "-n1")
    assert "FAILED test_suite.py::test_sine - FAIL: f: output[0] is wrong" in found.output
    assert "It looked no further: worker 'gw0' crashed while running 'test_suite.py::test_sine'" in found.output
    assert found.outcomes["test_right"] == "passed"
    assert "FAIL test_suite.py::test_sine" in found.section()
    assert "2 tests ran compiled code: 1 pass, 1 fail (2 regions, 2 calls, 0 backwards checked)" in found.section()
