"""Check the calls that compilation dropped, at the first call of their region."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.tensors import is_functorch_wrapped_tensor
from checked_backend.findings import Finding, Skip
from checked_backend.metadata.dropped_calls import TRANSFORM, Dropped, calls_alone
from checked_backend.metadata.interpreter import MetadataInterpreter
from checked_backend.metadata.reporter import MetadataReporter

__all__ = ["DroppedCallCheck", "Interpreters"]

Interpreters = Callable[[fx.GraphModule, Callable[[Sequence[Finding]], None]], MetadataInterpreter]


class DroppedCallCheck:
    """Checks the calls of one region that no compiled graph makes. It makes each once, alone, and watches its operator.

    Args:
        dropped: The calls in it that are missing from the compiled graphs.
        interpreter: Makes the interpreter that runs and checks a graph.
        reporter: Receives the findings.
    """

    def __init__(
        self, dynamo: fx.GraphModule, dropped: Sequence[Dropped], interpreter: Interpreters, reporter: MetadataReporter
    ) -> None:
        self._lock = threading.Lock()
        self._reporter = reporter
        self._ran = False
        self._found: list[Finding] = []
        self._calls = [call for call in dropped if not call.inside]
        self._skips = [_skip(call, f"it lies in {call.inside}") for call in dropped if call.inside]
        self._interpreter: MetadataInterpreter | None = None
        self._names: set[str] = set()
        if self._calls:
            try:
                part, self._names = calls_alone(dynamo, self._calls)
                self._interpreter = interpreter(part, self._found.extend)
            except Exception as error:
                self._fail(str(error))

    def check(self, args: Sequence[Any]) -> None:
        """Check at the first call. Report the findings and the unchecked calls at every call.

        Args:
            args: The region's real inputs; they are not changed.

        Raises:
            MetadataError: With ``on_divergence="raise"``.
        """
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor) for tensor in tensors):
            return  # another tracer traces the region
        with self._lock:
            if not self._ran:
                self._run(args)
        notes = [_note(call) for call in self._calls]
        self._reporter.dropped(len(notes), notes, self._skips)
        self._reporter.report(self._found)

    def _run(self, args: Sequence[Any]) -> None:
        self._ran = True
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is None:
            return
        devices = {arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda}
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices)):
                interpreter(list(args))
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        told = [f for f in self._found if f.node in self._names and not f.inherited]
        self._found = [
            replace(finding, message=f"{finding.message}\n    compilation dropped this call: nothing takes its results")
            for finding in told
        ]

    def _fail(self, why: str) -> None:
        self._skips += [_skip(call, why) for call in self._calls]
        self._calls = []


def _skip(call: Dropped, why: str) -> Skip:
    # a transform's rule may rightly have replaced the operator
    matters = call.inside != TRANSFORM
    return Skip(str(call), f"it is in no compiled graph, and it could not be made alone: {why}", matters=matters)


def _note(call: Dropped) -> str:
    text = f"{call} is in no compiled graph, for nothing takes its results; it was made once, alone, on copies"
    if call.pointless:
        text += (
            "; by its schema it does nothing: declare what it writes to, or its effect, or compiled code leaves it out"
        )
    return text
