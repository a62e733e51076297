"""Dump real programs with their values, show them, replay them, and run their repros where only torch is importable.

    python tests/dump/sweep_replay.py results.json [--only bert,cond]

A program passes if, for each graph of it, ``show`` and ``replay --compiler aot_eager`` exit with 0, what ``repro.py``
computes in a fresh process is bit for bit what the loaded dump computes here, and the outputs and gradients that the
user's program had are among what the graphs compute. What a dump says it cannot hold is listed as ``refused``. A later
run goes on where the file ends.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[2]))

import checked_backend as cb
from checked_backend.cli import verbs as cli
from tests.support.dump_tools import dumps, run, same, same_leaf
from tests.support.replayed_programs import PROGRAMS, Replayed


def main() -> None:
    """Sweep, print a line for each program, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="these programs, though the file has them")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(chosen.results.read_text()) if chosen.results.exists() else {}
    only = [name for name in chosen.only.split(",") if name]
    for name in only or [name for name in PROGRAMS if name not in results]:
        began = time.monotonic()
        recurrent = torch._dynamo.config.patch(allow_rnn=True)  # else Dynamo leaves nn.LSTM and nn.GRU in Python
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), recurrent:
            warnings.simplefilter("ignore")
            try:
                results[name] = replay_program(name, Path(folder))
            except Exception:
                results[name] = {"problems": [traceback.format_exc(limit=-3)]}
        chosen.results.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {time.monotonic() - began:.0f} s {json.dumps(results[name])}", flush=True)
    failed = [name for name, result in results.items() if result["problems"]]
    print(f"{len(results) - len(failed)} of {len(results)} programs pass; the others: {failed}")


def replay_program(name: str, root: Path) -> dict[str, Any]:
    """One program: the kinds of its graphs, and what was wrong."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    program = PROGRAMS[name]()
    outputs, gradients = _run_user(program, root)
    found = dumps(root)
    problems = [] if found else ["nothing was dumped"]
    told = _alone(list(found.values()))
    if told[-1].get("foreign") != []:
        problems.append(f"more than torch was imported: {told[-1]}")
    computed: dict[str, list[Any]] = {"backward": []}
    refused: dict[str, list[str]] = {}
    for (title, path), alone in zip(found.items(), told, strict=False):
        dump = cb.load_dump(path)
        others = [entry["value"] for entry in dump.metadata["inputs"]["inputs"] if entry["type"] == "other"]
        if dump.metadata["unsupported"] or others:
            refused[title] = [*dump.metadata["unsupported"], *others]
            continue
        here = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in run(dump)]
        computed.setdefault(dump.kind, []).extend(here)
        problems += [f"{title}: {problem}" for problem in _compare_alone(path, alone, here, dump)]
        problems += [f"{title}: {problem}" for problem in _command_line(path, dump)]
    for kind in computed.keys() & {"dynamo", "forward", "inference"}:
        same_as = _near if kind == "dynamo" else same_leaf  # AOT autograd may compute with a decomposition instead
        missing = [leaf for leaf in outputs if not any(same_as(leaf, other) for other in computed[kind])]
        single = sum(title.count("_dynamo_") for title in found) == 1
        # some of several regions may have no output
        if missing and not refused and (single or kind == "dynamo"):
            problems.append(f"{len(missing)} of {len(outputs)} outputs are not what the {kind} graphs compute")
    # autograd gives a gradient the strides of its parameter
    regained = [leaf.contiguous() for leaf in computed["backward"] if isinstance(leaf, torch.Tensor)]
    missing = [leaf for leaf in gradients if not any(same_leaf(leaf.contiguous(), other) for other in regained)]
    if missing and sum(title.count("_backward_") for title in found) == 1:
        problems.append(f"{len(missing)} of {len(gradients)} gradients are not what the backward graph computes")
    counts = {"graphs": len(found), "outputs": len(outputs), "gradients": len(gradients)}
    return {**counts, "refused": refused, "problems": problems}


def _run_user(program: Replayed, root: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    os.environ.update(CHECKED_BACKEND_DUMP=str(root), CHECKED_BACKEND_DUMP_VALUES="1")
    try:
        compiled = torch.compile(program.function, backend="graph_dumper", dynamic=program.dynamic)
        with torch.set_grad_enabled(program.train):
            returned = compiled(*program.args, **program.kwargs)
            outputs = [leaf for leaf in _leaves(returned) if isinstance(leaf, torch.Tensor)]
            kept = [leaf.detach().clone(memory_format=torch.preserve_format) for leaf in outputs]
            roots = [leaf for leaf in outputs if leaf.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    finally:
        del os.environ["CHECKED_BACKEND_DUMP"], os.environ["CHECKED_BACKEND_DUMP_VALUES"]
    module = program.function if isinstance(program.function, torch.nn.Module) else torch.nn.Module()
    owners = [*module.parameters(), *(arg for arg in program.args if isinstance(arg, torch.Tensor))]
    return kept, [owner.grad for owner in owners if owner.grad is not None]


def _near(leaf: torch.Tensor, other: Any) -> bool:
    if same_leaf(leaf, other):
        return True
    alike = isinstance(other, torch.Tensor) and (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
    return alike and leaf.is_floating_point() and torch.allclose(leaf, other, rtol=1e-5, atol=1e-6)


def _leaves(returned: Any) -> list[Any]:
    return pytree.tree_leaves(dict(returned) if hasattr(returned, "keys") else returned)


def _alone(folders: list[Path]) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "only_torch.py"), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return lines if done.returncode == 0 else [*lines, {"foreign": done.stderr[-500:]}]


def _compare_alone(path: Path, alone: dict[str, Any], here: list[Any], dump: cb.Dump) -> list[str]:
    if alone.get("outcome") != "ran":
        needs = dump.metadata["requires"]
        if any(name.partition(".")[0] in alone.get("outcome", "") for name in needs):
            return []  # it says what else it needs; the dump was replayed above, where that is imported
        return [f"repro.py: {alone}"]
    outputs = torch.load(path / "outputs.pt", weights_only=True)
    return [] if same(here, outputs) else ["repro.py does not compute the same bits as the loaded dump"]


def _command_line(path: Path, dump: cb.Dump) -> list[str]:
    problems = []
    # a replay calls no operators but torch's unless it is told whose
    trusted = [word for name in dump.metadata["requires"] for word in ("--import", name)]
    for words in (["show", path], ["replay", path, "--compiler", "aot_eager", *trusted]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main([str(word) for word in words])
            except SystemExit as ended:
                code = ended.code
        if code != 0 or err.getvalue():
            problems.append(f"{words[0]} exits with {code}: {err.getvalue()[-400:]} {out.getvalue()[-1200:]}")
    return problems


if __name__ == "__main__":
    main()
