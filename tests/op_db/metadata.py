"""Every sample of ``op_db`` through the metadata checks.

A sample is traced with `make_fx` on fake tensors, and the graph runs with all checks. One line per operator:
``mismatches`` (real metadata bugs of torch), ``errors`` (this package raised where the bare graph did not: always a bug
here), ``untraceable`` (torch itself cannot trace it), ``killed`` (the bare graph kills its process, or hangs: a bug of
one of torch's kernels) and ``ran``.
"""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from checked_backend.findings import Finding
from checked_backend.metadata.interpreter import MetadataInterpreter
from checked_backend.process.job import JobEnd
from checked_backend.process.worker import run_in_worker

from .entries import name_of, operators
from .results import append, read

SECONDS_PER_SAMPLE, SECONDS_PER_OPERATOR = 60, 1200
Run = Callable[[Any, Any], tuple[str, str, list[dict[str, Any]]]]
KNOWN = Path(__file__).parent / "known_metadata_bugs.json"


def layouts(sample: Any) -> Iterator[Any]:
    """The sample as it is, and in channels_last where that says something."""
    yield sample
    pictures = [leaf for leaf in tree_flatten((sample.input, sample.args, sample.kwargs))[0] if _is_picture(leaf)]
    if pictures:
        yield sample.transform(lambda leaf: leaf.to(memory_format=torch.channels_last) if _is_picture(leaf) else leaf)


def _is_picture(leaf: Any) -> bool:
    plain = isinstance(leaf, torch.Tensor) and leaf.ndim == 4 and leaf.layout is torch.strided
    return plain and leaf.shape[1] > 1 and leaf.numel() > 0


def run_sample(info: Any, sample: Any, *, bare: bool = False) -> tuple[str, list[Finding] | str]:
    """Trace and run one sample, with its gradients: ``ran`` and findings, or ``untraceable`` or ``errors`` and why.

    ``bare``: the graph runs without this package.
    """
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i].detach().clone() for i in places]

    def call(*given: torch.Tensor) -> Any:
        values = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            values[place] = tensor
        first, args, kwargs = tree_unflatten(values, spec)
        return info.op(first, *args, **kwargs)

    def call_with_gradients(*given: torch.Tensor) -> Any:
        with torch.enable_grad():
            free = [tensor.detach().requires_grad_(_differentiable(tensor)) for tensor in given]
            results = call(*free)
            outputs = [out for out in tree_flatten(results)[0] if isinstance(out, torch.Tensor) and out.requires_grad]
            inputs = [tensor for tensor in free if tensor.requires_grad]
            grads = torch.autograd.grad(outputs, inputs, list(map(torch.ones_like, outputs)), allow_unused=True)
        return results, grads

    state, reason = torch.get_rng_state(), ""
    with torch.no_grad():
        for function in (call_with_gradients, call) if info.supports_autograd else (call,):
            try:
                torch.set_rng_state(state)
                gm = make_fx(function, tracing_mode="fake")(*tensors)
                torch.set_rng_state(state)
                gm.forward(*[tensor.clone() for tensor in tensors])
                break
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:200]
        else:
            return "untraceable", reason
        found: list[Finding] = []
        if bare:
            return "ran", found
        torch.set_rng_state(state)
        try:
            MetadataInterpreter(gm, "inference", found.extend)([tensor.clone() for tensor in tensors])
        except Exception as error:
            return "errors", f"{type(error).__name__}: {error}"[:500]
    return "ran", found


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _told(info: Any, sample: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """The outcome of a sample, why, and its mismatches."""
    outcome, result = run_sample(info, sample)
    if isinstance(result, str):
        return outcome, result, []
    return outcome, "", [_mismatch(finding) for finding in result if not finding.evidence["inherited"]]


def _mismatch(finding: Finding) -> dict[str, Any]:
    return {
        "op": finding.op,
        "detail": finding.detail,
        "output": finding.subject.partition("]")[2].strip("[]"),
        "recorded": finding.expected,
        "ran": finding.actual,
        "fault": str(finding.evidence.get("at_fault", "")).replace(_SITE, ""),
    }


def _told_alone(info: Any, sample: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """The same in a process of its own, and whose fault it is if that dies."""
    told = run_in_worker(lambda: json.dumps(_told(info, sample)), timeout=SECONDS_PER_SAMPLE)
    if not isinstance(told, JobEnd):
        outcome, reason, mismatches = json.loads(told)
        return outcome, reason, mismatches
    bare = run_in_worker(lambda: run_sample(info, sample, bare=True)[0], timeout=SECONDS_PER_SAMPLE)
    return ("killed" if isinstance(bare, JobEnd) else "errors"), told.words, []


def sweep_operator(info: Any, limit: int | None, run: Run = _told) -> dict[str, Any]:
    """All samples of one operator."""
    torch.manual_seed(0)
    counts: Counter[str] = Counter()
    mismatches: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for number, sample in enumerate(info.sample_inputs("cpu", torch.float32, requires_grad=False)):
        if limit is not None and number >= limit:
            break
        for variant in layouts(sample):
            outcome, reason, told = run(info, variant)
            counts[outcome] += 1
            if reason:
                reasons.setdefault(outcome, reason)
            for mismatch in told:
                key = f"{mismatch['op']} {mismatch['detail']} {mismatch['output']}"
                mismatches.setdefault(key, {**mismatch, "sample": number})
    return {"name": name_of(info), **counts, "mismatches": list(mismatches.values()), "reasons": reasons}


def _sweep_in_worker(info: Any, limit: int | None) -> dict[str, Any]:
    """All samples in one other process; if that dies, each in its own."""
    told = run_in_worker(lambda: json.dumps(sweep_operator(info, limit)), timeout=SECONDS_PER_OPERATOR)
    if isinstance(told, JobEnd):
        return sweep_operator(info, limit, _told_alone)
    return json.loads(told)


_SITE = str(Path(torch.__file__).parent.parent) + "/"


def sweep(path: Path, *, seconds: float, samples: int | None = None, every: int = 1) -> Iterator[dict[str, Any]]:
    """Go on where the file ends, until the time is up, with every k-th operator and so many samples of each."""
    done, began = {result["name"] for result in read(path)}, time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in operators()[::every]:
            if name_of(info) in done:
                continue
            if time.monotonic() - began > seconds:
                return
            result = _sweep_in_worker(info, samples)
            append(path, result)
            yield result


def interesting(result: dict[str, Any]) -> bool:
    """Whether a person would want to see it now."""
    return bool(result["mismatches"] or result.get("errors"))


def summary(path: Path) -> str:
    """How far the sweep is, and what came out."""
    totals = Counter[str]()
    names = set()
    for result in read(path):
        names.add(result["name"])
        totals.update({key: result.get(key, 0) for key in ("ran", "untraceable", "killed", "errors")})
    return f"{len(names)} of {len(operators())} operators; samples: {dict(totals)}"


def document(path: Path) -> dict[str, Any]:
    """What was found, as the list that the tests go by."""
    results = {result["name"]: result for result in read(path)}
    return {"torch": torch.__version__.partition("+")[0], "dtype": "float32", "bugs": known_bugs(results)}


def known_bugs(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The mismatches of all results, each operator and detail once, with the entries of ``op_db`` that show it."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name in sorted(results):
        for mismatch in results[name]["mismatches"]:
            key = (mismatch["op"], mismatch["detail"], mismatch["output"])
            entry = {k: v for k, v in mismatch.items() if k != "sample"}
            found.setdefault(key, {**entry, "shown_by": []})["shown_by"].append(name)
    return [found[key] for key in sorted(found)]
