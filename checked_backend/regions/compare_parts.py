"""Compare two executions part by part: structure first, then aliasing, then (elsewhere) values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from checked_backend.findings import EvidenceKey, Finding, Kind
from checked_backend.modes.base import PLAIN
from checked_backend.numerics.structure import compare_structure
from checked_backend.regions.execution import COMPRESSED, compressed_indices, flat_tensors, grad_fn, gradient_edge
from checked_backend.regions.inputs import storage_key

_LOST = "gradients are lost"  # the text for gradients that only flow back through eager's result
_SHOWN_PLACES = 8


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that both executions have."""

    subject: str
    reference: Any
    candidate: Any
    source: str = ""

    def differs(self, aspect: str, message: str, expected: str, actual: str) -> Finding:
        """The finding that an aspect of its structure is not eager's."""
        detail, source = f"structure.{aspect}", self.source or None
        return Finding(Kind.STRUCTURE, self.subject, message, detail, expected=expected, actual=actual, source=source)


def compare_parts(parts: Sequence[Part], given: Sequence[Any] = ()) -> Iterator[Finding]:
    """Structure: None or not, type, dtype, shape, significant strides, device, layout, ``requires_grad``.

    Sparse tensors must store the same elements. Values that are not tensors must be equal.

    Args:
        given: The candidate's arguments, through which gradients flow back if they are returned.
    """
    inputs = {id(value) for value in given}
    for part in parts:
        if isinstance(part.reference, torch.Tensor) or isinstance(part.candidate, torch.Tensor):
            yield from _stored_elements(part)
            yield from _history(part, is_input=id(part.candidate) in inputs)
            for difference in compare_structure(reference=part.reference, candidate=part.candidate):
                message = f"{difference.aspect} differs from eager's"
                found = part.differs(difference.aspect, message, difference.expected, difference.actual)
                if difference.aspect == "requires_grad" and part.reference.requires_grad:
                    # a view made without grad may only require grad for its base
                    found = found if gradient_edge(part.reference) is None else gradients_lost(found)
                yield found
        elif not _same_value(part.reference, part.candidate):
            message = "a value that is no tensor differs from eager's"
            yield part.differs("value", message, repr(part.reference), repr(part.candidate))


def gradients_lost(found: Finding) -> Finding:
    """A finding about ``requires_grad``, where gradients only flow back through eager's result."""
    message = "no gradient flows back through it, and through eager's one does"
    evidence: dict[str, Any] = {EvidenceKey.GRADIENTS_LOST: True}
    return replace(found, message=message, evidence=evidence, more_than_layout=_LOST)


def _history(part: Part, *, is_input: bool) -> Iterator[Finding]:
    """Compare whether gradients flow back, where both sides require grad: as a new leaf does, and some views.

    A view made under ``no_grad`` requires grad as its base does, but nothing flows back through it.
    """
    both = part.reference, part.candidate
    if not all(isinstance(side, torch.Tensor) and side.requires_grad for side in both):
        return
    eager, compiled = map(grad_fn, both)
    if eager is None and compiled is not None and not gradient_edge(part.reference):
        message = "gradients flow back through it, and not through eager's: that is a view made with grad mode off"
        expected, actual = "requires_grad=True, without a grad_fn", f"requires_grad=True, grad_fn {compiled.name()}"
        yield part.differs("requires_grad", message, expected, actual)
    elif eager is not None and compiled is None and gradient_edge(part.reference) and not is_input:
        expected, actual = f"grad_fn {eager.name()}", "a leaf, which leads to no input"
        yield gradients_lost(part.differs("requires_grad", "", expected, actual))


def _stored_elements(part: Part) -> Iterator[Finding]:
    """Compare the stored elements. Optimizers for sparse gradients skip elements that are not stored, but not zeros."""
    both = (part.reference, part.candidate)
    if any(not isinstance(side, torch.Tensor) for side in both) or part.reference.layout is not part.candidate.layout:
        return
    if part.reference.layout not in (torch.sparse_coo, *COMPRESSED) or part.reference.shape != part.candidate.shape:
        return
    reference, candidate = (_stored_places(side.detach()) for side in both)
    if torch.equal(reference, candidate):
        return
    message = "other elements of this sparse tensor are stored than in eager's"
    yield part.differs("indices", message, _describe_indices(reference), _describe_indices(candidate))


