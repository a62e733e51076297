"""The backward pass of a check: its roots, the gradients that enter there, and the leaves that get gradients."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch

from checked_backend._torch.modes import disable_current_modes
from checked_backend._torch.tensors import is_wrapper_type, rewrapped
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Skip
from checked_backend.regions.execution import COMPRESSED, compressed_indices, gradient_edge

_NARROWER = (2, 3, 7, 10, 23)
"""Bits of mantissa of float8_e5m2, float8_e4m3, bfloat16, float16 (and TF32), float32."""

_OFFSET = 3

_OVERFLOWED = 4
"""One of so many gradients is infinite or NaN, where some are."""

Given = TypeVar("Given")


class Incoming(str, Enum):
    """A kind of incoming gradients. The words are for people.

    Two kinds of values find different faults. Full mantissas show a backward pass that computes at less precision than
    the dtype has. Multiples of 1/8 are exact in every floating dtype, and so are sums of them: a difference there is no
    rounding. Nothing arrives at some of several outputs, because a loss often uses one output only. Some gradients are
    infinite or NaN: a loss scaler looks for them after the backward pass, so that must not lose them.
    """

    CONTIGUOUS = "contiguous"
    STRIDED = "transposed with gaps at an offset"
    EXPANDED = "expanded"
    FIRST_OUTPUT_ONLY = "at the first output alone"
    ALL_BUT_FIRST = "at all outputs but the first"
    INFINITE = "of which some are infinite"
    NAN = "of which some are NaN"
    CONJUGATED = "conjugated lazily"  # the backward pass of torch.complex, compiled, fails on these

    @property
    def is_laid_out(self) -> bool:
        """Whether they lie otherwise in memory than a new tensor does."""
        return self in (Incoming.STRIDED, Incoming.EXPANDED, Incoming.CONJUGATED)

    @property
    def is_finite(self) -> bool:
        """Whether all of their numbers are finite."""
        return self not in (Incoming.INFINITE, Incoming.NAN)

    def at(self, outputs: Mapping[str, Given]) -> dict[str, Given]:
        """The outputs, of several, at which gradients enter."""
        places = list(outputs.items())
        if self is Incoming.FIRST_OUTPUT_ONLY:
            return dict(places[:1])
        return dict(places[1:] if self is Incoming.ALL_BUT_FIRST else places)


def draw(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, incoming: Incoming = Incoming.CONTIGUOUS
) -> torch.Tensor:
    """Random gradients that are exact in a floating dtype, as a float64 tensor on the CPU."""
    if incoming.is_laid_out:
        eighths = torch.randint(-16, 17, tuple(shape), generator=generator).to(torch.float64) / 8
        return torch.ones_like(eighths) if eighths.numel() == 1 else eighths  # as `loss.backward()` sends
    numbers = _full_mantissa(shape, dtype, generator)
    if incoming.is_finite:
        return numbers
    chosen = torch.randint(0, _OVERFLOWED, tuple(shape), generator=generator) == 0
    chosen.view(-1)[:1] = True
    wrong = torch.full_like(numbers, math.inf if incoming is Incoming.INFINITE else math.nan)
    return torch.where(chosen, torch.copysign(wrong, numbers), numbers)


def draw_like(
    tensor: torch.Tensor,
    generator: torch.Generator,
    dtype: torch.dtype | None = None,
    incoming: Incoming = Incoming.CONTIGUOUS,
) -> torch.Tensor:
    """Random gradients of a tensor's shape, dtype and device, that are exact in another dtype if one is given."""
    shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
    numbers = draw(shape, dtype or tensor.dtype, generator, incoming)
    whole = torch.view_as_complex(numbers) if tensor.is_complex() else numbers
    return whole.to(dtype=tensor.dtype, device=tensor.device)


