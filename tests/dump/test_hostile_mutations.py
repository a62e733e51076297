"""A dump whose JSON was changed anywhere, with checksums that fit: it is used, or refused with a `DumpError`."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from checked_backend.dump import render_dump
from tests.support.dump_tools import dumps, edit

JUNK: list[Any] = [
    *(None, True, 0, -1, 2**31, 2**63, -(2**70), 1.5, 1e308, "", "x", "../../x", "a\nb", "\x1b[2J", "\ud800", "self"),
    *("__class__", "import", "torch", "op:aten.add.Tensor", "function:operator:add", "method:view", "call_module"),
    *([], [1], [[]], {}, {"a": 1}, {"tuple": 5}, {"dict": 5}, {"dict": [[1]]}, {"node": []}, {"node": "x"}),
    *(
        {"slice": [1]},
        {"complex": ["x", 1]},
        {"float": "nan"},
        {"dtype": "load"},
        {"dtype": "float32"},
        {"size": ["a"]},
    ),
    *({"device": "nowhere"}, {"device": 5}, {"target": "op:aten.add.Tensor"}, {"target": 5}, {"layout": "strided"}),
    *({"tensor": 5}, {"tensor": {"symbolic": {"shape": 5}}}, {"symbol": []}, {"items": 5}, {"items": [{"items": [1]}]}),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
        y = self.linear(x).relu() + torch.tensor([1.0, 2.0])
        return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,)), i[1:] * 2, x.shape[0]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("originals")
    torch._dynamo.reset()
    options = {"dump": str(folder), "dump_values": True}
    compiled = torch.compile(Net(), backend="graph_dumper", dynamic=True, options=options)
    compiled(torch.randn(4, 3), torch.arange(5))[0].sum().backward()
    return [path for name, path in sorted(dumps(folder).items()) if "joint" not in name]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def mutate(document: dict[str, Any], chance: random.Random) -> tuple[Any, ...]:
    """Replace, remove or add one value anywhere. What was done, for a message."""
    # the name of what is replaced first: else the thousands of strides and shapes leave no turn to the rest
    by_name: dict[Any, list[tuple[Any, ...]]] = {}
    for path in places(document):
        by_name.setdefault(next((step for step in reversed(path) if isinstance(step, str)), ""), []).append(path)
    path = chance.choice(by_name[chance.choice(sorted(by_name))])
    parent: Any = document
    for step in path[:-1]:
        parent = parent[step]
    junk, how = copy.deepcopy(chance.choice(JUNK)), chance.random()
    if how < 0.15:
        del parent[path[-1]]
        return (*path, "removed")
    if how < 0.25 and isinstance(parent, list):
        parent.append(junk)
    elif how < 0.25:
        parent[chance.choice(("x", "forward", "a.b", "tuple"))] = junk
    else:
        parent[path[-1]] = junk
    return (*path, junk)


def use(dump: Path) -> str:
    """Load, show, build inputs and graph: ``used``, ``refused``, or what else came out."""
    try:
        loaded = cb.load_dump(dump)
        render_dump(loaded)
        _ = loaded.metadata
        loaded.inputs()
        with loaded.ambient():
            _ = loaded.module
    except cb.DumpError as error:
        return "refused" if str(error).startswith(str(dump)) else f"refused without a file: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "used"


@pytest.mark.parametrize("file", ["graph.json", "inputs.json"])
@pytest.mark.parametrize("seed", range(4))
def test_a_changed_dump_is_used_or_refused(originals: list[Path], tmp_path: Path, file: str, seed: int) -> None:
    chance = random.Random(seed)
    used = 0
    for number in range(60):
        dump = Path(shutil.copytree(chance.choice(originals), tmp_path / str(number)))
        done: list[tuple[Any, ...]] = []
        edit(dump / file, lambda document, done=done: done.append(mutate(document, chance)))
        if file == "graph.json":
            checksum = json.loads((dump / "graph.json").read_text())["checksum"]
            edit(dump / "inputs.json", lambda document, checksum=checksum: document.update(graph=checksum))
        outcome = use(dump)
        assert outcome in ("used", "refused"), f"{done}: {outcome}"
        used += outcome == "used"
        shutil.rmtree(dump)
    assert used < 60
