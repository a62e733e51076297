"""Build the inputs of a dump with nothing but torch. This file is also the first half of every ``repro.py``."""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def read_storages(path: Any) -> dict[str, torch.Tensor]:
    """Read a safetensors file of bytes; the storages by name."""
    found: dict[str, torch.Tensor] = {}
    with open(path, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        first = stream.tell()
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            data = bytearray(end - start)
            stream.seek(first + start)
            if stream.readinto(data) != len(data):
                raise ValueError(f"{path} is truncated")
            found[name] = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return found


def build_inputs(document: Mapping[str, Any], saved: Mapping[str, torch.Tensor], seed: int = 0) -> list[Any]:
    """Build the inputs that an ``inputs.json`` describes.

    Values that `read_storages` has not read are made from the seed, within the recorded ranges.
    """
    entries = document["inputs"]
    chosen = [entry for entry in entries if entry["type"] == "tensor"]
    tensors = iter(build_tensors([entry["tensor"] for entry in chosen], document["storages"], saved, seed))
    values: list[Any] = []
    for entry in entries:
        if entry["type"] == "tensor":
            values.append(next(tensors))
        elif entry["type"] == "other":
            raise ValueError(f"input {entry['name']} is {entry['value']}, which a dump cannot hold")
        else:
            values.append(float(entry["value"]) if entry["type"] == "float" else entry["value"])
    return values


def build_tensors(
    specs: Sequence[Mapping[str, Any]],
    storages: Sequence[Mapping[str, Any]],
    saved: Mapping[str, torch.Tensor],
    seed: int = 0,
) -> list[torch.Tensor]:
    """Build tensors with the dtypes, strides, offsets and shared memory that were recorded."""
    bases = []
    for index, storage in enumerate(storages):
        base = torch.zeros(storage["end"], dtype=torch.uint8, device=storage["device"])
        if f"storage_{index}" in saved:
            base[storage["start"] :].copy_(saved[f"storage_{index}"])
        bases.append(base)
    # the widest first: a tensor with a narrow range of values keeps it where it shares memory with a wide one
    for position in sorted(range(len(specs)), key=lambda at: (-_span(specs[at]), at)):
        spec = specs[position]
        if f"storage_{spec['storage']}" not in saved:
            _fill(bases[spec["storage"]], spec, torch.Generator().manual_seed(seed * 1000003 + position))
    return [_finish(_view(bases[spec["storage"]], spec), spec) for spec in specs]


def _span(spec: Mapping[str, Any]) -> int:
    if 0 in spec["shape"]:
        return 0
    return 1 + sum((int(size) - 1) * int(step) for size, step in zip(spec["shape"], spec["stride"], strict=True))


def _view(base: torch.Tensor, spec: Mapping[str, Any]) -> torch.Tensor:
    empty = torch.empty(0, dtype=getattr(torch, spec["dtype"]), device=base.device)
    return empty.set_(base.untyped_storage(), spec["storage_offset"], tuple(spec["shape"]), tuple(spec["stride"]))


def _fill(base: torch.Tensor, spec: Mapping[str, Any], generator: torch.Generator) -> None:
    span = _span(spec)
    if span == 0 or base.device.type == "meta":
        return
    flat = _view(base, {**spec, "shape": [span], "stride": [1]})
    flat.copy_(_values(flat.dtype, span, spec["range"], generator))


def _values(dtype: torch.dtype, count: int, bounds: Sequence[float] | None, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_complex:
        return torch.randn(count, dtype=torch.complex64, generator=generator).to(dtype)
    if dtype.is_floating_point:
        if dtype.itemsize == 1 and "x2" in str(dtype):  # two numbers in a byte
            return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype)
        if bounds is None:
            return torch.randn(count, generator=generator).to(dtype)
        low, high = bounds
        uniform = torch.rand(count, dtype=torch.float64, generator=generator)
        return (low + (high / 2 - low / 2) * 2 * uniform).clamp(low, high).to(dtype)
    if dtype is torch.bool and bounds is None:
        bounds = (0, 1)
    if bounds is None:  # an index that is 0 is in bounds of everything that has bounds
        return torch.zeros(count, dtype=dtype)
    low, high = int(bounds[0]), int(bounds[1])
    span = min(high, 2**63 - 2) + 1
    return torch.randint(min(low, span - 1), span, (count,), generator=generator).to(dtype)


def _finish(tensor: torch.Tensor, spec: Mapping[str, Any]) -> torch.Tensor:
    if spec["conj"]:
        tensor = torch.conj(tensor)
    if spec["neg"]:
        tensor = torch._neg_view(tensor)
    if spec["parameter"]:
        return torch.nn.Parameter(tensor, requires_grad=spec["requires_grad"])
    if not spec["requires_grad"]:
        return tensor
    if not spec["leaf"] and math.prod(spec["shape"]) and 0 not in spec["stride"]:
        # the result of an operator, in the memory that was asked for; times 1 changes no bit
        try:
            return tensor.mul_(torch.ones((), dtype=tensor.dtype, device=tensor.device, requires_grad=True))
        except (NotImplementedError, RuntimeError):
            pass
    return tensor.detach().requires_grad_(True)


@contextmanager
def ambient(document: Mapping[str, Any]) -> Iterator[None]:
    """Enter the modes and the random state that the graph was called under, and restore the previous ones."""
    state, states = document["ambient"], document["rng"] or {}
    there = [place for place in states if place == "cpu" or torch.cuda.is_available()]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([place for place in there if place != "cpu"], device_type="cuda"))
        stack.enter_context(torch.inference_mode(state["inference"]))
        stack.enter_context(torch.set_grad_enabled(state["grad"]))
        for device, dtype in state["autocast"].items():
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype)))
        for place in there:
            known = torch.frombuffer(bytearray(base64.b64decode(states[place])), dtype=torch.uint8)
            torch.set_rng_state(known) if place == "cpu" else torch.cuda.set_rng_state(known, place)
        yield


