"""The error flow as DOT, and Netron's own reader of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from checked_backend.findings import Coverage, Finding, Kind, NodeError
from checked_backend.report import Report
from checked_backend.report.dot import graph_to_dot
from checked_backend.report.flow_dot import render_dot
from checked_backend.report.write import write_report
from tests.support.cli_tools import runner

FLOW = (
    NodeError("mm", "aten.mm.default", (), 0.0, 0.0, 1e-7),
    NodeError("relu", "aten.relu.default", ("mm",), 0.01, 0.01, 1e-7, 'model.py:3 in forward: torch.relu(x, "a\\n")'),
    NodeError("add", "aten.add.Tensor", ("mm", "relu", "gone"), 0.001, None, 1e-7),
)
WRONG = Finding(Kind.LOGIC, "output[0]", "m", region="Net [0/0]", node="relu", op="aten.relu.default", flow=FLOW)
REPORT = Report((WRONG, replace(WRONG, flow=())), Coverage(checked={"outputs": 1}))

# Netron's reader of DOT, given what Netron gives it
_READ = """
const netron = process.argv[2];
const text = await import(`${netron}/text.js`);
const dot = await import(`${netron}/dot.js`);
const { readFileSync } = await import('fs');
const data = new Uint8Array(readFileSync(process.argv[3]));
let taken = null;
const context = {
    read: async (kind) => kind === 'text' ? text.Reader.open(data, 0x10000) : text.Decoder.open(data),
    set: (kind) => { taken = kind; return kind; }
};
const factory = new dot.ModelFactory();
await factory.match(context);
const model = await factory.open(context);
console.log(JSON.stringify({ taken, nodes: model.modules[0].nodes.map((node) => ({
    name: node.name, type: node.type.name, inputs: node.inputs.map((one) => one.value[0].name),
    attributes: Object.fromEntries(node.attributes.map((one) => [one.name, one.value])),
    metadata: Object.fromEntries(node.metadata.map((one) => [one.name, one.value])) })) }));
"""


def read_by_netron(text: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The nodes that Netron sees, by their names."""
    netron, node = find_spec("netron"), shutil.which("node")
    if netron is None or netron.origin is None or node is None:
        pytest.skip("Netron or Node.js is not installed here")
    home = folder / "netron"
    shutil.copytree(Path(netron.origin).parent, home, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (home / "package.json").write_text('{"type": "module"}')
    (folder / "read.mjs").write_text(_READ)
    (folder / "graph.dot").write_text(text)
    done = subprocess.run(
        [node, folder / "read.mjs", home, folder / "graph.dot"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["taken"] == "dot"
    return {one["name"]: one for one in seen["nodes"]}


def test_each_operator_has_its_errors_and_colour_and_the_edges_that_are_there() -> None:
    lines = render_dot([REPORT]).splitlines()
    assert lines[0] == 'digraph "checked_backend" {'
    label = r"{relu|op_code=call_function\l|aten.relu.default\lerror: 0.01\lown: 0.01\lnoise: 1e-07\l}"
    assert (
        f'    "relu" [label="{label}", fillcolor="#e5484d", comment="model.py:3 in forward: torch.relu(x, _a_n_)"];'
    ) in lines
    assert [line.strip() for line in lines if "->" in line] == ['"mm" -> "relu";', '"mm" -> "add";', '"relu" -> "add";']
    assert sum("#f7c6c7" in line for line in lines) == 1  # add inherits it


def test_several_findings_are_one_drawing_and_share_no_node() -> None:
    text = render_dot([REPORT, REPORT])
    assert '"1.mm" -> "1.relu";' in text
    assert '"2.mm" -> "2.relu";' in text
    assert text.count("digraph") == 1
    assert render_dot([Report((), Coverage())]).count("label") == 0


def test_names_of_a_strangers_file_end_no_string() -> None:
    evil = '"]; evil [label="<b>|{\\'
    wrong = replace(WRONG, flow=(NodeError(evil, evil, (evil,), float("nan"), float("inf"), None, evil),))
    text = render_dot([replace(REPORT, findings=(wrong,))])
    node, edge = text.splitlines()[3:-1]
    assert re.fullmatch(r' {4}"[^"]*" \[(\w+="[^"]*"(, )?){3}\];', node)
    assert re.fullmatch(r' {4}"[^"]*" -> "[^"]*";', edge)
    assert "<" not in text


def test_the_command_writes_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_report(REPORT, tmp_path / "reports")
    code, _, _ = runner(capsys)("report", tmp_path / "reports", "--dot", tmp_path / "graph.dot")
    assert code == 1
    assert (tmp_path / "graph.dot").read_text("utf-8") == render_dot([REPORT])


@pytest.mark.slow
def test_netron_sees_the_operators_and_their_errors(tmp_path: Path) -> None:
    nodes = read_by_netron(render_dot([REPORT]), tmp_path)
    assert {name: one["type"] for name, one in nodes.items()} == {
        "mm": "aten.mm.default",
        "relu": "aten.relu.default",
        "add": "aten.add.Tensor",
    }
    assert nodes["relu"]["attributes"] == {"error": "0.01", "own": "0.01", "noise": "1e-07"}
    assert nodes["relu"]["metadata"]["comment"].startswith("model.py:3 in forward")
    assert nodes["add"]["inputs"] == ["mm", "relu"]


@pytest.mark.slow
def test_netron_opens_the_drawing_of_a_dump(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(x, approximate="tanh") + 1

    nodes = read_by_netron(graph_to_dot(fx.symbolic_trace(Net()).graph, 'a "title"'), tmp_path)
    assert nodes["add"]["inputs"] == ["gelu"]
    assert {"x", "gelu", "add", "output"} <= set(nodes)
