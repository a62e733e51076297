"""Name the custom operator whose fake kernel is missing, or raised, while a program was traced."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from traceback import FrameSummary

from checked_backend._torch.dynamo import causes, traced_stack
from checked_backend._torch.fake_tensors import FakeTensorMode, UnsupportedOperatorException
from checked_backend._torch.operators import OpOverload, fake_kernel, operator_definition
from checked_backend.findings import EvidenceKey, Finding
from checked_backend.graphs.schema import is_built_in
from checked_backend.graphs.source_line import users_frame

__all__ = ["FakeError"]


@dataclass(frozen=True, slots=True)
class FakeError:
    """An exception of a fake kernel.

    Attributes:
        operator: The custom operator.
        error: The exception.
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
        for cause in (*causes(error), *causes(error.__context__ or error)):  # Dynamo raises its own from None
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
