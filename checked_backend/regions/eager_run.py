"""Run a region in eager: for a check, on copies, with the settings of the process set back; or for the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from checked_backend._torch.traces import profiled
from checked_backend.errors import is_out_of_memory
from checked_backend.regions.call import Call
from checked_backend.regions.execution import Execution, execute
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.process_state import ProcessState
from checked_backend.tensors.streams import wait_for_devices

__all__ = ["NOT_CONTINUED", "eager_instead", "run_eager"]

NOT_CONTINUED = (
    "eager did not go on with the exchanges of the pass in which the compiled program raised: nothing may be exchanged "
    "twice"
)


def run_eager(
    reference: Callable[..., Any], call: Call, memory: MemoryPressure
) -> tuple[Execution | Exception, tuple[ProcessState, ProcessState] | None]:
    """Run a region in eager. If memory runs out, release the checks' memory and run it once more.

    Args:
        reference: The region in eager.
        memory: Decides what to do if memory runs out.

    Returns:
        The execution, or the exception, which is the user's; and the settings of the process when the run began, and
        when it was over. They are set back.
    """

    def run() -> tuple[Execution | Exception, tuple[ProcessState, ProcessState] | None]:
        call.rng.restore()
        result, settings = _run(reference, call)
        if isinstance(result, Exception) and is_out_of_memory(result):
            raise result
        return result, settings

    try:
        return memory.twice(run, "eager's forward pass")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return error.with_traceback(None), None  # its frames hold tensors


def _run(
    reference: Callable[..., Any], call: Call
) -> tuple[Execution | Exception, tuple[ProcessState, ProcessState] | None]:
    settings: tuple[ProcessState, ProcessState] | None = None
    result: Execution | Exception
    arguments, leaves = call.inputs.fresh()
    before = ProcessState.capture()
    try:
        with call.ambient.entered():  # it is in a block of autocast itself
            start = ProcessState.capture()
            try:
                with profiled("checked_backend::reference"):
                    result = execute(reference, arguments, leaves)
                    wait_for_devices(arguments)
            finally:
                settings = start, ProcessState.capture()
    except Exception as error:  # the user's: raised to them, unless only eager raises
        result = error
    if settings is not None:
        before.restore(start.changed(settings[1]))
    return result, settings


def eager_instead(
    reference: Callable[..., Any], args: Sequence[Any], call: Call, note: Callable[[str], None], error: Exception | None
) -> Any:
    """Undo what the candidate did to inputs and random state, and run the region in eager for the user.

    Args:
        reference: The region in eager.
        args: The user's inputs.
        note: Notes a remark that changes no verdict.
        error: The exception of the candidate. It is raised if the candidate has begun to exchange tensors.
    """
    call.inputs.undo(args)
    call.rng.restore()
    if error is not None and call.exchanges is not None and call.exchanges.begun:
        note(NOT_CONTINUED)
        raise error
    with nullcontext() if call.exchanges is None else call.exchanges.for_the_user():
        return reference(*args)
