"""What share of a clean model's kernels is judged in place, and how far the worst is from what it is allowed.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.kernels_judged [--models Llama] [--ways amp float16] [--device cuda]

One training step of each model under Inductor. A buffer of floating-point numbers is judged if a kernel's result is
held against its own operators. Parts of an operator (the two sums of a variance), and what a fused kernel overwrites,
are judged with the buffer that is computed of them. What is not judged has a reason. The worst is the greatest error
over what rounding explains of it: 1 would be a false alarm.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

import checked_backend as cb
from checked_backend.graphs.nodes import recorded_value
from checked_backend.graphs.schema import operator_name
from checked_backend.regions import build
from checked_backend.regions.operator_check.findings import reached
from checked_backend.regions.operator_check.in_place import CheckedModule, KernelCheck
from checked_backend.regions.operator_check.tensor_checks import TensorChecks
from tests.support import models, more_models
from tests.support.models import Case

MODELS = {
    "BERT": models.bert_masked_lm,
    "ViT": models.vit_classifier,
    "ResNet": models.resnet,
    "Llama": more_models.HUGGING_FACE["llama"],
    "Mixtral": more_models.HUGGING_FACE["mixtral"],
    "Mamba": more_models.HUGGING_FACE["mamba"],
    "T5": more_models.HUGGING_FACE["t5"],
    "U-Net": more_models.WRITTEN_HERE["unet"],
    "embedding bag": more_models.WRITTEN_HERE["embedding_bag"],
    "GRU policy": more_models.WRITTEN_HERE["policy"],
}
WAYS = ("float32", "amp", "float16")

ITSELF = "by itself"
READER = "with what reads it"


def step(case: Case, way: str, device: str, *, dynamic: bool) -> tuple[list[CheckedModule], list[tuple[float, str]]]:
    """The modules that one training step checks, and each tensor's error over what it may be."""
    checked: list[CheckedModule] = []
    errors: list[tuple[float, str]] = []
    run, note = KernelCheck.run, TensorChecks.note

    def noting_run(kernels: KernelCheck, *args: Any, **kwargs: Any) -> Sequence[CheckedModule]:
        found = run(kernels, *args, **kwargs)
        checked.extend(found)
        return found

    def noting(checks: TensorChecks, node: Any, error: Any, *args: Any, **kwargs: Any) -> None:
        errors.append((error.excess, operator_name(node) if node.op == "call_function" else node.name))
        note(checks, node, error, *args, **kwargs)

    case = case.to(device, torch.float16 if way == "float16" else None)
    compiled = torch.compile(case.model, backend="numcheck", dynamic=dynamic or None, options={"localize": False})
    with (
        mock.patch.object(build, "computes_in_low_precision", return_value=True),
        mock.patch.object(KernelCheck, "run", noting_run),
        mock.patch.object(TensorChecks, "note", noting),
        cb.collect(closing=False),
        torch.autocast(device, torch.bfloat16, enabled=way == "amp"),
    ):
        loss = case.loss(compiled(**case.inputs))
    loss.backward()
    return checked, errors


def judged(module: CheckedModule) -> Mapping[str, str]:
    """How a buffer is judged, by its name: `ITSELF`, `READER`, or the reason why it is not."""
    checks, lowered = module.checks, module.module
    [output] = lowered.graph.graph.find_nodes(op="output")
    compared = module.values.keys() | {node.name for node in output.all_input_nodes}
    known = checks.limits[False].keys() | (compared - checks.unchecked.keys())
    nodes_by_name = {node.name: node for node in lowered.graph.graph.nodes}
    found = {}
    for name, held in lowered.held.items():
        if name in lowered.written:
            continue
        nodes = [node for node in held if node is not None]
        traced = [recorded_value(node) for node in nodes]
        if traced and not any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in traced):
            continue
        own = {node.name for node in nodes}
        behind = nodes or [nodes_by_name[one] for one in lowered.made.get(name, ()) if one in nodes_by_name]
        if known & own:
            found[name] = ITSELF
        elif any(one.name in known for node in behind for one in (node, *reached(node))):
            found[name] = READER
        elif any(node.target is torch.ops.aten.copy_.default for one in behind for node in (one, *reached(one))):
            found[name] = "written to an input, which is compared with the region"
        else:
            found[name] = next((checks.unchecked[one] for one in own if one in checks.unchecked), "nothing reads it")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--dynamic", action="store_true", help="sizes are symbols")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    columns = ("model", "in", "buffers", "by itself", "judged", "not judged, and why", "worst", "of")
    console = Console(width=150)
    for name in asked.models:
        table = Table(*columns)
        for way in asked.ways:
            torch.compiler.reset()
            torch.manual_seed(0)
            try:
                checked, errors = step(MODELS[name](), way, asked.device, dynamic=asked.dynamic)
            except Exception as error:  # a model that does not run so in eager either
                table.add_row(name, way, "", "", "", f"{type(error).__name__}: {error}".splitlines()[0][:70], "", "")
                continue
            ways = Counter(how for module in checked for how in judged(module).values())
            count, alone, told = ways.total(), ways.pop(ITSELF, 0), ways.pop(READER, 0)
            shares = [f"{part / max(count, 1):.0%}" for part in (alone, alone + told)]
            missing = ", ".join(f"{number} {why[:60]}" for why, number in ways.most_common(3))
            worst, operator = max(errors, default=(0.0, ""))
            table.add_row(name, way, str(count), *shares, missing, f"{worst:.2f}", operator)
        console.print(table)


if __name__ == "__main__":
    main()
