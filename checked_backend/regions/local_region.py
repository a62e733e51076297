"""A region without its exchanges, for what runs it outside of its program: no other rank need take part.

The tensors that other ranks sent are inputs, with the values that this call received. The tensors that this rank sends
are results. So the operator at fault is looked for on this rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.collectives import patience_of_ranks
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding
from checked_backend.graphs.nodes import outputs_of
from checked_backend.ranks.collectives import cut_collectives, with_sent_aliases
from checked_backend.ranks.exchanges import Exchanges
from checked_backend.regions.compile import copy_graph, eager_graph
from checked_backend.regions.execution import Call, Cotangents, Result, Subjects, execute
from checked_backend.regions.failure import Failure, Investigator, not_localized
from checked_backend.regions.inputs import Inputs

SHARE = 1 / 3
"""The share of the time that other ranks wait in a collective which looking for an operator may take."""

_EXCHANGED = "no: the collective itself is named; the operators around it were not looked at"


def time_to_search() -> float | None:
    """Seconds that looking for an operator may take; None where no other rank can wait meanwhile.

    They may wait for a rank whose region exchanges nothing, too: DDP and FSDP2 exchange gradients outside of regions.
    """
    patience = patience_of_ranks()
    return None if patience is None else SHARE * patience


_BACKWARD = "sent[backward "


class NotReceivedError(CheckedBackendError):
    """Raised if a call has not kept what it received from other ranks."""


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """A region without its exchanges.

    Attributes:
        traced: The recorded values of its inputs.
        names: Its exchanges, as findings call them, in the order of the last inputs and of the last results.
        own: The graph that exchanges.
    """

    graph: fx.GraphModule
    traced: tuple[Any, ...]
    names: tuple[str, ...]
    own: fx.GraphModule

    @classmethod
    def of(cls, gm: fx.GraphModule, traced: Sequence[Any]) -> LocalRegion | str:
        """Take the exchanges out of a region.

        Args:
            gm: Its Dynamo graph; it is not changed.
            traced: The recorded values of its inputs.

        Returns:
            The region without them; or the reason why they cannot be taken out.
        """
        try:
            cut = cut_collectives(copy_graph(gm))
        except Exception as error:  # the region is compared all the same
            return f"cutting its graph raised {type(error).__name__}: {error}".splitlines()[0]
        if isinstance(cut, str):
            return cut
        return cls(cut.graph, (*traced, *cut.received), cut.names, gm)

    @property
    def outputs(self) -> int:
        """The number of results that the region returns to its program."""
        return len(outputs_of(self.graph.graph)) - len(self.names)

    def call(self, call: Call) -> Call:
        """A call of the region, with what it received as further inputs.

        Raises:
            NotReceivedError: The call has not kept it.
        """
        return Call(self._inputs(call), call.ambient, call.rng, self._subjects(call.subjects))

    def _subjects(self, own: Subjects) -> Subjects:
        inputs = (*own.inputs, *(f"received from {name}" for name in self.names))
        outputs = (*(own.output(place) for place in range(self.outputs)), *(f"sent[{name}]" for name in self.names))
        return Subjects(inputs, outputs)

    def _inputs(self, call: Call) -> Inputs:
        received = _received(call.exchanges, self.names)
        own = call.inputs
        count = len(own.args)
        values = dict(enumerate(received, count))
        wanted = {
            place
            for place, recorded in enumerate(self.traced)
            if place >= count and recorded.requires_grad and own.requires_grad
        }
        # the program may write to what it received
        return replace(
            own,
            args=(*own.args, *received),
            mutated=own.mutated | values.keys(),
            pristine={**own.pristine, **values},
            requires_grad=own.requires_grad | wanted,
        )

    def cotangents(self, call: Call, arrived: Cotangents) -> Cotangents:
        """The gradients that arrived at the results, and those that other ranks sent for what they received.

        Args:
            arrived: The gradients that arrived at the region's own results.

        Raises:
            Exception: Whatever eager raises.
        """
        region = eager_graph(with_sent_aliases(copy_graph(self.own))).forward
        arguments, leaves = call.fresh()
        replayed = call.exchanges.replayed(backward=True)
        with call.undisturbed():
            call.rng.restore()
            with call.ambient.entered(), replayed.forward():
                execution = execute(region, arguments, leaves)
            aliases = {
                place: value
                for place, value in enumerate(execution.outputs)
                if place >= self.outputs and value.requires_grad
            }
            pairs = [
                (execution.outputs[place], gradient)
                for place, gradient in arrived.copied().outputs.items()
                if execution.outputs[place].requires_grad
            ]
            if not aliases or not pairs:
                return arrived
            with replayed.backward():
                found = torch.autograd.grad(
                    [value for value, _ in pairs],
                    list(aliases.values()),
                    [gradient.to(value.dtype) for value, gradient in pairs],
                    allow_unused=True,
                )
        sent: dict[Result, torch.Tensor] = {
            ("output", place): gradient for place, gradient in zip(aliases, found, strict=True) if gradient is not None
        }
        return Cotangents({**arrived.by_result, **sent})

    def investigate(
        self, failure: Failure, findings: Sequence[Finding], investigator: Investigator
    ) -> Sequence[Finding]:
        """Hand an investigator a failed call of the region, with what it received in place of its exchanges.

        Other ranks may wait for this one meanwhile, so it takes less time than they have patience.

        Returns:
            The findings, with their origin.

        Raises:
            Exception: The call cannot be run again.
        """
        if any(finding.detail == "structure.collective" for finding in findings):
            return not_localized(findings, _EXCHANGED)
        groups = [self.renamed(finding) for finding in findings]

        def in_own_names(known: Sequence[Finding]) -> list[Finding]:
            places = iter(known)
            found = []
            for own, group in zip(findings, groups, strict=True):
                first, *_ = [next(places) for _ in group]
                found.append(replace(first, subject=own.subject))
            return found

        call, cotangents = failure.call, failure.cotangents
        alone = replace(
            failure,
            graph=self.graph,
            example_inputs=self.traced,
            call=self.call(call),
            cotangents=None if cotangents is None else self.cotangents(call, cotangents),
            keep=lambda known: failure.keep(in_own_names(known)),
            kernels=None,
        )
        return in_own_names(investigator(alone, [one for group in groups for one in group]))

    def renamed(self, finding: Finding) -> list[Finding]:
        """A finding of the region, under the names that its graph without exchanges has for the finding's subject.

        What the backward pass sends follows from the gradients of what was received: these stand for it.
        """
        if finding.subject.startswith(_BACKWARD):
            return [replace(finding, subject=f"grad[received_{name}]") for name in self.names] or [finding]
        places = {f"sent[{name}]": f"output[{place}]" for place, name in enumerate(self.names, self.outputs)}
        return [replace(finding, subject=places.get(finding.subject, finding.subject))]


def _received(exchanges: Exchanges, names: Sequence[str]) -> list[torch.Tensor]:
    known = exchanges.received()
    missing = [name for name in names if name not in known]
    if missing:
        raise NotReceivedError(f"what {missing[0]} received is not known")
    return [known[name] for name in names]
