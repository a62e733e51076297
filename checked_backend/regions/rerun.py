"""Run a failed call of a region again, with another compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from checked_backend._torch.dynamo import TracingContext, compiling, tracing
from checked_backend._torch.fake_tensors import detect_fake_mode
from checked_backend.findings import Finding
from checked_backend.regions.build import build_region
from checked_backend.regions.compile import Compiler, compile_candidate, copy_graph
from checked_backend.regions.failure import Failure
from checked_backend.report.session import collect

__all__ = ["rerun_failure", "run_with", "wrong_like"]


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
    with failure.call.undisturbed(), collect(alone=True) as session:
        with _as_compiled_first(failure):
            region = build_region(copy_graph(failure.graph), failure.example_inputs, options, None, silent=True)
        try:
            failure.call.run(region, cotangents=failure.cotangents)
        except Exception:
            # else it is what the candidate raised in its backward pass, which its check reported
            if failure.cotangents is None or not session.report.findings:
                raise
    return session.report.findings


def run_with(failure: Failure, compiler: Compiler) -> None:
    """Run a failed call again, with its backward pass if that failed, with another compiler; nothing is compared.

    Raises:
        Exception: Whatever the compiler or the compiled region raises.
    """
    with failure.call.undisturbed():
        with _as_compiled_first(failure):
            region = compile_candidate(compiler, copy_graph(failure.graph), failure.example_inputs)
        failure.call.run(region, cotangents=failure.cotangents)


@contextmanager
def _as_compiled_first(failure: Failure) -> Iterator[None]:
    fake_mode = detect_fake_mode(failure.example_inputs)
    context = None if fake_mode is None else TracingContext(fake_mode)
    with compiling(), failure.call.ambient.entered(), tracing(context):
        yield


def wrong_like(before: Sequence[Finding], findings: Iterable[Finding]) -> list[Finding]:
    """The findings that fail. Where values were wrong before, a different layout is none of them."""
    layout = all(finding.is_layout for finding in before if finding.kind.fails)
    return [finding for finding in findings if finding.kind.fails and (layout or not finding.is_layout)]