def _full_mantissa(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Numbers of either sign, of magnitudes from 1/2 to 2, that are not near any number of a narrower dtype."""
    bits = round(-math.log2(torch.finfo(dtype).eps))
    mantissa = torch.randint(0, 1 << bits, tuple(shape), generator=generator) | 1
    for kept in _NARROWER:
        if kept + 2 <= bits:  # 01 or 10 after what a narrower dtype keeps: at least a quarter of its last place
            first = mantissa >> (bits - kept - 1) & 1
            place = 1 << (bits - kept - 2)
            mantissa = (mantissa & ~place) | (1 - first) * place
    sign_and_half = torch.randint(0, 4, tuple(shape), generator=generator)
    scale = (1 - 2 * (sign_and_half & 1)) / (1 + (sign_and_half >> 1))
    return (1 + mantissa.to(torch.float64) / (1 << bits)) * scale


def laid_out(values: torch.Tensor, incoming: Incoming) -> torch.Tensor:
    """The same values in another layout.

    Expanded ones repeat the first value, divided by a power of two so that sums over them keep their size.
    """
    if incoming is Incoming.STRIDED:
        order = tuple(reversed(range(values.dim())))
        return with_gaps(values.permute(order), _OFFSET).permute(order)
    if incoming is Incoming.EXPANDED and values.numel():
        first = values[(slice(1),) * values.dim()]
        scale = 2.0 ** -min(round(math.log2(values.numel()) / 2), 10)
        return (torch.where(first == 0, torch.ones_like(first), first) * scale).expand(values.shape)
    lazily = incoming is Incoming.CONJUGATED and values.is_complex()
    return values.conj().resolve_conj().conj() if lazily else values


def with_gaps(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A copy in every other element of memory of twice its size, from an offset on."""
    memory = tensor.new_zeros(2 * tensor.numel() + offset)
    return memory[offset:].view(*tensor.shape, 2)[..., 0].copy_(tensor)


def variants_of(roots: Sequence[torch.Tensor]) -> list[Incoming]:
    """The kinds, besides the usual one, that gradients of these outputs can have.

    Those that find most faults come first, because there may be no time for all.
    """
    plain = [root for root in roots if root.layout is torch.strided and not root.is_nested and root.numel()]
    possible: dict[Incoming, Sequence[torch.Tensor]] = {
        Incoming.STRIDED: plain,
        Incoming.EXPANDED: [root for root in plain if root.numel() > 1],
        Incoming.FIRST_OUTPUT_ONLY: roots[1:],
        Incoming.ALL_BUT_FIRST: roots[1:],
        Incoming.INFINITE: roots,
        Incoming.NAN: roots,
        Incoming.CONJUGATED: [root for root in plain if root.is_complex()],
    }
    return [incoming for incoming, ones in possible.items() if ones]


@dataclass(frozen=True, slots=True)
class Objective:
    """How the gradients that enter a backward pass are made.

    Attributes:
        step: The number of the step. Each step has its own gradients.
        bounded: Make them those of a loss that has a least value, so that an optimizer converges: for a scalar a
            multiple of the scalar itself, for any other output half its mean squared distance from a fixed random
            target. Otherwise each output gets a random gradient.
        dtypes: The dtype of an output's gradient by the output's name, if it is not the output's own. So a program in
            float64 gets the same numbers as at its own precision.
    """

    step: int = 0
    bounded: bool = False
    incoming: Incoming = Incoming.CONTIGUOUS
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    given: Mapping[str, torch.Tensor] | None = None


def roots_of(outputs: Mapping[str, Any], *, refusing: bool = True) -> dict[str, torch.Tensor]:
    """The outputs at which a backward pass begins: those that require grad (and have a history, as not all views do).

    Args:
        refusing: If no output requires grad, take all that could. Eager then refuses to differentiate, and so must the
            compiled program.
    """
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    floating = {name: value for name, value in tensors.items() if value.is_floating_point() or value.is_complex()}
    found = {name: root for name, root in floating.items() if root.requires_grad and gradient_edge(root)}
    return found or (floating if refusing else {})


def run_backward(
    roots: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor], objective: Objective
) -> torch.Tensor | float:
    """Differentiate outputs, each of which gets a gradient of its own, with respect to leaves, into their ``grad``.

    Returns:
        The loss that these gradients belong to; 0 if it is not `Objective.bounded`.

    Raises:
        CheckedBackendError: The gradients that enter could not be made. Autograd's exceptions are the program's own.
    """
    roots = objective.incoming.at(roots)
    if (given := objective.given) is not None:
        if lost := sorted(given.keys() - roots.keys()):
            raise CheckedBackendError(f"a gradient enters at {lost[0]}, which has no history here")
        roots = {name: root for name, root in roots.items() if name in given}
        own = [given[name].detach().to(root.dtype, copy=True) for name, root in roots.items()]
        torch.autograd.backward(list(roots.values()), own, inputs=list(leaves))
        return 0.0
    try:
        with torch.no_grad(), disable_current_modes():  # no part of the program: no mode may perturb it
            entering = [_entering(root.detach(), name, objective) for name, root in roots.items()]
            loss = sum(loss for _, loss in entering)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckedBackendError(
            f"no gradient could be made for an output: {why}. Check without gradients: gradients=False."
        ) from error
    torch.autograd.backward(list(roots.values()), [gradient for gradient, _ in entering], inputs=list(leaves))
    return loss


