"""Record what the compiled regions of a program take and give, call by call, instead of checking them."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checked_backend._torch.collectives import is_async_result
from checked_backend._torch.modes import OperatorWatch
from checked_backend._torch.operators import OpOverload
from checked_backend._torch.settings import precision_in_effect
from checked_backend._torch.tensors import inner_tensors
from checked_backend.aot.backend import compile_with
from checked_backend.aot.boxed import BoxedCallable, boxed, boxed_module
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.numerics.bits import unit_roundoff
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.options import AotOptions, CheckOptions, parse_options
from checked_backend.program.compile_calls import CompileWatch
from checked_backend.program.records import RecordFile, TensorRecord
from checked_backend.random_state import random_untouched
from checked_backend.regions.compile import compile_candidate, copy_graph, resolve_compiler
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.inputs import find_effects
from checked_backend.regions.torch_state import RngState
from checked_backend.report.causes import short_region
from checked_backend.report.environment import environment
from checked_backend.report.file_names import process_rank
from checked_backend.tensors.streams import is_capturing

_SAMPLE = 64
_PROJECTIONS = 4
_CHUNK = 1 << 18

_AT_FIRST = 16
"""So many calls of each region are recorded, and after them calls 32, 64, 128, ... and every n-th."""

PRODUCTS = ("matmul", "conv", "rnn")
"""The operations on float32 for whose precision torch has a setting."""

_ROUNDOFFS = {"tf32": 2.0**-11, "bf16": 2.0**-8}

_NAMES = (
    ("conv", "conv"), ("lstm", "rnn"), ("gru", "rnn"), ("rnn", "rnn"),
    *((name, "matmul") for name in ("mm", "mv", "dot", "linear", "addr", "cdist", "attention")),
)  # fmt: skip


class RecordWatch(CompileWatch):
    """Records a process, from its first ``torch.compile`` to its end; an OptionError for a bad option."""

    def __init__(self, began_with: Mapping[str, str]) -> None:
        super().__init__(began_with=began_with)
        options = self.check_run()
        if options.record is None:
            raise RuntimeError("there is no folder to record in")
        self._noise = options.noise
        self._recorder = Recorder(options.record, options.every)
        self._lock = threading.Lock()
        self._names: Counter[str] = Counter()

    def region(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any], mode: str | None
    ) -> Callable[..., Any]:
        """Compile a region, or perturb it, and record each call of it that is due."""
        info = GraphInfo.of(gm)
        with random_untouched():
            written = copy_graph(gm)  # as it is now: the compiler may change the graph
            if self._noise:
                noise = MonteCarloMode(self._noise + sum(self._names.values()))
                run = under_mode(copy_graph(gm), example_inputs, noise)
            else:
                parsed = parse_options(CheckOptions, "numcheck", dict(options))
                run = compile_candidate(resolve_compiler(parsed, mode), gm, example_inputs)
        short = short_region(info.name)
        with self._lock:
            self._names[short] += 1
            nth = self._names[short]
        return RecordedRegion(self._recorder, short if nth == 1 else f"{short} #{nth}", written, info.inputs, run)

    def write(self) -> None:
        """End the file; the process ends."""
        self._recorder.close()


class Recorder:
    """Writes down tensors, in a file for each process that this one forks into."""

    def __init__(self, folder: Path, every: int = 1) -> None:
        self._folder = folder
        self._every = every
        self._lock = threading.RLock()
        self._files: dict[int, RecordFile] = {}

    def due(self, call: int) -> bool:
        """Whether a call is recorded."""
        return call <= _AT_FIRST or not call & (call - 1) or (self._every > 1 and call % self._every == 0)

    def add(self, region: str, call: int, subject: str, tensor: torch.Tensor, **more: Any) -> None:
        """Record a tensor; of one that wraps others, these. More members of its record may be given."""
        with random_untouched(), torch.no_grad(), self._lock:
            try:
                parts = {} if is_async_result(tensor) else inner_tensors(tensor)  # its values are still on their way
            except Exception:  # the class's own code; what it wraps is then unknown
                parts = {}
            if not parts:
                self._file().add(replace(describe(region, call, subject, tensor), **more))
        for name, part in parts.items():
            self.add(region, call, f"{subject[:-1]}.{name}]", part, **more)

    def flush(self) -> None:
        """Hand what was recorded to the system: a process may be killed."""
        with self._lock:
            self._file().file.flush()

    def close(self) -> None:
        """End the file of this process."""
        if (records := self._files.pop(os.getpid(), None)) is not None:
            records.file.close()

    def _file(self) -> RecordFile:
        if os.getpid() not in self._files:
            header = {"program": " ".join(sys.argv), "environment": environment()}
            self._files[os.getpid()] = RecordFile(self._folder, str(process_rank() or 0), header)
        return self._files[os.getpid()]


def describe(region: str, call: int, subject: str, tensor: torch.Tensor) -> TensorRecord:
    """The record of a tensor. What cannot be read must not stop the program; the comparison tells it."""
    shape, device = tuple(int(size) for size in tensor.shape), tensor.device.type
    record = TensorRecord(region, call, subject, str(tensor.dtype).removeprefix("torch."), shape, device=device)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        why = f"a tensor of the class {type(tensor).__qualname__}"
    elif tensor.layout is not torch.strided or device == "meta":
        why = f"a tensor with layout {tensor.layout} on device {device}"
    else:
        try:
            return replace(record, **_values(tensor.detach()))
        except (RuntimeError, TypeError) as error:  # a dtype for which torch has no arithmetic
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
    return replace(record, unread=why)


def _values(tensor: torch.Tensor) -> dict[str, Any]:
    """The members of a tensor's record that follow from its values."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    floating = real.is_floating_point()
    roundoff = unit_roundoff(real.dtype) if floating else 0.0
    if floating and real.element_size() == 1:
        real = real.float()  # torch has no arithmetic in 8 bits
    wide = torch.float64 if real.device.type != "mps" else torch.float32
    flat = real.reshape(-1)
    finite = flat.isfinite() if floating else torch.ones_like(flat, dtype=torch.bool)
    plain = torch.where(finite, flat, torch.zeros((), dtype=flat.dtype, device=flat.device)).to(wide)
    count, total = min(_SAMPLE, flat.numel()), flat.numel()
    norm = float(torch.linalg.vector_norm(plain).item()) if count else 0.0
    places = torch.tensor([at * total // count for at in range(count)], device=flat.device, dtype=torch.long)
    return {
        "bits": fingerprint(tensor),
        "rms": min(norm / max(1, total) ** 0.5, sys.float_info.max),  # squares of float64 may overflow
        "nonfinite": int((~finite).sum().item()),
        "roundoff": roundoff,
        "sample": tuple(flat[places].to(wide).tolist()),
        "projections": _projections(plain) if count else (),
    }


def _projections(flat: torch.Tensor) -> tuple[float, ...]:
    """Sums of the elements with signs that follow from their places, over the root of their number."""
    sums = torch.zeros(_PROJECTIONS, dtype=flat.dtype, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        mixed = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 31)) * 0x3F58476D1CE4E5B9
        for number in range(_PROJECTIONS):
            minus = ((mixed >> (40 + number)) & 1).bool()
            sums[number] += torch.where(minus, -part, part).sum()
    return tuple((sums / flat.numel() ** 0.5).tolist())


@dataclass(eq=False)
class RecordedRegion:
    """A compiled region, each due call of which is recorded: what it takes, gives and changes, and its gradients.

    Its graph is a copy that no compiler has changed. It is kept until the first call.
    """

    _recorder: Recorder
    _name: str
    _graph: fx.GraphModule | None
    _inputs: Sequence[str]
    _run: Callable[..., Any]
    _calls: int = 0
    _mutated: frozenset[int] = frozenset()
    _kinds: frozenset[str] = frozenset()

    def __call__(self, *args: Any) -> Any:
        """Run the region, and record it if the call is due."""
        self._calls += 1
        call = self._calls
        if not self._recorder.due(call) or is_capturing():
            return self._run(*args)
        self._examine_graph(args)
        known = self._precision(args)
        tensors = [
            (position, name, arg)
            for position, (name, arg) in enumerate(zip(self._inputs, args, strict=False))
            if isinstance(arg, torch.Tensor)
        ]
        for _, name, arg in tensors:
            self._recorder.add(self._name, call, f"input[{name}]", arg, products_outside=known["products_outside"])
        before = RngState.for_inputs(args)
        returned = self._run(*args)
        known["drew"] = not before.same_as(RngState.for_inputs(args))
        for index, value in enumerate(returned if isinstance(returned, (tuple, list)) else (returned,)):
            if isinstance(value, torch.Tensor):
                self._recorder.add(self._name, call, f"output[{index}]", value, **known)
                if value.requires_grad and value.grad_fn is not None:
                    self._record_gradient(value, call, f"grad_output[{index}]", known)
        for position, name, arg in tensors:
            if position in self._mutated:
                self._recorder.add(self._name, call, f"mutated[{name}]", arg, **known)
            if arg.requires_grad and torch.is_grad_enabled():
                self._record_gradient(arg, call, f"grad[{name}]", known)
        self._recorder.flush()
        return returned

    def _record_gradient(self, tensor: torch.Tensor, call: int, subject: str, known: Mapping[str, Any]) -> None:
        """Record the first gradient that arrives at a tensor."""

        def once(gradient: torch.Tensor) -> None:
            hook.remove()
            if not is_capturing():
                self._recorder.add(self._name, call, subject, gradient, **known)
                self._recorder.flush()

        hook: Any = tensor.register_hook(once)

    def _examine_graph(self, args: Sequence[Any]) -> None:
        """Before the first call that is recorded: what the region changes in place, and whether it multiplies."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        kinds: set[str] = set()

        def run(*fakes: Any) -> Any:
            watch = OperatorWatch(lambda func, args, _kwargs: kinds.update(_products(func, args)), higher_order=True)
            try:
                with watch:
                    return graph.forward(*fakes)
            except BaseException:
                kinds.update(("matmul", "conv"))  # it may have any product
                raise

        with random_untouched():
            found = find_effects(run, args).mutated
        self._mutated = frozenset(range(len(args))) if found is None else found
        self._kinds = frozenset(kinds)

    def _precision(self, args: Sequence[Any]) -> dict[str, Any]:
        """The members of this call's records that tell how it computes."""
        devices = {arg.device.type for arg in args if isinstance(arg, torch.Tensor)} or {"cpu"}
        return {
            "products": max(coarsest(device, self._kinds) for device in devices),
            "products_outside": max(coarsest(device, PRODUCTS) for device in devices),
        }


def _products(func: Any, args: Sequence[Any]) -> Iterator[str]:
    """Which of `PRODUCTS` an operator makes of these arguments. One that is not torch's own may multiply inside."""
    if any(isinstance(arg, torch.Tensor) and arg.dtype in (torch.float32, torch.complex64) for arg in args):
        if isinstance(func, OpOverload) and func.namespace in ("aten", "prims", "prim"):
            name = func._schema.name.partition("::")[2]
            yield from [kind for part, kind in _NAMES if part in name][:1]
        else:
            yield "matmul"


def coarsest(device: str, operations: Sequence[str] | frozenset[str]) -> float:
    """The unit roundoff with which a kind of device now multiplies float32 in these operations; 0 for float32's own."""
    return max((_ROUNDOFFS.get(precision_in_effect(device, operation), 0.0) for operation in operations), default=0.0)


def under_mode(
    gm: fx.GraphModule, example_inputs: Sequence[Any], mode: AbstractContextManager[Any]
) -> Callable[..., Any]:
    """A region in eager, forward and backward under a mode, which may be entered any number of times."""

    def compiler(graph: fx.GraphModule, _inputs: Sequence[Any], /) -> BoxedCallable:
        run = boxed_module(graph)

        def perturbed(args: list[Any]) -> Any:
            with mode:
                return run(args)

        return boxed(perturbed)

    return compile_with(gm, example_inputs, options=AotOptions(), fw_compiler=compiler)
