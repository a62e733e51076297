"""The page at the end of a run: what its processes compiled, how much of that was checked, and the findings."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checked_backend.autostart import say
from checked_backend.findings import Finding, Verdict
from checked_backend.findings.paths import shown_path
from checked_backend.options import RunOptions, parse_options
from checked_backend.program.folder import WHOLE_CALLS, read_processes, seconds_of, tidy
from checked_backend.report import Report
from checked_backend.report.causes import causes_of
from checked_backend.report.clean import clean, plural
from checked_backend.report.codec import encode
from checked_backend.report.coverage_view import bluntest
from checked_backend.report.merged import merged_report
from checked_backend.report.one_line import annotation
from checked_backend.report.view import view

EXIT_CODES: Mapping[Verdict, int] = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run of a program.

    Attributes:
        status: The program's exit code; negative: the signal that killed it; None if it is not known.
        processes: The reports of the processes that compiled something.
        lost: What is missing, in sentences. With any of these the run is no pass.
    """

    program: str
    status: int | None
    seconds: float
    processes: Sequence[Report]
    lost: Sequence[str]
    folder: Path

    @property
    def used(self) -> list[Report]:
        """The processes in which Dynamo ran. A process that only imports a compiled function checks nothing."""
        return [one for one in self.processes if one.coverage.regions or one.coverage.skipped or one.findings]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all processes. A lost process, or nothing compiled, makes the run inconclusive."""
        lost = [Verdict.INCONCLUSIVE for _ in self.lost]
        return Verdict.worst([*(one.verdict for one in self.used), *lost]) or Verdict.INCONCLUSIVE

    @property
    def findings(self) -> list[Finding]:
        """The findings of all processes."""
        return [finding for one in self.used for finding in one.findings]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "schema": "checked_backend.run",
            "version": 1,
            "verdict": self.verdict.value,
            "program": self.program,
            "exit_code": self.status,
            "seconds": self.seconds,
            "checking_seconds": max((seconds_of(one)[0] for one in self.used), default=0.0),
            "folder": str(self.folder),
            "lost": list(self.lost),
            "reports": [{"path": str(one.path), "report": encode(one)} for one in self.used],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for report in self._told():
            yield str(report)
            yield ""
        yield f"checked-backend: {self.verdict.value.upper()}: {self._sentence()}"
        ended = "" if self.status is None else f"{_end(self.status)}, "  # Python tells no program its exit code
        yield _row("program", f"{clean(self.program)}: {ended}{self.seconds:.1f} s")
        if self.status and self.verdict is Verdict.PASS:
            yield _row("unknown", "whether the program ends so in eager too; what its compiled code computed agrees")
        for lost in self.lost if self.verdict is Verdict.FAIL else ():
            yield _row("missing", lost)
        if not self.used:
            return
        regions = [region for one in self.used for region in one.coverage.regions]
        calls, checked = sum(r.calls for r in regions), sum(r.checked_calls for r in regions)
        backwards = sum(r.checked_backwards for r in regions)
        where = f" in {len(self.used)} processes" if len(self.used) > 1 else ""
        yield _row(
            "checked",
            f"{plural(len(regions), 'region')}{where}, {checked} of {plural(calls, 'call')}, "
            f"{backwards} backward {'pass' if backwards == 1 else 'passes'}",
        )
        whole = sum(one.coverage.checked.get(WHOLE_CALLS, 0) for one in self.used)
        if whole:
            yield _row("whole", f"{plural(whole, 'call')} compared from outside with eager (--shadow)")
        limits = [limit for one in self.used for limit in one.coverage.detection_limit.items()]
        if limits:
            of, limit, but = bluntest(limits)
            where = f"in {of} would have been seen in every checked call{but}"
            yield _row("weakest", f"a relative error of {limit:.2g} {where}")
        failing = sum(finding.fails for finding in self.findings)
        others = len(self.findings) - failing
        yield _row("findings", f"{failing} that fail" + (f", {others} others" if others else ""))
        checking, seconds = max(map(seconds_of, self.used))
        share = checking / seconds if seconds else 0.0
        yield _row("time", f"checks took {checking:.1f} s of {seconds:.1f} s ({share:.0%})")
        yield _row("reports", shown_path(str(self.folder)))

    def _told(self) -> Iterator[Report]:
        """The reports to print; what the ranks of one program have in common is printed once, with their names."""
        groups: dict[object, list[Report]] = {}
        for one in self.used:
            if one.verdict is not Verdict.PASS or one.findings:
                title = re.sub(r" \(rank [0-9]+\)$", "", one.title)
                found = ((f.region, f.subject, f.detail or f.kind, f.severity, f.source) for f in one.findings)
                groups.setdefault((title, frozenset(found)), []).append(one)
        for group in groups.values():
            yield group[0] if len(group) == 1 else replace(merged_report(group), path=self.folder)

    def _sentence(self) -> str:
        if self.lost and self.verdict is not Verdict.FAIL:
            return "; ".join(self.lost)
        if not self.processes and self.status:
            return f"the program ended ({_end(self.status)}) before it compiled anything, so nothing was checked"
        if not self.processes:
            return (
                "the program never called torch.compile, so nothing was checked. If it compiles only with an option of "
                "its own (--compile, torch_compile=True), set that"
            )
        if not self.used:
            return (
                "the program called torch.compile, but nothing compiled ran, so nothing was checked: it was never "
                "called, or Dynamo left it to eager, as it does with a layer of torch.nn that is compiled by itself "
                "(TORCH_LOGS=dynamo tells)"
            )
        worst = next(one for one in self.used if one.verdict is self.verdict)
        return view(worst).sentence


def read_run(folder: Path, program: Sequence[str], status: int | None, seconds: float) -> RunResult:
    """Read the reports that the processes of a run left; the arguments are as in its result."""
    processes, lost = read_processes(folder)
    tidy(folder)
    return RunResult(shlex.join(program), status, seconds, processes, lost, folder)


def exit_code(result: RunResult) -> int:
    """The program's own exit code, or the verdict's if the program's is 0. A signal counts as in a shell."""
    if result.status:
        return 128 - result.status if result.status < 0 else result.status
    return EXIT_CODES[result.verdict]


def tell(folder: str, program: Sequence[str], seconds: float, *, github: str) -> None:
    """Print the page to stderr, as the last act of a program that no ``checked-backend run`` waits for."""
    raised = isinstance(getattr(sys, "last_value", None), Exception)  # set by Python for one that ends a program
    result = read_run(Path(folder), program, 1 if raised else None, seconds)
    say(f"\n{result}")
    if parse_options(RunOptions, "numcheck", {"github": github}).github:
        say("\n".join(["", *github_annotations(result.findings)]), to_stdout=True)


def github_annotations(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines that GitHub shows beside the user's code, one for each cause.

    Print them at the start of a line, which the program's own output may have left open: GitHub reads them only there.
    """
    return map(annotation, causes_of(findings))


def _row(label: str, text: str) -> str:
    return f"  {label:<10}{text}"


def _end(status: int) -> str:
    if status < 0:
        known = {one.value: one.name for one in signal.Signals}
        return f"killed by {known.get(-status, f'signal {-status}')}"
    return f"exit code {status}"
