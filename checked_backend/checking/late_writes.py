"""Find writes to the arguments of a call that come after it: the compiled program kept them, and changed them later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from checked_backend.checking.outcome import Outcome
from checked_backend.checking.program import ProgramCall, ProgramCopy
from checked_backend.findings import Finding, Kind
from checked_backend.numerics.bits import resolved, same_bits


def late_writes(
    calls: Sequence[ProgramCall],
    reference: tuple[ProgramCopy, Sequence[Outcome]],
    candidate: tuple[ProgramCopy, Sequence[Outcome]],
) -> list[tuple[int, Finding]]:
    """The arguments of calls that later calls of the compiled program have changed, and those of eager have not.

    Returns:
        The findings, each with the number of the call that the argument was given to.
    """
    found: list[tuple[int, Finding]] = []
    for index, call in enumerate(calls[:-1]):
        given_again = any(later is call or later.refills is call for later in calls[index + 1 :])
        if given_again or call.varies_gradients:
            continue
        eagers = _changed(reference[0], call, reference[1][index].values)
        for name in sorted(_changed(candidate[0], call, candidate[1][index].values) - eagers):
            message = (
                f"a later call of the compiled program writes to this argument of call {index + 1}; eager does not"
            )
            found.append((index, Finding(Kind.MUTATION, name, message, "mutation.unexpected")))
    return found


def _changed(run: ProgramCopy, call: ProgramCall, before: Mapping[str, torch.Tensor]) -> set[str]:
    """The arguments of a call that are not as they were at its end, by subject."""
    now = {f"mutated[{name}]": leaf for name, leaf in run.leaves(call) if isinstance(leaf, torch.Tensor)}
    both = {name: (before[name], leaf) for name, leaf in now.items() if name in before}
    return {
        name
        for name, (old, new) in both.items()
        if _plain(old) and _plain(new) and not same_bits(resolved(old), resolved(new))
    }


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized
