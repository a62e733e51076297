"""Plant faults inside Inductor, let numcheck look for them, and tell how often it names the planted operator.

    python tests/diagnose/localize/sweep_planted.py results.jsonl [--quick] [--seconds 600] [--only relu] [--on bert]
    python tests/diagnose/localize/sweep_planted.py results.jsonl --on models

Each fault is planted in a process of its own and, through ``everywhere/sitecustomize.py``, in every process that this
one starts, so that repros are confirmed under the same fault. Results are kept line by line, and a later run goes on.
``--quick`` only looks for the operator: nothing is reduced and no repro is written. ``--on models`` plants each fault
under one model that has its operator. ``--patience 4`` allows four times the seconds, on a machine that others use.

``planted_quick.jsonl`` is what ``python tests/diagnose/localize/sweep_planted.py planted_quick.jsonl --quick`` gave
with torch 2.13.0 on two cores (and, for a few faults, ``--on bert``); the seconds are those of a busy machine.

``planted_full.jsonl`` is what ``python tests/diagnose/localize/sweep_planted.py planted_full.jsonl --on models,small
--patience 4`` gave, with repros and without workarounds, on a machine that others used: so its seconds say little. A
fault that was missed and is ``harmless`` changes no bit of the model's results and gradients.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[3]))

from checked_backend import collect, numcheck
from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.inductor import warm_inductor
from checked_backend.diagnose.localize import Location, locate
from checked_backend.diagnose.oracle import gross_error_oracle, verdict_oracle
from checked_backend.findings import Finding
from checked_backend.options import CheckOptions
from checked_backend.process.job import JobEnd
from checked_backend.process.worker import run_in_worker
from checked_backend.regions.build import build_region
from checked_backend.regions.failure import Failure
from tests.support import models
from tests.support.planted import FAULTS, PLANTED, planted
from tests.support.programs import PROGRAMS

EVERYWHERE = Path(__file__).parent / "everywhere"
MODELS: dict[str, Callable[[], models.Case]] = {
    "bert": partial(models.bert_masked_lm, "eager", 0.0, 1),
    "gpt2": partial(models.gpt2_lm, "eager", 0.0, 1),
    "resnet": models.resnet,
    "vit": partial(models.vit_classifier, "eager", 0.0, 1),
}
HOMES: dict[str, tuple[str, ...]] = {
    "bert": (
        *("addmm", "gelu", "_softmax", "native_layer_norm", "embedding_dense_backward", "native_layer_norm_backward"),
        *("bmm", "gather", "erf", "where", "sum", "embedding", "_log_softmax_backward_data"),
    ),
    "gpt2": (
        *("tanh", "cumsum", "cat", "tanh_backward", "index", "mm", "slice", "constant_pad_nd", "div", "exp"),
        "tanh_fused",
    ),
    "resnet": (
        *("convolution_backward", "_native_batch_norm_legit_functional", "inject_relu", "threshold_backward", "mean"),
        *("max_pool2d_with_indices_backward", "convolution", "scatter_add", "max_pool2d_with_indices", "amax", "copy_"),
        "rsqrt",
    ),
    "vit": (
        *("select_scatter", "gelu_backward", "permute", "cat", "_softmax_backward_data", "any", "var_mean", "select"),
        *("_log_softmax", "nll_loss_backward", "_to_copy", "convert"),
    ),
}
"""A model for each fault whose operator Inductor meets in one of them."""
TIME_LIMIT = 420.0


def main() -> None:
    """Sweep and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--only", default="", help="faults, by comma; all if not given")
    parser.add_argument("--on", default="small", help=f"programs, by comma: small, models, {', '.join(MODELS)}")
    parser.add_argument("--quick", action="store_true", help="only look for the operator")
    parser.add_argument("--patience", type=float, default=1.0, help="so many times the usual seconds")
    options = parser.parse_args()
    _be_patient(options.patience)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    end = time.monotonic() + options.seconds
    known = {(line["fault"], line["on"]) for line in _lines(options.results)}
    warm_inductor()
    names = options.only.split(",") if options.only else [*FAULTS]
    for name, on in _pairs(names, options.on.split(",")):
        if (name, on) in known or time.monotonic() > end:
            continue
        result = one(name, on, quick=options.quick)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(_row(result), flush=True)
    print(_summary(_lines(options.results)))


def _pairs(names: Sequence[str], on: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Faults and the programs they are planted under; the models in turn, so that a part of a sweep has of each."""
    if "models" in on:
        in_turn = itertools.zip_longest(*([(name, model) for name in homes] for model, homes in HOMES.items()))
        yield from (pair for pairs in in_turn for pair in pairs if pair is not None and pair[0] in names)
    yield from ((name, program) for name in names for program in on if program != "models")


def _be_patient(times: float) -> None:
    global TIME_LIMIT
    TIME_LIMIT *= times
    module = sys.modules["checked_backend.diagnose.investigate"]
    for limit in ("TIME_LIMIT", "CASE_LIMIT", "REDUCTION_LIMIT", "LEAST_SCRIPT_LIMIT"):
        setattr(module, limit, getattr(module, limit) * times)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def one(name: str, on: str, *, quick: bool) -> dict[str, Any]:
    """Plant one fault under one program, and tell what was found."""
    start = time.monotonic()
    about = {"fault": name, "on": on, "family": FAULTS[name].family, "planted": FAULTS[name].operator}
    with tempfile.TemporaryDirectory() as folder:
        work = partial(_hunt, name, on, Path(folder), quick=quick)
        try:
            answer = run_in_worker(work, timeout=TIME_LIMIT)
        except Exception as error:
            return {**about, "error": str(error)[:500]}
    if isinstance(answer, JobEnd):
        return {**about, "error": answer.words}
    found = json.loads(answer)
    return {**about, **found, "right": names_it(found.get("op"), name), "seconds": round(time.monotonic() - start, 1)}


def names_it(op: str | None, name: str) -> bool:
    """Whether an operator that was named is that of a fault."""
    return any(_packet(op) == known for known in _names(name))


def _names(name: str) -> list[str]:
    return [known.rstrip("_") for known in FAULTS[name].names]


def _packet(op: str | None) -> str:
    """``relu`` of ``aten.relu_.default``, ``Tensor.relu`` or ``torch.relu``."""
    steps = (op or "").split(".")
    return (steps[1] if steps[0] in ("aten", "prims") and len(steps) > 1 else steps[-1]).rstrip("_")


def _hunt(name: str, on: str, folder: Path, *, quick: bool) -> str:
    """In the worker: plant, run, and tell what was found."""
    os.environ[PLANTED] = name
    os.environ["PYTHONPATH"] = os.pathsep.join([str(EVERYWHERE), os.environ.get("PYTHONPATH", "")])
    os.environ["CI"] = ""
    torch.manual_seed(0)
    told: dict[str, Any] = {}
    with planted(name), without_compile_caches(), collect() as session:
        if quick:
            backend: Any = partial(_region, told=told, folder=folder)
            _run(on, name, lambda target: torch.compile(target, backend=backend))
        else:
            options = {"on_divergence": "record", "report_dir": str(folder)}
            _run(on, name, lambda target: torch.compile(target, backend=numcheck, options=options))
    if quick:
        return json.dumps(told or {"missed": [str(one.kind) for one in session.report.findings]})
    failing = [finding for finding in session.report.findings if finding.kind.fails]
    return json.dumps(_described(failing[0]) if failing else {"missed": "numcheck found nothing", **_harm(on, name)})


def _harm(on: str, name: str) -> dict[str, bool]:
    """Whether a fault that was not found changes any bit of the results and gradients."""

    def results() -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return _run(on, name, torch.compile)

    with without_compile_caches():
        with planted(name):
            wrong = results()
        return {"harmless": all(map(torch.equal, wrong, results()))}


def _run(on: str, name: str, compile_it: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Run forward and backward; results and gradients."""
    if on in MODELS:
        case = MODELS[on]()
        loss = case.loss(compile_it(case.model)(**case.inputs))
        loss.backward()
        return [loss.detach(), *(one.grad for one in case.model.parameters() if one.grad is not None)]
    program = PROGRAMS[name]
    compiled, inputs = compile_it(program.run), program.inputs()
    with torch.set_grad_enabled(program.train):
        results = [one for one in pytree.tree_leaves(compiled(*inputs)) if isinstance(one, torch.Tensor)]
    if program.train:
        torch.autograd.backward([(one * torch.arange(one.numel()).reshape(one.shape).cos()).sum() for one in results])
    leaves = [one for one in inputs if isinstance(one, torch.Tensor)]
    return [*results, *leaves, *(one.grad for one in leaves if one.grad is not None)]


def _region(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, told: dict[str, Any], folder: Path) -> Any:
    def investigator(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        if not told:
            location = locate(
                failure,
                findings,
                lambda case: _failing(verdict_oracle(case, 60)),
                gross=lambda case: gross_error_oracle(case, 60) or (),
            )
            told.update(_located(location, findings))
        return findings

    options = CheckOptions(on_divergence="record", report_dir=folder)
    return build_region(gm, example_inputs, options, None, investigator=investigator, silent=True)


def _failing(findings: Sequence[Finding] | None) -> Sequence[Finding]:
    return [finding for finding in findings or () if finding.kind.fails]


def _located(location: Location, findings: Sequence[Finding]) -> dict[str, Any]:
    cut = None
    if location.cut is not None:
        cut = sum(node.op == "call_function" for node in location.cut.case.graph.graph.nodes)
    return {
        "op": location.op,
        "node": location.node and location.node.name,
        "stage": location.stage,
        "graph": location.graph,
        "cut": cut,
        "kinds": sorted({str(finding.kind) for finding in findings if finding.kind.fails}),
        "message": location.message[:300],
        "notes": [note[:300] for note in location.notes],
    }


def _described(finding: Finding) -> dict[str, Any]:
    text = ""
    if finding.repro is not None:
        text = Path(finding.repro).read_text("utf-8")
    evidence = {key: str(value)[:300] for key, value in finding.evidence.items()}
    return {
        "op": finding.op,
        "node": finding.node,
        "stage": finding.stage,
        "graph": finding.graph,
        "kinds": [str(finding.kind)],
        "calls": _calls(text),
        "confirmed": bool(text) and finding.repro_confirmed,
        "workaround": finding.workaround,
        "evidence": evidence,
    }


def _calls(script: str) -> int | None:
    """Statements of a repro's program that compute something: one for each call of its graph."""
    if not script:
        return None
    functions = [one for one in ast.parse(script).body if isinstance(one, ast.FunctionDef) and one.name == "program"]
    return sum(_computes(line) for function in functions for line in function.body) if functions else None


def _computes(line: ast.stmt) -> bool:
    computing = (ast.Call, ast.BinOp, ast.Compare, ast.UnaryOp, ast.Subscript)
    return any(isinstance(part, computing) for part in ast.walk(line))


def _row(result: dict[str, Any]) -> str:
    if "error" in result or "missed" in result:
        return f"{result['fault']:36} {result['on']:7} {result.get('error') or result['missed']}"
    size = result.get("calls", result.get("cut"))
    return (
        f"{result['fault']:36} {result['on']:7} {'right' if result['right'] else 'WRONG':6} {result['op']!s:44} "
        f"{result['stage']!s:12} {result['graph']!s:10} calls={size} confirmed={result.get('confirmed')} "
        f"{result['seconds']} s {'' if result['right'] else result.get('notes') or result.get('evidence')}"
    )


def _summary(lines: Sequence[dict[str, Any]]) -> str:
    shown = [line for line in lines if "missed" not in line and "error" not in line]
    harmless = sum(line.get("harmless", False) for line in lines)
    right = sum(line["right"] for line in shown)
    written = [line for line in shown if line.get("calls") is not None]
    small = sum(line["calls"] <= 5 and line["confirmed"] for line in written)
    return "\n".join(_told(lines, len(shown), harmless, right, len(written), small))


def _told(lines: Sequence[Any], shown: int, harmless: int, right: int, written: int, small: int) -> Iterator[str]:
    yield (
        f"{len(lines)} faults planted, {harmless} of them change no bit there, {shown} shown by numcheck, {right} of "
        "those rightly named"
    )
    if written:
        yield f"{written} repros, {small} of them confirmed and of at most 5 calls"


if __name__ == "__main__":
    main()
