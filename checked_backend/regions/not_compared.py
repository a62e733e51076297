"""Go on with the program where its check fails: for want of memory, or by a mistake of the check's own."""

from __future__ import annotations

import contextlib
import logging

from checked_backend._torch.autograd import StopRecomputationError
from checked_backend._torch.dynamo import dynamo_control_flow
from checked_backend.errors import CheckedBackendError, is_device_lost, is_out_of_memory
from checked_backend.findings import Skip
from checked_backend.regions.call_findings import DEVICE_LOST, described_exception
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.reporter import RegionReporter

__all__ = ["NotCompared", "is_for_the_program"]

log = logging.getLogger(__name__)

_LONGEST = 300


def is_for_the_program(error: BaseException) -> bool:
    """Whether an exception is raised on purpose: a reported divergence, or what steers Dynamo or a checkpoint."""
    raised: list[type[BaseException]] = [CheckedBackendError, Warning, StopRecomputationError, *dynamo_control_flow()]
    return isinstance(error, tuple(raised)) and not is_out_of_memory(error)


class NotCompared:
    """Reports calls and backward passes of a region that are not compared because their check raised an exception.

    Args:
        reporter: Receives the coverage.
        memory: Decides what is given up if memory runs out.
    """

    def __init__(self, reporter: RegionReporter, memory: MemoryPressure) -> None:
        self._reporter = reporter
        self._memory = memory

    def __call__(self, where: str, error: Exception, *, backward: bool = False) -> None:
        """Report a call. The program goes on as if it had not been checked.

        Args:
            where: What the check did: "comparing the results".
            backward: Whether its backward pass is not compared.

        Raises:
            Exception: The exception, if it `is_for_the_program`.
        """
        if is_for_the_program(error):
            raise error
        if is_out_of_memory(error):
            self._memory.not_compared(where, error, backward=backward)
            return
        told = described_exception(error).strip().partition("\n")[0][:_LONGEST]
        why = f"the check itself failed in {where}: {told}. This is a mistake of checked_backend: please report it"
        if is_device_lost(error):
            why = f"{where} found the device lost, by eager or by the compiled program: {told}. {DEVICE_LOST}"
        if not backward:
            self._reporter.not_checked()
        self._reporter.skip(Skip("gradients" if backward else "results", why, matters=True))
        with contextlib.suppress(ValueError):  # logging raises it where the program has closed its stderr
            log.error("the check itself failed in %s; the program goes on", where, exc_info=error)
