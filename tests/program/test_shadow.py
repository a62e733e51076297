"""Whole compiled calls compared with eager: what Dynamo itself does wrong, which no region shows."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from checked_backend import DivergenceError, Kind, Report, Verdict
from checked_backend.options import CheckOptions, parse_options
from checked_backend.program.folder import WHOLE_CALLS
from checked_backend.program.shadow import Shadows
from checked_backend.report.session import Session
from tests.support.region_tools import meanwhile


class Shadowed:
    """Compiles as a program does that runs with the option ``shadow``."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.session = Session()
        self.told: list[tuple[str, int]] = []
        given = {"on_divergence": "record", "localize": False, "report_dir": folder, **options}
        parsed = parse_options(CheckOptions, "numcheck", given)
        self.shadows = Shadows(parsed, lambda: self.session, lambda name, call: self.told.append((name, call)))

    def compile(self, model: Any, *, unguarded: bool = False) -> Any:
        def again(copy: Callable[..., Any], *, fresh: bool = False) -> Any:
            backend = functools.partial(_graph) if fresh else _graph
            options: Any = {"guard_filter_fn": _no_guards} if unguarded else {}
            return torch.compile(copy, backend=backend, options=options)

        return self.shadows.over(model, again(model), again)

    @property
    def report(self) -> Report:
        self.shadows.close()
        return self.session.report


@pytest.fixture
def program(tmp_path: Path) -> Shadowed:
    return Shadowed(tmp_path)


def _graph(gm: Any, _inputs: Any) -> Any:
    return gm.forward


def _no_guards(entries: Any) -> list[bool]:
    return [False for _ in entries]


def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@torch.compiler.substitute_in_graph(tripled)
def _wrongly_tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3.25


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5) + 1


def test_what_dynamo_translates_wrongly_is_found_and_named(program: Shadowed) -> None:
    program.compile(lambda x: tripled(x) + 1)(torch.ones(3))
    (finding,) = [one for one in program.report.findings if one.fails]
    assert (finding.kind, finding.subject, finding.stage) == (Kind.LOGIC, "output[0]", "eager")
    assert "Dynamo" in finding.evidence["level"]
    assert program.told[0][1] == 1


def test_an_optimizer_that_only_rounds_otherwise_is_no_wrong_logic(program: Shadowed) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 12))
    weight.grad = torch.linspace(1, 2, 12)
    optimizer = torch.optim.Adam([weight], lr=0.5)
    program.compile(lambda: optimizer.step())()
    assert {(one.kind, one.detail) for one in program.report.findings} == {(Kind.PRECISION, "precision.traced")}


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_missing_guard_is_found_in_the_call_in_which_it_matters(tmp_path: Path, scale: float) -> None:
    program, model = Shadowed(tmp_path), Scaled()
    compiled = program.compile(model, unguarded=True)
    compiled(torch.randn(5, 4))
    model.scale = scale
    compiled(torch.randn(5, 4))
    failing = [one for one in program.report.findings if one.fails]
    if scale == 1.0:
        assert not failing
        return
    assert "output[0]" in [one.subject for one in failing]
    assert all("compiled for an earlier call" in one.evidence["level"] for one in failing)
    assert program.told == [("Scaled as a whole", 2)]


def test_gradients_are_compared(program: Shadowed) -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @torch.compiler.substitute_in_graph(square)
    def _detached(x: torch.Tensor) -> torch.Tensor:
        return x.detach() * x

    program.compile(lambda x: square(x).sum())(torch.arange(3.0, requires_grad=True)).backward()
    assert [one.subject for one in program.report.findings] == ["grad[x]"]


