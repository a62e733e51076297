"""What torch's own tools show of a check: the structured trace, the log settings, the profiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.support import faults
from tests.support.started_programs import finished

PROGRAM = """
import sys, torch

def wrong(gm, inputs):
    if "wrong" in sys.argv:
        for node in gm.graph.nodes:
            if node.target in (torch.sin, "sin"):
                node.target = torch.cos if node.op == "call_function" else "cos"
        gm.recompile()
    return gm.forward

def f(x):
    return x.sin() + 1

options = {"compiler": wrong, "on_divergence": "record", "localize": False}
compiled = torch.compile(f, backend="numcheck", options=options)
for _ in range(3):
    compiled(torch.arange(4.0, requires_grad=True)).sum().backward()
"""

CLEAN_BEFORE_IT = """
def g(x):
    return x * 2

torch.compile(g, backend="numcheck", options={"compiler": "eager"})(torch.arange(4.0))

"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("program") / "p.py"
    file.write_text(PROGRAM)
    return file


def artifacts(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """Records of the structured trace that are artifacts of ours, with their texts."""
    (trace,) = folder.glob("dedicated_log_torch_trace_*.log")
    found: list[tuple[dict[str, Any], list[str]]] = []
    lines: list[str] = []
    for line in trace.read_text().splitlines():
        if line.startswith("\t"):
            lines.append(line[1:])
        else:
            lines = []
            found.append((json.loads(line[line.index("{") :]), lines))
    return [
        (record, "\n".join(text))
        for record, text in found
        if record.get("artifact", {}).get("name", "").startswith("checked_backend")
    ]


@pytest.mark.process
def test_a_failed_check_is_in_the_structured_trace_beside_its_graph(program: Path, tmp_path: Path) -> None:
    code, _, err = finished((sys.executable, program, "wrong"), tmp_path, {"TORCH_TRACE": str(tmp_path / "trace")})
    assert code == 0, err
    assert "compiled in" not in err  # our loggers are quiet unless told
    found = artifacts(tmp_path / "trace")
    assert all((record["frame_id"], record["frame_compile_id"], record["attempt"]) == (0, 0, 0) for record, _ in found)
    report = next(text for record, text in found if record["artifact"]["name"] == "checked_backend_report")
    assert report.startswith("FAIL: f: output[0] is wrong")
    findings = next(text for record, text in found if record["artifact"]["name"] == "checked_backend_findings")
    assert json.loads(findings)["verdict"] == "fail"


@pytest.mark.process
def test_tlparse_shows_a_failed_check_beside_its_graph(tmp_path: Path) -> None:
    tlparse = shutil.which("tlparse", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if tlparse is None:
        pytest.skip("tlparse is not installed")
    (tmp_path / "p.py").write_text(PROGRAM.replace("def f(", CLEAN_BEFORE_IT + "def f("))
    code, _, err = finished((sys.executable, "p.py", "wrong"), tmp_path, {"TORCH_TRACE": str(tmp_path / "trace")})
    assert code == 0, err
    (trace,) = tmp_path.glob("trace/*.log")
    code, _, err = finished((tlparse, trace, "-o", "page", "--no-browser"), tmp_path)
    assert code == 0, err
    clean, wrong = tmp_path / "page" / "-_0_0_0", tmp_path / "page" / "-_1_0_0"  # compile ids [0/0] and [1/0]
    names = [re.sub(r"_\d+\.", ".", path.name) for path in wrong.iterdir()]
    assert {"dynamo_output_graph.txt", "checked_backend_report.txt", "checked_backend_findings.json"} <= {*names}
    first = min(wrong.glob("checked_backend_report_*.txt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    assert first.read_text().startswith("FAIL: f: output[0] is wrong")
    assert json.loads(next(wrong.glob("checked_backend_findings_*.json")).read_text())["verdict"] == "fail"
    assert f'href="-_1_0_0/{first.name}"' in (tmp_path / "page" / "index.html").read_text()
    assert not list(clean.glob("checked_backend_report_*"))


@pytest.mark.process
def test_a_clean_program_leaves_no_report_in_the_trace_and_torch_logs_has_our_loggers(
    program: Path, tmp_path: Path
) -> None:
    more = {"TORCH_TRACE": str(tmp_path / "trace"), "TORCH_LOGS": "+checked_backend"}
    _, _, err = finished((sys.executable, program), tmp_path, more)
    assert not artifacts(tmp_path / "trace")
    assert "f [0/0]: 2 nodes, compiled in" in err
    assert "f [0/0]: call 1 agrees with eager" in err
    assert "f [0/0]: gradients of call 3 agrees with eager" in err
    _, _, err = finished((sys.executable, program), tmp_path, {"TORCH_LOGS": "checked_backend"})
    assert "compiled in" in err
    assert "call 1" not in err


@pytest.mark.process
def test_set_logs_knows_the_name(tmp_path: Path) -> None:
    # a process of its own: torch's log settings are the process's
    code = "import logging, torch, checked_backend.backends; torch._logging.set_logs(modules={'checked_backend': 10})"
    told = "print(logging.getLogger('checked_backend').level, len(logging.getLogger('checked_backend').handlers))"
    status, out, err = finished((sys.executable, "-c", f"{code}; {told}"), tmp_path)
    assert (status, out) == (0, "10 1\n"), err


def test_the_profiler_shows_what_a_check_runs() -> None:
    with torch.profiler.profile(acc_events=True) as profile, cb.collect(closing=False):
        options = {"compiler": faults.every_output(lambda output: output * (1 + 2**-23)), "localize": False}
        x = torch.randn(16, requires_grad=True)
        torch.compile(lambda x: (x.softmax(0) * 3).sum(), backend="numcheck", options=options)(x).backward()
    ranges = {event.key for event in profile.key_averages() if event.key.startswith("checked_backend::")}
    assert ranges >= {
        "checked_backend::reference",
        "checked_backend::candidate",
        "checked_backend::comparison",
        "checked_backend::reference backward",
        "checked_backend::comparison of gradients",
    }
    assert any(name.startswith("checked_backend::control run") for name in ranges)
