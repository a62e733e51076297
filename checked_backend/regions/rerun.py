"""Run a failed call of a region again, with another compiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from checked_backend._torch.dynamo import TracingContext, compiling, tracing
from checked_backend._torch.fake_tensors import detect_fake_mode
from checked_backend.findings import Finding
from checked_backend.regions.build import build_region
from checked_backend.regions.compile import Compiler, copy_graph
from checked_backend.regions.execution import execute
from checked_backend.regions.failure import Failure
from checked_backend.regions.torch_state import RngState
from checked_backend.report.session import collect

__all__ = ["rerun_failure", "wrong_like"]


def rerun_failure(failure: Failure, compiler: Compiler) -> tuple[Finding, ...]:
    """Run a failed call again, with its backward pass if that failed, and check it with another compiler.

    It raises whatever the region raises in eager.
    """
    options = failure.options.unsampled().model_copy(
        update={
            "compiler": compiler,
            "compiler_options": {},
            "on_divergence": "record",
            "layout": "raise",
            "localize": False,
        }
    )
    before = RngState.capture(tuple(failure.rng.cuda))
    try:
        with collect(alone=True) as session:
            fake_mode = detect_fake_mode(failure.example_inputs)
            context = None if fake_mode is None else TracingContext(fake_mode)
            with compiling(), failure.ambient.entered(), tracing(context):
                region = build_region(copy_graph(failure.graph), failure.example_inputs, options, None, silent=True)
            arguments, leaves = failure.inputs.fresh()
            failure.rng.restore()
            with failure.ambient.entered():
                execution = execute(region, arguments, leaves if failure.cotangents is not None else {})
            if failure.cotangents is not None:
                try:
                    execution.graph(failure.inputs.mutated).backward(failure.cotangents, retain_graph=False)
                except Exception:
                    if not session.report.findings:  # else it is what the candidate raised, which its check reported
                        raise
    finally:
        before.restore()
    return session.report.findings


def wrong_like(before: Sequence[Finding], findings: Iterable[Finding]) -> list[Finding]:
    """The findings that fail. Where values were wrong before, a different layout is none of them."""
    layout = all(finding.is_layout for finding in before if finding.kind.fails)
    return [finding for finding in findings if finding.kind.fails and (layout or not finding.is_layout)]
