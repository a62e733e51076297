"""Explain or report differing random states of torch that eager and a region's candidate left.

The generators belong to the whole process: a thread that draws meanwhile makes the same difference. So both sides are
run a few more times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checked_backend.findings import Finding, Skip
from checked_backend.regions.call_findings import rng_state_differs
from checked_backend.regions.control_runs import RegionControlRuns
from checked_backend.regions.other_threads import Left, OtherThreads, moves_by_itself
from checked_backend.regions.torch_state import RngState

__all__ = ["check_random_state"]

TORCH_RUNS = 5
"""How often reference and candidate are run again before a difference of the states that they leave is believed."""


def check_random_state(
    controls: RegionControlRuns, left: Left | None, cuda_devices: Sequence[int], skip: Callable[[Skip], None]
) -> list[Finding]:
    """Decide whether differing states of torch's generators are a finding.

    A difference that does not repeat is a skip if there is evidence that a thread draws, or that eager itself leaves
    another state each time.

    Args:
        controls: Runs both again.
        left: The random states that the call left behind.
        cuda_devices: CUDA devices whose generators count, too.
        skip: Receives a difference that is no finding.
    """
    threads = OtherThreads.now()
    runs = _runs_again(controls, skip)
    if not runs:
        return []
    (first, other), *again = runs
    steady = all(first.same_as(one) for one, _ in again)
    if steady and all(other.same_as(two) for _, two in again) and not first.same_as(other):
        return [rng_state_differs()]
    if not steady:
        reason = "eager leaves another one each time: torch.seed, or another thread, is at work"
    elif threads.active_since() or (left is not None and left.others_ran):
        reason = "it differed, not each time, and another thread ran meanwhile, which draws random numbers"
    elif moves_by_itself(tuple(cuda_devices)):
        reason = "it moves while neither eager nor the compiled program runs: another thread draws random numbers"
    else:
        return [rng_state_differs(sum(not one.same_as(two) for one, two in runs), len(runs))]
    skip(Skip("rng state", reason))
    return []


def _runs_again(controls: RegionControlRuns, skip: Callable[[Skip], None]) -> list[tuple[RngState, RngState]]:
    try:
        return [controls.random_states() for _ in range(TORCH_RUNS)]
    except Exception as error:  # a run that fails here only was disturbed too
        skip(Skip("rng state", f"could not be compared again: {error}".splitlines()[0], matters=True))
        return []
