"""The section at the end of a run. It reads the properties of test reports, which any worker may have sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

__all__ = ["COUNTS", "REPORT", "SENTENCE", "VERDICT", "Summary"]

REPORT = "numcheck"
"""Title of the section of a test's report."""

VERDICT = "numcheck.verdict"
SENTENCE = "numcheck.report"
COUNTS = "numcheck."
"""Names of properties: the verdict, the report's first line, and prefix of the counts."""

_COUNTED = ("regions", "calls", "backwards")


@dataclass(slots=True, eq=False)
class Summary:
    """Gathers the verdicts of tests and prints them. pytest keeps its plugins in sets.

    Attributes:
        verdicts: The number of tests by verdict.
        lines: Tests that did not pass or have a warning: verdict, test, first line of the report.
        totals: Sums of the counts.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    lines: list[tuple[str, str, str]] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the verdict of a test that is over."""
        properties = {str(name): str(value) for name, value in report.user_properties}
        verdict = properties.get(VERDICT)
        if report.when != "teardown" or verdict is None:
            return
        self.verdicts[verdict] += 1
        for name in _COUNTED:
            self.totals[name] += int(properties.get(f"{COUNTS}{name}", 0))
        if verdict != "pass" or properties.get(f"{COUNTS}findings", "0") != "0":
            self.lines.append((verdict, report.nodeid, properties.get(SENTENCE, "")))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the section, if anything was checked or should have been."""
        asked = terminalreporter.config.option.numcheck is not None
        if not self.verdicts and not asked:
            return
        terminalreporter.section("numcheck")
        for line in self._text():
            terminalreporter.write_line(line)

    def _text(self) -> Iterator[str]:
        for verdict, test, sentence in sorted(self.lines):
            yield f"{verdict.upper()} {test}"
            yield f"    {sentence.removeprefix(f'{verdict.upper()}: ')}"
        tests = sum(self.verdicts.values())
        if not tests:
            yield "nothing was checked: no test ran a compiled region"
            return
        verdicts = ", ".join(f"{self.verdicts[v]} {v}" for v in ("pass", "fail", "inconclusive") if self.verdicts[v])
        counts = ", ".join(_counted(self.totals[name], name) for name in _COUNTED)
        yield f"{_counted(tests, 'tests')} ran compiled code: {verdicts} ({counts} checked)"


def _counted(number: int, things: str) -> str:
    """``1 region``, ``2 regions``."""
    return f"{number} {things.removesuffix('s') if number == 1 else things}"
