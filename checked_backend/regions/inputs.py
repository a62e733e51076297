"""The inputs of one call of a region: which it mutates, what they were before, and fresh sets of them for each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.autograd import transforms_unharmed
from checked_backend._torch.collectives import is_async_result, waited
from checked_backend._torch.fake_tensors import FakeTensorMode
from checked_backend._torch.modes import TorchDispatchMode
from checked_backend._torch.operators import OpOverload, run_composite
from checked_backend._torch.tensors import (
    inner_tensors,
    is_zero_tensor,
    negative_view,
    rewrapped,
    storage_identity,
    version_of,
)
from checked_backend.graphs.operators import UNMARKED_STATISTICS, UPDATING, OperatorKind, argument, describe_operator
from checked_backend.modes.base import PLAIN, tensors_in, written_tensors
from checked_backend.numerics.fingerprint import fingerprints
from checked_backend.scripts.values import span

WIDEST = 4
"""A copy in the same layout may span this many times the memory of the tensor's own size."""

ALIGNED = 64
"""Elements after which any processor's vectors begin anew."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of a region besides its results.

    Attributes:
        mutated: Positions of the inputs whose storage it writes to; None if that could not be found out. None is
            treated as all inputs.
        random: Whether it draws random numbers (True if that could not be found out).
    """

    mutated: frozenset[int] | None
    random: bool
    reason: str = ""


def storage_key(tensor: torch.Tensor) -> int | None:
    """An identity of the memory that a tensor lives in; None if it has none."""
    if tensor.layout is not torch.strided or is_zero_tensor(tensor):
        return None
    if is_async_result(tensor):
        return storage_key(waited(tensor.detach()))
    try:
        return storage_identity(tensor)
    except (NotImplementedError, RuntimeError):  # wrapper subclasses
        return None