def _stored_places(sparse: torch.Tensor) -> torch.Tensor:
    """The indices of the elements that a sparse tensor stores, in order: int64, (dimensions, places)."""
    if sparse.layout is torch.sparse_coo:
        return sparse.coalesce().indices()
    ends, inner = compressed_indices(sparse)
    if ends.dim() > 1:  # a batch, each of its matrices with as many places
        return torch.cat([ends.flatten(), inner.flatten()])[None].long()
    outer = torch.repeat_interleave(torch.arange(len(ends) - 1, device=ends.device), ends.diff())
    by_row = sparse.layout in (torch.sparse_csr, torch.sparse_bsr)
    return torch.stack([outer, inner] if by_row else [inner, outer]).long()


def _describe_indices(places_of_all: torch.Tensor) -> str:
    places = [tuple(place) for place in places_of_all[:, : _SHOWN_PLACES + 1].t().tolist()]
    shown = ", ".join(str(place[0]) if len(place) == 1 else str(place) for place in places[:_SHOWN_PLACES])
    return f"{places_of_all.shape[1]} places: {shown}{', ...' if len(places) > _SHOWN_PLACES else ''}"


def _same_value(reference: Any, candidate: Any) -> bool:
    if isinstance(reference, float) and isinstance(candidate, float) and reference != reference:
        return candidate != candidate
    if type(reference) is not type(candidate):
        return False
    try:
        return bool(reference == candidate)
    except Exception:  # a failing comparison decides nothing, and the types are equal
        return True


def value_pairs(
    parts: Sequence[Part], failed: frozenset[str]
) -> Iterator[tuple[Part, str, torch.Tensor, torch.Tensor]]:
    """The plain tensors whose values can be compared.

    Args:
        failed: Subjects whose structure differs so that nothing can be compared.

    Yields:
        The part, the tensor's own name (a wrapper subclass has several tensors), reference and candidate.
    """
    for part in parts:
        if part.subject in failed:
            continue
        reference = flat_tensors(part.subject, part.reference)
        candidate = flat_tensors(part.subject, part.candidate)
        for name in reference.keys() & candidate.keys():
            yield part, name, reference[name], candidate[name]


def compare_aliasing(
    reference_outputs: Mapping[str, Any],
    reference_inputs: Mapping[str, Any],
    candidate_outputs: Mapping[str, Any],
    candidate_inputs: Mapping[str, Any],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Finding]:
    """Compare which outputs share memory with which inputs and outputs, and which are the same object.

    Args:
        sources: The user's line that made each output.
    """
    expected = _relations(reference_outputs, reference_inputs)
    actual = _relations(candidate_outputs, candidate_inputs)
    for subject, other in dict.fromkeys((*expected, *actual)):
        wanted = expected.get((subject, other), "separate memory")
        found = actual.get((subject, other), "separate memory")
        if "the same object" in (wanted, found) and not reference_outputs[subject].numel():
            # nothing tells an empty tensor's memory from another's
            wanted, found = (word.replace("separate", "shared") for word in (wanted, found))
        if wanted == found:
            continue
        identity = "separate memory" not in (wanted, found)
        message = (
            f"its relation to {other} differs from eager's: a later in-place operation on one of them "
            f"{'or a comparison by `is` ' if identity else ''}gives another result than in eager"
        )
        detail, source = "alias.identity" if identity else "alias.memory", sources.get(subject) or None
        wanted, found = f"{wanted}: {other}", f"{found}: {other}"
        yield Finding(Kind.ALIAS, subject, message, detail, expected=wanted, actual=found, source=source)


def _relations(outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Mapping[tuple[str, str], str]:
    memory: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and (key := _memory_key(value)) is not None:
            memory.setdefault(key, []).append((name, value))
    relations: dict[tuple[str, str], str] = {}
    for subject, output in outputs.items():
        if not isinstance(output, torch.Tensor) or (key := _memory_key(output)) is None:
            continue
        known = memory.setdefault(key, [])
        for name, other in known:
            if output is other:
                relations[subject, name] = "the same object"
            elif output.numel() and other.numel():
                relations[subject, name] = "shared memory"
        known.append((subject, output))
    return relations


def _memory_key(tensor: torch.Tensor) -> int | None:
    """Where the memory of a tensor begins, whose storage may be another one by way of NumPy; None if it has none."""
    key = storage_key(tensor)
    if key is not None and type(tensor) in PLAIN:
        with suppress(RuntimeError):  # a graph's pool took it back
            return tensor.untyped_storage().data_ptr() or key
    return key
