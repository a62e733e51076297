"""Fewer outputs, fewer calls, fewer inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from checked_backend.diagnose.reduce.failing_case import Draft, FailingCase, call_nodes, record_values
from checked_backend.diagnose.reduce.problem import Problem
from checked_backend.graphs.nodes import is_getitem, outputs_of

_MANY = 60
"""A graph with more calls than this is not compiled with each call on its own."""


def drop_outputs(problem: Problem) -> None:
    """Return the tracked output alone, or as few outputs as it needs beside it."""

    def places() -> range:
        return range(len(outputs_of(problem.best.case.graph.graph)))

    def without(dropped: Sequence[int]) -> FailingCase:
        draft, tracked = Draft(problem.best), problem.best.tracked
        kept = [at for at in places() if at not in dropped or at == tracked]
        returned = outputs_of(draft.graph)
        draft.set_outputs([returned[at] for at in kept], None if tracked is None else kept.index(tracked))
        return draft.finish()

    if len(places()) > 1 and not problem.consider(without(places())):
        problem.drop_runs(places, without)


def each_alone(problem: Problem) -> None:
    """Run every call on recorded inputs, all in one compile, and keep one that goes wrong on its own."""
    program = problem.best
    calls = [node.name for node in call_nodes(program.case.graph.graph)]
    if program.tracked is None or not 2 < len(calls) <= _MANY:
        return
    apart, results = _apart(program)
    candidates = []
    for place in problem.wrong_results(apart):
        result, call = results[place]
        candidates.append(with_recorded(_ending_at(program, result), frozenset(calls) - {call}))
    problem.first_of(candidates)


def _apart(program: FailingCase) -> tuple[FailingCase, list[tuple[str, str]]]:
    """A program in which every call runs on eager's values of its inputs, and all results are returned.

    Returns:
        The program, and for each of its outputs the node that it is and the call that makes it.
    """
    values = record_values(program)
    draft = Draft(program)
    made = [
        node
        for node in draft.graph.nodes
        if node.op.startswith("call_") and isinstance(values.get(node.name), torch.Tensor)
    ]
    results = [(node.name, str(node.args[0]) if is_getitem(node) else node.name) for node in made]
    for node in made:
        if node.users:
            draft.replace_by_value(node, values[node.name])
    draft.set_outputs(made, None)
    return draft.finish(), results


def with_recorded(program: FailingCase, names: frozenset[str]) -> FailingCase:
    """Replace calls by the values that they have in eager."""
    graph = program.case.graph.graph
    returned = set(outputs_of(graph))
    wanted: set[str] = set()
    for node in graph.nodes:
        if node.name in names:
            takers = [user for user in node.users if is_getitem(user)]
            wanted.update(user.name for user in takers)
            if len(takers) < len(node.users) and node not in returned:
                wanted.add(node.name)
    values = record_values(program, frozenset(wanted))
    draft = Draft(program)
    for name, value in values.items():
        if not isinstance(value, (tuple, list)):
            draft.replace_by_value(draft.node(name), value)
    return draft.finish()


def recorded_calls(problem: Problem) -> None:
    """Replace ever smaller runs of calls by the values that they have in eager."""
    problem.drop_runs(
        lambda: call_nodes(problem.best.case.graph.graph),
        lambda calls: with_recorded(problem.best, frozenset(node.name for node in calls)),
    )


def earlier_output(problem: Problem) -> None:
    """Return a value that the tracked output is made from instead, if it is wrong already."""
    while (program := problem.best).tracked is not None:
        root = outputs_of(program.case.graph.graph)[program.tracked]
        if not isinstance(root, fx.Node) or root.op == "placeholder":
            return
        calls = [node for node in root.all_input_nodes if node.op.startswith("call_")]
        # of a call that gives several results only single ones can be returned
        sources = [node for node in calls if not any(map(is_getitem, node.users))]
        if not problem.first_of([_ending_at(program, node.name) for node in sources]):
            return


def _ending_at(program: FailingCase, name: str) -> FailingCase:
    draft = Draft(program)
    draft.set_outputs([draft.node(name)], 0)
    return draft.finish()


def bypass_calls(problem: Problem) -> None:
    """Leave calls out: the users of a call get one of its inputs, of the same shape and dtype."""
    tried: set[str] = set()
    while True:
        program = problem.best
        calls = [node.name for node in call_nodes(program.case.graph.graph) if node.name not in tried]
        if not calls:
            return
        tried.add(calls[0])
        problem.first_of(_bypassed(program, calls[0]))


def _bypassed(program: FailingCase, name: str) -> list[FailingCase]:
    node = Draft(program).node(name)
    sources = [source.name for source in node.all_input_nodes]
    if sources and not node.users:
        return [_without(program, name, None)]  # a call for its effect alone
    values = record_values(program, frozenset([name, *sources]))
    return [_without(program, name, source) for source in sources if _alike(values.get(name), values.get(source))]


def _without(program: FailingCase, name: str, used: str | None) -> FailingCase:
    """Leave a node out, whose users get another one."""
    draft = Draft(program)
    node = draft.node(name)
    if used is not None:
        node.replace_all_uses_with(draft.node(used))
    draft.graph.erase_node(node)
    return draft.finish()


def merge_inputs(problem: Problem) -> None:
    """Use one input in place of another of the same shape and dtype."""
    names = list(problem.best.placeholders())
    for position, name in enumerate(names):
        values = problem.best.placeholders()
        if name not in values:
            continue
        earlier = [other for other in names[:position] if other in values and _alike(values[name], values[other])]
        problem.first_of([_without(problem.best, name, other) for other in earlier])


def _alike(one: object, other: object) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    )
