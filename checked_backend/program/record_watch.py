"""Records what the compiled regions of a program take and give, call by call, instead of checking them."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.collectives import is_async_result
from checked_backend._torch.tensors import inner_tensors
from checked_backend.numerics.bits import unit_roundoff
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.options import CheckOptions, parse_options
from checked_backend.program.compile_calls import CompileWatch, Settings, restored_backend
from checked_backend.program.perturbed import perturbed_region
from checked_backend.program.records import RecordFile, TensorRecord
from checked_backend.random_state import random_untouched
from checked_backend.regions.compile import compile_candidate, copy_graph, resolve_compiler
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.report.causes import short_region
from checked_backend.report.environment import environment
from checked_backend.report.file_names import process_rank
from checked_backend.report.session import Session

__all__ = ["RecordWatch"]

_SAMPLE = 64
_PROJECTIONS = 4
_CHUNK = 1 << 18
_AT_FIRST = 16
"""So many calls of each region are recorded, and after them calls 32, 64, 128, ... and every n-th."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class RecordWatch(CompileWatch):
    """Records a process, from its first ``torch.compile`` to its end.

    Args:
        began_with: The options that the environment had when the process began.

    Raises:
        OptionError: The environment has an unknown or bad option.
    """

    def __init__(self, began_with: Mapping[str, str]) -> None:
        super().__init__(began_with=began_with)
        self._options = self.run_options()
        self._settings.append(Settings(self._options.compiler))
        self.validate()
        self._lock = threading.RLock()
        self._files: dict[int, RecordFile] = {}
        self._names: Counter[str] = Counter()

    def current(self) -> Session | None:
        """None: nothing is checked."""
        return None

    def backend_for(
        self, compiler: str | Callable[..., Any], options: Mapping[str, Any], mode: str | None
    ) -> Callable[..., Any]:
        """The backend that the code names, with a recorder around each region."""
        return _RecordingBackend(self, {**options, "compiler": compiler}, mode)

    def write(self) -> None:
        """End the file; the process ends."""
        file = self._files.pop(os.getpid(), None)
        if file is not None:
            file.close()

    def region(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any], mode: str | None
    ) -> Callable[..., Any]:
        """Compile a region, or perturb it, and record each call of it that is due."""
        info = GraphInfo.of(gm)
        with random_untouched():
            if self._options.noise:
                run = perturbed_region(copy_graph(gm), self._options.noise + sum(self._names.values()))
            else:
                parsed = parse_options(CheckOptions, "numcheck", dict(options))
                run = compile_candidate(resolve_compiler(parsed, mode), gm, example_inputs)
        short = short_region(info.name)
        with self._lock:
            self._names[short] += 1
            nth = self._names[short]
        return _RecordedRegion(self, short if nth == 1 else f"{short} #{nth}", info.inputs, run)

    def due(self, call: int) -> bool:
        """Whether a call is recorded."""
        every = self._options.every
        return call <= _AT_FIRST or not call & (call - 1) or (every > 1 and call % every == 0)

    def add(self, region: str, call: int, subject: str, tensor: torch.Tensor) -> None:
        """Record a tensor; of one that wraps others, these."""
        with random_untouched(), torch.no_grad(), self._lock:
            try:
                parts = {} if is_async_result(tensor) else inner_tensors(tensor)  # its values are still on their way
            except Exception:  # the class's own code; what it wraps is then unknown
                parts = {}
            if not parts:
                self._file().add(_read(region, call, subject, tensor))
        for name, part in parts.items():
            self.add(region, call, f"{subject[:-1]}.{name}]", part)

    def flush(self) -> None:
        """Hand what was recorded to the system: a process may be killed."""
        with self._lock:
            self._file().flush()

    def _file(self) -> RecordFile:
        known = self._files.get(os.getpid())
        if known is None:
            rank = process_rank()
            header = {"program": " ".join(sys.argv), "environment": environment()}
            if self._options.record is None:
                raise RuntimeError("there is no folder to record in")
            known = self._files[os.getpid()] = RecordFile(self._options.record, str(rank or 0), header)
        return known


class _RecordingBackend:
    """A Dynamo backend; equal to another one that compiles alike, so that code of one serves the other."""

    compiler_name = "numcheck"

    def __init__(self, watch: RecordWatch, options: Mapping[str, Any], mode: str | None) -> None:
        self._watch = watch
        self._options = options
        self._mode = mode

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _RecordingBackend):
            return NotImplemented
        return (self._options, self._mode) == (other._options, other._mode)

    def __hash__(self) -> int:
        return hash((type(self), self._mode))

    def __deepcopy__(self, _memo: Any) -> _RecordingBackend:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return restored_backend, (self._options, self._mode)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_kwargs: Any) -> Callable[..., Any]:
        return self._watch.region(gm, example_inputs, self._options, self._mode)


