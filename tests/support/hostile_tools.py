"""Dumps as a stranger would write them: checksums that fit, around a graph that does not."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import checked_backend
from tests.support.dump_tools import dumping, dumps, edit, python

PACKAGE = Path(checked_backend.__file__).parents[1]


def node(name: str) -> dict[str, str]:
    """An argument that is another node."""
    return {"node": name}


def call(name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A node that calls something."""
    op = "call_method" if target.startswith("method:") else "call_function"
    given = {"args": {"tuple": list(args)}, "kwargs": {"dict": [[key, value] for key, value in kwargs.items()]}}
    return {"name": name, "op": op, "target": target, **given, "expected": None, "source": None, "stack": None}


def body(inputs: Sequence[str], calls: Sequence[dict[str, Any]], returned: Any) -> dict[str, Any]:
    """A graph that a higher-order operator calls."""
    output = {**call("output", "output", returned), "op": "output"}
    nodes = [*({**call(name, name), "op": "placeholder"} for name in inputs), *calls, output]
    return {"nodes": nodes, "subgraphs": {}, "constants": {}}


def dumped_relu(folder: Path) -> Path:
    """The dump of a graph with one relu, and of its input's values."""

    def relu(x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    torch._dynamo.reset()
    dumping(relu, folder)(torch.randn(4, 3))
    return dumps(folder)["relu_dynamo_0"]


def forged(
    original: Path,
    folder: Path,
    calls: Sequence[dict[str, Any]],
    returned: Sequence[str] = (),
    bodies: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> Path:
    """A copy of a dump that calls something else with its inputs, and returns the last result unless told."""
    dump = Path(shutil.copytree(original, folder))

    def change(document: dict[str, Any]) -> None:
        inputs = [one for one in document["graph"]["nodes"] if one["op"] == "placeholder"]
        inputs += [{**call(name, name), "op": "get_attr"} for name in bodies]
        document["graph"]["subgraphs"] = dict(bodies)
        output = {**call("output", "output"), "op": "output"}
        output["args"] = {"tuple": [{"tuple": [node(name) for name in returned or (calls[-1]["name"],)]}]}
        document["graph"]["nodes"] = [*inputs, *calls, output]

    edit(dump / "graph.json", change)
    return dump


def replayed(dump: Path, *words: str, verb: str = "replay", folder: Path | None = None) -> tuple[int, str, str]:
    """Replay a dump in a fresh process: the exit code, and what it printed."""
    done = python("-m", "checked_backend", verb, dump, *words, folder=folder or dump.parent, module_path=PACKAGE)
    return done.returncode, done.stdout, done.stderr
