"""Make the findings about operators that are wrong by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from checked_backend.findings import EvidenceKey, Finding, Kind, NoiseScale
from checked_backend.graphs.nodes import outputs_of, recorded_value
from checked_backend.graphs.schema import operator_name
from checked_backend.graphs.source_line import callers_line, module_path, source_line
from checked_backend.numerics.measure import measure
from checked_backend.regions.execution import Subjects
from checked_backend.regions.operator_check.probe import CALLS
from checked_backend.regions.operator_check.tensor_checks import Wrong
from checked_backend.verdict.distribution import distribution
from checked_backend.verdict.local_error import LocalError

FAR = 4.0
"""An error of this many times what is allowed is called wrong logic, not lost precision."""

BY_ITSELF = ("logic.this_dtype", "precision.operator")
"""Details of these findings."""

MOST = 3
"""The most findings: one wrong kernel is often called many times."""


def findings_of(gm: fx.GraphModule, wrong: Sequence[Wrong], subjects: Subjects) -> list[Finding]:
    """Findings for operators that are wrong by themselves: one for each function, the first that it is called by."""
    seen: dict[str, list[Wrong]] = {}
    for one in wrong:
        seen.setdefault(_function(one), []).append(one)
    return [_finding(gm, group, subjects) for group in list(seen.values())[:MOST]]


def _function(wrong: Wrong) -> str:
    readers = _readers(wrong.node) if wrong.gradient and wrong.operator is None else [wrong.operator or wrong.node]
    return ", ".join(sorted({operator_name(node) for node in readers}))


def _finding(gm: fx.GraphModule, group: Sequence[Wrong], subjects: Subjects) -> Finding:
    first = group[0]
    faulty = _faulty(first)
    dtype = str(first.found.dtype).removeprefix("torch.")
    error = first.error
    name = operator_name(faulty) if faulty is not None else first.node.name
    what = f"the gradient that {name} passes on" if first.gradient else f"what {name} computes"
    if first.output is not None:
        what = f"what is returned of {name}"
    evidence: dict[str, object] = {
        EvidenceKey.CHECKED: "by itself, on the compiled program's own inputs"
        + (" and gradients" if first.gradient else "")
        + (", with its intermediate tensors returned" if first.operator is None else ", by the kernel that ran"),
        EvidenceKey.OPERATOR_ERROR: error.relative,
        EvidenceKey.OPERATOR_BIAS: 1 + error.bias,
        EvidenceKey.OPERATOR_LIMIT: error.limit,
        EvidenceKey.OPERATOR_ERROR_IN_NOISE: error.spread,
    }
    if len(group) > 1:
        evidence[EvidenceKey.ALSO_WRONG] = ", ".join(one.node.name for one in group[1:9])
    if error.in_few:
        evidence[EvidenceKey.WRONG_ELEMENTS] = error.outliers
    far = error.in_few or error.excess >= FAR
    return Finding(
        kind=Kind.LOGIC if far else Kind.PRECISION,
        detail=BY_ITSELF[not far],
        subject=_subject(gm, first, subjects),
        message=f"{error_message(what, dtype, error, first.found.numel())}. The kernel is wrong in this dtype",
        metrics=measure(reference=first.right, candidate=first.found),
        noise=NoiseScale(
            rms=error.limit * _size(first.right),
            max=error.limit * _size(first.right),
            source="this operator alone: float64 on the compiled program's own inputs, moved by a rounding",
            detection_limit=error.limit,
        ),
        evidence=evidence,
        distribution=distribution(first.right, first.found),
        graph="dynamo",
        node=None if faulty is None else faulty.name,
        op=None if faulty is None else operator_name(faulty),
        source=None if faulty is None else source_line(faulty),
        caller=None if faulty is None else callers_line(faulty),
        module=None if faulty is None else module_path(faulty),
    )


def error_message(what: str, dtype: str, error: LocalError, count: int) -> str:
    """An error in words, with the number that shows that it is none of rounding."""
    if error.in_few:
        some = "one element" if error.outliers == 1 else f"{error.outliers} elements"
        return (
            f"{what} is off in {some} of {count} in {dtype}, in the worst by {error.worst:.2g}: a rounding or two of "
            "its own inputs and of its result explain none of that"
        )
    if error.is_factor:
        return (
            f"{what} is too {'large' if error.bias > 0 else 'small'} in {dtype}: {error.part} have a factor of "
            f"{1 + error.bias:.4g} in common. Roundings, which go either way, explain {error.bias_allowed:.2g} more or "
            "less than 1"
        )
    if error.relative <= error.limit:  # large elements are right, small ones are not
        return (
            f"{what} is off in {dtype}: the errors of its elements are {error.spread:.2g} times what a rounding or two "
            f"of its own inputs and of its result make of each, and at most {error.spread_allowed:.2g} times is "
            "rounding"
        )
    return (
        f"{what} is off by {error.relative:.2g} in {dtype}: a rounding or two of its own inputs and of its result "
        f"explain {error.limit:.2g}"
    )


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def _faulty(wrong: Wrong) -> fx.Node | None:
    """The faulty operator. For a gradient it is the one that reads the tensor, if there is only one."""
    if wrong.operator is not None or not wrong.gradient:
        return wrong.operator or wrong.node
    readers = _readers(wrong.node)
    return readers[0] if len(readers) == 1 else wrong.node if wrong.node.op in CALLS else None


def _readers(node: fx.Node) -> list[fx.Node]:
    """The calls that read a tensor or a view of it, and are no views themselves."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op not in CALLS or user in found:
                continue
            if _is_view(user):
                pending.append(user)
            else:
                found[user] = None
    return list(found)


def _is_view(node: fx.Node) -> bool:
    value, source = recorded_value(node), node.all_input_nodes[0] if node.all_input_nodes else None
    other = None if source is None else recorded_value(source)
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return value is not other and value._is_view() and value.untyped_storage()._cdata == other.untyped_storage()._cdata


def _subject(gm: fx.GraphModule, wrong: Wrong, subjects: Subjects) -> str:
    """The result that the error reaches; for a gradient, the input whose gradient it reaches."""
    for _, place in places_reached(gm, wrong):
        return subjects.gradient(place) if wrong.gradient else subjects.output(place)
    return f"gradient of {wrong.node.name}" if wrong.gradient else f"node[{wrong.node.name}]"


Place = tuple[bool, int]
"""Whether it is a gradient, and its place among the results or the inputs."""


def places_reached(gm: fx.GraphModule, wrong: Wrong) -> list[Place]:
    """The results that an error reaches, or the gradients."""
    if wrong.gradient:
        return [(True, place) for place in inputs_behind(gm, wrong.node)]
    if wrong.output is not None:
        return [(False, wrong.output)]
    behind = {wrong.node, *reached(wrong.node)}
    return [(False, place) for place, node in enumerate(outputs_of(gm.graph)) if node in behind]


def inputs_behind(gm: fx.GraphModule, node: fx.Node) -> list[int]:
    """The places of the inputs whose gradients a gradient at a node reaches."""
    places = []
    for place, source in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = recorded_value(source)
        if node is source or (isinstance(value, torch.Tensor) and value.requires_grad and node in reached(source)):
            places.append(place)
    return places


def reached(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that depend on one, each once."""
    seen: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user not in seen:
            seen.add(user)
            yield user
            pending.extend(user.users)
