"""Torch's tools to watch a program: its log settings, its structured trace, its profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch._guards import CompileContext, compile_context
from torch._logging._internal import register_log, trace_log, trace_structured

_NOTHING: AbstractContextManager[Any] = nullcontext()


def register_logs(name: str) -> None:
    """Give a package's loggers a name in ``TORCH_LOGS`` and ``torch._logging.set_logs``."""
    register_log(name, name)


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range in the trace of ``torch.profiler``. Nothing happens while no profiler runs."""
    return torch.profiler.record_function(name) if _profiler_enabled() else _NOTHING


@dataclass(frozen=True, slots=True)
class CompilePlace:
    """A compilation in torch's structured trace (``TORCH_TRACE``).

    Attributes:
        compile_id: Dynamo's identifier of it; None outside of a compilation.
        attempt: The number of times that Dynamo had restarted it.
    """

    compile_id: Any
    attempt: int

    @classmethod
    def now(cls) -> CompilePlace:
        """The compilation that runs."""
        trace = CompileContext.current_trace_id()
        return cls(None, 0) if trace is None else cls(trace.compile_id, trace.attempt)

    def artifact(self, name: str, payload: Callable[[], str], *, encoding: str = "string") -> None:
        """Add a text to the compilation's page. Nothing happens while torch writes no trace.

        Args:
            encoding: ``string`` or ``json``.
        """
        if not trace_log.handlers:
            return
        with self._entered():  # the trace files what is written by the compilation that runs, and by its attempt
            trace_structured(
                "artifact",
                metadata_fn=lambda: {"name": name, "encoding": encoding},
                payload_fn=payload,
                expect_trace_id=False,
            )

    def _entered(self) -> AbstractContextManager[Any]:
        if self.compile_id is None:
            return nullcontext()
        context = CompileContext(self.compile_id)
        context.attempt = self.attempt
        return compile_context(context)