def test_the_order_of_keys_in_an_argument_is_compared(tmp_path: Path) -> None:
    def touch(cache: dict[str, torch.Tensor]) -> None:
        cache["old"] = cache.pop("old")

    @torch.compiler.substitute_in_graph(touch)
    def _keeps_the_order(cache: dict[str, torch.Tensor]) -> None:
        cache["old"] = cache["old"]

    def program(x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
        touch(cache)
        return x + 1

    shadowed = Shadowed(tmp_path)
    shadowed.compile(program)(torch.ones(3), {"old": torch.ones(1), "new": torch.ones(1)})
    (finding,) = [one for one in shadowed.report.findings if one.fails]
    assert (finding.subject, finding.detail) == ("mutated[cache]", "structure.container")


class Switched(nn.Module):
    """Things that Dynamo takes for constant until a guard says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.doubled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.inner(x))) * (2 if self.doubled else factor)

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


factor = 1.0


def calling(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    return lambda x: model(x)


CHANGES: dict[str, Callable[[Switched], Any]] = {
    "a hook": lambda model: model.inner.register_forward_hook(lambda _module, _args, out: out.square()),
    "a hook on gradients": lambda model: model.inner.register_full_backward_pre_hook(lambda _, out: (2 * out[0],)),
    "an attribute": lambda model: setattr(model, "doubled", True),
    "a global": lambda _model: globals().update(factor=3.0),
    "a method": lambda model: setattr(model, "last", lambda x: x.sin()),
    "eval": lambda model: model.eval(),
}


@pytest.mark.parametrize("own", ["module", "function"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_programs_own_call_is_compared(change: str, own: str, tmp_path: Path, monkeypatch: Any) -> None:
    """What ran was compiled for an earlier call; a copy would be compiled anew, and be right."""
    monkeypatch.setattr(sys.modules[__name__], "factor", 1.0)
    for changes in (False, True):
        torch._dynamo.reset()
        program, model = Shadowed(tmp_path), Switched()
        compiled = program.compile(model if own == "module" else calling(model), unguarded=True)
        for number in range(2):
            if number and changes:
                CHANGES[change](model)
            compiled(torch.randn(5, 4, requires_grad=True)).sum().backward()
        failing = [one for one in program.report.findings if one.fails]
        assert bool(failing) == changes, str(program.report)
        assert all("compiled for an earlier call" in one.evidence["level"] for one in failing)
        assert (False in {one.about.is_gradient for one in failing}) == (changes and change != "a hook on gradients")


def test_a_hook_that_dynamo_does_not_guard(program: Shadowed) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    fast = program.compile(lambda x: net(x).sum(-1))
    fast(torch.randn(3, 4))
    net[1].register_forward_hook(lambda _module, _args, out: out + 7)
    fast(torch.randn(3, 4))
    (finding,) = [one for one in program.report.findings if one.fails]
    assert finding.subject == "output[0]"
    assert "skip_nnmodule_hook_guards = False" in finding.message
    text = str(program.report)
    assert "Dynamo: what it traced is wrong already" in text
    assert "localize=True" not in text  # no operator is at fault


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_it_compiles_what_the_program_compiles(program: Shadowed, noise: float) -> None:
    def rounding(gm: Any, _inputs: Any) -> Any:
        return lambda *args: [one * (1 + noise) for one in gm.forward(*args)]

    def run(compile_: Callable[..., Any]) -> dict[str, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        compiled = compile_(Scaled())
        step = compile_(lambda x: compiled(x).tanh().sum(-1))
        for size in (5, 5, 7, 7, 5, 9):
            step(torch.randn(size, 4)).square().sum().backward()
            compiled(torch.randn(size, 4))
        counters = torch._dynamo.utils.counters
        return {**counters["frames"], **counters["stats"], "recompiled": len(counters["recompiles"])}

    for _ in range(2):  # the first in a process may compile more
        plain = run(lambda model: torch.compile(model, backend=rounding))

    def again(copy: Callable[..., Any], *, fresh: bool = False) -> Any:
        return torch.compile(copy, backend=functools.partial(rounding) if fresh else rounding)

    assert run(lambda model: program.shadows.over(model, again(model), again)) == plain
    report = program.report
    assert (report.findings, report.coverage.checked[WHOLE_CALLS]) == ((), 6)
    assert report.coverage.checked["gradients of whole calls"] > 0


def stepped(program: Callable[[Any], Any], tmp_path: Path) -> tuple[Report, list[Any], list[Any]]:
    """A program that trains, checked; its losses and gradients as it is alone, and then."""

    def run(compile_: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return list(program(compile_))

    alone = run(lambda function: torch.compile(function, backend=_graph))
    shadowed = Shadowed(tmp_path)
    checked = run(shadowed.compile)
    return shadowed.report, alone, checked


def trained(compile_: Any) -> Any:
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters())
    step = compile_(model)
    for _ in range(5):
        step(dropped(torch.randn(5, 4))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield [value.tolist() for value in (*model.state_dict().values(), torch.rand(3))]


def scheduled(compile_: Any) -> Any:
    """The scheduler wraps a method of the optimizer, which so holds the optimizer itself: no copy may step that."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    update = compile_(lambda: optimizer.step())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        update()
        scheduler.step()
        yield [value.tolist() for value in model.parameters()]


def stepped_by_itself(compile_: Any) -> Any:
    """The scheduler's wrapper knows the optimizer by a weak reference."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    update = compile_(optimizer.step)
    model(torch.randn(4, 3)).square().sum().backward()
    update()
    yield [value.tolist() for value in model.parameters()]


@pytest.mark.parametrize(("program", "calls"), [(trained, 3), (scheduled, 2), (stepped_by_itself, 1)])
def test_a_training_run_is_as_it_is_alone(program: Callable[[Any], Any], calls: int, tmp_path: Path) -> None:
    report, alone, checked = stepped(program, tmp_path)
    assert checked == alone
    assert (report.findings, report.coverage.checked[WHOLE_CALLS]) == ((), calls), str(report)
    assert "exception" not in " ".join(skip.reason for skip in report.coverage.skipped), str(report)


def under_autocast(compile_: Any) -> Any:
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    step = compile_(lambda x: net(x))
    for _ in range(3):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = step(torch.randn(4, 8))
        out.float().square().sum().backward()  # outside of the block, as it is usual
        yield net[0].weight.grad.sum().item()


def checkpointed(compile_: Any) -> Any:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8))
    block = compile_(lambda x: net(x))
    for _ in range(2):
        net.zero_grad()
        x = torch.randn(4, 8, requires_grad=True)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        x.square().sum().backward()
        yield net[0].weight.grad.sum().item()


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        key = self.linear(x)
        cache.append(key)
        self.kept = key.tanh()
        return key.relu()


def kept_elsewhere(compile_: Any) -> Any:
    """Gradients enter at what the call has put into a list and an attribute, too."""
    model = Keeps()
    step = compile_(model)
    for _ in range(3):
        model.zero_grad()
        cache: list[torch.Tensor] = []
        (step(torch.randn(3, 4), cache).sum() + 3 * cache[0].square().sum() + model.kept.sum()).backward()
        yield model.linear.weight.grad.sum().item()


def bound(compile_: Any) -> Any:
    net = nn.Linear(4, 4)
    step = compile_(functools.partial(lambda module, x, times: module(x).relu() * times, net, times=2))
    for _ in range(2):
        net.zero_grad()
        step(torch.randn(3, 4)).square().sum().backward()
        yield net.weight.grad.sum().item()


@pytest.mark.parametrize("program", [under_autocast, checkpointed, kept_elsewhere, bound])
def test_gradients_of_clean_programs_are_not_accused(program: Callable[[Any], Any], tmp_path: Path) -> None:
    report, alone, checked = stepped(program, tmp_path)
    assert checked == alone
    assert report.findings == (), str(report)
    assert {skip.subject for skip in report.coverage.skipped if skip.matters} == {"the compiled code"}
    assert report.coverage.checked["gradients of whole calls"] > 0


class Slot:
    __slots__ = ("tensor",)
    tensor: torch.Tensor


def test_gradients_that_enter_where_nobody_looks_are_told(program: Shadowed) -> None:
    slot, linear = Slot(), nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        slot.tensor = linear(x)
        return slot.tensor.sin()

    (program.compile(step)(torch.randn(3, 4)).sum() + slot.tensor.square().sum()).backward()
    report = program.report
    assert not report.findings, str(report)
    assert report.verdict is Verdict.INCONCLUSIVE


def test_what_already_a_first_call_shows_is_no_stale_code(program: Shadowed) -> None:
    """The program asks for the identity of a tensor that no copy follows."""
    x, slot = torch.ones(3), Slot()
    slot.tensor = x

    assert program.compile(lambda x: x * (2 if slot.tensor is x else 1))(x).tolist() == [2.0] * 3
    report = program.report
    assert (report.findings, report.verdict) == ((), Verdict.INCONCLUSIVE), str(report)
    assert "not the whole program" in str(report)


def test_what_a_copy_writes_to_the_programs_own_tensors_is_taken_back(program: Shadowed) -> None:
    memory, slot = torch.zeros(3), Slot()
    slot.tensor = memory  # which no copy follows

    def adds(x: torch.Tensor) -> torch.Tensor:
        slot.tensor.add_(x)
        return memory * 1

    compiled = program.compile(adds)
    assert [compiled(torch.ones(3)).tolist() for _ in range(3)] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    report = program.report
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "writes to the program's own tensors" in str(report)


def test_only_the_outermost_call_is_compared(program: Shadowed) -> None:
    inner = program.compile(lambda x: x.sin())
    outer = program.compile(lambda x: inner(x) + 1)
    for _ in range(4):
        outer(torch.ones(3))
    assert program.report.coverage.checked[WHOLE_CALLS] == 3
    inner(torch.ones(3))
    assert program.report.coverage.checked[WHOLE_CALLS] == 4


def test_what_it_prints_is_printed_once(program: Shadowed, capsys: pytest.CaptureFixture[str]) -> None:
    def talks(x: torch.Tensor) -> torch.Tensor:
        print("here")
        return x.cos()

    program.compile(talks)(torch.ones(3))
    assert program.report.coverage.checked[WHOLE_CALLS] == 1
    assert capsys.readouterr().out == "here\n"


def test_methods_module_compile_and_lazy_modules(program: Shadowed) -> None:
    module = Scaled()
    module._compiled_call_impl = program.compile(module._call_impl)  # as module.compile() does
    module(torch.randn(5, 4))
    lazy = program.compile(nn.LazyLinear(3))
    lazy(torch.randn(5, 4))
    lazy(torch.randn(5, 4))

    class Holder:
        def __init__(self) -> None:
            self.weight = torch.ones(3)

        step = program.compile(lambda self, x: self.weight * x)

    Holder().step(torch.ones(3))
    assert program.report.coverage.checked[WHOLE_CALLS] == 4
    assert not program.report.findings


def test_what_cannot_be_copied_is_told_and_no_pass(program: Shadowed) -> None:
    class Held(nn.Module):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is one of me")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    program.compile(Held())(torch.ones(3))
    report = program.report
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "there is one of me" in str(report)


def test_policy_raise_ends_the_call(tmp_path: Path) -> None:
    program = Shadowed(tmp_path, on_divergence="raise")
    with pytest.raises(DivergenceError, match="output"):
        program.compile(lambda x: tripled(x))(torch.ones(3))
    assert list(tmp_path.glob("*.json"))


def test_every_and_budget_choose_the_calls(tmp_path: Path) -> None:
    program = Shadowed(tmp_path, every=3)
    compiled = program.compile(lambda x: x.sin())
    for _ in range(12):
        compiled(torch.ones(3))
    assert program.report.coverage.checked[WHOLE_CALLS] == 3  # calls 1, 4 and 10
    program = Shadowed(tmp_path, budget=1e-9)
    compiled = program.compile(lambda x: x.cos())
    for _ in range(4):
        compiled(torch.ones(3))
    assert program.report.coverage.checked[WHOLE_CALLS] == 1


class Tally:
    total = 0

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[int] = []


tally = Tally()
elsewhere = types.ModuleType("elsewhere")
elsewhere.steps = 0  # type: ignore[attr-defined]
names: Counter[str] = Counter()
rebound = 0


def helper(x: torch.Tensor) -> torch.Tensor:
    tally.count += 1
    return x * tally.count


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global rebound
        rebound += 1
        tally.seen.append(rebound)
        Tally.total += 1
        elsewhere.steps += 1  # type: ignore[attr-defined]
        names["forward"] += 1
        return helper(x) + elsewhere.steps


def counted() -> tuple[Any, ...]:
    return tally.count, list(tally.seen), Tally.total, elsewhere.steps, dict(names), rebound


@pytest.fixture
def counters() -> Any:
    global rebound
    rebound, tally.count, Tally.total, elsewhere.steps = 0, 0, 0, 0  # type: ignore[attr-defined]
    tally.seen.clear()
    names.clear()


@pytest.mark.parametrize("make", [Counting, lambda: Counting().forward, lambda: lambda x: Counting.forward(None, x)])
@pytest.mark.usefixtures("counters")
def test_what_code_counts_by_global_names_is_counted_once(program: Shadowed, make: Callable[[], Any]) -> None:
    compiled = program.compile(make())
    assert [compiled(torch.ones(1)).item() for _ in range(4)] == [2, 4, 6, 8]
    assert counted() == (4, [1, 2, 3, 4], 4, 4, {"forward": 4}, 4)
    report = program.report
    assert (report.findings, report.coverage.checked[WHOLE_CALLS]) == ((), 3)
    assert "another thread" not in str(report)


@pytest.mark.usefixtures("counters")
def test_what_another_thread_may_use_is_left_and_told(program: Shadowed) -> None:
    outer = types.SimpleNamespace(inner=tally)

    def counts_inside(x: torch.Tensor) -> torch.Tensor:
        outer.inner.count += 1
        return x * outer.inner.count

    with meanwhile():
        program.compile(counts_inside)(torch.ones(1))
        program.compile(helper)(torch.ones(1))  # its counter would be put in place, and is not
    assert tally.count > 2
    told = [one for one in program.report.coverage.skipped if "another thread" in one.reason]
    assert {(one.subject.rpartition(".")[2], one.matters) for one in told} >= {("inner", True), ("whole calls", True)}
