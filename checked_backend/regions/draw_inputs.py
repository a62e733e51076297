"""Compare the parameters of draws as values: probabilities, means, rates.

The drawn values show little about them: other probabilities mostly draw the same, and rounding changes a draw too. So
the region is compiled once more with the parameters of its draws as results. What is drawn is a result there too: if
the parameters are equal bit for bit, it must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checked_backend.findings import Finding, Kind
from checked_backend.graphs.source_line import source_line
from checked_backend.numerics.bits import same_bits
from checked_backend.regions.compile import CompiledOnce, Compiler, compile_again, copy_graph, eager_graph
from checked_backend.regions.execution import Subjects
from checked_backend.regions.float64_twin import compile_twin
from checked_backend.regions.runner import RegionRunner, Variants
from checked_backend.regions.schedule import TimedCheck
from checked_backend.verdict.decide import decide
from checked_backend.verdict.decisions import Decisions, TensorPair
from checked_backend.verdict.runner import REPEAT, Build, Values
from checked_backend.verdict.steps.candidate_again import AGAIN, ON_EAGERS_DRAWS

# Functions and methods whose tensor arguments are a distribution's parameters. Those with "_" write to the first one.
_DRAWS = frozenset(
    {"bernoulli", "bernoulli_", "binomial", "multinomial", "normal", "poisson", "_sample_dirichlet", "_standard_gamma"}
)


@dataclass(frozen=True, slots=True)
class _Draw:
    """One draw of a region."""

    parameters: tuple[str, ...]
    drawn: str
    source: str


class DrawInputs:
    """A region's graph with the parameters of its draws, and what they draw, as further results.

    Args:
        gm: The region's Dynamo graph; it is not changed.
        example_inputs: The fake values of its placeholders as Dynamo traced them.
    """

    def __init__(self, compiler: Compiler, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        graph = copy_graph(gm)
        self.draws: list[_Draw] = []
        self.names: list[str] = []
        added = [copy for node in list(graph.graph.nodes) for copy in self._exposed(graph.graph, node)]
        output = graph.graph.output_node()
        results = output.args[0]
        if added and isinstance(results, (tuple, list)):
            output.args = ((*results, *added),)
            graph.recompile()
        else:
            self.draws, self.names = [], []
        self._graph = graph
        self._compile = CompiledOnce(lambda inputs: compile_again(compiler, graph, example_inputs, inputs))
        self._make_twin = CompiledOnce(lambda inputs64: compile_twin(compiler, graph, example_inputs, inputs64))

    def __bool__(self) -> bool:
        """Whether the region draws by values at all."""
        return bool(self.names)

    def _exposed(self, graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op not in ("call_function", "call_method") or name not in _DRAWS:
            return []
        parameters = [
            source
            for source in (node.args[1:] if name.endswith("_") else (*node.args, *node.kwargs.values()))
            if isinstance(source, fx.Node)
            and isinstance(value := source.meta.get("example_value"), torch.Tensor)
            and value.is_floating_point()
        ]
        if name == "bernoulli" and len(node.args) > 1 and isinstance(node.args[1], (int, float)):
            return []  # the tensor says only how many
        word = name.strip("_")
        number = 1 + sum(draw.drawn.startswith(f"drawn[{word}") for draw in self.draws)
        names = [
            f"input[{_numbered(f'{word}.{place}' if len(parameters) > 1 else word, number)}]"
            for place in range(len(parameters))
        ]
        if not names:
            return []
        draw = _Draw(tuple(names), f"drawn[{_numbered(word, number)}]", source_line(node) or "")
        with graph.inserting_before(node):
            copies = [_copied(graph, parameter) for parameter in parameters]
        with graph.inserting_after(node):
            copies.append(_copied(graph, node))
        self.draws.append(draw)
        self.names += [*draw.parameters, draw.drawn]
        return copies

    def variants(self, own: Variants, inputs: Sequence[Any]) -> Variants:
        """The variants of this graph, for the variants of the region itself."""
        return replace(
            own,
            reference=eager_graph(self._graph).forward,
            candidate=self._compile(inputs),
            compilers={Build.TWIN: self._make_twin},
            make_own_random=None,
            operators=None,
        )


def _numbered(word: str, number: int) -> str:
    return word if number == 1 else f"{word} {number}"


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A copy of a node's value, because that may be written to later."""
    copy = graph.call_function(torch.clone, (node,))
    copy.meta = dict(node.meta)
    return copy


def compare_draw_inputs(draws: DrawInputs, own: RegionRunner, outputs: Sequence[str], *, thorough: bool) -> Decisions:
    """Compare the parameters of a region's draws.

    Raises:
        Exception: Whatever keeps the graph from being compiled, or from running.
    """
    call = own.call
    bare, _ = call.fresh()
    with call.undisturbed(), call.ambient.entered():
        variants = draws.variants(own.variants, bare)
    subjects = Subjects(call.subjects.inputs, (*outputs, *draws.names))
    alike = replace(call, subjects=subjects, final_rng_states=None, check=TimedCheck())
    probing = RegionRunner(variants, alike, own.memory)

    def both() -> tuple[Values, Values]:
        return probing.run(REPEAT) or {}, probing.run(AGAIN[0]) or {}

    reference, alone = both()  # also so that nothing is compiled under the replaying mode
    candidate = _replayed(probing) or alone
    pairs = [
        TensorPair(name, name, reference[name], candidate[name], source=draw.source)
        for draw in draws.draws
        for name in draw.parameters
        if name in reference and name in candidate and _alike(reference[name], candidate[name])
    ]
    decisions = decide(
        pairs, lambda: probing, {}, thorough=thorough, low_precision=variants.low_precision, recheck=True
    )
    draw = next((draw for draw in draws.draws if _draws_otherwise(draw, reference, alone)), None)
    if draw is not None and _draws_otherwise(draw, *both(), again=(reference, alone)):
        decisions.findings.append(_drawn_otherwise(draw))
    return decisions


def _replayed(probing: RegionRunner) -> Values | None:
    """The candidate on eager's draws, where a later draw depends on an earlier one."""
    try:
        return probing.run(ON_EAGERS_DRAWS)
    except Exception:  # it draws by other operators than eager
        return None


def _draws_otherwise(draw: _Draw, reference: Values, candidate: Values, again: Sequence[Values] = ()) -> bool:
    """Whether eager and the candidate have the same parameters bit for bit, and draw differently.

    Args:
        candidate: The candidate's, from the same random state.
        again: Earlier runs of both, which must have drawn the same: else another thread drew too.
    """
    names = (*draw.parameters, draw.drawn)
    if any(name not in values for name in names for values in (reference, candidate)):
        return False
    if not all(_alike(reference[name], candidate[name]) for name in names):
        return False
    now = (reference, candidate)
    repeated = all(same_bits(one[draw.drawn], other[draw.drawn]) for one, other in zip(now, again or now, strict=True))
    same = all(same_bits(reference[name], candidate[name]) for name in draw.parameters)
    return repeated and same and not same_bits(reference[draw.drawn], candidate[draw.drawn])


def _drawn_otherwise(draw: _Draw) -> Finding:
    return Finding(
        kind=Kind.RNG,
        detail="rng.stream",
        subject=draw.drawn,
        message=(
            "the compiled program draws other numbers than eager here, from the same random state and by parameters "
            "that are equal bit for bit: no rounding explains that"
        ),
        expected="what eager draws",
        actual="other numbers",
        source=draw.source or None,
    )


def _alike(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    return reference.shape == candidate.shape and reference.dtype == candidate.dtype
