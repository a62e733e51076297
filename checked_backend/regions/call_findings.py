"""Findings about a call as a whole: exceptions, the number of outputs, random state, inputs that should not change."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from traceback import FrameSummary
from typing import Any

from checked_backend._torch.dynamo import causes, inner_exception, traced_stack
from checked_backend._torch.fake_tensors import FakeTensorMode, UnsupportedOperatorException
from checked_backend._torch.operators import OpOverload, fake_kernel, operator_definition
from checked_backend.errors import is_device_lost, is_out_of_memory
from checked_backend.findings import EvidenceKey, Finding, Kind
from checked_backend.graphs.schema import is_built_in
from checked_backend.graphs.source_line import users_frame
from checked_backend.regions.compare_parts import Part

_SHORT_OUTPUT = 12
"""Lines of an exception's text that are shown as they are."""

_SHOWN_ERRORS = 3
"""Errors of a C++ compiler that are shown. Later ones follow from the first."""

DEVICE_LOST = (
    "The device is lost to this process: every further call on it raises, eager's too. To see which kernel did it, run "
    "it again with CUDA_LAUNCH_BLOCKING=1; to see which address, under `compute-sanitizer --tool memcheck python ...`"
)

_DURING = {"compiling": "compiling", "running": "running", "backward": "running its backward pass"}


def candidate_crashed(error: BaseException, *, during: str) -> Finding:
    """Only the candidate raises, while ``compiling``, ``running`` or in its ``backward``.

    Running out of memory, losing the device and a fake kernel that raises have details of their own.
    """
    lost = is_device_lost(error)
    raised = type(error).__name__
    told = f"{raised}: {_without_warnings(str(error))}{f'. {DEVICE_LOST}' if lost else ''}"
    message = f"{_DURING[during]} it raised, eager does not: {told}"
    detail = "crash.device" if lost else "crash.memory" if is_out_of_memory(error) else f"crash.{during}"
    crash = Finding(Kind.CRASH, "candidate", message, detail, expected="no exception", actual=raised)
    fake = FakeError.inside(error)
    return crash if fake is None else fake.added_to(crash)


def _without_warnings(text: str) -> str:
    """An exception's text; for the output of a C++ compiler only the errors, with the line of code below each.

    Inductor puts the whole output into its exception. Most of it is the command and warnings about torch's own headers.
    """
    lines = text.splitlines()
    errors = [number for number, line in enumerate(lines) if re.search(r"\b(fatal )?error: ", line)]
    if len(lines) <= _SHORT_OUTPUT or not errors:
        return text
    shown = [line for number in errors[:_SHOWN_ERRORS] for line in lines[number : number + 2]]
    left_out = len(lines) - 1 - len(shown)
    return "\n".join([lines[0], *shown, f"({left_out} more lines of the compiler's output)"])


def compare_exceptions(
    reference: BaseException | None, candidate: BaseException | None, *, during: str = "running"
) -> tuple[Finding | None, str]:
    """Compare what eager and the candidate raised; None where one did not.

    Returns:
        The finding, if code that catches the one exception does not catch the other; else a remark, or none.
    """
    if reference is None:
        return None if candidate is None else candidate_crashed(candidate, during=during), ""
    if candidate is None:
        return exception_missing(reference), ""
    expected, actual = described_exception(reference), described_exception(candidate)
    if same_exception(reference, candidate) or _same_message(reference, candidate):
        where = "" if during == "running" else " in the backward pass"
        words = "" if expected == actual else f", with other words; the candidate {actual}"
        return None, f"both raise{where}: {expected}{words}"
    message = "both raise, but not the same; eager's was raised"
    return Finding(Kind.EXCEPTION, "candidate", message, "exception.type", expected=expected, actual=actual), ""


def exception_missing(error: BaseException, *, own_random: bool = False) -> Finding:
    """Only eager raises, or the candidate too, but not with its own random operators."""
    how = ", where it draws its own random numbers" if own_random else ""
    raised = type(error).__name__
    message = f"eager raises, the compiled program returns{how}: {raised}: {error}"
    return Finding(Kind.EXCEPTION, "candidate", message, "exception.missing", expected=raised, actual="no exception")