def mark_dynamic(document: Mapping[str, Any], inputs: Sequence[Any]) -> None:
    """Mark the sizes that were symbolic, for Dynamo."""
    for entry, value in zip(document["inputs"], inputs, strict=True):
        symbolic = entry["tensor"]["symbolic"] if entry["type"] == "tensor" else None
        for dimension, size in enumerate(symbolic["shape"] if symbolic else ()):
            if isinstance(size, str):
                torch._dynamo.maybe_mark_dynamic(value, dimension)


def constants_of(specs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read constants.safetensors, which lies next to this file: storages as bytes."""
    storages = read_storages(os.path.join(os.path.dirname(os.path.abspath(__file__)), "constants.safetensors"))
    constants = {}
    for name, (storage, start, device, spec) in specs.items():
        base = torch.zeros(start + storages[storage].numel(), dtype=torch.uint8, device=device)
        base[start:] = storages[storage]
        constants[name] = _view(base, spec)
    return constants


def graph_module(body: torch.nn.Module, inputs: Sequence[str]) -> torch.fx.GraphModule:
    """A body as a graph, for operators that interpret its nodes, as checkpoints do."""
    graph = torch.fx.Graph()
    graph.output(graph.call_module("body", tuple(graph.placeholder(name) for name in inputs)))
    return torch.fx.GraphModule({"body": body}, graph)


def main(folder: str, needs: str, unsupported: Sequence[str]) -> None:
    """Run the graph of a folder, and print its outputs."""
    parser = argparse.ArgumentParser(description=f"Run the graph of this folder; needs {needs}.")
    parser.add_argument("--compiler", help="a backend of torch.compile to compare with eager")
    parser.add_argument("--seed", type=int, default=0, help="for input values that were not saved")
    parser.add_argument("--save", metavar="FILE", help="write eager's outputs there, for torch.load")
    chosen = parser.parse_args()
    if unsupported:
        raise SystemExit("this graph cannot be run from its dump: " + "; ".join(unsupported))
    with open(os.path.join(folder, "inputs.json"), encoding="utf-8") as stream:
        document = json.load(stream)
    path = os.path.join(folder, "inputs.safetensors")
    saved = read_storages(path) if document["values"] and os.path.exists(path) else {}
    if document["values"] and not saved:
        print("inputs.safetensors is not here: the values are made from the seed")
    print("inputs:", "the recorded values" if saved else f"made from seed {chosen.seed}")
    # from its text, because a compiled file in __pycache__ may hold other code
    module = types.ModuleType("module")
    module.__file__ = os.path.join(folder, "module.py")
    with open(module.__file__, encoding="utf-8") as stream:
        exec(compile(stream.read(), module.__file__, "exec"), module.__dict__)

    def run(compiled: bool) -> list[Any]:
        with ambient(document):
            call = module.GraphModule()
            inputs = build_inputs(document, saved, chosen.seed)
            if compiled:
                torch._dynamo.reset()
                mark_dynamic(document, inputs)
                call = torch.compile(call, backend=chosen.compiler)
            return list(torch.utils._pytree.tree_leaves(call(*inputs)))

    reference = run(False)
    if chosen.save:
        torch.save([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in reference], chosen.save)
    candidate = run(True) if chosen.compiler else reference
    for index, (expected, actual) in enumerate(zip(reference, candidate, strict=True)):
        if not isinstance(expected, torch.Tensor):
            print(f"output[{index}]: {expected}" + ("" if expected == actual else f", compiled {actual}"))
            continue
        different = _different(expected.detach(), actual.detach()) if chosen.compiler else ""
        line = f"output[{index}]: {str(expected.dtype)[6:]}{list(expected.shape)} strides {list(expected.stride())}"
        print(line + different)


def _different(expected: torch.Tensor, actual: torch.Tensor) -> str:
    """What is different, as the end of a line."""
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return f" but compiled {actual.dtype}{list(actual.shape)}"
    strides = "" if expected.stride() == actual.stride() else f", compiled strides {list(actual.stride())}"
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    expected, actual = expected.to(wide), actual.to(wide)
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    if bool(same.all()):
        return strides + ", equal"
    difference = (expected - actual).abs()[~same]
    return strides + f", {int((~same).sum())} of {same.numel()} differ, at most by {float(difference.max()):.6g}"
