"""The coverage of a check: the parts that it compared, and those that it did not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checked_backend.findings.finding import Finding
from checked_backend.findings.values import Count, Flag, Many, Real


@dataclass(frozen=True, slots=True)
class Skip:
    """Something that was not checked.

    Attributes:
        matters: Whether an error could hide there, so that the verdict cannot be *pass*.
    """

    subject: str
    reason: str
    matters: Flag = False
    region: str = ""


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """One region that Dynamo handed to the backend, and how much of it was checked.

    Attributes:
        sources: The user's lines that it was traced from.
        checked_calls: The number of its calls that were checked.
        checked_backwards: The number of its backward passes that were checked.
        last_checked_call: The last call that was checked, counted from 1; 0 if none was.
        drawn_calls: The number of checked calls that were drawn at random (option ``budget``).
    """

    name: str
    sources: Many[str] = ()
    nodes: Count = 0
    calls: Count = 0
    checked_calls: Count = 0
    checked_backwards: Count = 0
    last_checked_call: Count = 0
    drawn_calls: Count = 0


@dataclass(frozen=True, slots=True)
class Coverage:
    """The parts of a program that were checked, and those that were not.

    Attributes:
        checked: How often each kind of comparison ran: ``outputs``, ``mutated inputs``, ``gradients``, ...
        skipped: The parts that were not checked, with reasons.
        ignored: Findings that the user asked not to report.
        notes: Remarks that change no verdict (``fusion-rounding``, a control that was not needed).
        detection_limit: Per subject, the smallest relative error that the check would have caught.
        own_precision_limit: Per subject, the relative error that noise hides at the tensor's own precision where
            float64 does not show it: of kernels that are wrong in that precision alone, and of what Dynamo traced
            wrongly. Where each operator was checked by itself, at the calls that are rechecked, it is the error of an
            operator's whole result that its own noise hides. It comes from the noise alone; what exceeds it is held
            against more and larger roundings, which may hide a few times as much.
    """

    regions: Many[RegionInfo] = ()
    checked: Mapping[str, Count] = field(default_factory=dict)
    skipped: Many[Skip] = ()
    ignored: Many[Finding] = ()
    notes: Many[str] = ()
    detection_limit: Mapping[str, Real] = field(default_factory=dict)
    own_precision_limit: Mapping[str, Real] = field(default_factory=dict)
