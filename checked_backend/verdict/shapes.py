"""Tolerate shapes that depend on values: if rounding flips a comparison, a mask keeps another number of elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checked_backend.errors import is_out_of_memory
from checked_backend.findings import Finding, Skip
from checked_backend.verdict import thresholds
from checked_backend.verdict.runner import REPEAT, Control, Runner, monte_carlo, short


def tolerate_flipped_shapes(
    findings: Sequence[Finding],
    runner: Callable[[], Runner],
    name: Callable[[Finding], str] = lambda f: f.subject,
) -> tuple[list[Finding], list[Skip]]:
    """Take out findings about shapes that change in eager too when its roundings change.

    Args:
        runner: Gives what makes control runs; called only if a shape differs.
        name: The key of a finding's tensor among a control run's values.

    Returns:
        The findings that remain, and a skip for each that does not: such a tensor stays undecided.
    """
    doubtful = [finding for finding in findings if finding.detail == "structure.shape"]
    if not doubtful:
        return list(findings), []
    run = runner().run
    try:
        shapes = {key: value.shape for key, value in (run(REPEAT) or {}).items()}
        changing: set[str] = set()
        for magnitude in (1.0, thresholds.STRONG_MAGNITUDE):
            for seed in range(thresholds.SHAPE_RUNS):
                values = run(monte_carlo(seed, magnitude)) or {}
                changing |= {key for key, shape in shapes.items() if key not in values or values[key].shape != shape}
    except Exception as error:  # recorded: without controls the shape counts as wrong, but for want of memory
        if is_out_of_memory(error):
            return [finding for finding in findings if finding not in doubtful], [
                Skip(finding.subject, f"another shape than eager's; control runs: {short(error)}", matters=True)
                for finding in doubtful
            ]
        return list(findings), [Skip(f"control: {Control.SHAPES.value}", short(error))]
    tolerated = [finding for finding in doubtful if name(finding) in changing]
    reason = "its shape depends on values that rounding changes, in eager too, so there is no verdict on it"
    return [finding for finding in findings if finding not in tolerated], [
        Skip(finding.subject, reason, matters=True) for finding in tolerated
    ]
