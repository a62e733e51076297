"""What the tests of dumps share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import checked_backend as cb
from checked_backend.dump import RegionDump
from checked_backend.dump.load import with_checksum

KINDS = ("dynamo", "joint", "forward", "backward", "inference")


class Squared(torch.autograd.Function):
    """A square, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2 * ctx.saved_tensors[0]


class Net(torch.nn.Module):
    """A layer whose result meets a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() * torch.tensor([1.0, 2.0])


def dumping(function: Callable[..., Any], folder: Path, *, values: bool = True, **how: Any) -> Callable[..., Any]:
    """A function, compiled such that its graphs are dumped, with the values of their inputs unless told."""
    return torch.compile(function, backend="graph_dumper", options={"dump": str(folder), "dump_values": values}, **how)


def dumps(root: Path) -> dict[str, Path]:
    """The dumps under a folder, by the name of their folder."""
    return {path.parent.name: path.parent for path in sorted(root.glob("*/*/graph.json"))}


def same(expected: Sequence[Any], actual: Sequence[Any]) -> bool:
    """Whether leaves are equal bit for bit, in dtype, shape and strides too."""
    return len(expected) == len(actual) and all(map(same_leaf, expected, actual))


def same_leaf(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return type(expected) is type(actual) and bool(expected == actual)
    left, right = expected.detach(), actual.detach()
    if (left.dtype, left.shape, left.stride()) != (right.dtype, right.shape, right.stride()):
        return False
    return as_bytes(left) == as_bytes(right)


def as_bytes(tensor: torch.Tensor) -> bytes:
    resolved = tensor.detach().resolve_conj().resolve_neg().flatten()
    return bytes(torch.empty(resolved.numel(), dtype=resolved.dtype).copy_(resolved).view(torch.uint8).tolist())


def run(dump: cb.Dump) -> list[Any]:
    with dump.ambient(), torch.set_grad_enabled(dump.kind == "dynamo" and torch.is_grad_enabled()):
        return torch.utils._pytree.tree_leaves(dump.module(*dump.inputs()), is_leaf=lambda leaf: leaf is None)


def edit(path: Path, change: Any) -> None:
    """Change a JSON file of a dump and make the checksums fit, as a stranger would."""
    document = json.loads(path.read_text())
    document.pop("checksum")
    change(document)
    full = with_checksum(document)
    path.write_text(json.dumps(full))
    if path.name == "graph.json":
        edit(path.with_name("inputs.json"), lambda inputs: inputs.update(graph=full["checksum"]))


def observed(kind: str, gm: torch.fx.GraphModule, args: list[Any], folder: Path, *, values: bool = True) -> cb.Dump:
    """The dump of a graph and of the inputs of a call."""
    dump = RegionDump.claim(folder, "net", values=values)
    dump.write(kind, gm)
    dump.observe(kind, args)
    (path,) = dumps(folder).values()
    return cb.load_dump(path)


def told_by(program: str, *words: object, folder: Path) -> Any:
    """What a program of this folder says in its last line."""
    done = python(Path(__file__).with_name(program), *words, folder=folder, module_path=Path(__file__).parents[2])
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def python(*words: object, folder: Path, module_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(module_path or "")}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
