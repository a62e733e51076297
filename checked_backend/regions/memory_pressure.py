"""Go on with the program where its check fails: for want of memory, or by a mistake of the check's own.

Want of memory is never a finding or the user's problem, but it is reported, and the region is checked with less.

A check gives these up, in this order: eager's activations, which are computed again in the backward pass; control runs
in float64; calls. Control runs and calls are tried again later, at growing distances.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import TypeVar

from checked_backend._torch.autograd import StopRecomputationError
from checked_backend._torch.dynamo import dynamo_control_flow
from checked_backend.errors import CheckedBackendError, is_device_lost, is_out_of_memory
from checked_backend.findings import Skip
from checked_backend.regions.call_findings import DEVICE_LOST, described_exception
from checked_backend.regions.execution import Call
from checked_backend.regions.reporter import RegionReporter
from checked_backend.tensors.caches import empty_caches

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_LONGEST = 300

FARTHEST = 1024
"""The most occasions that are left out before a failed attempt is tried again."""


class LeftOutError(CheckedBackendError, MemoryError):
    """Raised for a control run that is not made, because memory ran out in an earlier one."""


class GrowingDistance:
    """Decides when to try again after a failure: after one occasion that is left out, then after two, four, ...

    Attributes:
        tries: Whether this occasion is tried, and has not failed so far.
    """

    def __init__(self) -> None:
        self.tries = True
        self._distance = 0
        self._left = 0

    def due(self) -> bool:
        """Count an occasion, and say whether to try."""
        self.tries = self._left == 0
        self._left = max(0, self._left - 1)
        return self.tries

    def failed(self) -> None:
        """Note that trying failed."""
        if self.tries:
            self._distance = self._left = min(2 * self._distance or 1, FARTHEST)
        self.tries = False

    def succeeded(self) -> None:
        """Note that the occasion is over. If it has not failed, the next failure is a first one."""
        if self.tries:
            self._distance = 0


class MemoryPressure:
    """Decides how much memory a region's checks may use, after memory ran out in one of them.

    Args:
        keeps_activations: Whether the user wants eager's activations kept for its backward pass.

    Attributes:
        keeps_activations: Whether they may be.
    """

    def __init__(self, reporter: RegionReporter, *, keeps_activations: bool) -> None:
        self.keeps_activations = keeps_activations
        self._reporter = reporter
        self._calls = GrowingDistance()
        self._float64 = GrowingDistance()
        self._collected = False
        self._graphs_kept: weakref.WeakSet[Call] = weakref.WeakSet()
        self._told: dict[tuple[str, str], Skip] = {}

    def due(self) -> bool:
        """Count a call, and say whether there may be memory to check it."""
        if not self._calls.due():
            return False
        self._float64.due()
        self._collected = False
        return True

    def holds(self, call: Call) -> None:
        """Note a call for which an autograd graph is kept, with activations that can be computed again."""
        self._graphs_kept.add(call)

    def release(self) -> None:
        """Free what this region's checks hold and can compute again."""
        self.keeps_activations = False
        for call in list(self._graphs_kept):
            call.graph = None
        self._empty_caches()

    def not_compared(self, where: str, error: Exception, *, backward: bool = False) -> None:
        """Report a call, or its backward pass, that is not compared because its check raised an exception.

        The program goes on as if it had not been checked. For want of memory later calls are tried, fewer and fewer.

        Args:
            where: The part that raised: "eager's forward pass".
            backward: Whether it is the backward pass that is not compared.

        Raises:
            Exception: The exception, if it was raised on purpose: a reported divergence, or what steers Dynamo or a
                checkpoint.
        """
        subject = "gradients" if backward else "results"
        if is_out_of_memory(error):
            self.keeps_activations = False
            self._calls.failed()
            what = "this backward pass was not compared" if backward else "this call was not compared"
            reason = f"unsupported: memory: {where} ran out of it, and {what}; later calls are tried, fewer and fewer"
            skip = self._told.setdefault((subject, where), Skip(subject, f"{reason} ({_short(error)})"))
            self._reporter.skip_until_compared(skip, backward=backward)
            self._empty_caches()
            return
        if isinstance(error, (CheckedBackendError, Warning, StopRecomputationError, *dynamo_control_flow())):
            raise error
        told = _short(error)
        why = f"the check itself failed in {where}: {told}. This is a mistake of checked_backend: please report it"
        if is_device_lost(error):
            why = f"{where} found the device lost, by eager or by the compiled program: {told}. {DEVICE_LOST}"
        if not backward:
            self._reporter.not_checked()
        self._reporter.skip(Skip(subject, why, matters=True))
        with contextlib.suppress(ValueError):  # logging raises it where the program has closed its stderr
            log.error("the check itself failed in %s; the program goes on", where, exc_info=error)

    def _empty_caches(self) -> None:
        """Empty caches. Once in a call that includes the oldest objects: what the check made since then is young."""
        empty_caches(oldest=not self._collected)
        self._collected = True

    def compared(self) -> None:
        """Note that a call was compared."""
        self._calls.succeeded()

    def twice(self, run: Callable[[], Result], where: str) -> Result:
        """Run a function. If memory runs out, release the memory that the checks hold, and run it once more.

        Args:
            where: The function's name in reports.

        Raises:
            Exception: The function ran out of memory for the second time, or raised for another reason.
        """
        try:
            return run()
        except Exception as error:
            if not is_out_of_memory(error) or isinstance(error, LeftOutError):
                raise
            told = _short(error)
        # not before the exception is gone, whose frames hold tensors
        self.release()
        result = run()
        reason = f"unsupported: memory: ran out of memory, and succeeded after the check freed its copies ({told})"
        self._reporter.skip(self._told.setdefault(("", where), Skip(where, reason)))
        return result

    def control(self, run: Callable[[], Result], *, float64: bool) -> Result:
        """Make a control run, with less if memory runs out.

        Args:
            float64: Whether the run is in float64. Such runs need the most memory, and are left out first.

        Raises:
            LeftOutError: Memory ran out in an earlier run, and this call does without.
        """
        if float64 and not self._float64.tries:
            raise LeftOutError("left out, because memory ran out in an earlier call; it is tried again later")
        try:
            return self.twice(run, "control runs")
        except Exception as error:
            if not is_out_of_memory(error) or isinstance(error, LeftOutError):
                raise
            self._float64.failed()
            if not float64:
                self._calls.failed()
            raise


def _short(error: BaseException) -> str:
    return described_exception(error)[:_LONGEST]
