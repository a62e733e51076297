"""Eager's gradients in a backward pass: from the kept activations, or from running eager again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from checked_backend.errors import CheckedBackendError
from checked_backend.ranks.exchanges import replaying
from checked_backend.regions.backward import BackwardPass
from checked_backend.regions.call import Call
from checked_backend.regions.execution import execute
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.torch_state import RngState

__all__ = ["InputsChangedError", "eager_gradients", "outputs_again"]


class InputsChangedError(CheckedBackendError):
    """Raised if the user wrote to inputs on which the region must run again."""


def eager_gradients(
    reference: Callable[..., Any], call: Call, passed: BackwardPass, memory: MemoryPressure
) -> dict[int, torch.Tensor | None]:
    """The gradients that eager sends to a region's inputs.

    If memory runs out, the checks release their memory and eager is run again.

    Args:
        reference: The region in eager.
        call: The call. Its graph is used up, unless the pass may be repeated.
        memory: Decides what to do if memory runs out.

    Raises:
        InputsChangedError: There is no graph, and the inputs were written to.
        Exception: Whatever eager raises.
    """

    def run() -> dict[int, torch.Tensor | None]:
        graph = call.graph  # None once memory was released
        if graph is None:
            return _run_again(reference, call, passed)
        if not passed.keeps_graph:
            call.graph = None  # its activations are freed as the backward pass goes
        with torch.no_grad(), _paired_backward(call):
            return graph.backward(passed.cotangents, retain_graph=passed.keeps_graph)

    return memory.twice(run, "eager's backward pass")


def outputs_again(reference: Callable[..., Any], call: Call) -> Sequence[Any]:
    """Eager's outputs of a call once more, with their history. The random state stays as it is.

    Raises:
        InputsChangedError: The inputs were written to.
        Exception: Whatever eager raises.
    """
    _refuse_changed(call)
    arguments, leaves = call.inputs.fresh()
    with _rng_untouched(call.rng):
        call.rng.restore()
        with call.ambient.entered():
            return execute(reference, arguments, leaves).outputs


def _refuse_changed(call: Call) -> None:
    if call.inputs.written_since():
        raise InputsChangedError("its inputs were written to after the forward pass, so it cannot be run again")


def _run_again(reference: Callable[..., Any], call: Call, passed: BackwardPass) -> dict[int, torch.Tensor | None]:
    _refuse_changed(call)
    arguments, leaves = call.inputs.fresh()
    with _rng_untouched(call.rng):
        call.rng.restore()
        with call.ambient.entered(), replaying(call.exchanges).forward():
            graph = execute(reference, arguments, leaves).graph(call.inputs.mutated)
        with _paired_backward(call):
            return graph.backward(passed.cotangents, retain_graph=False)


def _paired_backward(call: Call) -> AbstractContextManager[None]:
    """The block of the reference's backward pass, which exchanges nothing and records what it would have sent."""
    return nullcontext() if call.exchanges is None else call.exchanges.paired(backward=True)


@contextmanager
def _rng_untouched(rng: RngState) -> Iterator[None]:
    before = RngState.capture(tuple(rng.cuda))
    try:
        yield
    finally:
        before.restore()
