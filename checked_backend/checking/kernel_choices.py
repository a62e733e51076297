"""Compile a program with other kernels than those that were measured to be the fastest.

A compiler that measures kernels and takes the fastest makes another program on another machine, or on the same one when
it is busy: the candidate is a set of kernels, and a wrong one among them may hide for weeks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from checked_backend._torch.autotuning import Autotuning, Retime, watch_autotuning
from checked_backend._torch.caches import fresh_compile_caches
from checked_backend.checking.merge import joined
from checked_backend.findings import Coverage, Finding, Kind, Skip
from checked_backend.findings.evidence import EvidenceKey
from checked_backend.report import Report

_MOST_KERNELS = 5
_CHOICES, _MEASURED = "kernel choices", "kernels measured"


@dataclass(slots=True)
class KernelChoice:
    """One way to choose among kernels, and what it came to.

    Attributes:
        number: Its number, counted from 1, ``of`` so many.
        kernels: Which kernels it takes, in words.
        tuned: What the compiler measured and chose in this process.
    """

    number: int
    of: int
    kernels: str
    retime: Retime
    tuned: Autotuning = field(default_factory=Autotuning)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compile with this choice. Nothing that was compiled or measured before is used."""
        if self.of == 1:
            yield
            return
        with fresh_compile_caches(), watch_autotuning(self.retime) as self.tuned:
            yield

    @property
    def coverage(self) -> Coverage:
        """What was measured and chosen. A process of its own tells it to the one that started it in this way."""
        if self.of == 1:
            return Coverage()
        names = [f"{purpose}: {kernel}" for purpose, kernel in self.tuned.chosen.items()]
        more = [f"and {len(names) - _MOST_KERNELS} more"] if len(names) > _MOST_KERNELS else []
        measured = self.tuned.measured
        unknown = f"{measured} measurements, none of known kernels" if measured else "none measured"
        told = "; ".join([*names[:_MOST_KERNELS], *more]) or unknown
        return Coverage(checked={_CHOICES: 1, _MEASURED: measured}, notes=(f"{self._name}: {told}",))

    @property
    def _name(self) -> str:
        return f"kernel choice {self.number} of {self.of}, {self.kernels}"

    def words_of(self, report: Report) -> str:
        """What it chose, by the report of its check; without that if the process of the check died."""
        return next((note for note in report.coverage.notes if note.startswith(self._name)), self._name)


ONLY_CHOICE = KernelChoice(1, 1, "", lambda ms, _kernel: ms)
"""The compiler is left alone."""


def check_choices(count: int, check: Callable[[KernelChoice, bool], Report]) -> Report:
    """Check a program with several choices of kernels, to one report. It ends where no kernels were measured.

    Args:
        check: Checks it with one choice; where it is known to fail, without looking for the place.
    """
    if count == 1:
        return check(ONLY_CHOICE, False)
    tried: list[tuple[KernelChoice, Report]] = []
    for choice in kernel_choices(count):
        report = check(choice, any(finding.fails for _, made in tried for finding in made.findings))
        tried.append((choice, report))
        if choice.number == 1 and not report.coverage.checked.get(_MEASURED):
            return replace(report, coverage=joined([report.coverage, Coverage(skipped=(_skip(count, report),))]))
    coverage = joined([report.coverage for _, report in tried])
    words = {choice.number: choice.words_of(report) for choice, report in tried}
    shown: dict[tuple[str, ...], list[tuple[int, Finding]]] = {}
    for choice, report in tried:
        for finding in report.findings:
            key = (finding.kind, finding.detail, finding.subject, finding.region)
            shown.setdefault(key, []).append((choice.number, finding))
    findings = [finding for showing in shown.values() for finding in _told(showing, words)]
    return replace(tried[0][1], findings=tuple(findings), coverage=coverage, path=None)


def kernel_choices(count: int) -> Iterator[KernelChoice]:
    """The fastest kernels, the slowest, and then any."""
    yield KernelChoice(1, count, "the fastest kernels", ONLY_CHOICE.retime)
    yield KernelChoice(2, count, "the slowest kernels", lambda ms, _kernel: 1 / ms)
    for number in range(3, count + 1):
        yield KernelChoice(number, count, "any kernels", _any(number))


def _any(seed: int) -> Retime:
    """Times by a kernel's name alone, so that control runs, which are compiled too, take the same kernels."""

    def retime(_ms: float, kernel: str) -> float:
        digest = hashlib.sha256(f"{seed} {kernel}".encode()).digest()
        return (1 + int.from_bytes(digest[:4], "little")) / 2**32

    return retime


def _skip(count: int, report: Report) -> Skip:
    words = f"kernel choices 2 to {count}" if count > 2 else "kernel choice 2"
    if _MEASURED not in report.coverage.checked:
        return Skip(words, "not compiled: the process of the first ended before it told whether kernels are measured")
    if any(finding.kind is Kind.CRASH for finding in report.findings):
        return Skip(words, "not compiled: the compiled program failed before any kernel was measured")
    return Skip(words, "not compiled: the compiler measured no kernels, so there is one for each purpose")


def _told(showing: Sequence[tuple[int, Finding]], words: Mapping[int, str]) -> Iterator[Finding]:
    """A finding of some choices, told once. A choice may have several of one name, in several calls."""
    numbers = sorted({number for number, _ in showing})
    without = [text for number, text in words.items() if number not in numbers]
    evidence: dict[str, str] = {EvidenceKey.KERNELS: "\n".join(words[number] for number in numbers)}
    only = ""
    if without:
        evidence[EvidenceKey.OTHER_KERNELS] = "\n".join(without)
        others = f" (and with {', '.join(map(str, numbers[1:]))})" if numbers[1:] else ""
        only = f"; only with {words[numbers[0]]}{others}"
    for number, finding in showing:
        if number == numbers[0]:
            yield replace(finding, message=f"{finding.message}{only}", evidence={**finding.evidence, **evidence})
