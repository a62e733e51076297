"""Run a dumped graph again under a compiler, and check it against eager."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import dynamo_captures_data, dynamo_control_flow, dynamo_reset
from checked_backend._torch.pytree import tree_leaves
from checked_backend.dump import Dump, rehearse
from checked_backend.dump.standalone import mark_dynamic
from checked_backend.errors import CandidateError, CheckedBackendError
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.options import CheckOptions, parse_options
from checked_backend.process.job import JobEnd
from checked_backend.regions.build import build_region
from checked_backend.regions.compile import resolve_compiler
from checked_backend.regions.failure import Failure, Investigator
from checked_backend.report import Report
from checked_backend.report.dynamo_log import DynamoLog
from checked_backend.report.session import Session, collect

_ASSIGNMENT = re.compile(r": (?P<name>\w+)(?:: [^=]*)? = ")
"""A line of ``module.py``, as `source_line` quotes it."""


def replay(
    dump: Dump,
    *,
    compiler: str | Callable[..., Any] = "inductor",
    seed: int = 0,
    investigator: Investigator | None = None,
    report_dir: Path | None = None,
    rehearsed: bool = False,
) -> Report:
    """Compile a dumped graph, and check its outputs, mutations and gradients against eager.

    The graph runs under the modes and from the random state that were recorded. Dimensions that were symbolic are
    dynamic again.

    Args:
        seed: The seed for input values that were not saved.
        report_dir: The folder of reports and repros, if not the one that the environment names.
        rehearsed: Whether `rehearse` has already run the graph.

    Raises:
        OptionError: The compiler is unknown.
        DumpError: The graph or its inputs cannot be built here, eager refuses it, or it would leave its memory.
    """
    localize = investigator is not None
    given: dict[str, Any] = {"compiler": compiler, "on_divergence": "record", "layout": "raise", "localize": localize}
    if report_dir is not None:
        given["report_dir"] = report_dir
    options = parse_options(CheckOptions, "replay", given).unsampled()
    resolve_compiler(options)  # an unknown one is the user's mistake, not a finding
    if not rehearsed:
        rehearse(dump, seed)
    with (
        collect(threads=False, closing=False) as session,
        dump.ambient(),
        torch.set_grad_enabled(dump.kind == "dynamo" and torch.is_grad_enabled()),
    ):
        if not dump.has_values:
            made = f"not in the dump: made from seed {seed}, within the recorded ranges"
            session.ledger.skip(Skip("the recorded values", made))
        outputs = _run(dump, options, seed, session, investigator)
        roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if roots:
            try:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            except Exception:
                if not any(finding.kind is Kind.CRASH for finding in session.report.findings):
                    raise
        findings = tuple(_with_own_line(finding, dump) for finding in session.report.findings)
        return replace(session.report, title=f"replay {dump.title}", findings=findings)


def replay_of_death(
    dump: Dump,
    death: JobEnd,
    *,
    compiler: str | Callable[..., Any] = "inductor",
    seed: int = 0,
    investigator: Investigator | None = None,
    report_dir: Path | None = None,
) -> Report:
    """Report on a dumped graph that killed a process when it was compiled. This process does not try the compiler.

    Args:
        seed: As for `replay`, as are all others.
    """

    def died(_gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Any:
        raise CandidateError(death.cause)

    def told(finding: Finding) -> Finding:
        if finding.kind is not Kind.CRASH:
            return finding
        message = f"the process that compiled and ran the program died: {death.cause}"
        return replace(finding, message=message, detail=death.detail, expected="no death", actual=death.cause)

    def investigated(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        if investigator is None:
            return findings
        options = failure.options.model_copy(update={"compiler": compiler})
        return investigator(replace(failure, options=options), list(map(told, findings)))

    chosen = None if investigator is None else investigated
    report = replay(dump, compiler=died, seed=seed, investigator=chosen, report_dir=report_dir, rehearsed=True)
    return replace(report, findings=tuple(map(told, report.findings)))


def _with_own_line(finding: Finding, dump: Dump) -> Finding:
    """Name the user's line, which the dump remembers, instead of the line in its ``module.py``."""
    made = _ASSIGNMENT.search(finding.source or "")
    if made is None:
        return finding
    lines = {node["name"]: node["source"] for node in dump.metadata["graph"]["nodes"]}
    return replace(finding, source=lines.get(made["name"]) or finding.source)


def _run(dump: Dump, options: CheckOptions, seed: int, session: Session, investigator: Investigator | None) -> Any:
    """Run the graph as a user's program if Dynamo can trace it, whole or in parts, else directly."""

    def inputs() -> list[Any]:
        made = dump.inputs(seed)
        if dump.kind == "dynamo":
            return made
        # graphs of other kinds were traced with autograd already applied
        return [a.detach() if isinstance(a, torch.Tensor) else a for a in made]

    def checked(gm: fx.GraphModule, given: Sequence[Any], *, options: CheckOptions = options) -> Callable[..., Any]:
        return build_region(gm, given, options, None, thorough=True, investigator=investigator)

    log = DynamoLog()
    dynamo_reset()
    try:
        given = inputs()
        mark_dynamic(dump.metadata["inputs"], given)
        with dynamo_captures_data(), log.watch():
            outputs = torch.compile(dump.module, backend=checked)(*given)
        if session.report.coverage.regions:
            if reasons := log.reasons():
                session.ledger.skip(Skip("some operators", f"Dynamo left them in eager: {reasons}"))
            for skip in log.in_eager("some operators"):
                session.ledger.skip(skip)
            return outputs
        reason = "leaves this graph in Python"
    except CheckedBackendError:
        raise
    except Exception as error:
        if session.report.coverage.regions:
            raise  # the graph ran, and eager itself raises
        reason = f"cannot trace this graph again ({type(error).__name__})"
    finally:
        dynamo_reset()
    session.ledger.skip(Skip("dynamic shapes", f"Dynamo {reason}, so only the recorded sizes were run"))
    direct = options.model_copy(update={"compiler": _failing_openly(options), "compiler_options": {}})
    return checked(dump.module, given := inputs(), options=direct)(*given)


def _failing_openly(options: CheckOptions) -> Callable[..., Any]:
    """The candidate compiler. Exceptions that would steer Dynamo are failures here, because there is no Dynamo."""
    compiler = resolve_compiler(options)

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return compiler(gm, example_inputs)
        except dynamo_control_flow() as error:
            raise CandidateError(f"{type(error).__name__}: {error}") from error

    return compile_graph
