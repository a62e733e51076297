"""`check` on programs of every shape: what is compared, under which names, and that nothing of the user's changes."""

from __future__ import annotations

import functools
import random
import threading
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn.attention.flex_attention import flex_attention

import checked_backend as cb
from tests.support import faults
from tests.support.check_tools import Holder, Net, agreed, batch, found, only, skips, undecided

GLOBAL = torch.zeros(3)
GLOBAL_LAYER = nn.Linear(3, 3)
COUNTER = 0


class ViewOfParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.weight[1:], self.weight.t(), x @ self.weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


class LateBuffer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", x.sum())
        self.cache = self.cache + 1
        return x * self.cache


class PlainAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.several = torch.zeros(4), [torch.ones(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        self.several[0].mul_(2)
        return x + self.total + self.several[0]


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda _module, _inputs, output: output * 2)
    layer.weight.register_hook(lambda gradient: gradient * 3)
    return layer


@pytest.mark.parametrize(
    "make", [ViewOfParameter, Tied, LateBuffer, PlainAttributes, hooked, lambda: torch.compile(Tied())]
)
def test_modules(make: Callable[[], Any]) -> None:
    agreed(cb.check(make(), (batch(2, 4),), compiler="aot_eager", iterations=2), program_runs=2)


def yields(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for power in range(3):
        yield torch.sin(x) * power


def test_a_generator_is_read_to_its_end() -> None:
    agreed(cb.check(lambda x: list(yields(x)), (batch(3),), compiler="eager"))
    told = undecided(cb.check(yields, (batch(3),), compiler="eager"))  # Dynamo leaves such a function alone
    assert "Dynamo compiled no region of it: Attempt to trace generator" in told


@pytest.mark.more
def test_what_a_function_captures_is_compared_and_left_alone() -> None:
    norm, layer, calls = nn.BatchNorm1d(3), nn.Linear(3, 3), []

    def closure(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return norm(layer(x)) * len(calls)

    agreed(cb.check(closure, (batch(4, 3),), compiler="aot_eager"))
    assert norm.num_batches_tracked == 0
    assert not calls
    assert layer.weight.grad is None
    report = cb.check(closure, (batch(4, 3),), compiler=faults.scaled_gradient("layer.weight"))
    assert {detail for detail, _ in found(report)} == {"logic"}


def uses_globals(x: torch.Tensor) -> torch.Tensor:
    global COUNTER
    COUNTER += 1
    GLOBAL.add_(1)
    return _helper(x) + GLOBAL * COUNTER


def _helper(x: torch.Tensor) -> torch.Tensor:
    return GLOBAL_LAYER(x) + GLOBAL


def test_globals_are_compared_and_left_alone() -> None:
    agreed(cb.check(uses_globals, (batch(2, 3),), compiler="aot_eager", iterations=2), gradients=2)
    assert not GLOBAL.any()
    assert COUNTER == 0
    assert GLOBAL_LAYER.weight.grad is None

    def forgets(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            GLOBAL.add_(1)
        return x * 2

    assert found(cb.check(forgets, (batch(3),), compiler="eager")) == {("mutation", "mutated[GLOBAL]")}


def test_methods_partials_and_callable_objects() -> None:
    holder = Holder(torch.zeros(3))
    for function in (holder.method, holder, functools.partial(lambda w, x: w * x, batch(3, grad=True))):
        agreed(cb.check(function, (batch(2, 3),), compiler="aot_eager"), gradients=1)
    assert not holder.tensor.any()


def test_modules_among_the_arguments() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    agreed(cb.check(lambda m, x: m["net"](x), ({"net": net}, batch(4, 3)), compiler="aot_eager"), gradients=4)
    assert net[1].num_batches_tracked == 0


def test_tensors_with_a_history() -> None:
    for make in (lambda: batch(3, 4, grad=True) * 2, lambda: (batch(3, 4, grad=True) * 2).t()):
        x = make()
        agreed(cb.check(lambda x: (x.mul_(3), x.sum()), (x,), compiler="aot_eager"), gradients=1)
        assert x._version == 0
        assert not x.is_leaf


def test_transforms_of_torch_func() -> None:
    layer = nn.Linear(3, 1)
    agreed(cb.check(torch.func.grad(lambda x: layer(x).sum()), (batch(2, 3),), compiler="aot_eager"))
    agreed(cb.check(torch.func.vmap(lambda a, b: (a * b).sum()), (batch(4, 3), batch(4, 3)), compiler="aot_eager"))
    parameters = dict(nn.Linear(3, 1).named_parameters())
    call = functools.partial(torch.func.functional_call, layer)
    agreed(cb.check(lambda given, x: call(given, (x,)), (parameters, batch(2, 3)), compiler="eager"), gradients=2)


def test_modes_around_the_check_hold_inside_of_it() -> None:
    layer, x = nn.Linear(8, 8), batch(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agreed(cb.check(layer, (x,), compiler="aot_eager"), gradients=2)
        assert torch.is_autocast_enabled("cpu")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert "gradients" not in agreed(cb.check(layer, (x,), compiler="aot_eager")).coverage.checked


def test_python_and_numpy_random_numbers_are_the_same_on_both_sides() -> None:
    generator = torch.Generator().manual_seed(3)

    def draws(x: torch.Tensor) -> torch.Tensor:
        return x * float(np.random.rand()) + random.random() + torch.rand(3, generator=generator)

    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), generator.get_state().tolist()

    before = state()
    agreed(cb.check(draws, (batch(3),), compiler="eager", iterations=2))
    assert state() == before


def test_the_random_state_that_is_left_is_compared() -> None:
    def draws(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            torch.rand(3)
        return x * 2

    before = torch.get_rng_state()
    assert only(cb.check(draws, (batch(3),), compiler="eager")).detail == "rng.state"
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    batch(3)
    assert torch.equal(torch.get_rng_state(), after)


# arguments of check itself


class Unfriendly:
    """Cannot be copied."""

    def __init__(self) -> None:
        self.tensor, self.lock = torch.ones(3), threading.Lock()


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(cb.CheckedBackendError, match=r"argument 'held.lock' \(lock\) cannot be copied"):
        cb.check(lambda x, held: x + held.tensor, (batch(3), Unfriendly()), compiler="eager")
    with pytest.raises(cb.CheckedBackendError, match=r"argument 'parts' \(generator\) cannot be copied"):
        cb.check(lambda parts: sum(parts), ((batch(3) for _ in range(2)),), compiler="eager")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradients": "yes"}, "gradients got 'yes'"),
        ({"compiler": "no such compiler"}, "no such compiler"),
        ({"compiler": "numcheck"}, "cannot check itself"),
        ({"args": torch.ones(3)}, r"it is a tuple: check\(fn, \(x,\)\)"),
        ({"fn_or_module": 3}, "int, which cannot be called"),
        ({"isolate": True, "timeout": 0}, "timeout got 0"),
        ({"dynamic": "yes"}, "dynamic got 'yes'"),
        ({"args": (1, 2)}, "cannot be called with these arguments: too many positional arguments"),
        ({"fn_or_module": lambda x, missing: x}, "missing a required argument: 'missing'"),
        ({"kwargs": {"y": 1}}, "cannot be called with these arguments: got an unexpected keyword argument 'y'"),
        pytest.param({"args": (1, 2), "isolate": True}, "too many positional arguments", marks=pytest.mark.forks),
        ({"compiler": "inductor", "compiler_options": {"max_autotunes": 1}}, "does not have. Near it: max_autotune"),
    ],
)
def test_misuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(cb.OptionError, match=message):
        cb.check(**{"fn_or_module": lambda x: x.sin(), "args": (batch(3),), "compiler": "eager", **arguments})


def test_nothing_of_the_users_changes() -> None:
    model, x = Net(), batch(grad=True)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state = [tensor.clone() for tensor in model.state_dict().values()]
    values, rng = x.detach().clone(), torch.get_rng_state()
    agreed(cb.check(model, (x,), compiler="aot_eager", vary_data=True))
    assert all(map(torch.equal, state, model.state_dict().values()))
    assert torch.equal(x, values)
    assert x.grad is None
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()


def test_what_the_program_itself_compiles_is_eager_in_eager() -> None:
    """Else what a compiler does wrong there would be on both sides, or on eager's alone."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    wrong = faults.wrong_value(0)
    for compiler in ("eager", wrong):
        inner = torch.compile(double, backend=compiler)
        agreed(cb.check(lambda x, inner=inner: inner(x) + 1, (batch(3),), compiler="aot_eager"))
        assert only(cb.check(lambda x, inner=inner: inner(x) + 1, (batch(3),), compiler=wrong)).detail == "logic"
    torch.testing.assert_close(inner(torch.ones(3)), faults.changed(double(torch.ones(3))))  # compiled, for the user


def shifted_by(buffer: torch.Tensor) -> nn.Module:
    net = nn.Linear(3, 3)
    net.register_buffer("shift", buffer)
    net.register_forward_hook(lambda module, _, output: output + module.shift)
    return net


def test_a_buffer_of_zeros_without_memory() -> None:
    x = torch.ones(3, requires_grad=True)
    net = shifted_by(torch.autograd.grad(torch.sgn(x).sum(), x)[0])
    agreed(cb.check(net, (batch(2, 3),), compiler="aot_eager"))
    assert ("logic", "output[0]") in found(cb.check(net, (batch(2, 3),), compiler=faults.wrong_value(0)))


def with_gradients() -> nn.Linear:
    net = nn.Linear(3, 3)
    net(batch(2, 3)).square().sum().backward()
    return net


def test_a_program_may_read_the_gradients_that_its_tensors_have() -> None:
    weight = with_gradients().weight
    before = weight.grad.clone()

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x if weight.grad is None else x.exp() * weight.grad

    assert "high-precision" not in skips(agreed(cb.check(reads, (batch(3),), compiler="aot_eager")))
    assert found(cb.check(reads, (batch(3),), compiler=faults.wrong_operator("exp"))) == {("logic", "output[0]")}
    assert torch.equal(weight.grad, before)


def test_gradients_may_be_expanded() -> None:
    x = batch(3, grad=True)
    x.grad = torch.ones(1).expand(3)
    agreed(cb.check(lambda x: x * 2, (x,), compiler="aot_eager", iterations=2), gradients=2)


def test_a_sparse_gradient_that_a_program_changes_is_compared() -> None:
    table, x = nn.Embedding(5, 2, sparse=True), torch.tensor([1, 3])
    table(x).sum().backward()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        table.weight.grad.mul_(2)
        return table(x)

    agreed(cb.check(doubled, (x,), candidate=doubled))
    forgets = cb.check(doubled, (x,), candidate=lambda x: table(x))
    assert {subject.partition(".")[0] for _, subject in found(forgets)} == {"grad[table"}


def test_gradients_may_lie_in_memory_that_the_program_writes_to() -> None:
    net = with_gradients()
    bucket = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    net.weight.grad, net.bias.grad = bucket[:9].view(3, 3), bucket[9:]

    def emptied(x: torch.Tensor) -> torch.Tensor:
        bucket.zero_()
        return x.exp() if not net.bias.grad.any() else x * 2

    agreed(cb.check(emptied, (batch(3),), compiler="aot_eager"))
    assert found(cb.check(emptied, (batch(3),), compiler=faults.wrong_operator("exp"))) == {("logic", "output[0]")}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_views_and_their_base_as_arguments_count_writes_together(order: tuple[int, ...]) -> None:
    base = batch(12)
    views = base, base[:9].view(3, 3), base[9:]

    def written(*given: torch.Tensor) -> torch.Tensor:
        given[order.index(0)].zero_()
        return given[order.index(1)] + 1

    agreed(cb.check(written, tuple(views[place] for place in order), compiler="aot_eager"), mutated_inputs=2)


class Ring(nn.Module):
    """Writes to a row of its own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, 3))
        self.row = self.rows[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.row.add_(x.mean(0))
        return x * self.rows.sum()


def test_views_that_a_module_keeps_count_writes_together() -> None:
    for compiler in ("eager", "aot_eager"):
        agreed(cb.check(Ring(), (batch(3),), compiler=compiler, iterations=2))


class Flat(nn.Module):
    """Has a parameter in the memory of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.arange(1.0, 7.0))
        self.weight = nn.Parameter(self.flat[:3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.flat.mul_(2)
        return x * self.weight


def added(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.mul_(2)
    return a * 3 + b


def written_late(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A wrong compiler: what is read before a write should be read after it."""
    [write] = (node for node in gm.graph.nodes if node.target == "mul_")
    next(node for node in reversed(gm.graph.nodes) if node.op == "call_function").append(write)
    gm.recompile()
    return gm.forward


def test_what_shares_memory_and_is_no_view_does_so_in_copies() -> None:
    c = torch.randn(3, dtype=torch.complex64)
    programs: list[tuple[Any, tuple[torch.Tensor, ...]]] = [
        (Flat(), (batch(3),)),
        (added, (c, c.conj())),
        (added, (torch._neg_view(c.real), c.real)),
    ]
    for program, args in programs:
        agreed(cb.check(program, args, compiler="eager", gradients=False))
        assert ("logic", "output[0]") in found(cb.check(program, args, compiler=written_late, gradients=False))


def training(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step that differentiates and updates itself, and returns its loss with its history."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_a_training_step_may_return_its_loss_with_its_history() -> None:
    net = nn.Linear(3, 2)
    step = training(net)
    for program in (step, lambda x: step(x).detach()):
        report = cb.check(program, (batch(3),), compiler="aot_eager", iterations=2)
        agreed(report, program_runs=2, gradients=4)
    wrong = cb.check(step, (batch(3),), compiler=faults.scaled_gradient("net.weight", "aot"))
    assert found(wrong) == {("logic", "grad[weight]")}

    def returns_more(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        more = (x * net.bias.sum()).sin()  # the gradient of this is not known
        return step(x), more

    assert cb.check(returns_more, (batch(3),), compiler="aot_eager").verdict is cb.Verdict.INCONCLUSIVE


class Recurrent(nn.Module):
    """Keeps its state with its history, which the second step would go through again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.state = nn.Linear(3, 3), torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.cell(x + self.state).tanh()
        return self.state.sum()


def test_a_step_that_cannot_be_differentiated_is_no_pass() -> None:
    report = cb.check(Recurrent(), (batch(3),), compiler="aot_eager", iterations=2)
    assert report.verdict is not cb.Verdict.PASS
    assert "Trying to backward through the graph a second time" in str(report)


@pytest.mark.parametrize("names", [("q", "k"), ("rows", "k")])
def test_views_of_one_tensor_have_its_gradient(names: tuple[str, str]) -> None:
    def product(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q * k.sin()

    rows = torch.randn(2, 3, requires_grad=True) * 1
    args = tuple({"q": rows[0], "k": rows[1], "rows": rows}[name] for name in names)
    agreed(cb.check(product, args, compiler="aot_eager"), gradients=2)
    wrong = cb.check(product, args, compiler=faults.scaled_gradient("k"))
    assert {subject for _, subject in found(wrong)} == {"grad[k]"}


class Attribute(nn.Module):
    """A parameter that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.randn(3, requires_grad=True)
        self.weight.grad = torch.full((3,), 2.0)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        assert self.weight.grad is not None
        return weight * self.weight + self.weight.grad


def test_a_gradient_of_a_tensor_that_a_module_just_keeps_is_compared() -> None:
    agreed(cb.check(Attribute(), (batch(3, grad=True),), compiler="aot_eager"), gradients=2)
    wrong = faults.scaled_gradient("self.weight", "aot")
    assert found(cb.check(Attribute(), (batch(3),), compiler=wrong)) == {("logic", "grad[self.weight]")}


def test_fresh_data_keeps_views_and_expanded_buffers() -> None:
    def moved(rows: torch.Tensor, row: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        row.add_(x)
        return rows.sum(0)

    rows = torch.randn(2, 3)
    agreed(cb.check(moved, (rows, rows[0], torch.randn(3)), compiler="aot_eager", vary_data=True))
    agreed(cb.check(shifted_by(torch.zeros(1).expand(3)), (batch(2, 3),), compiler="aot_eager", vary_data=True))


@pytest.mark.more
def test_each_call_begins_with_the_gradients_that_there_were() -> None:
    net = with_gradients()
    report = cb.check(lambda x: net(x) + net.weight.grad.sum(), (batch(2, 3),), compiler="aot_eager", iterations=3)
    agreed(report, program_runs=3)


def test_earlier_gradients_are_not_in_those_that_are_compared() -> None:
    net = with_gradients()
    net.weight.grad.fill_(1e9)
    agreed(cb.check(net, (batch(2, 3),), compiler="aot_eager"), gradients=2)
    small = cb.check(net, (batch(2, 3),), compiler=faults.scaled_gradient("weight", "aot", factor=1.001))
    assert found(small) == {("logic", "grad[weight]")}


class CopiedByHand(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def __deepcopy__(self, _: object) -> CopiedByHand:
        return CopiedByHand(self.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_a_module_may_copy_its_parameters_itself() -> None:
    net = CopiedByHand(torch.ones(3))
    net(batch(3)).sum().backward()
    agreed(cb.check(net, (batch(3),), compiler="aot_eager"), gradients=1)


@pytest.mark.more
def test_gradients_that_a_program_changes_are_compared() -> None:
    net = with_gradients()

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    agreed(cb.check(clip, (), compiler="aot_eager"), mutated_inputs=2)
    agreed(cb.check(clip, (), candidate=clip), tensors=4)
    wrong = cb.check(clip, (), candidate=lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.2) and None)
    assert found(wrong) == {("logic", "grad[net.bias]"), ("logic", "grad[net.weight]")}
    for program in (clip, lambda: net.zero_grad()):
        forgets = cb.check(program, (), candidate=lambda: None)
        assert {subject for _, subject in found(forgets)} == {"grad[net.bias]", "grad[net.weight]"}
    agreed(cb.check(torch.optim.SGD(net.parameters(), 0.1).step, (), compiler="aot_eager"), mutated_inputs=2)


class Branching(nn.Module):
    """An operator of torch that calls ``torch.compile`` in eager, so that its bodies' closures become its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.one(y), lambda y: self.other(y).sin(), (x,))


@pytest.mark.more
@pytest.mark.parametrize("sign", [1, -1])
def test_operators_that_need_dynamo_in_eager(sign: int) -> None:
    x = sign * torch.rand(2, 3)
    assert agreed(cb.check(Branching(), (x,), compiler="aot_eager")).coverage.checked["gradients"] == 4
    if sign < 0:
        assert found(cb.check(Branching(), (x,), compiler=faults.wrong_value(0, "aot"))) == {("logic", "output[0]")}


@pytest.mark.more
def test_an_expanded_input_keeps_its_strides_where_nothing_tells_what_is_written_to() -> None:
    x = batch(3).expand(2, 3).requires_grad_()
    report = cb.check(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), (x,), compiler="aot_eager")
    agreed(report, gradients=1)


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention() -> None:
    """In eager it calls ``torch.compile`` itself, which compiles nothing under the modes of the control runs."""
    query, key, value = (batch(1, 2, 128, 16) for _ in range(3))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        def biased(score: torch.Tensor, _batch: Any, _head: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return score + 0.5 * (j - i)

        attended: torch.Tensor = flex_attention(query, key, value, score_mod=biased)
        return attended @ value.mT

    def last_bit(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (1 + 2**-23) if tensor.dtype is torch.float32 else tensor

    report = agreed(cb.check(attend, (query, key, value), compiler=faults.spoiled_output(last_bit)))
    assert report.coverage.detection_limit["output[0]"] < 1e-3
    assert not [skip for skip in report.coverage.skipped if "Monte Carlo" in skip.subject]
    assert only(cb.check(attend, (query, key, value), compiler=faults.wrong_value(0))).detail == "logic"


def test_it_reads_well_in_a_test_case() -> None:
    class TestLayer(unittest.TestCase):
        def setUp(self) -> None:
            self.layer = nn.Linear(3, 3)

        def test_right(self) -> None:
            cb.check(lambda x: self.layer(x), (batch(2, 3),), compiler="eager").raise_for_verdict()

        def test_wrong(self) -> None:
            cb.check(self.layer, (batch(2, 3),), compiler=faults.scaled_gradient("weight")).raise_for_verdict()

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(TestLayer).run(result)
    assert result.testsRun == 2
    ((_, text),) = result.errors
    assert "DivergenceError: FAIL" in text
    assert "grad[weight]" in text


def test_numpys_random_numbers_are_numpys_when_compiled_too() -> None:
    """By default Dynamo has torch's generator draw them, as PyTorch documents: other numbers, another state after."""

    def jittered(x: torch.Tensor) -> torch.Tensor:
        return x * float(np.random.rand()) + torch.rand(4)

    report = agreed(cb.check(jittered, (torch.ones(4),), compiler="eager"))
    assert "use_numpy_random_stream=True" in str(report.coverage.notes)
    assert not torch._dynamo.config.use_numpy_random_stream
    wrong = cb.check(jittered, (torch.ones(4),), compiler=faults.spoiled_output(lambda value: value * 2))
    assert ("logic", "output[0]") in found(wrong)
