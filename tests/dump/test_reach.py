"""Whatever a dump may call is tried: nothing of it imports, opens, writes, spawns or leaves its memory."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from checked_backend.dump.targets import functions
from tests.support.dump_tools import python

PROGRAM = Path(__file__).parents[1] / "support" / "reach_program.py"


def tried(part: int, parts: int, folder: Path) -> dict[str, Any]:
    done = python(PROGRAM, part, parts, folder=folder, module_path=Path(__file__).parents[2])
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.process
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 24))])
def test_nothing_that_a_dump_may_call_reaches_the_system(part: int, tmp_path: Path) -> None:
    told = tried(part, 24, tmp_path)
    assert told["reached"] == {}
    assert told["called"] > 100
    assert told["worked"] > 30
    assert os.listdir(tmp_path) == []


def test_no_callable_is_a_module_or_a_class_of_torch() -> None:
    plain = {bool, complex, float, int, list, range, slice, tuple, torch.Size}
    for name, function in functions().items():
        assert not inspect.ismodule(function), name
        assert not inspect.isclass(function) or function in plain, name
