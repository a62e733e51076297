"""Check the kernels of a region that Inductor compiled, as they ran: each on the inputs that it got."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.generated_modules import GeneratedModule, generated_modules_noted
from checked_backend._torch.operators import HigherOrderOperator, OpOverload
from checked_backend._torch.settings import without_autocast
from checked_backend.errors import CheckedBackendError
from checked_backend.graphs.effects import writes
from checked_backend.graphs.nodes import is_getitem, origin_of, outputs_of, recorded_value
from checked_backend.graphs.operators import describe_operator
from checked_backend.regions.execution import Call
from checked_backend.regions.operator_check.probe import CALLS, Exposed, Probed, run_region
from checked_backend.regions.operator_check.recorder import Key, Recording, recorded
from checked_backend.regions.operator_check.tensor_checks import TensorChecks, Wrong
from checked_backend.regions.operator_check.units import Needed, Units
from checked_backend.regions.operator_check.walk import Walk, walk_again


@dataclass(frozen=True, slots=True)
class CheckedModule:
    """What one call of a generated module's kernels showed.

    Attributes:
        inputs: What the module was called with.
        values: What its kernels wrote, by the names of the nodes.
        lines: The lines of the module's text that wrote to a buffer, by its name.
        is_short: Whether there was no room for the rest of it, which is not checked.
    """

    module: GeneratedModule
    units: Units
    checks: TensorChecks
    inputs: Sequence[Any]
    values: Mapping[str, torch.Tensor]
    lines: Mapping[str, Sequence[int]]
    is_short: bool = False


SMALL = 1 << 26
"""Bytes of tensors that are kept of a module at first. It takes one run, and hardly any memory beside a model's."""

MOST_RUNS = 32
"""The most runs of a region to check its kernels."""

FEW_RUNS = 4
"""About so many runs are worth the memory that they save."""

MakeCotangents = Callable[[Sequence[Any]], Mapping[int, torch.Tensor]]
"""Makes the gradients that are sent in, by place among the results."""


class NotInPlaceError(CheckedBackendError):
    """Raised if the kernels of a region cannot be seen as they run."""


