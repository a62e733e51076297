"""Dumps whose JSON was changed anywhere, with checksums that fit, are used in a child process under an audit hook.

Each is used, or refused with a `DumpError`, and reaches nothing.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.dump import rehearse, render_dump
from checked_backend.process.job import AnswerFolder, Job, JobResources, run
from tests.support.dump_tools import dumping, dumps, edit

JUNK: list[Any] = [
    *(None, True, 0, -1, 2**31, 2**63, -(2**70), 1.5, 1e308, "", "x", "../../x", "a\nb", "\x1b[2J", "\ud800", "self"),
    *("__class__", "import", "torch", "op:aten.add.Tensor", "function:operator:add", "method:view", "call_module"),
    *([], [1], [[]], {}, {"a": 1}, {"tuple": 5}, {"dict": 5}, {"dict": [[1]]}, {"node": []}, {"node": "x"}),
    *({"slice": [1]}, {"complex": ["x", 1]}, {"float": "nan"}, {"dtype": "load"}, {"dtype": "float32"}),
    *({"size": ["a"]}, {"device": "nowhere"}, {"device": 5}, {"target": "op:aten.add.Tensor"}, {"target": 5}),
    {"layout": "strided"},
    *({"tensor": 5}, {"tensor": {"symbolic": {"shape": 5}}}, {"symbol": []}, {"items": 5}, {"items": [{"items": [1]}]}),
]


USED, WRONG, REACHED = 0, 4, 5
REACHING = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.remove", "os.rename", "os.symlink", "os.mkdir")
REACHING += ("subprocess.Popen", "ctypes.dlopen", "socket.connect", "shutil.", "pty.spawn", "pickle.find_class")
BATCH = 20


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
        y = self.linear(x).relu() + torch.tensor([1.0, 2.0])
        return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,)), i[1:] * 2, x.shape[0]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("originals")
    torch._dynamo.reset()
    dumping(Net(), folder, dynamic=True)(torch.randn(4, 3), torch.arange(5))[0].sum().backward()
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


def watch(answers: AnswerFolder) -> None:
    """End this process where something reaches out of it."""

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if given and str(given[0]).startswith(str(answers.path)):
            return
        writes = event == "open" and isinstance(given[1], str) and set(given[1]) & set("wax+")
        strange = event == "open" and str(given[0]).startswith(("/etc", "/proc/self/mem", "~"))
        if event.startswith(REACHING) or writes or strange:
            answers.note(f"{answers.stage()[2]}: reached {event} {given!r}"[:700])
            os._exit(REACHED)

    sys.addaudithook(hook)


def use(dumps: dict[Path, Any], answers: AnswerFolder) -> int:
    """Load, show and run each dump, and note how often one was refused."""
    watch(answers)
    refused = 0
    for dump, changes in dumps.items():
        answers.note(f"{refused} {changes!r}"[:500])
        try:
            loaded = cb.load_dump(dump, registered=())
            render_dump(loaded)
            _ = loaded.metadata
            rehearse(loaded)
        except cb.DumpError as error:
            refused += 1
            if not str(error).startswith(str(dump)):
                answers.note(f"{changes!r}: refused without its file: {error}"[:700])
                return WRONG
        except Exception as error:
            answers.note(f"{changes!r}: {type(error).__name__}: {error}"[:700])
            return WRONG
    answers.note(str(refused))
    return USED


@pytest.mark.process
@pytest.mark.parametrize("batches", [15, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(0)])])
def test_a_changed_dump_is_used_or_refused_and_kills_nobody(
    originals: list[Path], tmp_path: Path, batches: int
) -> None:
    refused = 0
    for batch in range(batches):
        changed: dict[Path, Any] = {}
        for number in range(BATCH):
            chance = random.Random(batch * BATCH + number)
            dump = Path(shutil.copytree(chance.choice(originals), tmp_path / f"{batch}_{number}"))
            file, done = chance.choice(["graph.json", "inputs.json"]), changed.setdefault(dump, [])
            for _ in range(chance.randint(1, 3)):
                edit(dump / file, lambda document, done=done, chance=chance: done.append(mutate(document, chance)))
        ended = run(Job(partial(use, changed), seconds=60), JobResources(memory=4 << 30))
        assert ended.exit == USED, ended
        refused += int(ended.stage)
        for dump in changed:
            shutil.rmtree(dump)
    assert 0 < refused < batches * BATCH
