"""The error flow for Model Explorer."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from checked_backend.findings import Coverage, Finding, Kind, NodeError
from checked_backend.report import Report
from checked_backend.report.codec import dumps
from checked_backend.report.model_explorer import encode_graphs, encode_node_data
from checked_backend.report.write import write_report
from tests.support.browser import BROWSER
from tests.support.cli_tools import runner
from tests.support.web_page import shown_text

FLOW = (
    NodeError("mm", "aten.mm.default", (), 0.0, 0.0, 1e-7),
    NodeError("relu", "aten.relu.default", ("mm",), 0.01, 0.01, 1e-7, "model.py:3 in forward: torch.relu(x)"),
    NodeError("add", "aten.add.Tensor", ("mm", "relu", "gone"), 0.001, 0.0, 1e-7),
)
WRONG = Finding(Kind.LOGIC, "output[0]", "m", region="Net [0/0]", node="relu", op="aten.relu.default", flow=FLOW)
REPORT = Report((WRONG, replace(WRONG, flow=())), Coverage(checked={"outputs": 1}))


def test_the_graph_is_one_that_the_loader_takes() -> None:
    """A collection of graphs has a label and graphs; a graph an id and nodes; edges name nodes that are there."""
    found = encode_graphs([REPORT])
    assert set(found) == {"label", "graphs"}
    (graph,) = found["graphs"]
    assert graph["id"] == "1. relu in Net [0/0]"
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert [edge["sourceNodeId"] for edge in nodes["add"]["incomingEdges"]] == ["mm", "relu"]
    assert [node["label"] for node in nodes.values()] == ["mm", "relu", "add"]
    assert {"key": "your line", "value": "model.py:3 in forward: torch.relu(x)"} in nodes["relu"]["attrs"]
    colours = [node.get("style", {}).get("backgroundColor") for node in nodes.values()]
    assert colours[0] is None
    assert None is not colours[1] != colours[2] is not None


def test_the_node_data_are_of_the_same_graph_and_finite() -> None:
    strange = replace(
        WRONG,
        flow=(
            *FLOW,
            NodeError("nan", "op", (), math.nan),
            NodeError("one", "op", (), 1.0),
            NodeError("inf", "op", (), math.inf),
        ),
    )
    data = encode_node_data([replace(REPORT, findings=(strange,))])
    (results,) = (entry["results"] for entry in data.values())
    assert set(data) == {graph["id"] for graph in encode_graphs([REPORT])["graphs"]}
    assert results["relu"] == {"value": pytest.approx(-2)}
    assert set(results) == {"relu", "add", "nan", "one", "inf"}
    dumps(data)  # which refuses what JSON has no word for


def test_reports_without_a_flow_have_no_graph() -> None:
    assert encode_graphs([Report((), Coverage())])["graphs"] == []
    assert encode_node_data([Report((), Coverage())]) == {}


def test_the_command_writes_both(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_report(REPORT, tmp_path / "reports")
    code, _, _ = runner(capsys)("report", tmp_path / "reports", "--model-explorer", tmp_path / "graph.json")
    assert code == 1
    assert json.loads((tmp_path / "graph.json").read_text("utf-8")) == encode_graphs([REPORT])
    assert json.loads((tmp_path / "graph_node_data.json").read_text("utf-8")) == encode_node_data([REPORT])


@pytest.mark.slow
def test_model_explorers_own_types_read_both_files() -> None:
    builder = pytest.importorskip("model_explorer.graph_builder")
    node_data = pytest.importorskip("model_explorer.node_data_builder")
    dacite = pytest.importorskip("dacite")
    strict = dacite.Config(strict=True)
    collection = dacite.from_dict(builder.GraphCollection, encode_graphs([REPORT]), config=strict)
    data = dacite.from_dict(node_data.ModelNodeData, {"graphsData": encode_node_data([REPORT])}, config=strict)
    (graph,) = collection.graphs
    assert [node.id for node in graph.nodes] == ["mm", "relu", "add"]
    assert [edge.sourceNodeId for edge in graph.nodes[2].incomingEdges] == ["mm", "relu"]
    assert set(data.graphsData[graph.id].results) == {"relu", "add"}


def _wait_for(port: int) -> None:
    """Wait until a server answers."""
    for _ in range(120):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server did not start")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_model_explorers_own_page_shows_the_graph_and_its_errors(tmp_path: Path) -> None:
    pytest.importorskip("model_explorer")
    (tmp_path / "graph.json").write_text(dumps(encode_graphs([REPORT])))
    (tmp_path / "data.json").write_text(dumps(encode_node_data([REPORT])))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["graph.json", "--node_data_paths", "data.json", "--no_open_in_browser", "--skip_health_check"]
    server = [sys.executable, "-m", "model_explorer", *words, "--host", "127.0.0.1", "--port", str(port)]
    data = {
        "models": [{"url": str(tmp_path / "graph.json")}],
        "nodeData": [str(tmp_path / "data.json")],
        "nodeDataTargets": [""],
    }
    quiet = subprocess.DEVNULL
    with subprocess.Popen(server, cwd=tmp_path, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_for(port)
            page = f"http://127.0.0.1:{port}/?data={quote(json.dumps(data))}"
            text = shown_text(page, "Aggregated stats", tmp_path)
        finally:
            process.terminate()
    lines = [line.strip() for line in text.splitlines()]
    assert "1. relu in Net [0/0]" in text
    assert "3 nodes" in text
    assert "error (power of ten)" in lines
    assert any(line.startswith("Max") and float(line.split()[-1]) == pytest.approx(-2) for line in lines), text
