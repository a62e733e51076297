"""Hold a handwritten callable, such as a kernel, against plain PyTorch: the calls in which it has to prove itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from checked_backend.checking.program import Program, ProgramCall, Stopwatch
from checked_backend.checking.variants import fresh_data, other_layouts, substituted
from checked_backend.checking.whole_numbers import on_whole_numbers
from checked_backend.errors import OptionError
from checked_backend.findings import EvidenceKey, Finding, Kind, Severity, Skip
from checked_backend.report.ledger import Ledger
from checked_backend.verdict.classify import NOT_REPRODUCED

TILES = (16, 32, 64, 128, 256, 512, 1024)
"""Usual sizes of the pieces that kernels work on. Off by one from these, boundaries are wrong if they are wrong."""

SIZES = (1, *(size + step for size in TILES for step in (-1, 0, 1)), 97, 0)
"""The sizes that are tried if none are given.

Sizes at boundaries alone showed 78 % of the faults of one corpus of kernels, without a false alarm (arXiv 2606.27396).
"""

MOST_SECONDS = 60.0
"""Seconds of processor time after which no further size of `SIZES` is begun."""

_KEEPS = "without the calls before it the candidate is right in this call: it uses what it kept of an earlier one"
_OF_HARDWARE = (EvidenceKey.HOST, EvidenceKey.DEVICE, EvidenceKey.TIME)

MakeArguments: TypeAlias = Callable[[int], Sequence[Any]]
"""Makes the positional arguments of one size."""


@dataclass(frozen=True, slots=True)
class SizedArguments:
    """The arguments of a candidate's calls: of several sizes, or of none.

    Attributes:
        sizes: In the order in which they are tried: the first that shows a fault is the smallest. A size of 0 is last.
        seconds: Seconds of processor time after which no further size is begun.
    """

    make: MakeArguments
    sizes: Sequence[int]
    seconds: float

    @classmethod
    def of(cls, args: Sequence[Any] | MakeArguments, sizes: Sequence[int] | None) -> SizedArguments:
        """What makes arguments, with its sizes (by default `SIZES`); without any if ``args`` are arguments themselves.

        Raises:
            OptionError: There are sizes and nothing that makes arguments for them, or a size is no natural number.
        """
        if not callable(args):
            if sizes is not None:
                raise OptionError("check: sizes need a function in the place of args: check(fn, make, sizes=...).")
            return cls(lambda _: args, (), math.inf)
        known = SIZES if sizes is None else sizes
        if not known or any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in known):
            raise OptionError(f"check: sizes got {sizes!r}; valid: natural numbers, at least one.")
        ordered = sorted(set(known), key=lambda size: (size == 0, size))
        return cls(args, ordered, MOST_SECONDS if sizes is None else math.inf)

    def first(self) -> tuple[Sequence[Any], str]:
        """The arguments of the first call, and its label."""
        return (self.at(self.sizes[0]), f"with size {self.sizes[0]}") if self.sizes else (self.make(0), "")

    def beginning_with(self, accepts: Callable[[Sequence[Any]], bool], least: int = 0) -> SizedArguments:
        """Begin with the first size of at least ``least`` that can be made and is accepted; as they are without one."""
        for size in self.sizes:
            try:
                begins = size >= least and accepts(self.at(size))
            except OptionError:
                raise
            except Exception:  # told when its turn comes
                continue
            if begins:
                return replace(self, sizes=[size, *(other for other in self.sizes if other != size)])
        return self

    def at(self, size: int) -> Sequence[Any]:
        """The arguments of one size.

        Raises:
            OptionError: What was made is no sequence of arguments.
        """
        made: object = self.make(size)
        if not isinstance(made, Sequence):
            kind = type(made).__qualname__
            raise OptionError(f"check: args({size}) returned {kind}; it returns a tuple of arguments.")
        return made


def refuse_misuse(function: Callable[..., Any], candidate: object, **of_compilers: Any) -> None:
    """See that a candidate can be held against a function.

    Args:
        of_compilers: Arguments of `check` that only a compiled program has a use for; false where they say nothing.

    Raises:
        OptionError: It cannot be called, it is a module with other parameters, or a compiler's argument is given.
    """
    if not callable(candidate):
        raise OptionError(f"check: candidate got {type(candidate).__qualname__}, which cannot be called.")
    for name, value in of_compilers.items():
        if value:
            raise OptionError(f"check: {name} is for a compiled program, and candidate is run as it is; drop {name}.")
    if not (isinstance(function, torch.nn.Module) and isinstance(candidate, torch.nn.Module)):
        return
    mine = dict(function.named_parameters())
    shared = {id(tensor) for tensor in mine.values()}
    for name, tensor in candidate.named_parameters():
        if id(tensor) not in shared and (name not in mine or mine[name].shape != tensor.shape):
            raise OptionError(
                f"check: the candidate has the parameter {name!r}, and the reference none of this name and shape. "
                "Give both modules the same names, or the same parameters."
            )


def candidate_calls(program: Program, sized: SizedArguments, ledger: Ledger) -> Iterator[ProgramCall]:
    """The calls beside the first one: other sizes, junk in memory that is allocated, other data, other layouts.

    After calls of other sizes the first size comes again, on other data: what was kept of an earlier call by its shape
    shows. Then other data are put into the first call's tensors: what was kept by their address shows.
    """
    call, watch = program.calls[0], Stopwatch()
    for size in sized.sizes[1:]:
        if watch.seconds() > sized.seconds:
            ledger.skip(Skip(f"size {size}", f"left out: those before it took more than {sized.seconds:.0f} s"))
            continue
        try:
            args = sized.at(size)
        except OptionError:
            raise
        except Exception as error:  # the user's own function may know no size 0
            why = f"args({size}) raises {type(error).__name__}: {error}".partition("\n")[0]
            ledger.skip(Skip(f"size {size}", why))
        else:
            yield ProgramCall(args, call.kwargs, f"with size {size}")
    yield ProgramCall(call.args, call.kwargs, "with junk in the memory that it allocates", junk=2)
    if (exact := on_whole_numbers(program, ledger)) is not None:
        yield exact
    fresh = list(fresh_data(program, ledger))
    yield from fresh
    own = {name: leaf.detach().clone().requires_grad_(leaf.requires_grad) for name, leaf in program.tensors().items()}
    # the first call's own data come back, because later calls share its tensors
    refilled = ((fresh[0] if fresh else None, "other data"), (substituted(program, own, ""), "its own data again"))
    for other, words in refilled:
        if other is not None:
            yield replace(other, label=f"on {words} in the tensors of the first call", refills=call)
    yield from other_layouts(program, ledger)


def refuses_layout(finding: Finding, call: ProgramCall) -> bool:
    """Whether a candidate raises because an argument has another layout than it was given."""
    return call.varies_layout and finding.detail == "crash.running"


def told_of_candidate(finding: Finding, calls: Sequence[ProgramCall], showing: Sequence[int]) -> Finding:
    """A finding in the words of a candidate's author.

    Another layout of the same values is a warning, and so is an exception where an argument has another layout than it
    was given: a kernel may take one layout only, if it says so.
    """
    if finding.is_layout or all(refuses_layout(finding, calls[place]) for place in showing):
        return replace(finding, severity=Severity.WARNING)
    if finding.detail != NOT_REPRODUCED.detail or showing[0] == 0:
        return finding
    evidence = {key: value for key, value in finding.evidence.items() if key not in _OF_HARDWARE}
    return replace(finding, detail=str(Kind.LOGIC), message=_KEEPS, evidence=evidence)
