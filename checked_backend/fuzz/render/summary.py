"""What a database of fuzz says, read once, for each way to show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from checked_backend.findings import Verdict
from checked_backend.fuzz.database import UNSETTLED, Corpus, Totals
from checked_backend.fuzz.examine import CHECK_FAILED
from checked_backend.fuzz.groups import Group

__all__ = ["MEANING", "Shown", "Summary", "standing", "summarize"]

MEANING: Mapping[str, str] = MappingProxyType(
    {
        "new": "wrong, and not known before",
        "known": "wrong, and known before",
        "documented": "a documented difference of compiled programs",
        "unconfirmed": "did not show again in a fresh process",
    }
)
"""How groups may stand, in the order in which they are counted, and what that means."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A group as it is shown.

    Attributes:
        group: The group.
        standing: A word of `MEANING`.
    """

    group: Group
    standing: str

    @property
    def why(self) -> str:
        """Why it stands so, in words."""
        difference = self.group.difference
        return MEANING[self.standing] if difference is None else difference.reason

    @property
    def source(self) -> str:
        """The page that documents the difference; empty of what may be a bug."""
        return "" if self.group.difference is None else self.group.difference.source


@dataclass(frozen=True, slots=True)
class Summary:
    """A database of fuzz.

    Attributes:
        settings: What the results depend on: compiler, versions, hardware.
        totals: What was checked.
        groups: The groups, those met most first.
        waiting: How many failures are not confirmed yet.
        gone: The failures that did not show again in a fresh process, each with what it was.
        undecided: The programs without a verdict, each with the reason.
    """

    settings: Mapping[str, str]
    totals: Totals
    groups: Sequence[Shown]
    waiting: int
    gone: Sequence[tuple[str, str]]
    undecided: Sequence[tuple[str, str]]

    @property
    def verdict(self) -> Verdict:
        """*Fail* if a group is new. *Inconclusive* if there are `doubts`."""
        if any(shown.standing == "new" for shown in self.groups):
            return Verdict.FAIL
        return Verdict.INCONCLUSIVE if self.doubts else Verdict.PASS

    @property
    def doubts(self) -> list[str]:
        """The reasons why the compiler cannot pass."""
        doubts = []
        if not self.totals.checked:
            doubts.append("no program was checked")
        if self.waiting:
            doubts.append(f"{self.waiting} failures are not confirmed yet: run again with the same --db")
        gone = len(self.gone) + sum(shown.standing == "unconfirmed" for shown in self.groups)
        if gone:
            doubts.append(
                f"{gone} failures did not show again in a fresh process: the compiler may depend on what ran before"
            )
        for words, why in (
            (CHECK_FAILED, "checks failed themselves: that is a bug in checked_backend; please report it"),
            (
                UNSETTLED,
                "programs were in a process that ended, and not checked alone: run again with more --time",
            ),
        ):
            count = sum(reason.startswith(words) for _, reason in self.undecided)
            if count:
                doubts.append(f"{count} {why}")
        if self.totals.checked and 2 * self.totals.decided <= self.totals.checked:
            doubts.append(f"only {self.totals.decided} of {self.totals.checked} programs have a verdict")
        return doubts

    @property
    def title(self) -> str:
        """``FAIL: inductor on torch 2.13.0: groups: 1 new, 2 documented``."""
        counts = Counter(shown.standing for shown in self.groups)
        told = ", ".join(f"{counts[word]} {word}" for word in MEANING if counts[word]) or "none"
        compiler, torch = (self.settings.get(name, "?") for name in ("compiler", "torch"))
        return f"{self.verdict.value.upper()}: {compiler} on torch {torch}: groups: {told}"

    @property
    def counts(self) -> str:
        """``90 programs (2 fail, 88 pass), 80 of them compiled; 40 operations, 90 with dtypes``."""
        statuses = ", ".join(f"{number} {status}" for status, number in sorted(self.totals.statuses.items()))
        return (
            f"{self.totals.checked} programs ({statuses}), {self.totals.compiled} of them compiled; "
            f"{self.totals.ops} operations, {self.totals.pairs} with dtypes"
        )


def summarize(corpus: Corpus, known: set[str]) -> Summary:
    """Read a database.

    Args:
        corpus: The database.
        known: Signatures of groups that were known before.
    """
    return Summary(
        corpus.settings(),
        corpus.totals(),
        tuple(Shown(group, standing(group, known)) for group in corpus.groups()),
        len(corpus.failures()),
        tuple(corpus.unconfirmed()),
        tuple(corpus.inconclusive()),
    )


def standing(group: Group, known: set[str]) -> str:
    """``new``, ``known``, ``documented`` or ``unconfirmed``.

    Args:
        known: Signatures of groups that were known before.
    """
    if group.difference is not None:
        return "documented"
    if not group.confirmed:
        return "unconfirmed"
    return "known" if group.signature in known else "new"
