"""Findings that another order of the exchanges may explain, on a rank that cannot tell its exchanges apart."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing

import torch

from checked_backend.findings import Finding, Kind, Skip
from checked_backend.modes.collective_tape import CollectiveReplayError
from checked_backend.regions.control_runs import RegionControlRuns
from checked_backend.regions.investigate_alone import time_to_search

__all__ = ["proven"]

NEARER = 0.25
"""Another order explains a difference from eager that it makes so many times smaller, or less."""

_OF_VALUES = (Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION)


def proven(findings: Sequence[Finding], controls: RegionControlRuns) -> tuple[Sequence[Finding], Sequence[Skip]]:
    """The findings that stand however this rank's exchanges are paired, and a skip for others.

    A rank that sends the same in several exchanges, or only receives in them, sees no other order of them. So eager is
    run with each order. Where one gives what the compiled program gives, other ranks tell whether it is wrong.

    Args:
        findings: The findings of one check.
        controls: Runs its region again.
    """
    doubted = [finding for finding in findings if finding.kind in _OF_VALUES]
    if not doubted or controls.exchanges is None or not controls.exchanges.mistakable:
        return findings, ()
    try:
        unproven = _explained({finding.subject for finding in doubted}, controls)
    except Exception as error:
        unproven = f"which could not be tried: {type(error).__name__}: {error}".splitlines()[0]
    if unproven is None:
        return findings, ()
    subjects = ", ".join(dict.fromkeys(finding.subject for finding in doubted))
    why = (
        f"{doubted[0].message}; but this rank sent the same in several exchanges and received something else in each, "
        f"so that the compiled program may only have another order, {unproven}"
    )
    return [one for one in findings if one.kind not in _OF_VALUES], [Skip(subjects, why, matters=True)]


def _explained(subjects: set[str], controls: RegionControlRuns) -> str | None:
    """Words for how far another order explains what was found; None if none does."""
    orders = None if controls.exchanges is None else controls.exchanges.other_orders()
    if orders is None:
        return "of which there are too many to try"
    candidate, eager = controls.replay_candidate(), controls.bare()
    known = [name for name in eager if name in candidate and any(_is_of(name, subject) for subject in subjects)]
    apart = {name: _apart(eager[name], candidate[name]) for name in known}
    if not any(apart.values()):
        return None if known else "in which nothing can be compared"
    patience, began = time_to_search(), time.monotonic()
    with closing(orders):
        for _ in orders:
            if patience is not None and time.monotonic() - began > patience:
                return "not all of which could be tried while other ranks may wait"
            try:
                values = controls.bare()
            except CollectiveReplayError:  # in this order the program would have sent something else
                continue
            left = {name: _apart(values[name], candidate[name]) for name in known}
            if all(left[name] < math.inf and left[name] <= NEARER * apart[name] for name in known):
                return "in one of which eager gives the same"
    return None


def _is_of(name: str, subject: str) -> bool:
    return name == subject or name.startswith((f"{subject}.", f"{subject}["))


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The greatest difference of two tensors' elements; infinite where only one of them is a number."""
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    first, second = (_real(tensor) for tensor in (one, other))
    same = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(same, 0.0, first - second).abs().nan_to_num(math.inf).max())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).to(torch.float64)
