"""Run every sample of torch's ``op_db`` through the metadata checks; results are kept, and a later run goes on.

    python tests/interpret/sweep_op_db.py results.jsonl [--seconds 600] [--samples N] [--every K]
    python tests/interpret/sweep_op_db.py results.jsonl --write tests/interpret/known_metadata_bugs.json

A sample is traced with `make_fx` on fake tensors, and the graph runs with all checks. One line per operator:
``mismatches`` (real metadata bugs of torch), ``errors`` (this package raised where the bare graph did not: always a bug
here), ``untraceable`` (torch itself cannot trace it) and ``ran``.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from checked_backend.interpret.metadata import MetadataInterpreter
from checked_backend.record import Finding

KNOWN = Path(__file__).parent / "known_metadata_bugs.json"


def operators() -> list[Any]:
    """The entries of ``op_db`` that take float32 on the CPU, in a fixed order."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = [info for info in op_db if torch.float32 in info.dtypes]
    return sorted(found, key=lambda info: (info.name, info.variant_test_name))


def name_of(info: Any) -> str:
    """An entry's full name."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def layouts(sample: Any) -> Iterator[Any]:
    """The sample as it is, and in channels_last where that says something."""
    yield sample
    pictures = [leaf for leaf in tree_flatten((sample.input, sample.args, sample.kwargs))[0] if _is_picture(leaf)]
    if pictures:
        yield sample.transform(lambda leaf: leaf.to(memory_format=torch.channels_last) if _is_picture(leaf) else leaf)


def _is_picture(leaf: Any) -> bool:
    plain = isinstance(leaf, torch.Tensor) and leaf.ndim == 4 and leaf.layout is torch.strided
    return plain and leaf.shape[1] > 1 and leaf.numel() > 0


def run_sample(info: Any, sample: Any) -> tuple[str, list[Finding] | str]:
    """Trace and run one sample, with its gradients: ``ran`` and findings, or ``untraceable`` or ``errors`` and why."""
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
        torch.set_rng_state(state)
        try:
            MetadataInterpreter(gm, "inference", found.extend)([tensor.clone() for tensor in tensors])
        except Exception as error:
            return "errors", f"{type(error).__name__}: {error}"[:500]
    return "ran", found


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def sweep_operator(info: Any, limit: int | None) -> dict[str, Any]:
    """All samples of one operator."""
    torch.manual_seed(0)
    counts: Counter[str] = Counter()
    mismatches: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for number, sample in enumerate(info.sample_inputs("cpu", torch.float32, requires_grad=False)):
        if limit is not None and number >= limit:
            break
        findings: list[Finding] = []
        for variant in layouts(sample):
            outcome, result = run_sample(info, variant)
            counts[outcome] += 1
            if isinstance(result, str):
                reasons.setdefault(outcome, result)
            else:
                findings += result
        for finding in findings:
            if not finding.evidence["inherited"]:
                mismatches.setdefault(
                    f"{finding.op} {finding.detail} {finding.subject.partition(']')[2]}".strip(),
                    {
                        "op": finding.op,
                        "detail": finding.detail,
                        "output": finding.subject.partition("]")[2].strip("[]"),
                        "recorded": finding.expected,
                        "ran": finding.actual,
                        "fault": str(finding.evidence.get("likely at fault", "")).replace(_SITE, ""),
                        "sample": number,
                    },
                )
    return {"name": name_of(info), **counts, "mismatches": list(mismatches.values()), "reasons": reasons}


_SITE = str(Path(torch.__file__).parent.parent) + "/"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The results so far; a line that was cut off is dropped."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        found[result["name"]] = result
    return found


def sweep(path: Path, *, seconds: float, limit: int | None, every: int) -> Iterator[dict[str, Any]]:
    """Go on where the file ends, until the time is up."""
    done, began = read(path), time.monotonic()
    with path.open("a", encoding="utf-8") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in operators()[::every]:
            if name_of(info) in done:
                continue
            if time.monotonic() - began > seconds:
                return
            result = sweep_operator(info, limit)
            file.write(json.dumps(result) + "\n")
            file.flush()
            yield result


def known_bugs(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The mismatches of all results, each operator and detail once, with the entries of ``op_db`` that show it."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name in sorted(results):
        for mismatch in results[name]["mismatches"]:
            key = (mismatch["op"], mismatch["detail"], mismatch["output"])
            entry = {k: v for k, v in mismatch.items() if k != "sample"}
            found.setdefault(key, {**entry, "shown_by": []})["shown_by"].append(name)
    return [found[key] for key in sorted(found)]


def main() -> None:
    """Sweep, or write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--write", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.write is None:
        for result in sweep(options.results, seconds=options.seconds, limit=options.samples, every=options.every):
            if result["mismatches"] or result.get("errors"):
                print(json.dumps(result))
    results = read(options.results)
    totals = Counter[str]()
    for result in results.values():
        totals.update({key: result.get(key, 0) for key in ("ran", "untraceable", "errors")})
    print(f"{len(results)} of {len(operators())} operators; samples: {dict(totals)}")
    if options.write is not None:
        document = {"torch": torch.__version__.partition("+")[0], "dtype": "float32", "bugs": known_bugs(results)}
        options.write.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
