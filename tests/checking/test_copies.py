"""What a program takes from outside of itself is the same tensor in eager and compiled, also inside of operators."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import gc
import operator
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan

import checked_backend as cb
from checked_backend.checking.copies import Copier
from checked_backend.checking.state import State
from checked_backend.checking.tree import argument_leaves
from tests.support import faults
from tests.support.check_tools import Counting, agreed, found, skips

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

weight = torch.randn(3, requires_grad=True)
layer = torch.nn.Linear(3, 3)
held = {"weight": weight, "several": [weight]}


def row(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def mapped(x: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda one: one * weight, x)


def mapped_by_name(x: torch.Tensor) -> torch.Tensor:
    return torch_map(row, x)


def mapped_module(x: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda one: layer(one), x)


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -1e9, lambda x: layer(x) * weight, lambda x: x - weight, (x,))


def scanned(x: torch.Tensor) -> Any:
    return scan(lambda carried, one: (carried + one * weight, carried * 1), torch.zeros(3), x)


def nested(x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch_map(lambda one: functools.partial(lambda a, b: a * b * weight, weight)(one), y)

    return inner(x)


def by_default(x: torch.Tensor, by: torch.Tensor = weight) -> torch.Tensor:
    return x * by * weight


def built_in(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([*map(row, x)]) * held["weight"] * held["several"][0]


def transformed(x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda one: one * weight)(x) + torch.func.grad(lambda y: (y * weight).sum())(x)


def closed_over(own: torch.Tensor) -> Callable[..., Any]:
    return lambda x: torch_map(lambda one: one * own, x)


@pytest.mark.parametrize(
    "program",
    [
        mapped,
        mapped_by_name,
        mapped_module,
        pytest.param(branch, marks=pytest.mark.more),
        pytest.param(
            scanned, marks=[pytest.mark.more, pytest.mark.skipif(TORCH < (2, 13), reason="torch refuses this scan")]
        ),
        nested,
        by_default,
        built_in,
        transformed,
        closed_over(torch.randn(3, requires_grad=True)),
        functools.partial(row),
    ],
)
def test_what_a_program_takes_from_outside(program: Callable[..., Any]) -> None:
    agreed(cb.check(program, (torch.randn(2, 3, requires_grad=True),), compiler="aot_eager"), gradients=2)
    assert weight.grad is None
    assert layer.weight.grad is None


def test_a_wrong_gradient_of_it_is_found() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    assert found(cb.check(mapped, (x,), compiler=faults.scaled_gradient("weight"))) == {("logic", "grad[weight]")}


class Named:
    where = __name__

    @staticmethod
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * weight


def test_a_function_that_asks_for_its_module_is_answered() -> None:
    assert agreed(cb.check(lambda x: (x * weight, __name__), (torch.randn(3),), compiler="eager")).coverage.regions
    agreed(cb.check(lambda x: Named.scale(x), (torch.randn(3),), compiler="eager"))


class Scaled:
    """Reads a global in a method."""

    own = torch.randn(3, requires_grad=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * weight

    def helped(self, x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return self(y)

        return inner(x)

    def by_class(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.own

    def by_default(self, x: torch.Tensor, by: torch.Tensor = weight) -> torch.Tensor:
        return x * by

    @property
    def asked(self) -> torch.Tensor:
        return weight * 2

    def by_property(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.asked

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * weight


class Heir(Scaled):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x)


@dataclasses.dataclass
class Record:
    factor: float = 2.0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * weight * self.factor


class ReadsGlobal(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * weight


scaled = Scaled()
elsewhere = ModuleType("elsewhere")
exec(  # another module
    """
import torch
theirs = torch.randn(3, requires_grad=True)
def scale(x): return x * theirs
class Scale:
    def __call__(self, x): return scale(x)
