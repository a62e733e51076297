"""The error flow for Model Explorer."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from checked_backend.findings import Coverage, Finding, Kind, NodeError
from checked_backend.report import Report
from checked_backend.report.codec import dumps
from checked_backend.report.model_explorer import encode_graphs, encode_node_data
from tests.support.browser import BROWSER

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--no-proxy-server",
)


def shown_text(url: str, wanted: str, folder: Path, *, seconds: float = 120.0) -> str:
    """Open a page and wait until some text is there: all text of the page, as far as it was there in that time."""
    until, text = time.monotonic() + seconds, ""
    with _browser(folder) as ask:
        target = ask("Target.createTarget", url=url)["targetId"]
        session = ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        while wanted not in text and time.monotonic() < until:
            time.sleep(1)
            answer = ask("Runtime.evaluate", session, expression="document.body.innerText", returnByValue=True)
            text = str(answer.get("result", {}).get("value", ""))  # an error while the page is being loaded
    return text


@contextlib.contextmanager
def _browser(folder: Path) -> Iterator[Any]:
    """Start the browser; gives a function that asks it something over a pipe, and waits for the answer."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    words = [str(BROWSER), *_FLAGS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"]
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *words]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), stdout=quiet, stderr=quiet) as process:
        os.close(theirs_in)
        os.close(theirs_out)
        kept, asked = b"", 0

        def ask(method: str, session: str = "", **parameters: Any) -> Any:
            nonlocal kept, asked
            asked += 1
            question = {"id": asked, "method": method, "params": parameters}
            os.write(ours_out, json.dumps({**question, **({"sessionId": session} if session else {})}).encode() + b"\0")
            while True:
                while b"\0" in kept:
                    message, _, kept = kept.partition(b"\0")
                    answer = json.loads(message)
                    if answer.get("id") == asked:
                        return answer.get("result", {})
                if not select.select([ours_in], [], [], 60)[0]:
                    raise TimeoutError(method)
                kept += os.read(ours_in, 1 << 20)

        try:
            yield ask
        finally:
            process.terminate()
            os.close(ours_in)
            os.close(ours_out)


FLOW = (
    NodeError("mm", "aten.mm.default", (), 0.0, 0.0, 1e-7),
    NodeError("relu", "aten.relu.default", ("mm",), 0.01, 0.01, 1e-7, "model.py:3 in forward: torch.relu(x)"),
    NodeError("add", "aten.add.Tensor", ("mm", "relu", "gone"), 0.001, 0.0, 1e-7),
)
WRONG = Finding(Kind.LOGIC, "output[0]", "m", region="Net [0/0]", node="relu", op="aten.relu.default", flow=FLOW)
REPORT = Report((WRONG, replace(WRONG, flow=())), Coverage(checked={"outputs": 1}))


def test_the_node_data_are_of_the_same_graph_and_finite() -> None:
    more = (NodeError(str(error), "op", (), error) for error in (math.nan, 1.0, math.inf))
    strange = replace(WRONG, flow=(*FLOW, *more))
    data = encode_node_data([replace(REPORT, findings=(strange,))])
    (results,) = (entry["results"] for entry in data.values())
    assert set(data) == {graph["id"] for graph in encode_graphs([REPORT])["graphs"]}
    assert results["relu"] == {"value": pytest.approx(-2)}
    assert set(results) == {"relu", "add", "nan", "1.0", "inf"}
    dumps(data)  # which refuses what JSON has no word for


def test_reports_without_a_flow_have_no_graph() -> None:
    assert encode_graphs([Report((), Coverage())])["graphs"] == []
    assert encode_node_data([Report((), Coverage())]) == {}


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
    node_data = {"nodeData": [str(tmp_path / "data.json")], "nodeDataTargets": [""]}
    data = {"models": [{"url": str(tmp_path / "graph.json")}], **node_data}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(server, cwd=tmp_path, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_for(port)
            text = shown_text(f"http://127.0.0.1:{port}/?data={quote(json.dumps(data))}", "Aggregated stats", tmp_path)
        finally:
            process.terminate()
    lines = [line.strip() for line in text.splitlines()]
    assert "1. relu in Net [0/0]" in text
    assert "3 nodes" in text
    assert "error (power of ten)" in lines
    assert any(line.startswith("Max") and float(line.split()[-1]) == pytest.approx(-2) for line in lines), text
