"""The report of a check: findings, coverage, and the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checked_backend.errors import CheckedBackendError, DivergenceError
from checked_backend.findings import Coverage, Finding, Severity, Verdict
from checked_backend.report.codec import dumps, encode, read_file
from checked_backend.report.html import render_fragment, render_html
from checked_backend.report.text import render_text
from checked_backend.report.view import headline


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The findings of a check, and what the check did and did not look at.

    Attributes:
        findings: The problems, in the order in which they were found.
        coverage: What was checked, what was skipped and why.
        title: What was checked, in the user's words.
        environment: Versions and hardware the check ran on.
        path: The file this report was written to or read from, if any. Not part of the JSON.
    """

    findings: tuple[Finding, ...]
    coverage: Coverage
    title: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None

    @property
    def verdict(self) -> Verdict:
        """The answer.

        *Fail* if a finding fails. Else *inconclusive* if there is any finding but warnings, if something that matters
        was skipped, or if nothing was checked at all. Else *pass*. Ignored findings do not count.
        """
        if any(finding.fails for finding in self.findings):
            return Verdict.FAIL
        unknown = any(finding.severity is Severity.ERROR for finding in self.findings)
        undecided = unknown or any(skip.matters for skip in self.coverage.skipped)
        anything_checked = any(count > 0 for count in self.coverage.checked.values())
        return Verdict.PASS if anything_checked and not undecided else Verdict.INCONCLUSIVE

    def raise_for_verdict(self) -> None:
        """Raise if the candidate is wrong.

        Raises:
            DivergenceError: The verdict is *fail*. An *inconclusive* verdict does not raise.
        """
        if self.verdict is Verdict.FAIL:
            raise DivergenceError(self)

    def __str__(self) -> str:
        return render_text(self)

    def __repr__(self) -> str:
        named = f" {self.title!r}" if self.title else ""
        return f"<Report{named}: {self.verdict}, {len(self.findings)} finding{'s' * (len(self.findings) != 1)}>"

    def _repr_html_(self) -> str:
        """The page that a notebook shows."""
        return render_fragment(self)

    @property
    def headline(self) -> str:
        """The verdict and the worst cause in one line: ``FAIL: model.py:52: relu is wrong (compiled code): ...``."""
        return f"{self.verdict.value.upper()}: {headline(self)}"

    def to_text(self, *, verbose: bool = False) -> str:
        """Return the report as plain text; ``verbose`` tells all of findings, coverage and environment."""
        return render_text(self, verbose=verbose)

    def to_json(self) -> str:
        """Return the report as strict JSON in ASCII.

        NaN and infinities are the strings ``"nan"``, ``"inf"`` and ``"-inf"``; a complex number is
        ``{"re": ..., "im": ...}``.
        """
        return dumps(encode(self))

    def to_html(self) -> str:
        """Return the report as one self-contained HTML page."""
        return render_html([self])

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read a report that `to_json` wrote.

        The text may come from a stranger: it is data only, and every field is checked.

        Raises:
            CheckedBackendError: The text is not a report; the message names the field, and what was expected there.
        """
        file = read_file(text)
        report = cls(file.findings, file.coverage, file.title, file.environment)
        if file.verdict not in (None, report.verdict):  # somebody has edited the file
            follows = f"expected '{report.verdict}', which follows from its findings and coverage"
            raise CheckedBackendError(f"not a report: report.verdict: {follows}, got '{file.verdict}'")
        return report
