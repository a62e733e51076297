"""One call of a region, and one execution of it: results, the values that it left in its inputs, and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from checked_backend._torch.collectives import is_async_result, waited
from checked_backend._torch.tensors import inner_tensors
from checked_backend.modes.float64 import to_float64
from checked_backend.numerics.bits import with_memory
from checked_backend.numerics.fingerprint import is_freed
from checked_backend.ranks.exchanges import Exchanges
from checked_backend.regions.inputs import Inputs, WriteCounts, copy_values, is_strided
from checked_backend.regions.schedule import TimedCheck
from checked_backend.regions.torch_state import FinalRngStates, RngState, TorchState

COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
"""Layouts of sparse tensors whose indices are compressed along one dimension."""


Result = tuple[Literal["output", "mutated"], int]
"""A result of a region: an output by its index, or a mutated input by its position."""


def results_of(outputs: Sequence[Any], mutated: Mapping[int, Any]) -> dict[Result, Any]:
    """The results of a call, from its outputs and from its mutated inputs by their position."""
    results: dict[Result, Any] = {("output", index): value for index, value in enumerate(outputs)}
    results.update({("mutated", position): value for position, value in mutated.items()})
    return results


@dataclass(frozen=True, slots=True)
class Subjects:
    """The names of a region's parts, for people.

    Attributes:
        inputs: The user's name of each input.
        outputs: The names of outputs that have one of their own.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()

    def output(self, index: int) -> str:
        """``output[0]``."""
        return self.outputs[index] if index < len(self.outputs) else f"output[{index}]"

    def mutated(self, position: int) -> str:
        """``mutated[bn.running_mean]``."""
        return f"mutated[{self.inputs[position]}]"

    def result(self, result: Result) -> str:
        """``output[0]`` or ``mutated[bn.running_mean]``."""
        return self.output(result[1]) if result[0] == "output" else self.mutated(result[1])

    def gradient(self, position: int) -> str:
        """``grad[layer.weight]``."""
        return f"grad[{self.inputs[position]}]"


@dataclass(frozen=True, slots=True)
class Cotangents:
    """The gradients that arrived at a region's results in a backward pass."""

    by_result: Mapping[Result, torch.Tensor]

    def __bool__(self) -> bool:
        return bool(self.by_result)

    @property
    def outputs(self) -> dict[int, torch.Tensor]:
        """Those of outputs alone, by index."""
        return {index: gradient for (place, index), gradient in self.by_result.items() if place == "output"}

    def copied(self, *, wide: bool = False) -> Cotangents:
        """Copies, in float64 if asked, for a backward pass that may write to them: in a layout in which it may fail."""
        copies = copy_values([*self.by_result.values()])
        return Cotangents(dict(zip(self.by_result, to_float64(copies) if wide else copies, strict=True)))


@dataclass(slots=True)
class Execution:
    """The results of one run of a region.

    Attributes:
        arguments: Its arguments. The mutated ones now hold the values that the run left in them.
        leaves: The tensors whose gradients are taken, by position of the input.
        gradients: Gradients, by position, if a backward pass was run.
        counted: The positions of the arguments to which autograd counted writes.
        led: The positions of those whose gradients now lead through what it wrote to them.
        sent: What it would have sent to other ranks, by subject.
        final_rng: The random state that it left; set by `Call.run`.
    """

    outputs: Sequence[Any]
    arguments: Sequence[Any]
    leaves: Mapping[int, torch.Tensor] = field(default_factory=dict)
    gradients: Mapping[int, torch.Tensor | None] = field(default_factory=dict)
    counted: frozenset[int] = frozenset()
    led: frozenset[int] = frozenset()
    sent: Mapping[str, Any] = field(default_factory=dict)
    final_rng: RngState = field(init=False, repr=False, compare=False)

    def results(self, mutated: Iterable[int]) -> dict[Result, Any]:
        """Outputs, and inputs that the region mutates."""
        return results_of(self.outputs, {position: self.arguments[position] for position in mutated})

    def graph(self, mutated: Iterable[int]) -> AutogradGraph:
        """The autograd graph alone, without the values."""
        roots = {result: _root(value) for result, value in self.results(mutated).items()}
        return AutogradGraph({result: root for result, root in roots.items() if root is not None}, self.leaves)

    def without_graph(self) -> Execution:
        """This execution without its autograd graph, so that the activations that the graph holds are freed.

        A tensor with a history gets one that holds nothing. A tensor that only requires grad for its base stays.
        """
        bare: dict[int, Any] = {}
        for value in (*self.outputs, *self.arguments):
            bare.setdefault(id(value), _without_history(value))
        outputs, arguments = ([bare[id(value)] for value in side] for side in (self.outputs, self.arguments))
        return Execution(outputs, arguments, self.leaves, counted=self.counted, led=self.led)

    def values(self, subjects: Subjects, mutated: Iterable[int]) -> dict[str, torch.Tensor]:
        """Outputs and mutated inputs under their subjects' names."""
        return _flat({subjects.result(result): value for result, value in self.results(mutated).items()})

    def gradient_values(self, subjects: Subjects) -> dict[str, torch.Tensor]:
        """Gradients under their subjects' names."""
        return _flat({subjects.gradient(position): gradient for position, gradient in self.gradients.items()})


