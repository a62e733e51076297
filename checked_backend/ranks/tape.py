"""Record the tensors that a program exchanges with other ranks, and replay them in runs that must exchange nothing.

Only the run whose results the user gets exchanges tensors: with or without a check, each rank issues the same
collectives in the same order. All other runs of a region take the recorded tensors of other ranks as inputs. The
tensors that they would send are compared like results. No rank therefore depends on what another rank checks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from checked_backend._torch.collectives import wait_for_result
from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.modes import DisableTorchDispatch, TorchDispatchMode
from checked_backend._torch.operators import OpOverload
from checked_backend._torch.tensors import storage_identity
from checked_backend.errors import CheckedBackendError, is_out_of_memory
from checked_backend.graphs.operators import Operator
from checked_backend.modes.base import OperatorMode
from checked_backend.ranks.collectives import Collective, Role, describe_collective, role_of

NEAR = 0.05
"""Two sent tensors count as equal, apart from noise, if their relative difference is at most this.

This only decides which of several collectives of one kind and shape belong together, never whether one is right.
"""

SAME = 1e-3
"""Of two sent tensors whose relative differences from a third one are at most this, neither is the likelier match.

A compiler may reorder collectives, so of two that are near, the one that sends the very same is the right one.
"""

_SAMPLE = 4096


Key = tuple[str, tuple[tuple[str, Any], ...], tuple[int, ...]]


@dataclass(eq=False, slots=True)
class Exchange:
    """One tensor that a rank sent in a collective, and the tensor that it received.

    Attributes:
        family: ``all_reduce``, ...
        terms: The parameters on which all ranks must agree.
        sent: A copy of the tensor that is sent; None if nothing of it reaches another rank, or memory was too short.
        received: A copy of the result; None before it has arrived, or if memory was too short.
        name: Its name in findings, once eager's order is known: ``all_reduce_0``.
    """

    family: str
    terms: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent: torch.Tensor | None
    received: torch.Tensor | None = None
    name: str = ""

    @property
    def key(self) -> Key:
        """The facts in which two exchanges must agree to be the same."""
        return self.family, self.terms, self.shape

    def __str__(self) -> str:
        terms = ", ".join(f"{name}={value}" for name, value in self.terms)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.family}({dtype}{list(self.shape)}, {terms})"


def nearest(own: Exchange, others: Sequence[Exchange]) -> Exchange | None:
    """The exchange that sends the same. Of those that differ by rounding alone it is the first: their order decides."""
    near_ones = []
    for one in others:
        distance = _distance(own, one)
        if distance <= SAME:
            return one
        if distance <= NEAR:
            near_ones.append((distance, one))
    least = min((distance for distance, _ in near_ones), default=0.0)
    return next((one for distance, one in near_ones if distance <= 10 * least), None)


def indistinguishable(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """The exchanges that send the same and receive something else each, so that their order alone tells which is which.

    Returns:
        Groups of two exchanges and more.
    """
    groups: list[list[Exchange]] = []
    for one in exchanges:
        if one.received is None:
            continue
        like = [group for group in groups if group[0].key == one.key and _distance(group[0], one) <= SAME]
        if like:
            like[0].append(one)
        else:
            groups.append([one])
    return [group for group in groups if not all(_is_same(group[0].received, one.received) for one in group[1:])]


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def _distance(one: Exchange, other: Exchange) -> float:
    """The relative distance of what two exchanges of one shape send, in a sample of the elements."""
    if one.sent is None or other.sent is None:
        return 0.0
    step = max(1, one.sent.numel() // _SAMPLE)
    first, second = (tensor.detach().reshape(-1)[::step].to(torch.float64) for tensor in (one.sent, other.sent))
    both = torch.isfinite(first) & torch.isfinite(second)
    same = first.nan_to_num(0.25, 0.5, -0.5)[~both] == second.nan_to_num(0.25, 0.5, -0.5)[~both]
    if not bool(same.all()):
        return math.inf
    scale = float(first[both].norm()) + float(second[both].norm())
    return 0.0 if not scale else 2 * float((first - second)[both].norm()) / scale


class CollectiveReplayError(CheckedBackendError):
    """Raised if a run exchanges something that was not recorded, or that cannot be replayed."""


@dataclass(eq=False, slots=True)
class CollectiveTape:
    """The exchanges of one run, in order.

    Attributes:
        opaque: The first operator whose exchange cannot be seen from outside; "" if there was none.
        failed: The exception that a collective raised: a broken connection, a timeout.
        short: The exception that was raised where there was no memory for a copy.
        under_way: Exchanges whose results the program waits for after the run, and these results.
    """

    exchanges: list[Exchange] = field(default_factory=list)
    opaque: str = ""
    failed: Exception | None = None
    short: Exception | None = None
    under_way: list[tuple[Exchange, torch.Tensor]] = field(default_factory=list)

    def arrive(self) -> None:
        """Wait for the results that are under way.

        Raises:
            Exception: A collective failed.
        """
        while self.under_way:
            exchange, result = self.under_way[0]
            wait_for_result(result)
            with DisableTorchDispatch():
                exchange.received = result.clone()
            del self.under_way[0]


class RecordCollectives(OperatorMode):
    """Run a program as it is, and record its exchanges on a tape.

    Args:
        tape: Exchanges are appended to it.
    """

    def __init__(self, tape: CollectiveTape) -> None:
        super().__init__()
        self._tape = tape
        self._pending: list[tuple[Exchange, torch.Tensor]] = []

    def __enter__(self) -> RecordCollectives:
        TorchDispatchMode.__enter__(self)  # the run is the user's own, so autocast's cache stays on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        TorchDispatchMode.__exit__(self, kind, error, traceback)

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and keep copies of the tensors that it exchanges."""
        role = role_of(func, operator)
        if role is Role.NONE or _is_traced(args):
            return func(*args, **kwargs)
        if role is Role.COLLECTIVE:
            return self._exchange(func, describe_collective(operator, args, kwargs), args, kwargs)
        if role is Role.OPAQUE:
            self._tape.opaque = self._tape.opaque or operator.name
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._tape.failed = error
            raise
        if role is Role.WAIT:
            for waited in args[0] if isinstance(args[0], (list, tuple)) else args:
                self._arrived(waited)
        return result

    def finish(self, *, leave: bool = False) -> None:
        """Wait for the collectives that are still under way, unless one has failed: the other ranks may not come.

        Args:
            leave: Leave them under way: the program waits for them itself, perhaps only after another exchange, without
                which the other ranks do not come.
        """
        if self._tape.failed is not None:
            return
        if leave:
            with DisableTorchDispatch():
                for exchange, result in self._pending:
                    exchange.received = torch.zeros_like(result)  # for runs that do no more than hand it out
                    self._tape.under_way.append((exchange, result.detach()))
            self._pending.clear()
        for _, result in list(self._pending):
            try:
                wait_for_result(result)
            except Exception as error:
                self._tape.failed = error
                return
            self._arrived(result)

    def _exchange(self, func: OpOverload, collective: Collective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sends = collective.sends_here()
        sent = [self._copied(tensor) if sends else None for tensor in collective.inputs]
        try:
            returned = func(*args, **kwargs)
        except Exception as error:
            self._tape.failed = error
            raise
        for tensor, copy, result in zip(collective.inputs, sent, _results(collective, returned), strict=True):
            exchange = Exchange(collective.family, collective.terms, tuple(tensor.shape), tensor.dtype, copy)
            self._tape.exchanges.append(exchange)
            if collective.waits:
                exchange.received = self._copied(result)
            else:
                self._pending.append((exchange, result))
        return returned

    def _arrived(self, waited: torch.Tensor) -> None:
        memory = storage_identity(waited)
        for pending in list(self._pending):
            exchange, result = pending
            if storage_identity(result) == memory:
                exchange.received = self._copied(result)
                self._pending.remove(pending)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor | None:
        try:
            with DisableTorchDispatch():
                return tensor.detach().clone()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._tape.short = error.with_traceback(None)
            return None


def _results(collective: Collective, returned: Any) -> Sequence[torch.Tensor]:
    if collective.out is not None:
        return (collective.out,)
    if collective.in_place:
        return collective.inputs
    return tuple(returned) if isinstance(returned, (list, tuple)) else (returned,)


def _is_traced(args: Sequence[Any]) -> bool:
    """Whether a compiler makes this call while it traces, so that it exchanges nothing."""
    parts = [part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


class ReplayCollectives(OperatorMode):
    """Run a program that receives the tensors on a tape, and sends nothing.

    A collective is matched with one on the tape by its facts (kind, group, shape) and by the tensor that is sent. The
    order alone is not enough: a compiler may reorder collectives, merge equal ones, issue several at once, and issue
    one again where it recomputes something.

    Args:
        tape: Recorded by :class:`RecordCollectives`.
        earlier: Tapes of earlier passes that the program may recompute: a backward pass may recompute its forward pass.
        pairs: Whether this run decides which exchanges belong together, and names them. Where an exchange is missing
            on the tape, such a run goes on with zeros, and any other run raises.
        where: The prefix of the names of these exchanges.

    Attributes:
        sent: The tensors that the run would have sent, by the exchange on the tape, in order.
        missing: Exchanges that are not on the tape.
        matched_by_order: Exchanges on the tape that were matched by their place alone.
        repeated: Whether the run made an exchange a second time.

    Raises:
        CollectiveReplayError: From the program.
    """

    def __init__(
        self,
        tape: CollectiveTape,
        earlier: Sequence[CollectiveTape] = (),
        *,
        pairs: bool = False,
        where: str = "",
    ) -> None:
        super().__init__()
        self.tape = tape
        self._earlier = [exchange for other in earlier for exchange in other.exchanges]
        self._pairs = pairs
        self._where = where
        self._unused = list(tape.exchanges)
        self._counts = Counter[str]()
        self.sent: dict[Exchange, torch.Tensor] = {}
        self.missing: list[Exchange] = []
        self.matched_by_order: set[Exchange] = set()
        self.repeated = False

    @property
    def unused(self) -> Sequence[Exchange]:
        """Exchanges on the tape that this run did not make, without repetitions of those that it made."""
        known = [*self.sent, *self._earlier]
        return [
            one
            for one in self._unused
            if not any(one.key == other.key and _distance(one, other) <= NEAR for other in known)
        ]

    @property
    def doubtful(self) -> bool:
        """Whether a result was not received, or may belong to another exchange."""
        return bool(self.missing or (self.matched_by_order and self.unused))

    @property
    def in_step(self) -> bool:
        """Whether the run would make the recorded exchanges, in the same order."""
        return not self.missing and not self.repeated and list(self.sent) == self.tape.exchanges

    def values(self) -> dict[str, torch.Tensor]:
        """The sent tensors that can be compared, by subject."""
        return {
            f"sent[{exchange.name}]": tensor
            for exchange, tensor in self.sent.items()
            if exchange.name and exchange.sent is not None
        }

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, or return its recorded result if it is a collective."""
        role = role_of(func, operator)
        if role is Role.NONE or _is_traced(args):
            return func(*args, **kwargs)
        if role is Role.WAIT:
            return list(args[0]) if isinstance(args[0], (list, tuple)) else args[0]
        if role is Role.OPAQUE:
            raise CollectiveReplayError(
                f"{operator.name} exchanges something with other ranks which cannot be replayed, and a check must not "
                "exchange it a second time"
            )
        collective = describe_collective(operator, args, kwargs)
        with DisableTorchDispatch():
            received = [
                self._received(func, collective, place, args, kwargs) for place in range(len(collective.inputs))
            ]
            return _handed_out(collective, received)

    def _received(
        self, func: OpOverload, collective: Collective, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        tensor = collective.inputs[place].detach()
        own = Exchange(collective.family, collective.terms, tuple(tensor.shape), tensor.dtype, None)
        own.sent = tensor if collective.sends_here() else None
        exchange = self._find(own)
        if exchange is None:
            if not self._pairs:
                raise CollectiveReplayError(f"{own} is not among what was exchanged when the region ran")
            own.sent = None
            self.missing.append(own)
            return _zeros(func, collective, place, args, kwargs)
        received = exchange.received
        if received is None:
            why = "it had not arrived" if self.tape.short is None else "there was no memory for a copy"
            raise CollectiveReplayError(f"the result of {own} was not kept: {why}")
        if exchange in self.sent or exchange not in self.tape.exchanges:
            self.repeated = True
        else:
            # a copy: the program may write to it later
            self.sent[exchange] = tensor.clone()
            if self._pairs:
                exchange.name = f"{self._where}{own.family}_{self._counts[own.family]}"
                self._counts[own.family] += 1
        return received.to(tensor.dtype if tensor.dtype.is_floating_point else received.dtype, copy=True)

    def _find(self, own: Exchange) -> Exchange | None:
        left = [one for one in self._unused if one.key == own.key]
        known = [one for one in (*self.sent, *self._earlier) if one.key == own.key]
        found = nearest(own, left) or nearest(own, known)
        if found is None:
            found = next(iter(left), None)  # no tensor is near, so this one is wrong or noisy: only the order is left
            if found is not None:
                self.matched_by_order.add(found)
        if found is None and not self._pairs:
            found = next(iter(known), None)
        if found is not None and found in self._unused:
            self._unused.remove(found)
        return found


def _zeros(
    func: OpOverload, collective: Collective, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Zeros of the shape that a collective's result would have."""
    shapes = func(*[_meta(arg) for arg in args], **{name: _meta(value) for name, value in kwargs.items()})
    shape = _results(collective, shapes)[place]
    return torch.zeros(shape.shape, dtype=shape.dtype, device=collective.inputs[place].device)


def _meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_meta(item) for item in value]
    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value


def _handed_out(collective: Collective, received: Sequence[torch.Tensor]) -> Any:
    if collective.out is not None:
        return collective.out.copy_(received[0])
    if collective.in_place:
        for target, result in zip(collective.inputs, received, strict=True):
            target.detach().copy_(result)
        return list(collective.inputs) if collective.many else collective.inputs[0]
    return list(received) if collective.many else received[0]