def same_exception(reference: BaseException, candidate: BaseException) -> bool:
    """Whether the candidate's exception, or one of its causes, has the type of eager's."""
    causes = (candidate, candidate.__cause__, inner_exception(candidate))
    return any(isinstance(cause, type(reference)) for cause in causes)


def _same_message(reference: BaseException, candidate: BaseException) -> bool:
    """Whether both exceptions have the same message: Dynamo raises its own types with the messages of others."""
    said = _first_line(reference)
    return bool(said) and said in str(candidate)


def described_exception(error: BaseException | None) -> str:
    """An exception's type and the first line of its message."""
    return "no exception" if error is None else f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def wrong_outputs(expected: int, returned: Any) -> Finding:
    """The candidate did not return a tuple of the right length."""
    counted = f" of {len(returned)}" if isinstance(returned, (tuple, list)) else ""
    message = (
        "the compiled region returned the wrong number of outputs; the function that a Dynamo backend makes "
        "returns a tuple with one value for each output of the graph"
    )
    actual = f"{type(returned).__name__}{counted}"
    return Part("outputs", None, None).differs("outputs", message, f"tuple of {expected}", actual)


def rng_state_differs() -> Finding:
    """The random state after the call is not eager's."""
    message = (
        "the compiled program leaves torch's random number generator in a different state than eager, so every random "
        "number after it differs from eager's"
    )
    expected, actual = "the state eager leaves", "another state"
    return Finding(Kind.RNG, "rng state", message, "rng.state", expected=expected, actual=actual)


def memory_written(subject: str, message: str, detail: str = "mutation.unexpected") -> Finding:
    """The compiled program has written to memory that eager leaves alone."""
    return Finding(Kind.MUTATION, subject, message, detail, expected="unchanged", actual="changed")


@dataclass(frozen=True, slots=True)
class FakeError:
    """An exception of a fake kernel.

    Attributes:
        callers: The frames that called the operator, and those in which Dynamo was, the innermost last.
        called: The frames from the call on.
    """

    operator: OpOverload
    error: BaseException
    callers: Sequence[FrameSummary]
    called: Sequence[FrameSummary]

    @classmethod
    def inside(cls, error: BaseException) -> FakeError | None:
        """The exception of a custom operator's fake kernel that an exception is, or comes from."""
        for cause in causes(error, suppressed=True):
            frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
            for place in reversed(range(len(frames))):
                held = frames[place].f_locals
                operator = held.get("func")
                # a fake kernel calls others, which are torch's
                if not isinstance(held.get("self"), FakeTensorMode) or not isinstance(operator, OpOverload):
                    continue
                if not is_built_in(operator):
                    stack = traceback.extract_tb(cause.__traceback__)
                    return cls(operator, cause, (*stack[:place], *traced_stack(error)), stack[place:])
        return None

    @property
    def fault(self) -> str:
        """What is to be mended, in words."""
        operator, error = self.operator, self.error
        definition = operator_definition(operator.name().partition(".")[0])
        if isinstance(error, UnsupportedOperatorException) or (definition is not None and definition.fake is None):
            code = None if definition is None else definition.function.__code__
            where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
            return f"the custom operator {operator}{where}, which has no register_fake"
        raised = next(filter(users_frame, self.called), None)
        where = "" if raised is None else f" ({raised.filename}:{raised.lineno})"
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"the {fake_kernel(operator)[1]} of the custom operator {operator}{where}, which raises {said}"

    def added_to(self, crash: Finding) -> Finding:
        """The finding of the crash, with its operator: nothing is searched for it."""
        lines = [line for one in self.callers if (line := users_frame(one))]
        return replace(
            crash,
            detail="crash.fake",
            op=str(self.operator),
            source=lines[-1] if lines else crash.source,
            at_fault=self.fault,
            evidence={**crash.evidence, EvidenceKey.AT_FAULT: self.fault},
        )