class _RecordedRegion:
    def __init__(self, watch: RecordWatch, name: str, inputs: Sequence[str], run: Callable[..., Any]) -> None:
        self._watch = watch
        self._name = name
        self._inputs = inputs
        self._run = run
        self._calls = 0

    def __call__(self, *args: Any) -> Any:
        self._calls += 1
        call = self._calls
        if not self._watch.due(call):
            return self._run(*args)
        for name, arg in zip(self._inputs, args, strict=False):
            if isinstance(arg, torch.Tensor):
                self._watch.add(self._name, call, f"input[{name}]", arg)
        returned = self._run(*args)
        for index, value in enumerate(returned if isinstance(returned, (tuple, list)) else (returned,)):
            if isinstance(value, torch.Tensor):
                self._watch.add(self._name, call, f"output[{index}]", value)
                if value.requires_grad and value.grad_fn is not None:
                    value.register_hook(_Once(self._watch, self._name, call, f"grad_output[{index}]"))
        for name, arg in zip(self._inputs, args, strict=False):
            if isinstance(arg, torch.Tensor) and arg.requires_grad and torch.is_grad_enabled():
                once = _Once(self._watch, self._name, call, f"grad[{name}]")
                once.handle = arg.register_hook(once)
        self._watch.flush()
        return returned


class _Once:
    """Records the first gradient that arrives at a tensor, and goes away."""

    def __init__(self, watch: RecordWatch, region: str, call: int, subject: str) -> None:
        self._watch = watch
        self._where = (region, call, subject)
        self.handle: Any = None

    def __call__(self, gradient: torch.Tensor) -> None:
        if self.handle is not None:
            self.handle.remove()
        region, call, subject = self._where
        self._watch.add(region, call, subject, gradient)
        self._watch.flush()


def _read(region: str, call: int, subject: str, tensor: torch.Tensor) -> TensorRecord:
    """The record of a tensor. What cannot be read must not stop the program; the comparison tells it."""
    if type(tensor) not in _PLAIN:
        why = f"a tensor of the class {type(tensor).__qualname__}"
    elif tensor.layout is not torch.strided or tensor.device.type == "meta":
        why = f"a tensor with layout {tensor.layout} on device {tensor.device.type}"
    else:
        try:
            return _described(region, call, subject, tensor.detach())
        except (RuntimeError, TypeError) as error:  # a dtype for which torch has no arithmetic
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
    kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(int(size) for size in tensor.shape)
    return TensorRecord(region, call, subject, kind, shape, None, 0.0, 0.0, 0, 0.0, (), tensor.device.type, why)


def _described(region: str, call: int, subject: str, tensor: torch.Tensor) -> TensorRecord:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    bits = fingerprint(tensor)
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    floating, roundoff = real.is_floating_point(), 0.0
    if floating:
        roundoff = unit_roundoff(real.dtype)
        real = real.float() if real.element_size() == 1 else real  # torch has no arithmetic in 8 bits
    finite = real.isfinite() if floating else None
    nonfinite = 0 if finite is None else int((~finite).sum().item())
    plain = real if finite is None or not nonfinite else torch.where(finite, real, torch.zeros((), dtype=real.dtype))
    wide = torch.float64 if real.device.type != "mps" else torch.float32
    norm = float(torch.linalg.vector_norm(plain.to(wide)).item()) if plain.numel() else 0.0
    flat = real.reshape(-1)
    count = min(_SAMPLE, flat.numel())
    places = torch.tensor([at * flat.numel() // count for at in range(count)], device=flat.device, dtype=torch.long)
    wider = plain.reshape(-1).to(wide)
    return TensorRecord(
        region=region,
        call=call,
        subject=subject,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(int(size) for size in tensor.shape),
        bits=bits,
        rms=min(norm / max(1, plain.numel()) ** 0.5, sys.float_info.max),  # squares of float64 may overflow
        max=float(plain.abs().max().to(wide).item()) if plain.numel() and floating else 0.0,
        nonfinite=nonfinite,
        roundoff=roundoff,
        sample=tuple(flat[places].to(wide).tolist()) if count else (),
        device=tensor.device.type,
        projections=_projections(wider) if count else (),
    )


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
