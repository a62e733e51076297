"""Mutated dumps, run in a child process under an audit hook: they are used or refused, and reach nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import checked_backend as cb
from checked_backend.dump import rehearse, render_dump
from checked_backend.process.child import Limits, Noticeboard, confined
from tests.dump.test_hostile_mutations import mutate, originals
from tests.support.dump_tools import edit

__all__ = ["originals"]

USED, REFUSED, WRONG, REACHED = 0, 3, 4, 5
REACHING = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.remove", "os.rename", "os.symlink", "os.mkdir")
REACHING += ("subprocess.Popen", "ctypes.dlopen", "socket.connect", "shutil.", "pty.spawn", "pickle.find_class")


def use(dump: Path, board: Noticeboard) -> int:
    def hook(event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(given[1], str) and set(given[1]) & set("wax+")
        strange = event == "open" and str(given[0]).startswith(("/etc", "/proc/self/mem", "~"))
        if event.startswith(REACHING) or writes or strange:
            board.note(f"reached {event} {given!r}"[:500])
            os._exit(REACHED)

    sys.addaudithook(hook)
    try:
        loaded = cb.load_dump(dump, registered=())
        render_dump(loaded)
        rehearse(loaded)
    except cb.DumpError as error:
        board.note(str(error)[:500])
        return REFUSED if str(error).startswith(str(dump)) else WRONG
    except Exception as error:
        board.note(f"{type(error).__name__}: {error}"[:500])
        return WRONG
    return USED


@pytest.mark.process
@pytest.mark.parametrize("count", [40, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(0)])])
def test_a_mutated_dump_runs_nothing_and_kills_nobody(originals: list[Path], count: int) -> None:
    seen: dict[int, int] = {}

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**64), st.sampled_from(["graph.json", "inputs.json"]), st.integers(1, 3))
    def mutated(seed: int, file: str, changes: int) -> None:
        chance = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            dump = Path(shutil.copytree(chance.choice(originals), Path(folder) / "dump"))
            done: list[Any] = []
            for _ in range(changes):
                edit(dump / file, lambda document: done.append(mutate(document, chance)))
            if file == "graph.json":
                checksum = json.loads((dump / "graph.json").read_text())["checksum"]
                edit(dump / "inputs.json", lambda document: document.update(graph=checksum))
            ended = confined(lambda board: use(dump, board), Limits(60, 4 << 30))
        seen[ended.status] = seen.get(ended.status, 0) + 1
        # a kernel that dies, dies alone; but nothing that is refused may be refused without saying where
        assert ended.status in (USED, REFUSED), f"{done}: {ended}"

    mutated()
    print(seen)
    assert seen[REFUSED]
