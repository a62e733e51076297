"""The operator check as a part of a region's check: when it runs, and how it changes the region's decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding, Skip
from checked_backend.regions.execution import Call, Subjects
from checked_backend.regions.operator_check.check import SUBJECT, OperatorCheck, OperatorDecisions
from checked_backend.regions.operator_check.findings import findings_of, inputs_behind
from checked_backend.regions.operator_check.tensor_checks import Wrong
from checked_backend.verdict.decisions import Decisions
from checked_backend.verdict.envelope import NoiseBaseline

_HIDDEN = (
    "its noise would hide an error of 100 % of a kernel in this precision alone, and the operators in front of it were "
    "not checked by themselves: {}"
)


class OperatorStep:
    """Adds what the operator check finds to the decisions of a region's calls.

    Args:
        local: A call as the check gets it: without exchanges with other ranks.
    """

    def __init__(self, check: OperatorCheck, local: Callable[[Call], Call] = lambda call: call) -> None:
        self._check = check
        self._local = local
        self._limits: Mapping[str, float] = {}
        self._last: tuple[OperatorDecisions, Subjects] | None = None
        self._reason = ""

    @property
    def is_checked(self) -> bool:
        """Whether the operators were checked when that was tried last."""
        return not self._reason

    def forward(self, call: Call, decisions: Decisions, scales: Mapping[str, NoiseBaseline]) -> int:
        """Check the operators of a call that is rechecked, unless an error has been found in it already.

        Findings about their gradients are kept until the region's backward pass is compared.

        Args:
            decisions: The decisions on its results; findings and skips are added.
            scales: The noise of the results in earlier calls.

        Returns:
            The number of tensors inside of the region that were checked.
        """
        checked = 0
        if decisions.recheck and not _fails(decisions):
            found = self._checked(call)
            self._limits, self._last, self._reason = found.limits or {}, (found, call.subjects), found.reason
            decisions.findings += found.forward
            decisions.skips += found.skips
            checked = found.checked
        self._note_limits(decisions, {**scales, **decisions.scales})
        return checked

    def _checked(self, call: Call) -> OperatorDecisions:
        try:
            local = self._local(call)
        except CheckedBackendError as error:
            return OperatorDecisions(skips=[Skip(SUBJECT, f"not checked: {error}")], reason=str(error))
        return self._check.run(local)

    def backward(self, decisions: Decisions, scales: Mapping[str, NoiseBaseline]) -> None:
        """Add what was found wrong with operators' gradients, unless the region's own gradients show an error.

        What only reaches gradients of inputs that are zero but for rounding is left out. Roundings that go the same
        way, and that the compiled program leaves out, may be all that there is of them.

        Args:
            decisions: The decisions on the region's gradients.
            scales: Their noise in earlier calls.
        """
        known = {**scales, **decisions.scales}
        last, self._last = self._last, None
        if last is not None and not _fails(decisions):
            found, subjects = last
            decisions.findings += _gradient_findings(found, subjects, known)
        self._note_limits(decisions, known)

    def _note_limits(self, decisions: Decisions, scales: Mapping[str, NoiseBaseline]) -> None:
        """Lower the limits if each operator was checked: a result hides no more than the least precise operator.

        Where operators were not checked, tensors whose noise hides any error in this precision are skipped. A tensor
        that is nothing but rounding is no skip: no part of it can be wrong.
        """
        limits = self._limits
        decisions.own_precision_limits = {
            name: min(limit, limits.get(name, limit)) for name, limit in decisions.own_precision_limits.items()
        }
        for name, limit in decisions.own_precision_limits.items() if self._reason else ():
            if limit >= 1 and not _is_rounding(scales.get(name)):
                decisions.skips.append(Skip(name, _HIDDEN.format(self._reason), matters=True))


def _gradient_findings(
    found: OperatorDecisions, subjects: Subjects, scales: Mapping[str, NoiseBaseline]
) -> Sequence[Finding]:
    if found.graph is None:
        return ()

    def matters(wrong: Wrong) -> bool:
        places = inputs_behind(graph, wrong.node)
        return not places or not all(_is_rounding(scales.get(subjects.gradient(place))) for place in places)

    graph = found.graph
    return findings_of(graph, [wrong for wrong in found.backward if matters(wrong)], subjects)


def _is_rounding(scale: NoiseBaseline | None) -> bool:
    """Whether a tensor is zero but for rounding."""
    return scale is not None and scale.sizes is not None


def _fails(decisions: Decisions) -> bool:
    return any(finding.kind.fails for finding in decisions.findings)
