"""Compare the structure of two tensors: type, dtype, shape, device, layout, strides, ``requires_grad``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from checked_backend._torch.collectives import is_async_result

StructureAspect = Literal["type", "dtype", "shape", "device", "layout", "stride", "requires_grad", "inference"]


@dataclass(frozen=True, slots=True)
class StructureDifference:
    """One difference between the structures of two values."""

    aspect: StructureAspect
    expected: str
    actual: str

    def __str__(self) -> str:
        return f"{self.aspect}: expected {self.expected}, got {self.actual}"


def significant_strides(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """The strides of dimensions with more than one element: they decide where elements lie.

    Returns:
        Pairs of dimension and stride, in order of the dimensions; no pair for an empty tensor.
    """
    if tensor.numel() == 0:
        return ()
    return tuple((dim, tensor.stride(dim)) for dim in range(tensor.dim()) if tensor.shape[dim] > 1)


def compare_structure(*, reference: Any, candidate: Any) -> tuple[StructureDifference, ...]:
    """Compare everything about two values except the numbers.

    The order is type, dtype, shape, device, layout, significant strides (for strided tensors of one shape),
    ``requires_grad``, and whether only the candidate is a tensor of inference mode. If the types differ, nothing else
    is compared. Three things do not count as differences: a pending conjugation or negation, ``torch.nn.Parameter`` in
    place of a plain tensor, and a collective's result that eager waits for at its first use in place of one that has
    arrived.

    Returns:
        The differences; empty if the structure is the same. For two values that are not tensors, only the types are
        compared.
    """
    expected, actual = _type_name(reference), _type_name(candidate)
    if expected != actual:
        return (StructureDifference("type", expected, actual),)
    if not (isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor)):
        return ()
    aspects = _aspects(reference, candidate)
    return tuple(StructureDifference(aspect, left, right) for aspect, left, right in aspects if left != right)


def _aspects(reference: torch.Tensor, candidate: torch.Tensor) -> list[tuple[StructureAspect, str, str]]:
    same_shape = _shape(reference) == _shape(candidate)
    same_place = same_shape and reference.layout == candidate.layout == torch.strided
    aspects: list[tuple[StructureAspect, str, str]] = [
        ("dtype", str(reference.dtype), str(candidate.dtype)),
        ("shape", str(_shape(reference)), str(_shape(candidate))),
        ("device", str(reference.device), str(candidate.device)),
        ("layout", str(reference.layout), str(candidate.layout)),
    ]
    if same_place and not reference.is_nested and significant_strides(reference) != significant_strides(candidate):
        aspects.append(("stride", str(tuple(reference.stride())), str(tuple(candidate.stride()))))
    aspects.append(("requires_grad", str(reference.requires_grad), str(candidate.requires_grad)))
    if candidate.is_inference() and not reference.is_inference():  # autograd refuses it
        aspects.append(("inference", "a normal tensor", "a tensor of inference mode"))
    return aspects


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The sizes of a tensor. For a nested tensor in the strided layout, which has none, the sizes of its parts."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return tuple(tuple(part.shape) for part in tensor.unbind())
    return tuple(tensor.shape)


def _type_name(value: Any) -> str:
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) or is_async_result(value):
        return "Tensor"
    if value is None:
        return "None"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
