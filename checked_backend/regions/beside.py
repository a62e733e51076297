"""Watch what lies beside a region's inputs and must not change: memory outside of views, and gradients.

A kernel that writes past the end of a slice changes the tensor that the slice is a view of. No input shows that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from checked_backend.findings import Finding, Kind, Skip
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.regions.control_runs import RegionControlRuns
from checked_backend.regions.execution import is_leaf
from checked_backend.regions.inputs import Inputs, copy_values, storage_key

__all__ = ["Beside"]

Run = Callable[[Sequence[Any]], object]
"""Runs a region on inputs."""

_BY_OTHERS = (
    "it was changed while this call was checked; another thread ran, and the compiled program alone does not change it"
)

FARTHEST = 4
"""On either side of a view, memory is looked at up to this many times the view's span."""


@dataclass(frozen=True, slots=True)
class _Gradient:
    """An input's ``.grad``: which tensor, and its checksum."""

    tensor: torch.Tensor | None
    checksum: int | None

    @classmethod
    def of(cls, leaf: torch.Tensor) -> _Gradient:
        tensor = leaf.grad
        return cls(tensor, None if tensor is None else fingerprint(tensor))

    def same_as(self, other: _Gradient) -> bool:
        return self.tensor is other.tensor and self.checksum == other.checksum


@dataclass(frozen=True, slots=True)
class Beside:
    """The state of what lay beside the inputs of a call.

    Attributes:
        memory: Checksums of the memory around views, by the position of an input that is one.
        gradients: Gradients of leaves, by position.
        unseen: Why the memory around a view was not looked at, by the position of an input that is one.
    """

    memory: dict[int, int | None]
    gradients: dict[int, _Gradient]
    unseen: dict[int, str]

    @classmethod
    def of(cls, args: Sequence[Any], *, gradients: bool = True) -> Beside:
        """Record the state.

        Args:
            args: The inputs.
            gradients: Whether to look at the inputs' gradients.
        """
        plain = [(place, arg) for place, arg in enumerate(args) if type(arg) in (torch.Tensor, torch.nn.Parameter)]
        groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for place, tensor in plain:
            key = storage_key(tensor)
            if key is not None and tensor.numel():
                groups.setdefault(key, []).append((place, tensor.detach()))
        memory: dict[int, int | None] = {}
        unseen: dict[int, str] = {}
        for group in groups.values():
            around = _around([tensor for _, tensor in group])
            if isinstance(around, str):
                unseen[group[0][0]] = around
            elif around is not None:
                memory[group[0][0]] = fingerprint(around)
        leaves = {place: tensor for place, tensor in plain if gradients and tensor.requires_grad and is_leaf(tensor)}
        return cls(memory, {place: _Gradient.of(leaf) for place, leaf in leaves.items()}, unseen)

    def findings(
        self,
        args: Sequence[Any],
        runs: RegionControlRuns,
        skip: Callable[[Skip], None],
    ) -> list[Finding]:
        """Findings about changes that the candidate made there, and eager does not make.

        Args:
            args: The inputs, after the call.
            runs: Runs the region in eager from the inputs as they were before; and if another thread ran during the
                call, the candidate again. What that does not change by itself was the thread's doing: a backward pass
                there adds to the same gradients.
            skip: Receives the changes that another thread made.
        """
        memory, gradients = self._changed(args)
        if not memory and not gradients:
            return []
        inputs, subjects = runs.inputs, runs.subjects
        eagers_memory, eagers_gradients = self._changed_by(runs.run_on, inputs)
        if set(memory) - set(eagers_memory):  # what is there may be what eager writes too
            eagers_memory += self._changed_by(runs.run_on, inputs, other_memory=True)[0]
        found = {place: _memory_changed(subjects.mutated(place)) for place in memory if place not in eagers_memory}
        added = {place: _gradient_changed(subjects.mutated(place)) for place in gradients}
        added = {place: finding for place, finding in added.items() if place not in eagers_gradients}
        # that one ran meanwhile is not always visible at once: its time is told some milliseconds later
        others = threading.active_count() > 1 or runs.left is None or runs.left.others_ran
        if others and (found or added):
            again = partial(runs.run_on, region=runs.variants.candidate)
            own_memory, own_gradients = self._changed_by(again, inputs)
            if found.keys() - own_memory:  # what is there may be what it wrote, and would write again
                own_memory += self._changed_by(again, inputs, other_memory=True)[0]
            for place in added.keys() - own_gradients:
                skip(Skip(f"what lies beside {subjects.inputs[place]}", _BY_OTHERS))
            for place in found.keys() - own_memory:
                skip(Skip(f"what lies beside {subjects.inputs[place]}", _BY_OTHERS, matters=True))
            found = {place: finding for place, finding in found.items() if place in own_memory}
            added = {place: finding for place, finding in added.items() if place in own_gradients}
        return [*found.values(), *added.values()]

    def _changed_by(self, run: Run, inputs: Inputs, *, other_memory: bool = False) -> tuple[list[int], list[int]]:
        """The positions of inputs beside which a run on copies changes memory, or gradients; those are copies too.

        Args:
            other_memory: Whether to have other values in the memory around views, each bit turned.
        """
        given, _ = inputs.fresh()
        self._with_own_memory(given, inputs.args, other_memory)
        for place, gradient in self.gradients.items():
            if gradient.tensor is not None and is_leaf(given[place]) and given[place].requires_grad:
                given[place].grad = gradient.tensor.detach().clone()
        before = Beside.of(given)
        run(given)
        return before._changed(given)

    def _with_own_memory(self, given: list[Any], users: Sequence[Any], other_memory: bool) -> None:
        """Copy views that share the user's memory, with the memory around them."""
        around = {storage_key(users[place]) for place in self.memory}
        places = [
            place
            for place, tensor in enumerate(given)
            if type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and storage_key(tensor) in around
            and storage_key(tensor) == storage_key(users[place])
        ]
        copies = copy_values([given[place].detach() for place in places])
        values = [copy.clone() for copy in copies]
        turned = {storage_key(copy): copy.untyped_storage() for copy in copies} if other_memory else {}
        for storage in turned.values():
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).bitwise_not_()
        for place, copy, value in zip(places, copies, values, strict=True):
            given[place] = copy.copy_(value).requires_grad_(given[place].requires_grad)

    def _changed(self, args: Sequence[Any]) -> tuple[list[int], list[int]]:
        now = Beside.of(args)
        memory = [place for place, known in self.memory.items() if now.memory.get(place, known) != known]
        gradients = [
            place
            for place, known in self.gradients.items()
            if place in now.gradients and not known.same_as(now.gradients[place])
        ]
        return memory, gradients


