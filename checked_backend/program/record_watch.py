"""Records what the compiled regions of a program take and give, call by call, instead of checking them."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.collectives import is_async_result
from checked_backend._torch.tensors import inner_tensors
from checked_backend.options import CheckOptions, parse_options
from checked_backend.program.compile_calls import CompileWatch, Settings, restored_backend
from checked_backend.program.described import described
from checked_backend.program.perturbed import perturbed_region
from checked_backend.program.recorded_region import RecordedRegion
from checked_backend.program.records import RecordFile
from checked_backend.random_state import random_untouched
from checked_backend.regions.compile import compile_candidate, copy_graph, resolve_compiler
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.report.causes import short_region
from checked_backend.report.environment import environment
from checked_backend.report.file_names import process_rank
from checked_backend.report.session import Session

__all__ = ["RecordWatch"]

_AT_FIRST = 16
"""So many calls of each region are recorded, and after them calls 32, 64, 128, ... and every n-th."""


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
            written = copy_graph(gm)  # as it is now: the compiler may change the graph
            if self._options.noise:
                run = perturbed_region(copy_graph(gm), self._options.noise + sum(self._names.values()))
            else:
                parsed = parse_options(CheckOptions, "numcheck", dict(options))
                run = compile_candidate(resolve_compiler(parsed, mode), gm, example_inputs)
        short = short_region(info.name)
        with self._lock:
            self._names[short] += 1
            nth = self._names[short]
        return RecordedRegion(self, short if nth == 1 else f"{short} #{nth}", written, info.inputs, run)

    def due(self, call: int) -> bool:
        """Whether a call is recorded."""
        every = self._options.every
        return call <= _AT_FIRST or not call & (call - 1) or (every > 1 and call % every == 0)

    def add(self, region: str, call: int, subject: str, tensor: torch.Tensor, **more: Any) -> None:
        """Record a tensor; of one that wraps others, these. More members of its record may be given."""
        with random_untouched(), torch.no_grad(), self._lock:
            try:
                parts = {} if is_async_result(tensor) else inner_tensors(tensor)  # its values are still on their way
            except Exception:  # the class's own code; what it wraps is then unknown
                parts = {}
            if not parts:
                self._file().add(replace(described(region, call, subject, tensor), **more))
        for name, part in parts.items():
            self.add(region, call, f"{subject[:-1]}.{name}]", part, **more)

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
