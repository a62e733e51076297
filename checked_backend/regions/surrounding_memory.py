"""Watch what lies beside a region's inputs and must not change: memory outside of views, and gradients.

A kernel that writes past the end of a slice changes the tensor that the slice is a view of. No input shows that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend.findings import Finding, Kind
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.regions.execution import is_leaf
from checked_backend.regions.inputs import Inputs, copy_values, storage_key

__all__ = ["SurroundingMemory", "surroundings_changed"]

Run = Callable[[Sequence[Any]], object]
"""Runs a region on inputs."""

FARTHEST = 4
"""On either side of a view, memory is looked at up to this many times the view's span."""


@dataclass(frozen=True, slots=True)
class SurroundingMemory:
    """What lay beside the inputs of a call.

    Attributes:
        seen: Checksums of the memory around views ("beyond") and of gradients ("grad", with which tensor it was), by
            the finer kind of a change and the position of the input.
    """

    seen: Mapping[tuple[str, int], object]

    @classmethod
    def of(cls, args: Sequence[Any], *, gradients: bool = True) -> SurroundingMemory:
        """Record the state; that of the inputs' gradients only if asked."""
        seen: dict[tuple[str, int], object] = {}
        groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for place, tensor in enumerate(args):
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                continue
            key = storage_key(tensor)
            if key is not None and tensor.numel():
                groups.setdefault(key, []).append((place, tensor.detach()))
            if gradients and tensor.requires_grad and is_leaf(tensor):
                grad = tensor.grad
                seen["grad", place] = None if grad is None else (id(grad), fingerprint(grad))
        for group in groups.values():
            around = _around([tensor for _, tensor in group])
            if around is not None:
                seen["beyond", group[0][0]] = fingerprint(around)
        return cls(seen)

    def changed(self, args: Sequence[Any]) -> set[tuple[str, int]]:
        """What has changed since."""
        now = SurroundingMemory.of(args).seen
        return {key for key, known in self.seen.items() if now.get(key, known) != known}

    def changed_by(self, run: Run, args: Sequence[Any], inputs: Inputs) -> set[tuple[str, int]]:
        """What a run changes beside copies of the inputs, with copies of the gradients.

        Each bit of the memory around views is turned there: what is there now may be what the run would write too.
        """
        given, _ = inputs.fresh()
        views = {storage_key(args[place]) for what, place in self.seen if what == "beyond"}
        shared = [
            place
            for place, tensor in enumerate(given)
            if type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and storage_key(tensor) in views
            and storage_key(tensor) == storage_key(args[place])
        ]
        copies = copy_values([given[place].detach() for place in shared])
        values = [copy.clone() for copy in copies]
        for storage in {storage_key(copy): copy.untyped_storage() for copy in copies}.values():
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).bitwise_not_()
        for place, copy, value in zip(shared, copies, values, strict=True):
            given[place] = copy.copy_(value).requires_grad_(given[place].requires_grad)
        for what, place in self.seen:
            grad = args[place].grad if what == "grad" else None
            if grad is not None and is_leaf(given[place]) and given[place].requires_grad:
                given[place].grad = grad.detach().clone()
        before = SurroundingMemory.of(given)
        run(given)
        return before.changed(given)


def _around(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory around views of one storage, with zeros in place of the views; None if there is none to look at.

    Views in several dtypes are not looked at, nor one of few elements that are far from each other in much memory.
    """
    first = views[0]
    if first.is_quantized or any(view.dtype != first.dtype for view in views):
        return None
    whole = first.untyped_storage().nbytes() // first.element_size()
    starts = [view.storage_offset() for view in views]
    ends = [start + _span(view) for start, view in zip(starts, views, strict=True)]
    reach, size = FARTHEST * max(map(_span, views)), sum(view.numel() for view in views)
    start, end = max(0, min(starts) - reach), min(whole, max(ends) + reach)
    if not size < end - start <= 2 * reach + FARTHEST * size:
        return None
    with torch.no_grad():
        memory = first.as_strided((end - start,), (1,), start).clone()
        for view in views:
            memory.as_strided(view.shape, view.stride(), view.storage_offset() - start).zero_()
    return memory


def _span(view: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))


def surroundings_changed(what: str, subject: str) -> Finding:
    """The candidate changed memory, or a gradient, beside an input."""
    memory = what == "beyond"
    return Finding(
        kind=Kind.MUTATION,
        detail=f"mutation.{what}",
        subject=subject,
        message=(
            "the compiled program wrote to memory beside this input, which is a view: to elements of its base that are "
            "outside of it, and that eager leaves alone"
            if memory
            else "the compiled program changed the `.grad` of this input in its forward pass, which eager leaves "
            "alone: the optimizer's next step is another"
        ),
        expected="unchanged" if memory else "the `.grad` before the call",
        actual="changed" if memory else "another",
    )
