"""Eager's side of a check: results and gradients on copies, and what the user gets in place of the candidate's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from checked_backend._torch.traces import profiled
from checked_backend.errors import CheckedBackendError, is_out_of_memory
from checked_backend.regions.backward import BackwardPass
from checked_backend.regions.execution import Call, Execution, execute
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.process_state import ProcessState
from checked_backend.tensors.streams import wait_for_devices

NOT_CONTINUED = (
    "eager did not go on with the exchanges of the pass in which the compiled program raised: nothing may be exchanged "
    "twice"
)

Region = Callable[..., Any]


class InputsChangedError(CheckedBackendError):
    """Raised if the user wrote to inputs on which the region must run again."""


def run_eager(
    reference: Region, call: Call, memory: MemoryPressure
) -> tuple[Execution | Exception, tuple[ProcessState, ProcessState] | None]:
    """Run a region in eager. If memory runs out, release the checks' memory and run it once more.

    Returns:
        The execution, or the exception, which is the user's; and the settings of the process when the run began, and
        when it was over. They are set back.
    """
    try:
        return memory.twice(lambda: _run(reference, call), "eager's forward pass")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return error.with_traceback(None), None  # its frames hold tensors


def _run(reference: Region, call: Call) -> tuple[Execution | Exception, tuple[ProcessState, ProcessState] | None]:
    """Run it once. Only running out of memory raises."""
    settings: tuple[ProcessState, ProcessState] | None = None
    result: Execution | Exception
    call.rng.restore()
    arguments, leaves = call.fresh()
    before = ProcessState.capture()
    try:
        with call.quiet(), call.ambient.entered():  # it is in a block of autocast itself
            start = ProcessState.capture()
            try:
                with profiled("checked_backend::reference"):
                    result = execute(reference, arguments, leaves)
                    wait_for_devices(arguments)
            finally:
                settings = start, ProcessState.capture()
    except Exception as error:  # the user's: raised to them, unless only eager raises
        if is_out_of_memory(error):
            raise
        result = error
    finally:
        if settings is not None:
            before.restore(settings[0].changed(settings[1]))
    return result, settings


def eager_instead(
    reference: Region, args: Sequence[Any], call: Call, note: Callable[[str], None], error: Exception | None
) -> Any:
    """Undo what the candidate did to inputs and random state, and run the region in eager for the user.

    Args:
        error: The exception of the candidate. It is raised if the candidate has begun to exchange tensors.
    """
    call.inputs.undo(args)
    call.rng.restore()
    if error is not None and call.exchanges.begun:
        note(NOT_CONTINUED)
        raise error
    with call.exchanges.for_the_user():
        return reference(*args)


def eager_gradients(
    reference: Region, call: Call, passed: BackwardPass, memory: MemoryPressure
) -> dict[int, torch.Tensor | None]:
    """The gradients that eager sends to a region's inputs: from the kept activations, or from running it again.

    If memory runs out, the checks release their memory and eager is run again.

    Args:
        call: The call. Its graph is used up, unless the pass may be repeated.

    Raises:
        InputsChangedError: There is no graph, and the inputs were written to.
        Exception: Whatever eager raises.
    """

    def run() -> dict[int, torch.Tensor | None]:
        graph = call.graph  # None once memory was released
        if graph is None:
            if written := call.written_inputs():
                words = f"the program wrote to {', '.join(written)} after the forward pass, so it cannot be run again"
                raise InputsChangedError(words)
            return dict(call.run(reference, cotangents=passed.cotangents, paired=True).gradients)
        if not passed.keeps_graph:
            call.graph = None  # its activations are freed as the backward pass goes
        with call.quiet(), torch.no_grad(), call.exchanges.paired(backward=True):
            return graph.backward(passed.cotangents, retain_graph=passed.keeps_graph)

    return memory.twice(run, "eager's backward pass")