class KernelCheck:
    """Checks the kernels of one region that Inductor compiled.

    Args:
        digest: That of its graph.
        lower: Compiles it once more for given inputs, past torch's caches of graphs.

    Attributes:
        modules: What was generated for it, as far as that is known by now.
    """

    def __init__(
        self,
        region: Callable[..., Any],
        digest: str,
        modules: Iterable[GeneratedModule],
        lower: Callable[[Sequence[Any]], Callable[..., Any]],
    ) -> None:
        self._region = region
        self._digest = digest
        self.modules = list(modules)
        self._lower: Callable[[Sequence[Any]], Callable[..., Any]] | None = lower
        self._earlier: dict[tuple[int, Set[str]], tuple[Units, TensorChecks]] = {}  # by the identity of a module

    def run(
        self,
        call: Call,
        cotangents: MakeCotangents,
        room: float,
        enough: Callable[[Wrong], bool] | None = None,
    ) -> Sequence[CheckedModule]:
        """Run the region on copies of its inputs, and check what its kernels wrote.

        Args:
            cotangents: Makes the gradients that are sent in, by place among the results.
            room: The most bytes that a module's tensors may take.
            enough: Whether the check may end at an error. None: it is one of many, and what earlier ones have shown
                need not be shown again.

        Returns:
            What each module showed.

        Raises:
            NotInPlaceError: No kernel was seen, or there is no room.
        """
        first = room if enough is not None else min(room, SMALL)  # who searches is done sooner
        called = self._recorded(call, cotangents, first)
        if not called and self._lower is not None:  # it comes from a cache, where nothing is kept of its modules
            lower, self._lower = self._lower, None
            given, _ = call.fresh()
            with without_compile_caches(), generated_modules_noted(self.modules, self._digest):
                self._region = lower(given)
                called = self._recorded(call, cotangents, first)
        if not called:
            raise NotInPlaceError("the kernels of the compiled region cannot be seen")
        parts = {id(module): Parts(module, one, first, room) for module, one in called if not one.is_complete}
        checked = self._checked(called, parts, call, enough)
        while not (enough and any(enough(wrong) for one in checked for wrong in one.checks.wrong)):
            keys = {number: part.next_part() for number, part in parts.items()}
            if not any(keys.values()):
                break
            checked = [replace(one, inputs=(), values={}) for one in checked]
            del called  # there is no room for it and for the next one
            called = self._recorded(call, cotangents, max(part.room for part in parts.values()), keys)
            if not called:
                raise NotInPlaceError("another thread runs the region at the same time")
            checked += self._checked(called, parts, call, enough)
        for part in parts.values():
            if part.unchecked:
                rest = TensorChecks(unchecked=part.unchecked)
                checked.append(CheckedModule(part.module, part.units, rest, (), {}, {}, is_short=True))
        return checked

    def _recorded(
        self,
        call: Call,
        cotangents: MakeCotangents,
        room: float,
        keys: Mapping[int, Set[Key]] | None = None,
    ) -> Sequence[tuple[GeneratedModule, Recording]]:
        """What was recorded of each module; nothing if that is not the whole region."""
        known = -1
        while known < len(self.modules):  # a backward pass may be compiled when it is first run
            known = len(self.modules)
            with generated_modules_noted(self.modules, self._digest), recorded(self.modules, room, keys) as recordings:
                sent = run_region(self._region, call, cotangents).cotangents
        called = [(module, recording) for module, recording in recordings if recording.arguments is not None]
        kinds = {module.kind for module, _ in called}
        mixed = any(recording.is_mixed for _, recording in called)
        complete = kinds and not mixed and (not sent or kinds == {"forward", "backward"})
        return called if complete else ()

    def _checked(
        self,
        called: Sequence[tuple[GeneratedModule, Recording]],
        parts: Mapping[int, Parts],
        call: Call,
        enough: Callable[[Wrong], bool] | None,
    ) -> list[CheckedModule]:
        """What one run showed of each module, up to an error that is enough."""
        checked: list[CheckedModule] = []
        for module, recording in called:
            one = self._check_module(module, recording, parts.get(id(module)), call, enough)
            if one is not None:
                checked.append(one)
                if enough is not None and any(map(enough, one.checks.wrong)):
                    break
        return checked

    def _check_module(
        self,
        module: GeneratedModule,
        recording: Recording,
        part: Parts | None,
        call: Call,
        enough: Callable[[Wrong], bool] | None,
    ) -> CheckedModule | None:
        """Walk through a module's graph on the tensors that its kernels wrote, or through the part that is known.

        Returns:
            What it showed; None if nothing can be checked.
        """
        arguments = recording.arguments or ()
        if len(arguments) != len(module.graph.graph.find_nodes(op="placeholder")):
            raise NotInPlaceError("the compiled region is called with other inputs than its graph has")
        values = {node.name: value for node, value in written(module, recording)}
        ready = [] if part is None else part.take(recording, values)
        names = frozenset(node.name for node in ready)
        units, known = self._earlier.get((id(module), names), (None, None)) if enough is None else (None, None)
        if part is not None:
            if not ready:
                return None
            units = part.units
            values = {name: value for name, value in values.items() if name in units.exposed}
        count = len(recording.results)
        places = {name: count + place for place, name in enumerate(values)}
        if units is None or (part is None and units.exposed != places.keys()):
            units = Units(module.graph, places.keys(), returned=count > 0)
        exposed = Exposed(module.graph, count, places, {}, {}, recording.kept)

        def walk(checks: TensorChecks) -> None:
            probed = Probed(arguments, [*recording.results, *values.values()], {}, {}, {})
            without = () if part is None else part.ends
            call.rng.restore()
            with without_autocast():
                Walk(
                    module.graph,
                    exposed,
                    probed,
                    units=units,
                    checks=checks,
                    without=without,
                    enough=enough or (lambda _wrong: False),
                ).run()

        if part is None:
            checks = walk_again(walk, known)
        else:
            only = {(name, False, None) for name in names}
            checks = walk_again(walk, known, only, part.drawing_before(ready)).of_nodes(names)
        if enough is None:
            self._earlier[id(module), names] = units, checks
        return CheckedModule(module, units, checks, arguments, values, recording.lines)


