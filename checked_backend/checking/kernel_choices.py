"""Compile a program with other kernels than those that were measured to be the fastest.

A compiler that measures kernels and takes the fastest makes another program on another machine, or on the same one when
it is busy: the candidate is a set of kernels, and a wrong one among them may hide for weeks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from checked_backend._torch.autotuning import Autotuning, watch_autotuning
from checked_backend.findings import Coverage, Finding, Skip
from checked_backend.findings.evidence import EvidenceKey
from checked_backend.regions.fresh_cache import FreshCache

__all__ = ["KernelChoice", "kernel_choices", "told_by_choice"]

_MOST_KERNELS = 5


@dataclass(slots=True)
class KernelChoice:
    """One way to choose among kernels, and what it came to.

    Attributes:
        number: Its number, counted from 1.
        of: How many there are.
        kernels: Which kernels it takes, in words.
        retime: Makes the time that the compiler is told of the measured time.
        tuned: What the compiler measured and chose.
    """

    number: int
    of: int
    kernels: str
    retime: Callable[[float], float]
    tuned: Autotuning = field(default_factory=Autotuning)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compile with this choice. Nothing that was compiled or measured before is used."""
        if self.of == 1:
            yield
            return
        with FreshCache().used(), watch_autotuning(self.retime) as self.tuned:
            yield

    @property
    def words(self) -> str:
        """What it chose, in words."""
        names = [f"{purpose}: {kernel}" for purpose, kernel in self.tuned.chosen.items()]
        more = f"; and {len(names) - _MOST_KERNELS} more" if len(names) > _MOST_KERNELS else ""
        told = "; ".join(names[:_MOST_KERNELS]) or f"{self.tuned.measured} measurements, none of them of known kernels"
        return f"kernel choice {self.number} of {self.of}, {self.kernels}: {told}{more}"


def kernel_choices(count: int) -> Iterator[KernelChoice]:
    """The ways to choose: the fastest kernels, the slowest, and then any. It ends where no kernels were measured.

    Args:
        count: How many there are at most. With one, the compiler is left alone.
    """
    first = KernelChoice(1, count, "the fastest kernels", lambda ms: ms)
    yield first
    if not first.tuned.measured:
        return
    if count > 1:
        yield KernelChoice(2, count, "the slowest kernels", lambda ms: 1 / ms)
    for number in range(3, count + 1):
        yield KernelChoice(number, count, "any kernels", _drawn(random.Random(number)))


def _drawn(numbers: random.Random) -> Callable[[float], float]:
    """Times at random, of a generator of their own: the program's random state is left alone."""
    return lambda _ms: numbers.random()


def told_by_choice(tried: Sequence[tuple[KernelChoice, Sequence[Finding]]]) -> tuple[tuple[Finding, ...], Coverage]:
    """The findings of all choices, each once, with the kernels that show it; and what was tried.

    Args:
        tried: Each choice with its findings.
    """
    (first, _), *_ = tried
    if first.of == 1:
        return tuple(tried[0][1]), Coverage()
    shown: dict[tuple[str, str, str], list[tuple[KernelChoice, Finding]]] = {}
    for choice, findings in tried:
        for finding in findings:
            shown.setdefault((finding.kind, finding.detail, finding.subject), []).append((choice, finding))
    if not first.tuned.measured:
        words = f"kernel choices 2 to {first.of}" if first.of > 2 else "kernel choice 2"
        skip = Skip(words, "not compiled: the compiler measured no kernels, so there is one for each purpose")
        return tuple(tried[0][1]), Coverage(checked={"kernel choices": 1}, skipped=(skip,))
    choices = [choice for choice, _ in tried]
    told = tuple(finding for showing in shown.values() for finding in _told(showing, choices))
    notes = tuple(choice.words for choice, _ in tried)
    return told, Coverage(checked={"kernel choices": len(tried)}, notes=notes)


def _told(showing: Sequence[tuple[KernelChoice, Finding]], tried: Sequence[KernelChoice]) -> Sequence[Finding]:
    """A finding of some choices, told once. A choice may have several of one name, in several regions or calls."""
    first = showing[0][0]
    choices = list({choice.number: choice for choice, _ in showing}.values())
    numbers = {choice.number for choice in choices}
    without = [choice for choice in tried if choice.number not in numbers]
    evidence: dict[str, str] = {EvidenceKey.KERNELS: "\n".join(choice.words for choice in choices)}
    if without:
        evidence[EvidenceKey.OTHER_KERNELS] = "\n".join(choice.words for choice in without)
    others = ", ".join(str(number) for number in sorted(numbers - {first.number}))
    only = f"; only with {first.words}{f' (and with {others})' if others else ''}" if without else ""
    return [
        replace(finding, message=f"{finding.message}{only}", evidence={**finding.evidence, **evidence})
        for choice, finding in showing
        if choice is first
    ]