@dataclass(frozen=True, slots=True)
class AutogradGraph:
    """The autograd graph of an execution: everything that its backward pass needs, without the results' memory.

    Attributes:
        roots: The places where gradients of results enter, with their dtype there.
        leaves: The tensors whose gradients are taken, by position of the input.
    """

    roots: Mapping[Result, tuple[GradientEdge, torch.dtype]]
    leaves: Mapping[int, torch.Tensor]

    def backward(self, cotangents: Cotangents, *, retain_graph: bool) -> dict[int, torch.Tensor | None]:
        """Gradients of the leaves, given those of the results.

        Results that do not require grad here take no part, as in eager.
        """
        pairs = [(self.roots[result], grad) for result, grad in cotangents.by_result.items() if result in self.roots]
        if not pairs or not self.leaves:
            return dict.fromkeys(self.leaves)
        found = torch.autograd.grad(
            [edge for (edge, _), _ in pairs],
            tuple(self.leaves.values()),
            [grad.to(dtype) for (_, dtype), grad in pairs],
            retain_graph=retain_graph,
            allow_unused=True,
        )
        return dict(zip(self.leaves, found, strict=True))


@dataclass(eq=False)
class Call:
    """One checked call, kept until its backward passes are over.

    Attributes:
        rng: Random state before it.
        graph: The reference's autograd graph; None before it ran, after its activations were freed, and with
            ``reference="recompute"``.
        final_rng_states: The random states that both sides left behind; None before they ran.
        exchanges: Its exchanges with other ranks.
        ratios: The differences of its results, or later of its gradients, divided by their noise, by name;
            None before that is known.
        number: The number of the call in its region, from 1.
        fingerprints: Those of the inputs that the region leaves alone, if they were taken.
        ignores_warnings: Whether eager's warnings are ignored: filters of the program make an error of one, and the
            compiled program gives none.
    """

    inputs: Inputs
    ambient: TorchState
    rng: RngState
    subjects: Subjects
    graph: AutogradGraph | None = None
    final_rng_states: FinalRngStates | None = None
    check: TimedCheck = field(default_factory=TimedCheck)
    exchanges: Exchanges = field(default_factory=Exchanges)
    ratios: Mapping[str, float] | None = None
    number: int = 0
    fingerprints: Mapping[int, int | None] = field(default_factory=dict)
    ignores_warnings: bool = False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A block in which warnings are ignored, if those of eager are."""
        with warnings.catch_warnings() if self.ignores_warnings else nullcontext():
            if self.ignores_warnings:
                warnings.simplefilter("ignore")
            yield

    def freed_inputs(self) -> list[str]:
        """The names of inputs whose memory was freed after the call, as FSDP frees parameters. None may be read."""
        had_memory = [place for place, value in self.fingerprints.items() if value is not None]
        freed = (place for place in had_memory if is_freed(self.inputs.args[place]))
        return [self.subjects.inputs[place] for place in freed]

    def written_inputs(self) -> list[str]:
        """The names of inputs that the region leaves alone, and that the program wrote to after the call."""
        return [self.subjects.inputs[place] for place in self.inputs.written_since(self.fingerprints)]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leave the random state as it was after a block."""
        before = self.rng.now()
        try:
            with self.quiet():
                yield
        finally:
            before.restore()

    def fresh(self, *, wide: bool = False) -> tuple[list[Any], dict[int, torch.Tensor]]:
        """Inputs for one run, and the leaves whose gradients are taken; in float64, if asked."""
        return self.inputs.fresh(to_float64 if wide else None)

    def run(
        self,
        region: Callable[..., Any],
        arguments: Sequence[Any] | None = None,
        *,
        modes: Sequence[AbstractContextManager[Any]] = (),
        wide: bool = False,
        cotangents: Cotangents | None = None,
        paired: bool = False,
    ) -> Execution:
        """Run the region, or another one, as it was called. The random state stays as it is.

        What other ranks sent is replayed, and nothing is sent to them.

        Args:
            arguments: Its arguments, instead of fresh copies of the inputs.
            modes: Dispatch modes to run it under, its backward pass too.
            cotangents: Run the backward pass too, from these, to which it may write.
            paired: Let that backward pass decide which exchanges belong together.

        Raises:
            Exception: Whatever the region raises.
        """
        leaves: Mapping[int, torch.Tensor] = {}
        if arguments is None:
            arguments, leaves = self.fresh(wide=wide)
        copies = [leaf for leaf in leaves.values() if wide and is_strided(leaf)]
        arguments = _in_views(arguments, copies)
        with self.undisturbed(), ExitStack() as stack:
            self.rng.restore()
            for mode in modes:
                stack.enter_context(mode)
            replayed = self.exchanges.replayed(backward=cotangents is not None and not paired)
            with self.ambient.entered(), replayed.forward():  # innermost: received tensors are not perturbed
                execution = execute(region, arguments, leaves)
            execution.final_rng = self.rng.now()
            if cotangents is not None:
                graph = execution.graph(self.inputs.mutated)
                execution.outputs = execution.arguments = arguments = ()  # frees what the backward pass does not need
                for leaf in copies:
                    leaf.data = leaf.new_empty(0)  # and lets that pass free what it has used
                with self.exchanges.paired(backward=True) if paired else replayed.backward():
                    execution.gradients = graph.backward(cotangents, retain_graph=False)
        execution.sent = replayed.values()
        return execution


