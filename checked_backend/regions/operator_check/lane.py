"""One way of running a region's operators on the compiled program's own values: in eager, in float64, perturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import Node

from checked_backend._torch.modes import DisableTorchDispatch
from checked_backend._torch.operators import OpOverload
from checked_backend._torch.pytree import tree_map_only
from checked_backend.graphs.effects import has_effects
from checked_backend.graphs.nodes import recorded_value
from checked_backend.modes.float64 import to_float64
from checked_backend.modes.noise_source import NoiseSource
from checked_backend.numerics.bits import unit_roundoff
from checked_backend.regions.execution import gradient_edge
from checked_backend.regions.gradient_gate import Edge

FEW_VALUES = 64
"""A tensor of fewer values is moved by a whole roundoff, up or down: everything that uses one value moves together."""

CANCELS = 8.0
"""A sum cancels where its greatest part is more than so many times what is left: three bits are lost."""

_LOW = (torch.float16, torch.bfloat16)


class Missing:
    """Stands for a value that could not be computed in this lane."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Lane:
    """The values of a region's nodes, as one kind of arithmetic has them.

    Args:
        wide: Whether it computes in float64.
        moved: Moves what an operator keeps for its backward pass, which a compiled program may have rounded.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        wide: bool = False,
        moved: Moved | None = None,
    ) -> None:
        self.wide = wide
        self.moved = moved
        self.values: dict[fx.Node, Any] = {}
        self._mode = mode
        self._interpreter = _Interpreter(gm, garbage_collect_values=False)
        self._interpreter.env = self.values

    def run(self, node: fx.Node) -> Any:
        """Run one node on this lane's values, and keep its result.

        An exception makes the result, and what depends on it, missing.
        """
        lost = [source for source in node.all_input_nodes if isinstance(self.values.get(source), Missing)]
        if lost:
            result: Any = self.values[lost[0]]
        else:
            try:
                with self._mode(), self._kept(node):
                    result = self._call(node)
            except Exception as error:  # the check does without this value, and the coverage says so
                result = Missing(f"{type(error).__name__}: {error}".splitlines()[0])
        self.values[node] = result
        return result

    def _call(self, node: fx.Node) -> Any:
        try:
            return self._interpreter.run_node(node)
        except RuntimeError:
            if not has_effects(node):
                raise
        # Autograd records no write to a leaf. Here inputs are leaves if their gradients are asked for; in the user's
        # program they come from other tensors.
        with torch.no_grad():
            return self._interpreter.run_node(node)

    def _kept(self, node: fx.Node) -> AbstractContextManager[Any]:
        value = recorded_value(node)
        moved = self.moved
        if moved is None or not isinstance(value, torch.Tensor) or value.dtype not in _LOW:
            return nullcontext()
        roundoff = unit_roundoff(value.dtype)

        def pack(kept: torch.Tensor) -> torch.Tensor:
            if not kept.is_floating_point() or kept.is_leaf:
                return kept
            with DisableTorchDispatch(), torch.no_grad():
                return kept + moved.shift(kept, roundoff)

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept)

    def gradients(
        self, node: fx.Node, sources: Sequence[fx.Node], arriving: torch.Tensor, largest: dict[fx.Node, torch.Tensor]
    ) -> Mapping[fx.Node, Any]:
        """The gradients that a node's backward pass makes of the arriving gradient, by the leaf that they go to.

        Args:
            largest: Receives the magnitude of the greatest part of each gradient, if this lane is the one in float64.
        """
        made = self.values[node]
        leaves = [source for source in sources if getattr(self.values.get(source), "requires_grad", False)]
        if not isinstance(made, torch.Tensor) or not made.requires_grad or not leaves:
            return {}
        if made.dtype != arriving.dtype:
            arriving = arriving.to(made.dtype)
        exact = self.wide and self.moved is None
        watched: AbstractContextManager[dict[fx.Node, torch.Tensor]] = nullcontext({})
        if exact:
            watched = _largest_parts(made, {leaf: self.values[leaf] for leaf in leaves})
        with self._mode(), watched as parts:
            found = torch.autograd.grad(
                made,
                [self.values[leaf] for leaf in leaves],
                arriving.expand(made.shape),
                allow_unused=True,
                retain_graph=True,
            )
        largest.update(parts)
        return dict(zip(leaves, found, strict=True))

    def put(self, node: fx.Node, value: Any, *, gradient: bool) -> None:
        """Go on with the compiled program's value of a node."""
        if self.wide and isinstance(value, torch.Tensor):
            [wide] = to_float64([value.detach()])
            value = wide.clone() if wide.dtype == value.dtype else wide  # it may be written to
        if isinstance(value, torch.Tensor) and (gradient or value.requires_grad):
            value = value.detach().requires_grad_(gradient)
        self.values[node] = value


