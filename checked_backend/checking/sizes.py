"""Other sizes for a program's inputs: find the dynamic dimensions of the compiled program, and choose their sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias, TypeVar

import sympy
import torch
from torch import fx

from checked_backend._torch.symbols import evaluate_expression, shape_facts
from checked_backend.checking.program import Program, ProgramCall, Stopwatch
from checked_backend.checking.variants import substituted
from checked_backend.findings import Skip
from checked_backend.numerics.randomize import randomize_tensors
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.report.ledger import Ledger

TILE_SIZES = (
    *(17, 255, 1024, 65, 31, 129, 15, 513, 64, 33),
    *(127, 257, 16, 32, 63, 128, 256, 511, 512, 1023, 1025),
    *(200, 777, 2047, 2048, 2049, 4095, 4096, 4097),
)
"""Sizes around powers of two, where kernels change. Those that each stand for many others come first."""

MOST_SECONDS = 20.0
"""Seconds after which no further call of these sizes is begun."""

MOST_BYTES = 1 << 29
"""Bytes that the tensors of one such call may have. A check holds some twelve copies of them, and takes some 10 s."""

HALF = 50
"""How many times as long a byte of a tensor at 16 bits takes: each operator is also checked by itself."""

REFUSALS = 2
"""After this many sizes that eager refuses, with none accepted, no more sizes of a dimension are tried."""

_PRIMES = (7, 13, 19, 31, 61, 127, 251, 509)
_LARGEST = 4096
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")

_T = TypeVar("_T")

Dimension: TypeAlias = Any
"""A size: a plain integer, or a sympy expression."""

_Renamed: TypeAlias = dict[sympy.Symbol, Dimension]
"""What the symbols of one region are in the whole program."""


@dataclass(slots=True)
class _Region:
    """Dynamo's symbols for the sizes of one compiled region's inputs."""

    names: tuple[str, ...]
    sizes: list[tuple[Dimension, ...] | sympy.Expr | None]
    work: Dimension = 0
    example: Any = None
    arguments: list[int] | None = None


@dataclass(slots=True)
class Shapes:
    """The dynamic sizes of a program's inputs, gathered while it is compiled and first run.

    Attributes:
        compilations: How many regions were compiled so far.
        sizes: For each input by name, its dimensions as expressions; for an integer input, the expression of its value.
        hints: The value of each symbol in the user's own call.
        bounds: Sizes at which something changes for the compiler, by symbol.
        work: For each region, the bytes of all tensors that its graph computes, those at 16 bits counted `HALF` times.
    """

    compilations: int = 0
    sizes: dict[str, tuple[Dimension, ...] | sympy.Expr] = field(default_factory=dict)
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)
    bounds: dict[sympy.Symbol, tuple[int, ...]] = field(default_factory=dict)
    work: list[Dimension] = field(default_factory=list)
    _regions: list[_Region] = field(default_factory=list)

    def note(self, gm: fx.GraphModule) -> None:
        """Read a region's graph when it is about to be compiled."""
        self.compilations += 1
        region = _Region(GraphInfo.of(gm).inputs, [])
        for node in gm.graph.find_nodes(op="placeholder"):
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt):
                region.sizes.append(value.node.expr)
                region.example = value
            elif isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
                shape: Sequence[Any] = value.shape
                region.sizes.append(tuple(map(_expression, shape)))
                region.example = next((size for size in shape if isinstance(size, torch.SymInt)), region.example)
            else:
                region.sizes.append(None)
        values = (node.meta.get("example_value") for node in gm.graph.nodes)
        region.work = sum(map(_work, values))
        self._regions.append(region)

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the region noted last, so that its first call shows which inputs of the program its inputs are."""
        region = self._regions[-1]

        def run(*args: Any) -> Any:
            if region.arguments is None:
                region.arguments = [id(arg) for arg in args]
            return function(*args)

        return run

    def locate(self, leaves: Sequence[tuple[str, Any]]) -> None:
        """Find out which dimension of which input is dynamic, once the first call with these inputs is over."""
        tensors = {id(leaf): (name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
        integers = {name: leaf for name, leaf in leaves if isinstance(leaf, int) and not isinstance(leaf, bool)}
        for number, region in enumerate(self._regions):
            renamed: _Renamed = {}
            for name, sizes, identity in zip(region.names, region.sizes, region.arguments or (), strict=False):
                if isinstance(sizes, tuple) and identity in tensors:
                    self._tensor(number, tensors[identity], sizes, renamed)
                elif isinstance(sizes, sympy.Symbol) and name in integers:
                    symbol = self._symbol(number, sizes, renamed)
                    self.sizes.setdefault(name, symbol)
                    self.hints.setdefault(symbol, integers[name])
            if region.example is not None:
                self._bounds(number, region.example, renamed)
            self.work.append(region.work.subs(renamed) if isinstance(region.work, sympy.Expr) else region.work)

    def work_at(self, values: Mapping[sympy.Symbol, int]) -> int:
        """The sum of `work` at some sizes, as far as the graphs tell."""
        total = 0
        for one in self.work:
            try:
                total += one if isinstance(one, int) else evaluate_expression(one, values)
            except Exception:  # a symbol of which no input tells the value
                continue
        return total

    def place(self, symbol: sympy.Symbol) -> str:
        """The dimension whose size a symbol is, for people: ``x.shape[0]``."""
        for name, sizes in self.sizes.items():
            if not isinstance(sizes, tuple):
                if sizes == symbol:
                    return name
            elif symbol in sizes:
                return f"{name}.shape[{sizes.index(symbol)}]"
        return str(symbol)

    def _symbol(self, number: int, symbol: sympy.Symbol, renamed: _Renamed) -> Any:
        """The program-wide symbol for a symbol of one region, because regions have separate symbols."""
        own = symbol if not number else sympy.Symbol(f"{symbol}_{number}", integer=True, nonnegative=True)
        return renamed.setdefault(symbol, own)

    def _tensor(
        self, number: int, named: tuple[str, torch.Tensor], sizes: tuple[Dimension, ...], renamed: _Renamed
    ) -> None:
        name, leaf = named
        known = self.sizes.get(name)
        for dim, size in enumerate(sizes):
            if isinstance(size, sympy.Symbol) and size not in renamed:
                renamed[size] = known[dim] if isinstance(known, tuple) else self._symbol(number, size, renamed)
            if isinstance(size, sympy.Symbol) and isinstance(renamed[size], sympy.Symbol):
                self.hints.setdefault(renamed[size], leaf.shape[dim])
        if known is None:
            self.sizes[name] = tuple(size.subs(renamed) if isinstance(size, sympy.Expr) else size for size in sizes)

    def _bounds(self, number: int, example: Any, renamed: Mapping[sympy.Symbol, Dimension]) -> None:
        for symbol, ours in renamed.items():
            if not isinstance(ours, sympy.Symbol) or ours not in self.hints:
                continue
            ranges, relations = shape_facts(example, {str(symbol)})
            found = {end for ends in ranges.values() for end in ends if end is not None}
            found |= {int(text) for relation in relations for text in _NUMBER.findall(relation)}
            near = {size + step for size in found for step in (-1, 0, 1)}
            self.bounds[ours] = tuple(sorted(size for size in near if 0 <= size <= _LARGEST))


def _work(value: Any) -> Dimension:
    """The bytes of the tensors of a node's result whose memory its sizes tell, those at 16 bits `HALF` times."""
    if isinstance(value, (tuple, list)):
        return sum(map(_work, value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        return 0
    sizes: Iterable[Any] = value.shape
    bytes_each = value.element_size() * (HALF if value.dtype in (torch.float16, torch.bfloat16) else 1)
    return math.prod(map(_expression, sizes)) * bytes_each


def _expression(size: Any) -> Dimension:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def other_sizes(program: Program, shapes: Shapes, ledger: Ledger, most: int) -> Iterator[ProgramCall]:
    """Calls with other sizes of the dynamic dimensions, and with inputs that share memory.

    Each symbol gets the neighbours of its present value, 2, 1, 0, a prime, and the sizes at which a guard changes. Then
    all symbols vary together. Inputs with a common symbol vary together. Their data are fresh. Integers stay in their
    range, and below a size that shrinks. There are at most ``most`` calls with other sizes.
    """
    choices = list(_small_choices(shapes))
    if not choices:
        ledger.skip(Skip("other sizes", "the compiled program takes no size of an argument as dynamic"))
    for number, values in enumerate(_evenly(choices, most, "other sizes", ledger)):
        if (made := _call_of_sizes(program, shapes, values, number)) is not None:
            yield made
    yield from _aliased(program)


def tile_sizes(program: Program, shapes: Shapes, ledger: Ledger, most: int | None = None) -> Iterator[ProgramCall]:
    """Calls of `TILE_SIZES`, as far as time and memory allow: of all dynamic dimensions together, and of each alone."""
    groups = [(symbol,) for symbol in shapes.hints]
    if len(groups) > 1:  # together first: most faults show there, in whichever dimension they are
        groups.insert(0, tuple(shapes.hints))
    known = [shapes.hints, *_small_choices(shapes)]
    tries = [(group, size, shapes.hints | dict.fromkeys(group, size)) for size, group in product(TILE_SIZES, groups)]
    tries = [one for one in tries if one[2] not in known]
    watch, refusals = Stopwatch(), dict.fromkeys(groups, 0.0)
    sizes: dict[tuple[tuple[sympy.Symbol, ...], str], list[int]] = {}
    chosen = _evenly(tries, most, "sizes around powers of two", ledger, first=sum(shapes.hints.values()))
    for number, (group, size, values) in enumerate(chosen, 1000):
        why = ""
        if refusals[group] >= REFUSALS:
            why = "eager refuses the first of them"
        elif watch.seconds() > MOST_SECONDS or shapes.work_at(values) > MOST_BYTES:
            why = "they may take too much time or memory"
        elif (made := _call_of_sizes(program, shapes, values, number)) is not None:
            yield made
            refused = any(skip.subject == made.label for skip in ledger.coverage().skipped)
            refusals[group] += 1 if refused else -math.inf
        sizes.setdefault((group, why), []).append(size)
    for (group, why), those in sizes.items():
        place, listed = " and ".join(map(shapes.place, group)), ", ".join(map(str, sorted(those)))
        if why:
            ledger.skip(Skip(f"sizes of {place}", f"left out {listed}: {why}"))
        else:
            ledger.note(f"sizes of {place} that were tried around powers of two: {listed}")


def _evenly(choices: list[_T], most: int | None, what: str, ledger: Ledger, first: int = 0) -> list[_T]:
    """So many of all, evenly spread from the first on."""
    if most is None or len(choices) <= most:
        return choices
    ledger.skip(Skip(what, f"only {most} of {len(choices)} combinations were tried"))
    return [choices[(first + place * len(choices) // most) % len(choices)] for place in range(most)]


def _call_of_sizes(
    program: Program, shapes: Shapes, values: Mapping[sympy.Symbol, int], number: int
) -> ProgramCall | None:
    """The program's first call with other sizes and fresh data; None if none of its arguments has such a size.

    Another ``number`` makes other data.
    """
    leaves = program.leaves()
    made = {name: _resized(name, old, shapes, values) for name, old in leaves.items()}
    made |= {name: _in_range(new, shapes, values) for name, new in made.items() if isinstance(new, torch.Tensor)}
    changed = {name: new for name, new in made.items() if new is not leaves[name]}
    tensors = {name: new for name, new in changed.items() if isinstance(new, torch.Tensor)}
    changed |= dict(zip(tensors, randomize_tensors(list(tensors.values()), number), strict=True))
    resized = {name: value for name, value in changed.items() if _told(value) != _told(leaves[name])}
    label = ", ".join(f"{name} {_told(value)}" for name, value in resized.items())
    return substituted(program, changed, f"with {label}")


def _small_choices(shapes: Shapes) -> Iterator[dict[sympy.Symbol, int]]:
    """Sizes of all symbols: near the present ones, the smallest, and those near which a guard changes."""
    for symbol, hint in shapes.hints.items():
        prime = next((prime for prime in _PRIMES if prime > hint + 1), _PRIMES[-1])
        wanted = (hint + 1, hint - 1, prime, 2, 1, 0, *shapes.bounds.get(symbol, ()))
        for size in dict.fromkeys(size for size in wanted if size >= 0 and size != hint):
            yield {**shapes.hints, symbol: size}
    if len(shapes.hints) > 1:
        for step in (1, -1):
            yield {symbol: max(hint + step, 0) for symbol, hint in shapes.hints.items()}
        yield dict.fromkeys(shapes.hints, 0)


def _resized(name: str, old: Any, shapes: Shapes, values: Mapping[sympy.Symbol, int]) -> Any:
    """An input for other sizes; itself if these do not change it."""
    sizes = shapes.sizes.get(name)
    if sizes is None:
        return old
    if not isinstance(sizes, tuple):
        new = values.get(sizes, old)
        return old if new == old else new
    try:
        shape = [size if isinstance(size, int) else evaluate_expression(size, values) for size in sizes]
    except KeyError:  # a symbol of which no input tells the value
        return old
    if tuple(shape) == tuple(old.shape):
        return old
    order = sorted(range(old.dim()), key=lambda dim: (-old.stride(dim), dim))
    new = old.detach().permute(order)
    for dim, size in enumerate(shape[place] for place in order):
        if new.shape[dim] == 0 and size:
            new = new.new_zeros(*new.shape[:dim], size, *new.shape[dim + 1 :])
        else:
            new = new.index_select(dim, torch.arange(size, device=new.device) % max(new.shape[dim], 1))
    new = new.contiguous().permute([order.index(dim) for dim in range(old.dim())])
    return new.requires_grad_(old.requires_grad)


def _in_range(tensor: torch.Tensor, shapes: Shapes, values: Mapping[sympy.Symbol, int]) -> torch.Tensor:
    """Keep integers that may be indices into a shrunken dimension below its new size."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or not tensor.numel():
        return tensor
    greatest = int(tensor.max())
    under = [size for symbol, size in values.items() if size <= greatest < shapes.hints[symbol]]
    return tensor % max(min(under), 1) if under else tensor


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    return f"= {value}"


def _aliased(program: Program) -> Iterator[ProgramCall]:
    """Calls in which two inputs of the same metadata share memory: as one tensor, and as two."""
    leaves = program.tensors()
    seen: dict[tuple[Any, ...], str] = {}
    for name, leaf in leaves.items():
        if leaf.layout is not torch.strided or type(leaf) is not torch.Tensor:
            continue
        key = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        other = seen.setdefault(key, name)
        if other == name or leaves[other] is leaf:
            continue
        view = leaves[other].detach().requires_grad_(leaf.requires_grad)
        for new, how in ((leaves[other], "the same tensor as"), (view, "on the memory of")):
            if (made := substituted(program, {name: new}, f"with {name} {how} {other}")) is not None:
                yield made