def _in_views(arguments: Sequence[Any], leaves: Sequence[torch.Tensor]) -> list[Any]:
    """Arguments with views in place of leaves: a view keeps the values of a leaf that loses them."""
    with torch.enable_grad():
        views = {id(leaf): torch.ops.aten.alias.default(leaf) for leaf in leaves}
    return [views.get(id(value), value) for value in arguments]


def _without_history(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.requires_grad or None in (grad_fn(value), gradient_edge(value)):
        return value
    with torch.enable_grad():
        leaf = value.detach().requires_grad_(True)
        return leaf.view_as(leaf) if leaf.layout is torch.strided and not leaf.is_nested else leaf


def _root(value: Any) -> tuple[GradientEdge, torch.dtype] | None:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return None
    edge = gradient_edge(value)
    return None if edge is None else (edge, value.dtype)


def gradient_edge(tensor: torch.Tensor) -> GradientEdge | None:
    """The place in the autograd graph where the gradient of a tensor that requires grad arrives.

    Returns:
        The edge. None for a view that was made with grad mode off, of a tensor with a history: the view has none. None
        also if inference mode keeps autograd from giving it a history, and if `grad_fn` gets no answer.
    """
    try:
        return get_gradient_edge(tensor)
    except (AssertionError, AttributeError, RuntimeError):  # torch's own, and the one way to learn it
        return None


def grad_fn(tensor: torch.Tensor) -> Node | None:
    """The autograd node that made a tensor.

    Returns:
        The node. None also for a view that was made with grad mode off, of a base that was written to since: autograd
        refuses to tell its history.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _flat(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        part: tensor.detach() for name, value in named.items() for part, tensor in flat_tensors(name, value).items()
    }


def flat_tensors(name: str, value: Any) -> dict[str, torch.Tensor]:
    """The plain tensors inside a value: itself, or the parts of a wrapper subclass as ``name.part``.

    A sparse tensor gives its stored values (COO: those of one place are added up). A quantised tensor and one in
    oneDNN's layout give a plain copy, a nested tensor gives its parts, and zeros without memory give zeros with memory.
    A meta tensor has no values.
    """
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return {}
    if value.is_nested and value.layout is torch.strided:
        return {f"{name}[{place}]": part for place, part in enumerate(value.detach().unbind())}
    if is_async_result(value):
        return flat_tensors(name, waited(value.detach()))
    inner = inner_tensors(value)
    if not inner:
        return {name: _plain(value)}
    return {key: leaf for part, tensor in inner.items() for key, leaf in flat_tensors(f"{name}.{part}", tensor).items()}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.sparse_coo:
        return tensor.detach().coalesce().values()
    if tensor.layout in COMPRESSED:
        return tensor.detach().values()
    if tensor.is_quantized:
        return tensor.detach().dequantize()
    return tensor.detach().to_dense() if tensor.is_mkldnn else with_memory(tensor)


def compressed_indices(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The compressed indices of a sparse tensor in a compressed layout, and the plain ones."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


def execute(region: Callable[..., Any], arguments: Sequence[Any], leaves: Mapping[int, torch.Tensor]) -> Execution:
    """Run a region once."""
    before, histories = WriteCounts.of(arguments), _histories(arguments)
    returned = region(*arguments)
    outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
    led = frozenset(place for place, made_by in _histories(arguments).items() if made_by != histories.get(place))
    return Execution(outputs, arguments, leaves, counted=before.advanced(arguments), led=led)


def _histories(arguments: Sequence[Any]) -> dict[int, Node]:
    return {
        place: made_by
        for place, value in enumerate(arguments)
        if isinstance(value, torch.Tensor) and value.requires_grad and (made_by := grad_fn(value)) is not None
    }
