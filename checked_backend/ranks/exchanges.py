"""The exchanges of one call with other ranks: recorded from the candidate, replayed in every other run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from checked_backend._torch.tensors import storage_identity
from checked_backend.errors import is_out_of_memory
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.ranks.tape import (
    CollectiveTape,
    Exchange,
    RecordCollectives,
    ReplayCollectives,
    indistinguishable,
)
from checked_backend.verdict.decisions import TensorPair

_BACKWARD = "backward "

_OF_VALUES = (Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION)


@dataclass(eq=False)
class Agreement:
    """How the exchanges of the reference and of the candidate match.

    Attributes:
        pairs: The tensors that both send.
        findings: Findings about collectives that only one of them issues.
        skips: The parts that could not be compared.
        complete: Whether the reference received everything, so that its results can be compared.
    """

    pairs: list[TensorPair] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    complete: bool = True


class ReplayedRun:
    """The modes of one run that exchanges nothing, and the tensors that it would have sent.

    Args:
        backward: The mode of its backward pass; None if it has none.
    """

    def __init__(self, forward: ReplayCollectives | None, backward: ReplayCollectives | None) -> None:
        self._forward = forward
        self._backward = backward

    def forward(self) -> AbstractContextManager[Any]:
        """The block of its forward pass."""
        return nullcontext() if self._forward is None else self._forward

    def backward(self) -> AbstractContextManager[Any]:
        """The block of its backward pass."""
        return nullcontext() if self._backward is None else self._backward

    def values(self) -> Mapping[str, Any]:
        """The tensors that it would have sent, by subject: in the backward pass, if it has one."""
        last = self._backward or self._forward
        return {} if last is None else last.values()


class Exchanges:
    """The exchanges of one call; false if its region exchanges nothing with other ranks.

    Args:
        lines: The user's lines of the collectives that the region's graph names, in order, by family; None if the
            region exchanges nothing.
        returns_pending: Whether the program waits for some results of the region, instead of the region itself.

    Attributes:
        in_step: Whether eager exchanges the same in the same order as the candidate, as far as was seen, so that one
            rank could go on in eager alone.
    """

    def __init__(self, lines: Mapping[str, Sequence[str]] | None = None, *, returns_pending: bool = False) -> None:
        self._exist = lines is not None
        self._lines = lines or {}
        self._returns_pending = returns_pending
        self._forward = CollectiveTape()
        self._backward = CollectiveTape()
        self._paired: ReplayCollectives | None = None
        self.in_step = True

    def __bool__(self) -> bool:
        return self._exist

    @property
    def begun(self) -> bool:
        """Whether the candidate exchanged something in its forward pass. It must not do so a second time."""
        return bool(self._forward.exchanges or self._forward.opaque or self._forward.failed)

    @property
    def failed(self) -> Exception | None:
        """The exception of a collective of the candidate; None if there was none."""
        return self._forward.failed or self._backward.failed

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the exchanges of the candidate's forward pass.

        Where it raises, what it has begun to exchange still arrives.
        """
        if not self:
            yield
            return
        mode = RecordCollectives(self._forward)
        try:
            with mode:
                yield
        except Exception:
            mode.finish()
            raise
        mode.finish(leave=self._returns_pending)

    def _is_under_way(self, value: object) -> bool:
        if not self._forward.under_way or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        return storage_identity(value) in {storage_identity(result) for _, result in self._forward.under_way}

    def under_way(self, results: Mapping[str, object]) -> dict[str, Skip]:
        """The results, by subject, that have not arrived yet, or are part of one. Their values must not be read.

        The program waits for them itself: they will hold what other ranks send.
        """
        why = "received after the region has ended, so that what is sent for it is compared, and not what is received"
        return {subject: Skip(subject, why) for subject, value in results.items() if self._is_under_way(value)}

    def arrived(self, values: Sequence[Any]) -> Sequence[Any]:
        """The region's results, with None in place of those that are under way."""
        return [None if self._is_under_way(value) else value for value in values]

    def backward_passed(self, tape: CollectiveTape) -> None:
        """Note the exchanges of the candidate's backward pass."""
        self._backward = tape

    def replayed(self, *, backward: bool = False) -> ReplayedRun:
        """One more run of the region, or of its backward pass too, whether it exchanges anything or not."""
        if not self:
            return ReplayedRun(None, None)
        later = ReplayCollectives(self._backward, [self._forward]) if backward else None
        return ReplayedRun(ReplayCollectives(self._forward), later)

    def paired(self, *, backward: bool = False) -> AbstractContextManager[Any]:
        """The run of the reference that decides which exchanges belong together: it exchanges nothing."""
        if not self:
            return nullcontext()
        if backward:
            self._paired = ReplayCollectives(self._backward, [self._forward], pairs=True, where=_BACKWARD)
        else:
            self._paired = ReplayCollectives(self._forward, pairs=True)
        return self._paired

    def paired_region(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """The region in eager. Each of its runs is a paired run."""

        def run(*args: Any) -> Any:
            with self.paired():
                return reference(*args)

        return run

    @property
    def doubtful(self) -> bool:
        """Whether the last paired run of the reference may not have received what it needed."""
        return self._paired is not None and self._paired.doubtful

    @property
    def backward_begun(self) -> bool:
        """Whether the candidate exchanged something in its backward pass, or eager would have."""
        return self.doubtful or bool(self._backward.exchanges or self._backward.opaque)

    def for_the_user(self) -> AbstractContextManager[Any]:
        """A run of eager for the user: with the other ranks if nothing was exchanged yet, else with what they sent.

        Raises:
            Exception: A collective that is under way failed.
        """
        if not self.begun:
            return nullcontext()
        self._forward.arrive()
        return ReplayCollectives(self._forward)

    def received(self) -> Mapping[str, torch.Tensor]:
        """The tensors received in the forward pass, by the names that the last paired run gave to the exchanges."""
        return {one.name: one.received for one in self._forward.exchanges if one.name and one.received is not None}

    def agreement(self) -> Agreement:
        """The agreement that the last paired run of the reference shows."""
        found = Agreement()
        run = self._paired
        if run is None:
            return found
        tape = run.tape
        self.in_step = self.in_step and run.in_step
        found.complete = not run.doubtful
        if tape.opaque:
            found.skips.append(
                Skip(
                    "collectives",
                    f"the compiled program exchanges something by {tape.opaque}, which cannot be seen from outside",
                    matters=True,
                )
            )
        if tape.short is not None and is_out_of_memory(tape.short):
            found.skips.append(
                Skip("collectives", "unsupported: memory: there was none to keep what is sent", matters=True)
            )
        left = list(run.unused)
        if run.missing or left:
            self._unpaired(found, run.missing, left, opaque=bool(tape.opaque))
        for exchange, tensor in run.sent.items():
            if exchange.sent is None or (run.doubtful and exchange in run.matched_by_order):
                continue
            subject = f"sent[{exchange.name}]"
            if exchange.sent.dtype != tensor.dtype:
                found.findings.append(self._differs(exchange, str(tensor.dtype), str(exchange.sent.dtype)))
                continue
            found.pairs.append(TensorPair(subject, subject, tensor, exchange.sent, source=self._line(exchange)))
        return found

    def proven(self, findings: Sequence[Finding]) -> tuple[Sequence[Finding], Sequence[Skip]]:
        """The findings that stand however this rank's exchanges are paired, and a skip for others.

        A rank that sends the same in several exchanges, or only receives in them, sees no other order of them. Other
        ranks tell whether it is wrong.
        """
        doubted = [finding for finding in findings if finding.kind in _OF_VALUES]
        if not doubted or not any(indistinguishable(tape.exchanges) for tape in (self._forward, self._backward)):
            return findings, ()
        why = (
            f"{doubted[0].message}; but this rank sent the same in several exchanges and received something else in "
            "each, so that the compiled program may only have another order"
        )
        subjects = ", ".join(dict.fromkeys(finding.subject for finding in doubted))
        return [one for one in findings if one.kind not in _OF_VALUES], [Skip(subjects, why, matters=True)]

    def _line(self, exchange: Exchange) -> str:
        family, _, number = exchange.name.removeprefix(_BACKWARD).rpartition("_")
        lines = self._lines.get(family, ())
        known = not exchange.name.startswith(_BACKWARD) and int(number) < len(lines)
        return lines[int(number)] if known else ""

    def _differs(self, exchange: Exchange, expected: str, actual: str) -> Finding:
        lines = self._lines.get(exchange.family, ())
        known = self._line(exchange) if exchange.name else lines[0] if len(lines) == 1 else ""
        return Finding(
            kind=Kind.STRUCTURE,
            detail="structure.collective",
            subject=f"sent[{exchange.name or exchange.family}]",
            message=(
                "the compiled program exchanges something else with the other ranks than eager does; nothing that "
                "follows from it was compared"
            ),
            expected=expected,
            actual=actual,
            source=known or None,
        )

    def _unpaired(self, found: Agreement, missing: Sequence[Exchange], left: list[Exchange], *, opaque: bool) -> None:
        for own in missing:
            other = next((one for one in left if (one.family, one.shape) == (own.family, own.shape)), None)
            if other is not None:
                left.remove(other)
                found.findings.append(self._differs(own, str(own), str(other)))
            elif not left and not opaque:
                found.findings.append(self._differs(own, str(own), "nothing"))
            else:
                found.skips.append(Skip("collectives", _otherwise(missing, left), matters=True))
                return
        if left:
            found.skips.append(Skip("collectives", _otherwise(missing, left), matters=True))


def _otherwise(missing: Sequence[Exchange], left: Sequence[Exchange]) -> str:
    told = "; ".join(
        f"{who} {', '.join(map(str, some[:3]))}{', ...' if len(some) > 3 else ''}"
        for who, some in (("eager alone issues", missing), ("the compiled program alone issues", left))
        if some
    )
    return (
        f"unsupported: the compiled program exchanges tensors in another way than eager, which is not compared: {told}"
    )