class _EffectLog(TorchDispatchMode):
    """Notes the storages that operators write to, and whether one draws random numbers."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.random = False
        self.opaque: str = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            self.opaque = str(func)
            return func(*args, **kwargs)
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **kwargs)
        operator = describe_operator(func)
        if operator.kind is OperatorKind.COMPOSITE:  # under inference mode
            with self:
                return run_composite(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True
        written = written_tensors(operator, args, kwargs)
        if operator.base in UPDATING and argument(operator, args, kwargs, "training") is not False:
            written += tensors_in([argument(operator, args, kwargs, name) for name in UNMARKED_STATISTICS])
        self.written.update(*map(_storages, written))
        return func(*args, **kwargs)


def find_effects(graph: Callable[..., Any], args: Sequence[Any]) -> Effects:
    """Run a region on fake tensors to see which inputs it mutates and whether it is random, before anything is run.

    Args:
        args: Its real inputs; they are not touched.

    Returns:
        The effects. Everything is assumed where the fake run is impossible (data-dependent control, a higher-order
        operator whose body the log does not see).
    """
    log = _EffectLog()
    # detach here, not under the fake mode: that would describe the tensor itself, with its gradient
    bare = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
        try:
            fakes = [
                fake_mode.from_tensor(arg, static_shapes=True) if isinstance(arg, torch.Tensor) else arg for arg in bare
            ]
            keys = {position: _storages(fake) for position, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)}
            with torch.no_grad(), transforms_unharmed(), log:
                graph(*fakes)
        except Exception as error:  # any failure means "assume everything", and is reported as the reason
            return Effects(None, True, f"{type(error).__name__}: {error}".splitlines()[0])
    if log.opaque:
        return Effects(None, True, f"contains {log.opaque}")
    mutated = frozenset(position for position, own in keys.items() if own & log.written)
    return Effects(mutated, log.random)


def _storages(tensor: torch.Tensor) -> set[int]:
    """The memory of a tensor; for a wrapper subclass also that of its inner tensors."""
    key = storage_key(tensor)
    own = set() if key is None else {key}
    return own.union(*map(_storages, inner_tensors(tensor).values()))


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one call, kept so that the region can be run on them any number of times.

    Attributes:
        args: Detached aliases of the user's arguments: runs here build no edge into the user's autograd graph, and call
            none of its hooks.
        mutated: Positions whose storage the region writes to.
        pristine: The values before the call, for these positions.
        requires_grad: Positions whose gradient is wanted; of a tensor that is given more than once, the last alone.
        given_again: For each other position of such a tensor, the last.
        entangled: Positions that are mutated, require grad, and share memory with another input: gradients with
            respect to each of them are not defined apart.
        marked: Positions that require grad although no gradient is wanted, because views of them require grad too.
        history: For mutated inputs with an autograd history, a copy that carries it.
        versions: How often each input that is not mutated had been written to, by position.
        views: Mutated inputs that are views of one tensor, after the position of that tensor, if it is an input too:
            what is written to one gives the others its history.
    """

    args: tuple[Any, ...]
    mutated: frozenset[int]
    pristine: Mapping[int, torch.Tensor]
    requires_grad: frozenset[int]
    given_again: Mapping[int, int]
    entangled: frozenset[int]
    marked: frozenset[int]
    history: Mapping[int, torch.Tensor]
    versions: Mapping[int, int]
    views: tuple[tuple[int | None, list[int]], ...] = ()

    @classmethod
    def capture(cls, args: Sequence[Any], mutated: frozenset[int] | None, *, gradients: bool) -> Inputs:
        """Keep the inputs of a call that is about to run.

        Args:
            mutated: Positions that the region mutates; None to copy every tensor that it may mutate.
            gradients: Whether gradients will be wanted.
        """
        tensors = {position: arg for position, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        keys = {position: storage_key(tensor) for position, tensor in tensors.items()}
        # a copy with history has no elements that share memory, and no compiled program writes to such a tensor
        free = (position for position, one in tensors.items() if not (one.requires_grad and repeats_elements(one)))
        chosen = set(free) if mutated is None else set(mutated)
        written = {keys[position] for position in chosen if keys[position] is not None}
        chosen |= {position for position, key in keys.items() if key is not None and key in written}
        uses = Counter(key for position, key in keys.items() if position in chosen and key is not None)
        shared = {key for key, count in uses.items() if count > 1}
        kept = tuple(tensors[position].detach() if position in tensors else arg for position, arg in enumerate(args))
        wanted = [position for position, tensor in tensors.items() if gradients and tensor.requires_grad]
        last = {id(tensors[position]): position for position in wanted}
        requires_grad = frozenset(last.values())
        return cls(
            args=kept,
            mutated=frozenset(chosen),
            pristine=_clone_together({position: kept[position] for position in sorted(chosen)}),
            requires_grad=requires_grad,
            given_again={place: last[id(tensors[place])] for place in wanted if place not in requires_grad},
            entangled=frozenset(
                position for position in chosen & requires_grad if mutated is not None and keys[position] in shared
            ),
            marked=frozenset(position for position, tensor in tensors.items() if tensor.requires_grad) - requires_grad,
            history={
                position: tensors[position].clone()
                for position in sorted(chosen & requires_grad)
                if not tensors[position].is_leaf
            },
            versions={
                position: tensor._version
                for position, tensor in tensors.items()
                if position not in chosen and not tensor.is_inference()
            },
            views=_views_of_one({place: tensors[place] for place in sorted(chosen)}),
        )

    def fingerprints(self, args: Sequence[Any]) -> dict[int, int | None]:
        """Checksums of the inputs that must stay as they are, by position. ``args`` may be aliases of the call's."""
        kept = {
            position: arg
            for position, arg in enumerate(args)
            if isinstance(arg, torch.Tensor) and position not in self.mutated and not inner_tensors(arg)
        }
        return dict(zip(kept, fingerprints(list(kept.values())), strict=True))

    def written_since(self, known: Mapping[int, int | None]) -> list[int]:
        """The positions of inputs that the region leaves alone, and that somebody wrote to after the call.

        Args:
            known: Their `fingerprints`: what is written through ``.data`` or NumPy is not counted.
        """
        now = self.fingerprints(self.args) if known else {}
        seen = {place for place, value in now.items() if None not in (value, known[place]) and value != known[place]}
        counted = {place for place, version in self.versions.items() if self.args[place]._version != version}
        return sorted(seen | counted)

    def fresh(
        self, transform: Callable[[list[Any]], list[Any]] | None = None
    ) -> tuple[list[Any], dict[int, torch.Tensor]]:
        """Make inputs for one run.

        Args:
            transform: Applied to the bare inputs first, for example to make them float64.

        Returns:
            The arguments to call the region with, and for each position of `requires_grad` the leaf whose gradient
            stands for that input's.
        """
        bare: list[Any] = list(self.args)
        for position, clone in _clone_together(self.pristine).items():
            bare[position] = clone
        if transform is not None:
            bare = transform(bare)
        for position in self.marked:
            bare[position] = bare[position].detach().requires_grad_(True)
        leaves: dict[int, torch.Tensor] = {}
        for position in sorted(self.requires_grad - self.entangled):
            leaf = bare[position].detach().requires_grad_(True)
            leaves[position] = leaf
            # A leaf that requires grad must not be written to in place, but its copy may be. The copy must hang on the
            # leaf even if this is called in a backward pass, in which grad mode is off.
            with torch.enable_grad():
                bare[position] = _recorded_copy(leaf) if position in self.mutated else leaf
        for base, views in self.views:
            recorded = views[0] in self.entangled
            if recorded or not bare[views[0]].requires_grad:
                _relate(bare, base, views, recorded=recorded)
        for position, last in self.given_again.items():
            bare[position] = bare[last]
        return bare, leaves

    def undo(self, args: Sequence[Any]) -> None:
        """Give the user's mutated inputs back the values and the autograd history they had before the call."""
        for position, clone in self.pristine.items():
            target = args[position]
            if target.requires_grad and not target.is_leaf and position in self.history:
                target.copy_(self.history[position])
                continue
            with torch.no_grad():
                if target.shape != clone.shape or target.stride() != clone.stride():
                    target.set_(clone.detach().clone())
                else:
                    target.copy_(clone)


def copy_values(values: Sequence[Any]) -> list[Any]:
    """Copy the tensors among values, without history. Tensors that share memory still do."""
    tensors = {place: value.detach() for place, value in enumerate(values) if isinstance(value, torch.Tensor)}
    copies = _clone_together(tensors)
    return [copies.get(place, value) for place, value in enumerate(values)]


def copy_in_layout(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a plain tensor without history, with its strides and its offset unless that takes far more memory.

    A copy of a lazily conjugated or negated tensor is one too.

    Args:
        tensor: A strided tensor, whose elements do not share memory.
    """
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = negative_view(plain) if plain.is_neg() else plain
        return _with_bits(copy_in_layout(plain.conj() if plain.is_conj() else plain), tensor)
    room, reach = WIDEST * plain.numel() + ALIGNED, span(plain)
    if not plain.numel() or reach > room:
        return plain.clone()
    offset = plain.storage_offset()
    if offset + reach > room:
        offset %= ALIGNED
    memory = torch.zeros(offset + reach, dtype=plain.dtype, device=plain.device)
    return memory.as_strided(plain.shape, plain.stride(), offset).copy_(plain)


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no subclass, and its elements lie in memory by strides."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested


def repeats_elements(tensor: torch.Tensor) -> bool:
    """Whether a tensor is expanded: its elements share memory."""
    strided = tensor.layout is torch.strided
    return strided and any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _recorded_copy(leaf: torch.Tensor) -> torch.Tensor:
    """Copy a tensor as autograd records it, with its strides unless its elements share memory or lie far apart."""
    copy = leaf.clone()
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or copy.stride() == leaf.stride():
        return copy
    if repeats_elements(leaf) or span(leaf) > WIDEST * leaf.numel() + ALIGNED or leaf.is_conj() or leaf.is_neg():
        return copy
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _clone_together(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copy tensors so that those which share memory still do, with their strides and offsets."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, torch.Tensor] = {}
    for position, tensor in tensors.items():
        key = storage_key(tensor)
        if key is None or tensor.numel() == 0 or type(tensor) is not torch.Tensor:
            copies[position] = _copied(tensor)
            continue
        if key not in storages:
            storages[key] = tensor.untyped_storage().clone()
        with torch.inference_mode(tensor.is_inference()):  # else autograd knows its views otherwise than the original's
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        copies[position] = _with_bits(copy, tensor)
    return copies


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a plain one is a view of, where both require grad or neither, and no bit is waiting."""
    if type(tensor) is not torch.Tensor or tensor.is_inference() or not tensor._is_view() or tensor._base is None:
        return None
    base = tensor._base
    alike = type(base) in PLAIN and base.dtype is tensor.dtype and tensor.requires_grad == base.requires_grad
    waits = any(one.is_conj() or one.is_neg() for one in (tensor, base))
    return base if alike and not waits and storage_key(base) == storage_key(tensor) is not None else None


def _views_of_one(tensors: Mapping[int, torch.Tensor]) -> tuple[tuple[int | None, list[int]], ...]:
    """The positions of tensors that are views of one, after the position of that one itself, if it has one."""
    views: dict[int, list[int]] = {}
    for position, tensor in tensors.items():
        if (base := base_of(tensor)) is not None:
            views.setdefault(id(base), []).append(position)
    bases = {id(tensor): position for position, tensor in tensors.items()}
    return tuple((bases.get(key), own) for key, own in views.items() if key in bases or len(own) > 1)


def _relate(values: list[Any], base: int | None, views: Sequence[int], *, recorded: bool) -> None:
    """Make tensors that share memory, at positions of a list, views of the one at ``base``, or of an unseen one.

    If they are ``recorded``, they all have a history.
    """
    related = [*views] if base is None or not recorded else [*views, base]
    with torch.enable_grad():  # a view that is made without may not be written to with
        if base is not None and not recorded:
            whole = values[base]
        else:
            largest = max((values[place].detach() for place in related), key=torch.numel)
            whole = largest.new_empty(0).set_(largest.untyped_storage())
            whole = whole.requires_grad_().clone() if recorded else whole
        for place in related:
            own = values[place]
            values[place] = whole.as_strided(own.shape, own.stride(), own.storage_offset())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor by itself, without history. A wrapper subclass may lack ``clone``: its inner tensors have it."""
    plain = tensor.detach()
    try:
        return plain.clone()
    except NotImplementedError:
        if not inner_tensors(plain):
            raise
        return rewrapped(plain, _copied)


def _with_bits(copy: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Mark a copy of raw memory as the original is: lazily conjugated or negated."""
    if original.is_conj():
        copy = copy.conj()
    return negative_view(copy) if original.is_neg() else copy


@dataclass(frozen=True, slots=True)
class WriteCounts:
    """How often each plain tensor among inputs had been written to at one moment, by position."""

    counts: Mapping[int, int]

    @classmethod
    def of(cls, args: Sequence[Any]) -> WriteCounts:
        """Read the counts. A tensor of inference mode has none."""
        plain = {place: arg for place, arg in enumerate(args) if type(arg) in PLAIN}
        return cls({place: version_of(arg) for place, arg in plain.items() if not arg.is_inference()})

    def advanced(self, args: Sequence[Any]) -> frozenset[int]:
        """The positions of the same inputs to which counted writes have been made since."""
        return frozenset(place for place, count in self.counts.items() if version_of(args[place]) != count)
