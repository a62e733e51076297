"""Dumps: honest ones that are replayed, and those that a stranger has edited, which are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch

import checked_backend as cb
from checked_backend.cli import main
from checked_backend.dump import render_dump
from tests.dump.test_hostile import FILES, INPUT_EDITS
from tests.dump.test_hostile_replay import REFUSED
from tests.ledger.answer import Answer, Answers, Case, of_error, of_report
from tests.support.dump_tools import Net, dumps, edit
from tests.support.faults import interpreted
from tests.support.hostile_edits import GRAPH_EDITS
from tests.support.hostile_tools import call, dumped_relu, forged, node

_HONEST = [call("r", "op:aten.relu.default", node("l_x_"))]
_ENDLESS = [call("r", "function:math:factorial", 10**9)]


def cases() -> Iterator[Case]:
    """Edits that are refused when a dump is read, ones that are refused when it is replayed, and replays."""
    yield Case("dumps/edited graphs", partial(_edited, "graph.json", GRAPH_EDITS), quick=True)
    yield Case("dumps/edited inputs", partial(_edited, "inputs.json", INPUT_EDITS), quick=True)
    yield Case("dumps/damaged", _damaged, quick=True)
    yield Case("dumps/forged", _forged)
    yield Case("dumps/replayed", _honest)


def _dumped(folder: str = "original") -> dict[str, Path]:
    options = {"dump": folder, "dump_values": True}
    torch.compile(Net(), backend="graph_dumper", options=options)(torch.randn(4, 3)).sum().backward()
    return {path.name.split("_")[1]: path for path in dumps(Path(folder)).values()}


def _used(dump: Path) -> Answer:
    """What reading all of a dump gives."""
    try:
        loaded = cb.load_dump(dump)
        render_dump(loaded)
        loaded.inputs()
        with loaded.ambient():
            _ = loaded.module
    except Exception as error:
        accused = [file for file in FILES if str(dump / file) in str(error)]
        return {**of_error(error), "findings": [["refused", "refused", file] for file in accused]}
    return {"verdict": "loaded", "findings": []}


def _edited(file: str, edits: dict[str, tuple[Callable[[Any], Any], str]]) -> Answers:
    original, answers = _dumped()["forward"], {}
    for name, (change, _) in {"nothing": (lambda _: None, ""), **edits}.items():
        dump = Path(shutil.copytree(original, "edited"))
        edit(dump / file, change)
        answers[name] = _used(dump)
        shutil.rmtree(dump)
    return answers


_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "truncated": lambda data: data[:-3],
    "flipped": lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:],
    "nested": lambda _: b"[" * 100_000,
    "claims to be large": lambda data: (2**62).to_bytes(8, "little") + data,
}


def _damaged() -> Answers:
    original, answers = _dumped()["forward"], {}
    for file in FILES:
        for name, damage in _DAMAGE.items():
            dump = Path(shutil.copytree(original, "damaged"))
            (dump / file).write_bytes(damage((dump / file).read_bytes()))
            answers[f"{file}, {name}"] = _used(dump)
            shutil.rmtree(dump)
    return answers


def _forged() -> Answers:
    """Graphs that would leave their memory, or do not end: eager refuses them before a compiler sees them."""
    original = dumped_relu(Path("original"))
    calls = {"nothing": _HONEST, **{name: calls for name, (calls, _) in REFUSED.items()}, "does not end": _ENDLESS}
    return {
        name: _replayed(forged(original, Path(f"{number}"), given), "eager", "--timeout", "40")
        for number, (name, given) in enumerate(calls.items())
    }


wrong = interpreted(lambda node, value: value * 1.5 if node.name in ("addmm", "mm") else value, "aot")


def _honest() -> Answers:
    found = _dumped()
    return {
        f"{kind}, {name}": _replayed(dump, compiler)
        for kind, dump in found.items()
        for name, compiler in (("eager", "eager"), ("wrong", f"{__file__}:wrong"))
    }


def _replayed(dump: Path, compiler: str, *more: str) -> Answer:
    """What ``checked-backend replay`` gives."""
    out = StringIO()
    try:
        with redirect_stdout(out):
            main(["replay", str(dump), "--compiler", compiler, "--json", *more])
    except SystemExit as ended:
        answer = of_report(cb.Report.from_json(out.getvalue())) if out.getvalue() else {"verdict": "no report"}
        return {"findings": [], **answer, "verdict": f"exit {ended.code}, {answer['verdict']}"}
    raise AssertionError("it did not exit")
