"""Plain data: what a check found, and what it did and did not look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

from checked_backend.subjects import Subject, SubjectKind

__all__ = [
    "Coverage",
    "Finding",
    "Kind",
    "Metrics",
    "NoiseScale",
    "RegionInfo",
    "Severity",
    "Skip",
    "Verdict",
]


class _Word(str, Enum):
    """A string enumeration that prints as its value on every Python (``enum.StrEnum`` is 3.11)."""

    def __str__(self) -> str:
        return str(self.value)


class Verdict(_Word):
    """The answer of a check. Never a bool: *inconclusive* is neither a pass nor a fail."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class Severity(_Word):
    """Whether a finding fails a check, or is only told."""

    ERROR = "error"
    WARNING = "warning"


class Kind(_Word):
    """What sort of problem a finding is."""

    STRUCTURE = "structure"
    ALIAS = "alias"
    MUTATION = "mutation"
    LOGIC = "logic"
    PRECISION = "precision"
    NONFINITE = "nonfinite"
    RNG = "rng"
    EXCEPTION = "exception"
    CRASH = "crash"
    NONDETERMINISTIC = "nondeterministic"
    UNSUPPORTED = "unsupported"

    @property
    def fails(self) -> bool:
        """Whether a finding of this kind makes the verdict *fail* (the other kinds make it *inconclusive*)."""
        return self not in (Kind.NONDETERMINISTIC, Kind.UNSUPPORTED)


@dataclass(frozen=True, slots=True)
class Metrics:
    """How two tensors differ. Knows no tolerance: `NoiseScale` and a judge give it a meaning.

    Differences are over elements that are finite on both sides. Elements that are NaN on both sides, or the same
    infinity on both sides, are equal.

    Attributes:
        total: Number of elements.
        mismatched: Number of elements that are not equal (NaN equals NaN, ``-0.0`` equals ``0.0``).
        max_abs_diff: Greatest absolute difference.
        max_rel_diff: Greatest ``|candidate - reference| / |reference|``; infinite where the reference is 0 and the
            candidate is not.
        max_ulp: Greatest distance in representable numbers of the dtype (real floating point only).
        rmse: Root of the mean squared difference.
        reference_rms: Root mean square of the reference's finite elements.
        reference_max: Greatest magnitude of the reference's finite elements.
        nonfinite_mismatched: Number of elements whose class (finite, NaN, +inf, -inf) differs.
        nan_reference: Number of NaNs in the reference.
        nan_candidate: Number of NaNs in the candidate.
        inf_reference: Number of infinities in the reference.
        inf_candidate: Number of infinities in the candidate.
        index: Where the greatest difference is (an element whose class differs comes before all others); None if
            all elements are equal.
        reference_value: The reference's value at ``index``.
        candidate_value: The candidate's value at ``index``.
        dtype: The reference's dtype: ``float32``; empty if it is not known.
    """

    total: int
    mismatched: int
    max_abs_diff: float
    max_rel_diff: float
    max_ulp: int | None
    rmse: float
    reference_rms: float
    reference_max: float
    nonfinite_mismatched: int
    nan_reference: int
    nan_candidate: int
    inf_reference: int
    inf_candidate: int
    index: tuple[int, ...] | None
    reference_value: float | int | bool | complex | None
    candidate_value: float | int | bool | complex | None
    dtype: str = ""

    @property
    def bitwise_equal(self) -> bool:
        """Whether no element differs."""
        return self.mismatched == 0


