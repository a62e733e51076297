"""The section at the end of a run. It reads the properties of test reports, which any worker may have sent."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPORT = "numcheck"
"""Title of the section of a test's report."""

VERDICT = "numcheck.verdict"
SENTENCE = "numcheck.report"
COUNTS = "numcheck."
"""Names of properties: the verdict, the report's first line, and prefix of the counts."""

FOLDER = "numcheck_folder"
"""What a worker of pytest-xdist is told: the folder in which it keeps what is known of the test that runs."""

_COUNTED = ("regions", "calls", "backwards")


def kept_file(folder: str, test: str) -> Path:
    """The file for what is known of a test."""
    return Path(folder) / f"{hashlib.sha256(test.encode()).hexdigest()}.json"


@dataclass(slots=True, eq=False)
class Summary:
    """Gathers the verdicts of tests and prints them. pytest keeps its plugins in sets.

    Attributes:
        lines: Tests that did not pass or have a warning: verdict, test, first line of the report.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    lines: list[tuple[str, str, str]] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    _folder: tempfile.TemporaryDirectory[str] | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of pytest-xdist where to keep what it knows: it may die."""
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="checked_backend_")
        node.workerinput[FOLDER] = self._folder.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Tell what was found by a worker that died."""
        file = kept_file("" if self._folder is None else self._folder.name, crashitem)
        if file.exists():
            properties, text = json.loads(file.read_text("utf-8"))
            report.user_properties += [(name, value) for name, value in properties]
            report.longrepr = f"{text}\n\nIt looked no further: {report.longrepr}"

    def pytest_unconfigure(self) -> None:
        """Remove the workers' folder."""
        if self._folder is not None:
            self._folder.cleanup()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the verdict of a test that is over."""
        properties = {str(name): str(value) for name, value in report.user_properties}
        verdict = properties.get(VERDICT)
        if verdict is None:  # only the last report of a test has it
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