def _entering(root: torch.Tensor, name: str, objective: Objective) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The gradient that enters at an output, and the loss whose gradient it is.

    Its random numbers are the same in every run, and in every precision.
    """
    step = 0 if objective.bounded else objective.step  # the target of a bounded loss stays the same in all steps
    generator = torch.Generator().manual_seed((step << 32) + zlib.crc32(name.encode()))
    dtype = objective.dtypes.get(name, root.dtype)
    like = partial(draw_like, generator=generator, dtype=dtype, incoming=objective.incoming)
    if root.layout is torch.sparse_coo:
        stored = root.coalesce()
        return torch.sparse_coo_tensor(stored.indices(), like(stored.values()), root.shape), 0.0
    if root.layout in COMPRESSED:
        values = like(root.values())
        return torch.sparse_compressed_tensor(*compressed_indices(root), values, root.shape, layout=root.layout), 0.0
    if is_wrapper_type(type(root)):
        return rewrapped(root, lambda inner: like(inner) if inner.is_floating_point() else inner), 0.0
    if type(root) is not torch.Tensor or root.layout is not torch.strided or root.is_nested:
        return torch.ones_like(root) * like(torch.empty((), dtype=root.dtype)).item(), 0.0
    values = like(root)
    if not objective.bounded:
        return laid_out(values, objective.incoming), 0.0
    if root.dim() == 0 and not root.is_complex():
        slope = values.abs()
        return slope, root * slope
    distance = root - values / 2
    scale = 1 / max(root.numel(), 1)
    return distance * scale, distance.abs().square().sum().double() * (scale / 2)


_LEAF = "torch::autograd::AccumulateGrad"


def unreached_leaves(roots: Mapping[str, torch.Tensor], wanted: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward pass from some roots reaches and whose gradients are not wanted."""
    known = {id(leaf) for leaf in wanted}
    todo = [edge.node for root in roots.values() if (edge := gradient_edge(root)) is not None]
    seen = set(todo)
    found = []
    while todo:
        node = todo.pop()
        if node.name() == _LEAF and id(leaf := node.variable) not in known:  # type: ignore[attr-defined]
            found.append(leaf)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        todo += new
    return found


def not_differentiated(
    unreached: Iterable[torch.Tensor], is_copy: Callable[[torch.Tensor], bool], again: Callable[[], list[torch.Tensor]]
) -> Iterator[Skip]:
    """Skips for tensors from outside the program whose gradients are not compared.

    Args:
        again: Gives the leaves of another run. Leaves that both runs have were not made by the program in its call.
    """
    missed = list(unreached)
    if not missed:
        return
    others = {id(leaf) for leaf in again()}
    for leaf in missed:
        if is_copy(leaf) or id(leaf) in others:
            yield Skip(
                f"gradient of a tensor {tuple(leaf.shape)}",
                "the program reads a tensor that requires grad from a place that check does not know, so its gradient "
                "is compared nowhere; hand it in as an argument, or make it a parameter of the module",
                matters=True,
            )