def _renamed(old: str, new: str) -> property:
    """An attribute's old name, which tells the new one."""

    def read(self: object) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__}.{old} is called {new}: it is the smallest error that would have been caught, and "
            "statistical power is a probability"
        )

    return property(read, doc=f"Raises AttributeError: it is called `{new}`.")


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The rounding noise that a tensor must have at its precision, and where that number came from.

    Attributes:
        rms: Root mean square of the noise, in units of the tensor.
        max: Greatest noise of one element, in units of the tensor.
        source: How it was obtained, in words.
        detection_limit: The smallest relative error (of the tensor's root mean square) that would have been caught.
    """

    rms: float
    max: float
    source: str
    detection_limit: float | None = None

    detection_power = _renamed("detection_power", "detection_limit")


_LAYOUT = frozenset({"structure.stride", "structure.requires_grad", "logic.sign_of_zero"})
_LAYOUT_OF_NODES = frozenset({"structure.stride", "structure.offset"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem. The names of its fields are the package's public interface.

    A finding about layout alone (option ``layout``) may have the severity of a warning: it is told and fails nothing.
    ``evidence`` is for people; what code reads is a field.

    Attributes:
        more_than_layout: Why a difference in layout matters: a later node depends on it, or gradients are lost; or "".
        inherited: Whether it is about a node of a graph, an input of which was wrong already.
        ignored: Which of the user's options hides it, or that it follows from a node that is hidden; or "".
        script: A Python script that shows the operator alone.
    """

    kind: Kind
    subject: str
    message: str
    detail: str = ""
    region: str = ""
    expected: str | None = None
    actual: str | None = None
    metrics: Metrics | None = None
    noise: NoiseScale | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    graph: str | None = None
    stage: str | None = None
    node: str | None = None
    op: str | None = None
    source: str | None = None
    workaround: str | None = None
    repro: str | None = None
    severity: Severity = Severity.ERROR
    more_than_layout: str = ""
    inherited: bool = False
    ignored: str = ""
    script: str | None = None

    @property
    def fails(self) -> bool:
        """Whether it makes the verdict *fail*."""
        return self.kind.fails and self.severity is Severity.ERROR

    @property
    def is_layout(self) -> bool:
        """Whether it is about layout alone: the same values with other strides, ``requires_grad`` or signs of zeros.

        A result through which gradients flow in eager and not in the compiled program is more than that. A node of a
        graph has other strides, or begins elsewhere in its storage, than was traced, and nothing depends on that.
        """
        return self.detail in (_LAYOUT_OF_NODES if self.of_node else _LAYOUT) and not self.more_than_layout

    @property
    def about(self) -> Subject:
        """What it is about, as data."""
        return Subject(self.subject)

    @property
    def of_node(self) -> bool:
        """Whether it is about what was traced of a node of a graph, not about results of a program."""
        return self.about.kind is SubjectKind.NODE


@dataclass(frozen=True, slots=True)
class Skip:
    """Something that was not checked.

    Attributes:
        subject: What was not checked.
        reason: Why.
        matters: Whether an error could hide there, so that the verdict cannot be *pass*.
        region: In which region.
    """

    subject: str
    reason: str
    matters: bool = False
    region: str = ""


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """One region that Dynamo handed to the backend, and how much of it was checked.

    Attributes:
        name: Its name.
        sources: Lines of the user's that it was traced from.
        nodes: Nodes of its graph.
        calls: How often it was called.
        checked_calls: How many of these calls were checked.
        checked_backwards: How many of its backward passes were.
        last_checked_call: The last call that was checked, counted from 1; 0 if none was.
    """

    name: str
    sources: tuple[str, ...] = ()
    nodes: int = 0
    calls: int = 0
    checked_calls: int = 0
    checked_backwards: int = 0
    last_checked_call: int = 0


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was checked and what was not.

    Attributes:
        regions: The regions seen.
        checked: How often each kind of comparison ran: ``outputs``, ``mutated inputs``, ``gradients``, ...
        skipped: What was not checked, and why.
        ignored: Findings that the user asked not to report.
        notes: Remarks that change no verdict (``fusion-rounding``, a control that was not needed).
        detection_limit: Per subject, the smallest relative error that the check would have caught.
        own_precision_limit: Per subject, the relative error that noise hides at the tensor's own precision where
            float64 does not show it: of kernels that are wrong in that precision alone, and of what Dynamo traced
            wrongly. Where each operator was judged by itself, at the calls that are judged anew, it is the error of an
            operator's whole result that its own noise hides. It comes from the noise alone; what exceeds it is held
            against more and larger roundings, which may hide a few times as much.
    """

    regions: tuple[RegionInfo, ...] = ()
    checked: Mapping[str, int] = field(default_factory=dict)
    skipped: tuple[Skip, ...] = ()
    ignored: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    detection_limit: Mapping[str, float] = field(default_factory=dict)
    own_precision_limit: Mapping[str, float] = field(default_factory=dict)

    detection_power = _renamed("detection_power", "detection_limit")
    own_precision_power = _renamed("own_precision_power", "own_precision_limit")