def written(module: GeneratedModule, recording: Recording) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """The nodes whose values are known. A buffer that holds a value of no node is checked with what reads it."""
    for name, nodes in module.held.items():
        versions = recording.values.get(name, ())
        if 0 < len(versions) <= len(nodes) and {*nodes} <= {None, nodes[-1]}:  # one kernel may fill it and add to it
            nodes, versions = nodes[-1:], versions[-1:]
        if len(versions) == len(nodes):
            for node, value in zip(nodes, versions, strict=True):
                if node is not None and _is_alike(recorded_value(node), value):
                    yield node, value
    if recording.returned:
        outputs = outputs_of(module.graph.graph)
        yield from ((outputs[place], value) for place, value in recording.returned.items())


def _is_alike(traced: Any, value: torch.Tensor) -> bool:
    """Whether a tensor may be what was traced. Symbolic sizes are not compared: that would add guards."""
    if not isinstance(traced, torch.Tensor) or traced.dtype != value.dtype or traced.dim() != value.dim():
        return False
    return all(size == own for size, own in zip(traced.shape, value.shape, strict=True) if isinstance(size, int))


class Parts:
    """The tensors of a module that are not checked yet.

    In each run of the region some of them are kept, with all that they are computed from.

    Args:
        recording: The first run.
        kept: The bytes that the first run may have kept.
        room: The most bytes to keep in a run.

    Attributes:
        module: The module.
        room: The most bytes that are kept in a run.
        units: The units of the module's graph, as far as it is known which tensors can be seen.
        ends: The calls at the end of its graph that write to inputs. They are compared with the region as a whole.
        unchecked: Nodes that cannot be checked, with the reason.
    """

    def __init__(self, module: GeneratedModule, recording: Recording, kept: float, room: float) -> None:
        self.module = module
        self._sizes = dict(recording.sizes)
        self._graph = module.graph
        nodes = list(module.graph.graph.nodes)
        last = itertools.takewhile(lambda node: node.op == "output" or (writes(node) and not node.users), nodes[::-1])
        self.ends = {node for node in last if node.op != "output"}
        self._buffers: dict[fx.Node, Key] = {}
        for name, held in module.held.items():
            if name in recording.sizes:  # others are never written
                self._buffers |= {node: name for node in held if node is not None and node not in self.ends}
            if name in recording.left_out:
                self._sizes[name] *= len(held)
        self._add_results()
        self.room = min(room, max(kept, sum(self._sizes.values()) / FEW_RUNS))
        self._places: dict[fx.Node, Key] = {
            node: place for place, node in enumerate(module.graph.graph.find_nodes(op="placeholder"))
        }
        self._drawing = [node for node in nodes if _draws(node)]
        self._pending = [node for node in nodes if node in self._buffers]
        self.unchecked: dict[str, str] = {}
        self.units = self._new_units()
        self._asked = False
        self._runs = 1

    def take(self, recording: Recording, values: Mapping[str, torch.Tensor]) -> list[fx.Node]:
        """The nodes that can be checked now, because all that they are computed from was kept.

        Args:
            values: The values of nodes that are known of the recording.
        """
        hidden = [node for node, name in self._buffers.items() if name in recording.values and node.name not in values]
        if hidden:  # they are checked with what reads them
            for node in hidden:
                del self._buffers[node]
            self._pending = [node for node in self._pending if node in self._buffers]
            self._pending += self._add_results()
            self.units = self._new_units()
        arguments = recording.arguments or ()
        known = {node for node in self._buffers if node.name in values}
        known |= {node for (node, _), value in zip(self._places.items(), arguments, strict=True) if value is not None}
        ready = [node for node in self._pending if node in known and known.issuperset(self._kept_for(node))]
        if self._asked and not ready and not hidden:
            self._give_up(self._pending[0])
        self._pending = [node for node in self._pending if node not in ready]
        return ready

    def _add_results(self) -> list[fx.Node]:
        """Let the results that no buffer has be checked, too, but those that are views."""
        added = []
        for place, node in enumerate(outputs_of(self._graph.graph)):
            is_known = not isinstance(node, fx.Node) or node.op not in CALLS or node in self._buffers or _is_view(node)
            if not is_known and isinstance(recorded_value(node), torch.Tensor):
                self._buffers[node] = ~place
                added.append(node)
        return added

    def drawing_before(self, nodes: Sequence[fx.Node]) -> set[str]:
        """Names of the nodes that draw random numbers up to the last of some nodes."""
        last = max(map(self.units.order.__getitem__, nodes), default=0)
        return {node.name for node in self._drawing if self.units.order[node] <= last}

    def next_part(self) -> set[Key]:
        """What to keep in the next run; nothing if all is checked."""
        keys: set[Key] = set()
        self._runs += 1
        for node in list(self._pending):
            if self._runs > MOST_RUNS:
                self._give_up(node)
                continue
            more = {self._buffers.get(one, self._places.get(one, "")) for one in (node, *self._kept_for(node))}
            size = sum(self._sizes.get(key, 0) for key in keys | more)
            if size <= self.room:
                keys |= more
            elif keys:
                break
            else:
                self._give_up(node)
        self._asked = bool(keys)
        return keys

    def _give_up(self, node: fx.Node) -> None:
        self._pending.remove(node)
        self.unchecked[node.name] = f"the tensors inside of the region take more than {self.room / 2**30:.2g} GiB"

    def _new_units(self) -> Units:
        self._known_needs: dict[fx.Node, set[fx.Node]] = {}
        return Units(self._graph, {node.name for node in self._buffers}, returned=False)

    def _kept_for(self, node: fx.Node) -> set[fx.Node]:
        """The tensors that have to be known so that a node can be checked."""
        if node not in self._known_needs:
            needed: Needed = self.units.needed({node.name, *self.drawing_before([node])})
            self._known_needs[node] = needed.sources | needed.calls.intersection(self._buffers)
        return self._known_needs[node]


def _is_view(node: fx.Node) -> bool:
    target = node.args[0].target if is_getitem(node) and isinstance(node.args[0], fx.Node) else node.target
    returns = target._schema.returns if isinstance(target, OpOverload) else ()
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _draws(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        return describe_operator(node.target).draws
    return isinstance(node.target, HigherOrderOperator)


def of_region(gm: fx.GraphModule, checked: Iterable[CheckedModule]) -> TensorChecks:
    """The checks of all modules, with errors at the nodes of Dynamo's graph where these are known."""
    checks = TensorChecks()
    for one in checked:
        own, backward = one.checks, one.module.kind == "backward"
        if backward:
            common = max((limit for limit in own.limits[False].values() if limit < 1), default=0.0)
            checks.limits[True].update({node.name: common for node in gm.graph.find_nodes(op="placeholder")})
        else:
            checks.limits[False].update(own.limits[False])
        checks.unchecked.update(own.unchecked)
        for wrong in own.wrong:
            origin = origin_of(wrong.node, gm)
            checks.wrong.append(
                Wrong(origin or wrong.node, wrong.error, wrong.found, wrong.right, gradient=backward, operator=origin)
            )
    return checks