def _around(views: Sequence[torch.Tensor]) -> torch.Tensor | str | None:
    """The memory around views of one storage, with zeros in place of the views.

    Returns:
        The memory; None if there is none; or why it is not looked at.
    """
    first = views[0]
    if any(view.dtype != first.dtype for view in views):
        return "not looked at: several inputs are views of it, in several dtypes"
    if first.is_quantized:
        return None
    whole = first.untyped_storage().nbytes() // first.element_size()
    starts = [view.storage_offset() for view in views]
    ends = [start + _span(view) for start, view in zip(starts, views, strict=True)]
    reach = FARTHEST * max(map(_span, views))
    start, end = max(0, min(starts) - reach), min(whole, max(ends) + reach)
    if end - start > 2 * reach + FARTHEST * sum(view.numel() for view in views):
        return "not looked at: the view has few elements far from each other in much memory"
    if end - start <= sum(view.numel() for view in views):
        return None
    with torch.no_grad():
        memory = first.as_strided((end - start,), (1,), start).clone()
        for view in views:
            memory.as_strided(view.shape, view.stride(), view.storage_offset() - start).zero_()
    return memory


def _span(view: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))


def _memory_changed(subject: str) -> Finding:
    return Finding(
        kind=Kind.MUTATION,
        detail="mutation.beyond",
        subject=subject,
        message=(
            "the compiled program wrote to memory beside this input, which is a view: to elements of its base that are "
            "outside of it, and that eager leaves alone"
        ),
        expected="unchanged",
        actual="changed",
    )


def _gradient_changed(subject: str) -> Finding:
    return Finding(
        kind=Kind.MUTATION,
        detail="mutation.grad",
        subject=subject,
        message=(
            "the compiled program changed the `.grad` of this input in its forward pass, which eager leaves alone: the "
            "optimizer's next step is another"
        ),
        expected="the `.grad` before the call",
        actual="another",
    )
