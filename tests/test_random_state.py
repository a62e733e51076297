"""Random numbers after a check are those of an unchecked run: Python's, NumPy's and torch's, first call included."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import checked_backend as cb
from checked_backend.random_state import random_untouched

PROGRAM = """
import hashlib, json, os, random, sys
import numpy as np
import torch, torch._dynamo

def net(x):
    return torch.nn.functional.dropout(torch.relu(x), 0.5) * 2

def wrong(gm, example_inputs):  # a backend with a wrong result, made of nothing but torch
    return lambda *args: tuple(out * 1.5 if torch.is_tensor(out) else out for out in gm(*args))

def drawn():
    numbers = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    return [hashlib.sha256(repr(stream).encode()).hexdigest()[:12] for stream in numbers]

def run(backend, **options):
    compiled = torch.compile(net, backend=backend, **({"options": options} if options else {}))
    compiled(torch.ones(4, requires_grad=True)).sum().backward()

def check(**how):
    import checked_backend as cb
    before = torch.get_rng_state()
    cb.check(net, (torch.ones(4, requires_grad=True),), **how)
    assert torch.equal(before, torch.get_rng_state())
    run("aot_eager")

def show():
    import checked_backend as cb
    with cb.collect() as session:
        run("numcheck", compiler="aot_eager", on_divergence="record")
    str(session.report), session.report.to_json(), session.report.to_html()

folder = sys.argv[1]
localized = {"compiler": wrong, "on_divergence": "record", "report_dir": folder}
WAYS = {
    "unchecked": lambda: run("aot_eager"),
    "nop": lambda: run("nop"),
    "debug_interpreter": lambda: run("debug_interpreter"),
    "graph_dumper": lambda: run("graph_dumper", dump=folder, dump_values=True),
    "numcheck": lambda: run("numcheck", compiler="aot_eager"),
    "dumping": lambda: run("numcheck", compiler="aot_eager", dump=folder + "/dumps", dump_values=True),
    "localizing": lambda: run("numcheck", **localized),
    "check": lambda: check(compiler="aot_eager"),
    "isolated": lambda: check(compiler="aot_eager", isolate=True),
    "a report": show,
}
for name in ("unchecked", *sys.argv[2:]):
    way = WAYS[name]
    receiver, sender = os.pipe()
    child = os.fork()  # each way is the first to import what it needs
    if child == 0:
        try:
            random.seed(1), np.random.seed(1), torch.manual_seed(1)
            way()
            os.write(sender, json.dumps([name, drawn()]).encode() + b"\\n")
        finally:
            os._exit(0)
    os.close(sender)
    os.waitpid(child, 0)
    print(os.read(receiver, 10**6).decode() or json.dumps([name, "died"]), flush=True)
"""


def drawn(folder: Path, *ways: str) -> dict[str, list[str]]:
    """What is left of each stream, by what was done in a process of its own."""
    path = os.pathsep.join([str(Path(cb.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *ways],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines, done.stderr
    return dict(json.loads(line) for line in lines)


def agree(streams: dict[str, list[str]]) -> None:
    names = ("python", "numpy", "torch")
    wanted = dict(zip(names, streams.pop("unchecked"), strict=True))
    assert {way: dict(zip(names, left, strict=True)) for way, left in streams.items()} == dict.fromkeys(streams, wanted)


@pytest.mark.process
@pytest.mark.parametrize(
    "ways",
    [
        ("numcheck", "check"),
        pytest.param(("nop", "debug_interpreter", "graph_dumper", "a report"), marks=pytest.mark.slow),
        pytest.param(("dumping", "localizing", "isolated"), marks=pytest.mark.slow),
    ],
    ids=["checks", "others", "with other processes"],
)
def test_the_streams_are_those_of_an_unchecked_run(ways: tuple[str, ...], tmp_path: Path) -> None:
    streams = drawn(tmp_path, *ways)
    assert set(streams) == {"unchecked", *ways}
    agree(streams)


def test_a_block_leaves_no_trace_also_when_it_raises() -> None:
    wanted = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    def draw() -> None:
        random.random(), np.random.rand(), torch.rand(1)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"), random_untouched():
        draw()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == wanted


@torch.library.custom_op("checked_backend_tests::host_noise", mutates_args=())
def host_noise(x: torch.Tensor) -> torch.Tensor:
    """An operator that draws from Python's and NumPy's streams."""
    return x * random.random() + float(np.random.rand())


@host_noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_that_draws_on_the_host_draws_the_same_on_both_sides() -> None:
    x = torch.ones(3)
    left, results = [], []
    for backend, options in (("aot_eager", None), ("numcheck", {"compiler": "aot_eager"})):
        random.seed(3)
        np.random.seed(3)
        torch._dynamo.reset()
        compiled = torch.compile(host_noise, backend=backend, options=options)
        with cb.collect() as session:
            results.append([compiled(x) for _ in range(3)])
        left.append((random.random(), float(np.random.rand())))
    assert session.report.verdict is cb.Verdict.PASS, str(session.report)
    assert left[0] == left[1]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