class _Interpreter(fx.Interpreter):
    """Calls attention on tensors whose last dimension is dense, as Inductor does.

    ATen's kernels for the CPU read any other wrongly (``sdpa_constraint`` in ``torch/_inductor/lowering.py``).
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, OpOverload) and "attention" in str(target):
            args, kwargs = tree_map_only(torch.Tensor, _dense, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value if value.dim() == 0 or value.stride(-1) == 1 else value.contiguous()


class Moved:
    """Moves values by a rounding, as a fused kernel may never have rounded them. No global generator is used."""

    def __init__(self, seed: int) -> None:
        self._source = NoiseSource(seed)

    def shift(self, value: torch.Tensor, roundoff: float) -> torch.Tensor:
        """The distance to move each element, as a float64 tensor."""
        wide = value.detach().to(torch.float64)
        limits = torch.finfo(value.dtype)
        step = wide.abs().clamp_max_(limits.max / 8).mul_(roundoff).add_(limits.tiny * limits.eps / 2)
        moved: torch.Tensor = step.mul_(self._noise(wide)).nan_to_num_()
        return moved

    def _noise(self, wide: torch.Tensor) -> torch.Tensor:
        shape = wide.shape
        for dim in range(wide.dim()):  # what is repeated along a dimension was rounded once
            first = wide.narrow(dim, 0, min(1, wide.size(dim)))
            if torch.equal(first, wide.narrow(dim, wide.size(dim) - first.size(dim), first.size(dim))):
                wide = first if bool((first == wide).all()) else wide
        noise = self._source.uniform(wide)
        return (noise.sign_() if wide.numel() < FEW_VALUES else noise).expand(shape)


@contextmanager
def _largest_parts(made: torch.Tensor, leaves: Mapping[fx.Node, torch.Tensor]) -> Iterator[dict[fx.Node, torch.Tensor]]:
    """Watch the backward pass that is run from a tensor within the block.

    A tensor that is read several times gets the sum of what its readers send. Where great parts cancel, a rounding of
    the sum on the way is greater than what is left of it. The order of the sum is the compiler's.

    Args:
        made: A tensor that requires grad.
        leaves: The tensors for which gradients are asked.

    Returns:
        The magnitude of the greatest part that each leaf gets, by element, once the pass has run.
    """
    edges: dict[Edge, fx.Node] = {}
    for leaf, tensor in leaves.items():
        if (edge := gradient_edge(tensor)) is not None:
            edges[edge.node, edge.output_nr] = leaf
    largest: dict[fx.Node, torch.Tensor] = {}

    def sent(targets: Sequence[tuple[int, fx.Node]], gradients: Sequence[torch.Tensor | None], _: object) -> None:
        for number, leaf in targets:
            part = gradients[number]
            if part is not None and part.shape == leaves[leaf].shape:
                with DisableTorchDispatch(), torch.no_grad():
                    size = part.abs()
                    largest[leaf] = torch.maximum(largest[leaf], size) if leaf in largest else size

    handles = []
    queue: list[Node] = [] if made.grad_fn is None else [made.grad_fn]
    known = set(queue)
    while queue:
        node = queue.pop()
        targets = [(number, edges[edge]) for number, edge in enumerate(node.next_functions) if edge in edges]
        if targets:
            handles.append(node.register_hook(partial(sent, targets)))
        for target, number in node.next_functions:
            if target is not None and target not in known and (target, number) not in edges:
                known.add(target)
                queue.append(target)
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()