""",
    vars(elsewhere),
)


def closed_over_by_a_method() -> Callable[..., Any]:
    own = torch.randn(3, requires_grad=True)

    class Local:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * own

    return Local()


OUTSIDE: dict[str, Callable[..., Any]] = {
    "object": Scaled(),
    "heir": Heir(),
    "helper": Scaled().helped,
    "class attribute": Scaled().by_class,
    "default": Scaled().by_default,
    "property": Scaled().by_property,
    "class method": lambda x: Scaled.of_class(x),
    "closure": closed_over_by_a_method(),
    "dataclass": Record().run,
    "partial": functools.partial(Scaled()),
    "module": ReadsGlobal(),
    "module inside": torch.nn.Sequential(ReadsGlobal()),
    "global object": lambda x: scaled(x),
    "made inside": lambda x: Scaled()(x),
    "attribute of a module": lambda x: x * elsewhere.theirs,
    "function of a module": lambda x: elsewhere.scale(x),
    "class of a module": elsewhere.Scale(),
    "default of a function": lambda x, by=weight: x * by,
}


def scaled_in_shape(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Scale the gradient that goes to the one input of three elements."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    (place,) = [place for place, value in enumerate(example_inputs) if tuple(value.shape) == (3,)]
    return faults.scaled_gradient(names[place])(gm, example_inputs)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OUTSIDE)
def test_gradients_of_what_code_finds_in_its_own_places(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    x, leaves = torch.randn(2, 3, requires_grad=True), (weight, Scaled.own, elsewhere.theirs)
    before = [leaf.detach().clone() for leaf in leaves]
    agreed(cb.check(OUTSIDE[name], (x,), compiler="aot_eager"), gradients=2)
    (finding,) = cb.check(OUTSIDE[name], (x,), compiler=scaled_in_shape).findings
    assert finding.subject.startswith("grad[")
    assert finding.subject != "grad[x]"
    assert finding.kind is cb.Kind.LOGIC
    assert all(map(operator.is_, leaves, (weight, Scaled.own, elsewhere.theirs)))
    for leaf, value in zip(leaves, before, strict=True):
        assert leaf.grad is None
        assert torch.equal(leaf, value)


def test_what_a_method_changes_is_put_back_and_compared() -> None:
    count = torch.zeros(3)

    class Counting:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            count.add_(1)
            return x * count

    x = torch.randn(2, 3)
    agreed(cb.check(Counting(), (x,), compiler="aot_eager", iterations=3))
    assert not count.any()

    def twice(results: list[Any], args: Sequence[Any]) -> list[Any]:
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.shape == (3,):
                arg.add_(1)
        return results

    report = cb.check(Counting(), (x,), compiler=faults.run_in_python(lambda _gm: twice))
    assert {finding.kind for finding in report.findings} == {cb.Kind.MUTATION}
    assert not count.any()


class Uncopied(list[torch.Tensor]):
    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError


uncopied = Uncopied([torch.ones(3)])


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * uncopied[0],
        (lambda kept: lambda x: x * kept[0])(uncopied),
        lambda x, kept=uncopied: x * kept[0],
    ],
)
def test_what_a_function_names_and_cannot_be_copied_is_refused(program: Callable[..., Any]) -> None:
    with pytest.raises(cb.CheckedBackendError, match="cannot be copied"):
        cb.check(program, (torch.ones(3),), compiler="eager")


def gathering(x: torch.Tensor, given: list[int] = []) -> torch.Tensor:  # noqa: B006 (that is what is tested)
    given.append(1)
    return x * len(given)


class Tally:
    total = 0
    seen: list[int] = []  # noqa: RUF012 (that is what is tested)


tally, calls = Tally(), 0
counts: dict[str, Any] = {"calls": 0, "of": tally}
tally.own = 0  # type: ignore[attr-defined]
kept: list[torch.Tensor] = []


def in_a_global(times: int) -> int:
    global calls
    calls += times
    return calls


def in_a_class(times: int) -> int:
    Tally.total += times
    return Tally.total


def in_a_list_of_a_class(times: int) -> int:
    Tally.seen.extend([1] * times)
    return len(tally.seen)


def in_a_function(times: int) -> int:
    in_a_function.its += times  # type: ignore[attr-defined]
    return in_a_function.its  # type: ignore[attr-defined,no-any-return]


in_a_function.its = 0  # type: ignore[attr-defined]


def in_an_object(times: int) -> int:
    tally.own += times  # type: ignore[attr-defined]
    return tally.own if counts["of"] is tally else -1  # type: ignore[attr-defined,no-any-return]


def in_a_dict(times: int) -> int:
    counts["calls"] += times
    return int(counts["calls"])


def in_a_list_of_tensors(times: int) -> int:
    kept.extend([torch.ones(2)] * times)
    return len(kept)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.log = 0, list[str]()

    def forward(self, x: torch.Tensor, loses: bool) -> torch.Tensor:
        if not (loses and torch.compiler.is_compiling()):
            self.step += 1
            self.log.append("called")
        return x * 2


def test_what_a_module_counts_is_compared() -> None:
    """Dynamo has lost such a number (#120248)."""
    module, x = Module(), torch.ones(3)
    assert cb.check(module, (x, False), compiler="eager", iterations=3).verdict is cb.Verdict.PASS
    findings = cb.check(module, (x, True), compiler="eager").findings
    assert {finding.subject for finding in findings} == {"attribute[step]", "attribute[log[0]]"}
    assert (module.step, module.log) == (0, [])


PLACES = {
    "calls": in_a_global,
    "Tally.total": in_a_class,
    "Tally.seen[0]": in_a_list_of_a_class,
    "tally.own": in_an_object,
    "its": in_a_function,
    "counts[calls]": in_a_dict,
    "kept[0]": in_a_list_of_tensors,
}


@pytest.mark.parametrize("place", PLACES)
def test_what_a_program_counts_is_as_it_was_and_is_compared(place: str) -> None:
    """A write that Dynamo loses is no pass: a method's to a closure's list (#197896), one to a class's (#169253)."""
    counted = PLACES[place]

    def state() -> str:
        return repr((calls, Tally.total, Tally.seen, vars(tally), vars(in_a_function), counts, kept))

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * counted(1)

    def losing(x: torch.Tensor) -> torch.Tensor:
        counted(0 if torch.compiler.is_compiling() else 1)
        return x * 2

    before = state()
    report = cb.check(program, (torch.ones(3),), compiler="eager")
    assert report.verdict is cb.Verdict.PASS
    report = cb.check(losing, (torch.ones(3),), compiler="eager")
    assert f"mutated[{place}]" in {finding.subject for finding in report.findings}
    assert report.verdict is cb.Verdict.FAIL
    assert state() == before


def test_a_time_that_a_program_keeps_is_compared_with_no_other() -> None:
    times: list[float] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        y = x.sin()
        times.append(time.perf_counter() - began)
        return y

    report = cb.check(program, (torch.ones(3),), compiler="eager")
    assert report.verdict is cb.Verdict.PASS
    assert [skip.reason for skip in report.coverage.skipped if skip.subject == "mutated[times[0]]"] == [
        "eager leaves another number each time, as a clock does"
    ]


def test_a_text_with_a_rounded_number_is_compared_but_for_that() -> None:
    texts: list[str] = []

    def program(x: torch.Tensor, eager: float, compiled: float) -> torch.Tensor:
        texts.append(f"it is {compiled if torch.compiler.is_compiling() else eager}")
        return x * 2

    report = cb.check(program, (torch.ones(3), 0.125, 1.5e-2), compiler="eager")
    assert report.verdict is cb.Verdict.PASS
    assert "mutated[texts[0]]" in {skip.subject for skip in report.coverage.skipped}
    assert cb.check(program, (torch.ones(3), 3, 4), compiler="eager").verdict is cb.Verdict.FAIL


def test_what_programs_keep_in_state_of_their_own_is_copied_and_compared() -> None:
    seen: dict[Any, int] = {}
    recent: collections.deque[float] = collections.deque()
    drawn, counts = np.random.default_rng(0), np.zeros(2)
    state = repr(drawn.bit_generator.state)

    def program(x: torch.Tensor) -> torch.Tensor:
        seen[id(x)] = seen[x.data_ptr(), 1] = 1  # addresses are others in each run
        recent.append(drawn.normal())
        counts[0] += 1
        return x * len(recent) * recent[0]

    assert cb.check(program, (torch.ones(3),), compiler="eager", iterations=3).verdict is cb.Verdict.PASS
    assert (seen, list(recent), counts.any(), repr(drawn.bit_generator.state)) == ({}, [], False, state)


def test_an_object_that_does_something_at_its_end_is_not_copied() -> None:
    class Handle:
        calls = ended = 0

        def __del__(self) -> None:
            Handle.ended += 1

    handle = Handle()
    handle.calls = 1

    def program(x: torch.Tensor) -> torch.Tensor:
        handle.calls += 1
        return x * 2

    assert cb.check(program, (torch.ones(3),), compiler="eager").verdict is cb.Verdict.PASS
    gc.collect()
    assert Handle.ended == 0


def test_what_a_function_counts_in_its_own_places_is_as_it_was() -> None:
    counting = Counting()
    for program in (gathering, counting.forward):
        assert cb.check(program, (torch.ones(3),), compiler="eager").verdict is cb.Verdict.PASS
    assert (gathering.__defaults__, counting.calls) == (([],), 0)


def test_tensors_of_one_name_are_told_apart() -> None:
    def times(weight: torch.Tensor) -> Callable[..., Any]:
        return lambda x: x * weight

    first, second = times(torch.randn(3, requires_grad=True)), times(torch.randn(2, 1, requires_grad=True))

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return first(x) + second(x) + row(x) + weight

    args = torch.randn(2, 3, requires_grad=True), torch.randn(1, 3, requires_grad=True)
    copier = Copier()
    arguments = copier.arguments(program, args, {})[0]
    copier.find_variables([program])
    state = State.of(program, copier.held(), argument_leaves(program, arguments, {}), copier.leaves)
    shapes = {name: tuple(leaf.shape) for name, leaf in state.differentiable.items()}
    assert sorted(shapes.values()) == [(1, 3), (2, 1), (2, 3), (3,), (3,)]
    assert shapes["weight"] == (1, 3)
    agreed(cb.check(program, args, compiler="eager"), gradients=5)


hidden: contextvars.ContextVar[torch.Tensor] = contextvars.ContextVar("hidden")


def test_a_gradient_that_is_compared_nowhere_is_told() -> None:
    token = hidden.set(torch.randn(3, requires_grad=True))
    told = "gradient of a tensor (3,): the program reads a tensor that requires grad from a place"
    try:
        for x in torch.randn(2, 3, requires_grad=True), torch.randn(2, 3):
            report = cb.check(lambda x: x * hidden.get(), (x,), compiler="eager")
            assert report.verdict is cb.Verdict.INCONCLUSIVE
            assert told in skips(report)
    finally:
        hidden.reset(token)


def test_a_leaf_that_the_program_makes_itself_is_its_own() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    agreed(cb.check(lambda x: x * torch.ones(3, requires_grad=True), (x,), compiler="eager"))


class FrozenConfig(collections.OrderedDict[str, Any]):
    """Keeps its values as attributes, too."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        vars(self).update(values)


class LazyNames(collections.OrderedDict[str, Any]):
    def values(self) -> Any:
        raise ValueError("what it names cannot be imported")

    items = values


class Irreducible(tuple[str, ...]):
    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


class Boxes(torch.Tensor):
    format = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        if func not in (torch.Tensor.detach, torch.Tensor.requires_grad_):
            return made
        made = made.as_subclass(cls)
        vars(made)["format"] = vars(args[0])["format"]
        return made


names = LazyNames()


class Library(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.irreps = Irreducible(("1x0e",))

    def known(self) -> bool:
        return self.irreps[0] in names

    def forward(self, x: torch.Tensor, *, checked: bool = False) -> torch.Tensor:
        return x if checked and self.known() else x * 2


class Schedule:
    def __init__(self) -> None:
        self.config = FrozenConfig(steps=4)
        self.sigmas = torch.rand(3)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.config["steps"] + self.sigmas


class Limits(torch.nn.Module):
    """Reads a value, so that Dynamo compiles a part of ``__init__``, before this is a module."""

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        if torch.any(low * 1.0 >= high):
            raise ValueError
        super().__init__()
        self.low = low

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.low


def test_objects_of_libraries_that_are_like_no_others_are_copied() -> None:
    schedule, x = Schedule(), torch.rand(3)
    boxes = torch.rand(3).as_subclass(Boxes)  # type: ignore[arg-type]
    boxes.format = "XYXY"
    programs = (Library(), lambda x: schedule.step(x), lambda x: Limits(x[0] * 0, x[0] * 0 + 1)(x), lambda x: x * 2)
    for program, given in zip(programs, (x, x, x, boxes), strict=True):
        torch._dynamo.reset()
        agreed(cb.check(program, (given,), compiler="eager"))
