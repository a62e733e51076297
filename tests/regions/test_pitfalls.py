"""Programs with a difficulty of their own: each passes when it is clean, and is caught when it is wrong just there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from tests.support import faults
from tests.support.classifier import Classifier, Compile, data
from tests.support.faults import Compiler, How
from tests.support.noise_tools import rounding_otherwise
from tests.support.region_tools import agreed, audit, backwards, calls, clean_reports, found

# Dynamo itself looks at .grad of every input
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

Fault = tuple[Callable[[How], Compiler], str, str]
"""Makes a wrong compiler; the detail ("" for any) and the subject of what is found."""


@dataclass(frozen=True)
class Pitfall:
    """A program, what of it is compared, and what is found where it is wrong.

    Attributes:
        counts: Of the coverage; also ``passes`` (backward passes), ``calls`` and ``regions``.
    """

    program: Callable[[Compile], Any]
    faults: tuple[Fault, ...]
    hows: tuple[How, ...]
    counts: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)


PITFALLS: dict[str, Pitfall] = {}


def pitfall(
    *wrong: Fault, hows: tuple[How, ...] = ("python", "aot"), reference: str = "keep", name: str = "", **counts: int
) -> Callable[[Any], Any]:
    def register(program: Any) -> Any:
        known = {key.replace("_", " "): count for key, count in counts.items()}
        PITFALLS[name or program.__name__] = Pitfall(program, wrong, hows, known, {"reference": reference})
        return program

    return register


def scaled(name: str) -> Fault:
    return partial(faults.scaled_gradient, name), "logic", f"grad[{name}]"


def zeroed(name: str) -> Fault:
    return partial(faults.zeroed_gradient, name), "logic", f"grad[{name}]"


def value(place: int) -> Fault:
    return partial(faults.wrong_value, place), "logic", f"output[{place}]"


def element(place: int) -> Fault:
    return partial(faults.one_element, place), "logic", f"output[{place}]"


def dropped(name: str) -> Fault:
    return partial(faults.dropped_mutation, name), "mutation.dropped", f"mutated[{name}]"


def mutated(name: str) -> Fault:
    return partial(faults.wrong_mutation, name), "mutation.wrong", f"mutated[{name}]"


def unaliased(place: int) -> Fault:
    return lambda _how: faults.lost_alias(place), "alias.memory", f"output[{place}]"


# which outputs receive gradients


STARTS: dict[str, Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]] = {
    "loss_only": lambda loss, _: [loss],
    "logits_only": lambda _, logits: [logits.square().sum()],
    "both_in_one": lambda loss, logits: [loss + logits.square().sum()],
    "one_after_the_other": lambda loss, logits: [loss, logits.square().sum()],
    "twice": lambda loss, _: [loss, loss],
}
for number, (word, starts) in enumerate(STARTS.items()):
    passes = 2 if word in ("one_after_the_other", "twice") else 1

    @pitfall(
        scaled("hidden.weight"),
        zeroed("head.bias"),
        name=word,
        reference=("keep", "recompute")[number % 2],
        passes=passes,
        gradients=4 * passes,
    )
    def one_output_feeds_another(compile_: Compile, starts: Any = starts) -> None:
        """Loss and logits come from one region; the loss is made of the logits."""
        *first, last = starts(*compile_(Classifier())(*data()))
        for start in first:
            start.backward(retain_graph=True)
        last.backward()


@pitfall(scaled("head.weight"), gradients=1)
def gradient_of_some_inputs_only(compile_: Compile) -> None:
    """`torch.autograd.grad` of one parameter: only that gradient is computed, and checked."""
    model = Classifier()
    loss, _ = compile_(model)(*data())
    torch.autograd.grad(loss, [model.head.weight])


@pitfall(scaled("x"))
@pitfall(
    (partial(faults.spoiled_gradient, "unused", torch.ones_like), "", "grad[unused]"), hows=("aot",), name="made up"
)
def gradient_that_is_none(compile_: Compile) -> None:
    """`unused` is in the region but has no influence on what the backward pass starts from."""
    x, unused = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    used, _other = compile_(lambda x, unused: (x.sin(), unused.exp()))(x, unused)
    used.sum().backward()


@pitfall(scaled("head.bias"), gradients=2)
def frozen_parameters(compile_: Compile) -> None:
    model = Classifier()
    model.hidden.requires_grad_(False)
    compile_(model)(*data())[0].backward()


def grad_mode_turned_on(compile_: Compile, *, outside: bool) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            y = (x + 1).sin()
        return y, x * 2

    x = torch.randn(5, requires_grad=True)
    with torch.set_grad_enabled(outside):
        y, z = compile_(run)(x)
    assert (y.requires_grad, z.requires_grad) == (True, outside)
    y.sum().backward()


pitfall(scaled("x"), name="grad mode on", gradients=1)(partial(grad_mode_turned_on, outside=True))
# what is planted in Python works with grad mode on
pitfall(scaled("x"), name="grad mode on inside", hows=("aot",), gradients=1)(
    partial(grad_mode_turned_on, outside=False)
)


@pitfall(*map(value, range(4)), hows=("aot",), outputs=4)
def outputs_that_need_no_gradient(compile_: Compile) -> None:
    x = torch.randn(5, requires_grad=True)
    compile_(lambda x: (x.sin(), x.detach() * 2, x.argmax(), (x > 0)))(x)[0].sum().backward()


# inputs that are changed in place


STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


@pitfall(*map(dropped, STATISTICS), *map(mutated, STATISTICS), mutated_inputs=6)
def batch_norm(compile_: Compile) -> None:
    model = compile_(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    for _ in range(2):
        model(torch.randn(5, 4)).square().sum().backward()


@pitfall(dropped("x"), mutated("x"), mutated_inputs=1)
def user_adds(compile_: Compile) -> None:
    compile_(lambda x: x.add_(1) * 2)(torch.randn(4, 3))


@pitfall(dropped("x"), mutated("x"), mutated_inputs=1)
def user_writes_a_view(compile_: Compile) -> None:
    compile_(lambda x: (x[1:3, 0].mul_(3), x.sum())[1])(torch.randn(4, 3))


@pitfall(dropped("x"), mutated("x"), mutated_inputs=1)
def user_writes_a_strided_slice(compile_: Compile) -> None:
    compile_(lambda x: x.mul_(2).sum())(torch.randn(6, 8)[::2, 1::3])


@pitfall(
    value(0),
    (lambda _how: lambda *_given: lambda base, _view: (base * 2,), "mutation.dropped", "mutated[base]"),
    (lambda _how: lambda *_given: lambda base, _view: (base * 2,), "mutation.dropped", "mutated[view]"),
    mutated_inputs=2,  # both change, though one is written to
)
def one_storage_passed_twice(compile_: Compile) -> None:
    base = torch.randn(4, 3)
    compile_(lambda base, view: (view.add_(5), base * 2)[1])(base, base[1:3])


@pitfall(dropped("x"), hows=("python",))
def one_tensor_passed_twice(compile_: Compile) -> None:
    x = torch.randn(3)
    compile_(lambda x, y: x.add_(1) * y)(x, x)


def written_to(compile_: Compile, *, returned: bool) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        x.add_(w * 2)  # x.mul_(w) would need x from before, which AOT autograd does not keep
        return x.sin() if returned else None

    w = torch.randn(3, requires_grad=True)
    x = torch.randn(4, 3, requires_grad=True) * 1.0
    y = compile_(run)(x, w)
    ((y.sum() if returned else 0) + (x * x).sum()).backward()  # gradients arrive at both


returning, alone = partial(written_to, returned=True), partial(written_to, returned=False)
pitfall(scaled("w"), mutated("x"), name="mutated, no leaf", passes=1, gradients=2)(returning)
pitfall(scaled("x"), hows=("aot",), name="mutated, no leaf, by AOT")(returning)
pitfall(scaled("w"), name="gradient through a mutated input", passes=1, gradients=2)(alone)


# outputs that alias


@pitfall(unaliased(0), unaliased(1), outputs=3)
def views_of_an_input(compile_: Compile) -> None:
    compile_(lambda x: (x[1:], x.t(), x * 2))(torch.randn(4, 3))


@pitfall(unaliased(1), outputs=3)
def views_of_one_result(compile_: Compile) -> None:
    compile_(lambda x: (y := x.sin(), y.view(-1), y[0]))(torch.randn(4, 3, requires_grad=True))


@pitfall(scaled("x"), passes=1)
def gradients_through_a_view_of_an_input(compile_: Compile) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    view, product = compile_(lambda x: (x.t(), x * 3))(x)
    (view.square().sum() + product.sum()).backward()


# what an input can be


@pitfall(value(0), outputs=3)
def inputs_that_are_no_tensors(compile_: Compile) -> None:
    def run(x: torch.Tensor, scale: float, times: int, names: list[str], flag: bool) -> tuple[torch.Tensor, int, str]:
        for _ in range(times):
            x = x * scale
        return (-x if flag else x), times, names[0]

    compiled = compile_(run)
    for scale in (0.5, 0.25, 0.125):
        assert compiled(torch.randn(3), scale, 2, ["a"], True)[1:] == (2, "a")


@pitfall(value(0), calls=3, regions=1)
def sizes_that_are_symbols(compile_: Compile) -> None:
    compiled = compile_(lambda x, times: (x.reshape(-1) * times, x.shape[0] * times), dynamic=True)
    for rows, times in ((2, 3), (5, 4), (7, 9)):
        assert compiled(torch.randn(rows, 3), times)[1] == rows * times


@pitfall(zeroed("x"), gradients=2)
def input_that_requires_grad_and_is_no_leaf(compile_: Compile) -> None:
    first, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    hidden = first * 2
    hidden.retain_grad()
    compile_(lambda x, w: (x * w).tanh())(hidden, w).sum().backward()
    assert first.grad is not None
    assert hidden.grad is not None


@pitfall(scaled("right"), gradients=2)
def two_inputs_that_are_results_of_one_node(compile_: Compile) -> None:
    halves = torch.randn(4, 6, requires_grad=True).chunk(2, dim=1)
    compile_(lambda left, right: left.exp() * right)(*halves).sum().backward()


# dtypes and shapes


for dtype in (torch.complex64, torch.complex128):

    @pitfall(element(0), hows=("python",), name=f"{dtype}, a result", gradients=1)
    @pitfall(scaled("x"), hows=("aot",), name=f"{dtype}")
    def complex_numbers(compile_: Compile, dtype: torch.dtype = dtype) -> None:
        x = torch.randn(4, 3, dtype=dtype, requires_grad=True)
        compile_(lambda x: (x * x.conj()) + x.exp())(x).abs().sum().backward()


for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):

    @pitfall(element(0), element(1), name=f"{dtype}", tensors=2)
    def exact_dtypes(compile_: Compile, dtype: torch.dtype = dtype) -> None:
        compile_(lambda x: (x | x.flip(0), x.sum()))(torch.randint(0, 2, (4, 3)).to(dtype))


for dtype in (torch.bfloat16, torch.float16, torch.float64):

    @pitfall(value(0), zeroed("x"), name=f"{dtype}", gradients=1)
    def floating_dtypes(compile_: Compile, dtype: torch.dtype = dtype) -> None:
        x = torch.randn(8, 8, dtype=dtype, requires_grad=True)
        compile_(lambda x: (x @ x).tanh().sum(0))(x).sum().backward()


@pitfall(
    (partial(faults.wrong_shape, 0), "structure.shape", "output[0]"),
    (partial(faults.wrong_dtype, 2), "structure.dtype", "output[2]"),
    value(1),
    outputs=3,
    passes=1,
)
def empty_tensors(compile_: Compile) -> None:
    compile_(lambda x: (x * 2, x.sum(), x.new_zeros(2, 0)))(torch.randn(0, 3, requires_grad=True))[1].backward()


@pitfall(value(0), scaled("w"), gradients=2)
def tensors_without_dimensions(compile_: Compile) -> None:
    x, w = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    compile_(lambda x, w: (x * w).sin())(x, w).backward()


@pitfall(scaled("a"), (partial(faults.wrong_stride, 0), "structure.stride", "output[0]"), gradients=2)
def expanded_and_permuted_inputs(compile_: Compile) -> None:
    wide = torch.randn(4, 1, requires_grad=True).expand(4, 5)
    across = torch.randn(5, 4, requires_grad=True).t()
    compile_(lambda a, b: a * b)(wide, across).sum().backward()


# modes


for mode in (torch.no_grad, torch.inference_mode):

    @pitfall(element(1), name=f"in {mode.__name__}", outputs=2, passes=0)
    def without_gradients(compile_: Compile, mode: Any = mode) -> None:
        with mode():
            loss, _ = compile_(Classifier())(*data())
        assert not loss.requires_grad

    @pitfall(mutated("x"), name=f"written to in {mode.__name__}", mutated_inputs=1)
    def mutation_without_gradients(compile_: Compile, mode: Any = mode) -> None:
        with mode():
            compile_(lambda x: x.mul_(2))(torch.randn(3))

    @pitfall(mutated("1.running_mean"), name=f"running statistics in {mode.__name__}", mutated_inputs=3)
    def statistics_without_gradients(compile_: Compile, mode: Any = mode) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        with mode():
            compile_(model)(torch.randn(6, 8))


@pitfall()
def a_parameter_without_gradients_where_effects_are_unknown(compile_: Compile) -> None:
    """What a cond mutates is not known, so eager gets copies of the parameters, which never require grad."""
    layer = nn.Linear(4, 4)

    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: layer(t).sin(), lambda t: layer(t).cos(), (x,))

    with torch.no_grad():
        compile_(branch)(torch.randn(2, 4))


@pitfall(scaled("x"), passes=1)
def no_grad_inside_the_region(compile_: Compile) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            scale = x.exp()
        return x * scale, scale

    compile_(run)(torch.randn(5, requires_grad=True))[0].sum().backward()


class Autocast(Classifier):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, target)


for inside in (True, False):

    @pitfall(value(1), hows=("python",), name=f"autocast {inside}", gradients=4)
    @pitfall(scaled("hidden.weight"), hows=("aot",), name=f"autocast {inside}, backward")
    def autocast(compile_: Compile, inside: bool = inside) -> None:
        """bfloat16 on the CPU; the backward pass runs outside of the autocast block."""
        model = compile_(Autocast() if inside else Classifier())
        with nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
            loss, logits = model(*data())
        assert logits.dtype is torch.bfloat16
        loss.backward()


class Checkpointed(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def checkpointed(compile_: Compile, dropout: float = 0.0) -> None:
    """The block runs again in the backward pass, from the same random state."""
    compiled = compile_(Checkpointed(dropout))
    for _ in range(2):
        compiled(torch.randn(5, 6)).square().sum().backward()


any_value = partial(faults.wrong_value, 0), "", "output[0]"
pitfall(any_value, zeroed("block.0.weight"), passes=2, gradients=8)(checkpointed)


@pitfall(scaled("2.weight"), hows=("aot",), calls=1, passes=1)
def checkpoint_around_a_compiled_block(compile_: Compile) -> None:
    """The block is compiled, its checkpoint is not: the region runs again in the backward pass, until that has all."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    shift, block = model[2].bias.requires_grad_(False), compile_(model)
    x = torch.randn(5, 6, requires_grad=True)  # the program writes to an input of the region, in either run
    checkpoint(lambda x: block(x + 0 * shift.add_(1)), x, use_reentrant=False).square().sum().backward()


# several regions and shapes


def growing(compile_: Compile, **more: Any) -> None:
    model = compile_(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), **more)
    for rows in (3, 5, 7, 9):
        model(torch.randn(rows, 4)).square().sum().backward()


for dynamic, count in ((None, 2), (True, 1), (False, 4)):  # None: the first for 3 rows, then one for any number
    pitfall(element(0), scaled("2.weight"), name=f"dynamic={dynamic}", regions=count, calls=4, passes=4)(
        partial(growing, dynamic=dynamic)
    )


@pitfall(element(0), scaled("weight"), regions=1, calls=2, passes=2)
def marked_dynamic(compile_: Compile) -> None:
    model = compile_(nn.Linear(4, 2))
    for rows in (3, 8):
        x = torch.randn(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        model(x).square().sum().backward()


# a scale of noise learned at one size does not hide an error at another
late = (
    partial(faults.spoiled_output, lambda tensor: tensor * 1.001 if tensor.shape[0] == 9 else tensor, 0),
    "",
    "output[0]",
)
pitfall(late, hows=("aot",), name="at the last shape")(partial(growing, dynamic=True))


# tensor subclasses


def two_tensors() -> Any:
    return TwoTensor(torch.randn(3, 4), torch.randn(3, 4))


@pitfall(
    (lambda _how: faults.spoiled_output(lambda out: TwoTensor(out.a, out.b * 1.01)), "", "output[0]"),
    (lambda _how: faults.spoiled_output(lambda out: out.a), "structure.type", "output[0]"),
    outputs=1,
    tensors=2,  # both halves are compared
)
def wrapper_subclass(compile_: Compile) -> None:
    compile_(lambda x: x.sin() * 2)(two_tensors())


@pitfall((partial(faults.scaled_gradient, "x"), "", "grad[x]"), gradients=1)
def gradient_of_a_wrapper_subclass(compile_: Compile) -> None:
    compile_(lambda x: x.sin() * 2)(two_tensors().requires_grad_()).sum().backward()


def test_a_wrapper_subclass_has_noise_and_a_float64() -> None:
    def program(compile_: Compile) -> None:
        def run(x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                x = torch.sin(x @ x) * 2
            return x

        compile_(run)(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))

    assert agreed(audit(program, faults.spoiled_output(rounding_otherwise)))
    report = audit(program, faults.spoiled_output(lambda tensor: tensor * 1.01))
    assert found(report) == {("logic", "output[0]")}
    assert not report.coverage.skipped
    assert all(finding.noise is not None and finding.noise.rms > 0 for finding in report.findings)


@pytest.mark.parametrize(
    ("compiler", "expected"), [("aot_eager", set()), (faults.spoiled_output(torch.neg), {("logic", "output[0]")})]
)
def test_a_wrapper_that_cannot_be_cloned_is_copied_part_by_part(
    compiler: Any, expected: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchao's optimizer states."""
    dispatch = TwoTensor.__torch_dispatch__

    def without_clone(_cls: type, func: Any, *more: Any) -> Any:
        if func is torch.ops.aten.clone.default:
            raise NotImplementedError("clone")
        return dispatch(func, *more)

    monkeypatch.setattr(TwoTensor, "__torch_dispatch__", classmethod(without_clone))
    state, gradient = TwoTensor(torch.ones(4), torch.ones(4)), torch.randn(4)
    report = audit(
        lambda compile_: compile_(lambda state, grad: (state.mul_(0.9).add_(grad), grad * 2)[1])(state, gradient),
        compiler,
    )
    assert found(report) == expected, str(report)
    assert report.coverage.checked["mutated inputs"] >= 1
    assert torch.equal(state.a, 0.9 + gradient)


# sparse gradients


class Sparse(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=True, dtype=dtype)
        self.linear = nn.Linear(3, 2, dtype=dtype)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.table(index)))


Change = Callable[[torch.Tensor, torch.Tensor], Any]


def rebuilt(change: Change, how: How) -> Compiler:
    """A compiler that changes the indices and the values of the table's gradient."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.coalesce()
        parts = change(gradient.indices(), gradient.values().clone())
        return torch.sparse_coo_tensor(*parts, gradient.shape, check_invariants=True)

    return faults.spoiled_gradient("table.weight", spoil, how)


def one_value(indices: torch.Tensor, values: torch.Tensor) -> Any:
    values[-1, -1] *= 1.01
    return indices, values


CHANGES: dict[str, tuple[Change, ...]] = {
    "logic": (one_value, lambda indices, values: (indices, values * 2)),
    "structure.indices": (
        lambda indices, values: ((indices + 1) % 20, values),
        lambda indices, values: (indices[:, 1:], values[1:]),
        # a zero is stored
        lambda indices, values: (torch.cat([indices, torch.tensor([[9]])], 1), F.pad(values, (0, 0, 0, 1))),
    ),
}


def sparse_gradient(compile_: Compile, dtype: torch.dtype = torch.float32) -> None:
    compile_(Sparse(dtype))(torch.tensor([1, 2, 2, 5])).sum().backward()


pitfall(
    *((partial(rebuilt, change), detail, "grad[table.weight]") for detail in CHANGES for change in CHANGES[detail]),
    gradients=3,
)(sparse_gradient)
pitfall(name="sparse, bfloat16", gradients=3)(partial(sparse_gradient, dtype=torch.bfloat16))


# torch 2.11 warns although the test says what it wants
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_a_sparse_gradient_in_another_order_is_right() -> None:
    assert agreed(audit(sparse_gradient, rebuilt(lambda indices, values: (indices.flip(1), values.flip(0)), "python")))
    report = audit(sparse_gradient, rebuilt(CHANGES["structure.indices"][0], "aot"))
    assert report.findings[0].expected == "3 places: 1, 2, 5"


# writes to inputs, and their counts


def doubles(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


def without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x + 1


WRITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "doubles": doubles,
    "twice": lambda x: (x.add_(1), x.mul_(2), x.sum())[2],
    "without grad": without_grad,
    "a row": lambda x: (x[0].add_(1), x + 1)[1],
}
NO_COUNT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hidden": lambda x: (x.data.mul_(2), x + 1)[1],
    "to what it was": lambda x: (x.mul_(1), x + 1)[1],
}


def plain(*, requires_grad: bool = False) -> torch.Tensor:
    return torch.rand(4, 3, requires_grad=requires_grad) + 1


def written_twice(compile_: Compile, function: Any, make: Callable[[], torch.Tensor] = plain) -> None:
    compiled = compile_(function)
    for _ in range(2):
        compiled(make())


uncounted = (lambda _how: faults.forgets_to_count), "mutation.uncounted", "mutated[x]"
for word, function in {**WRITES, **NO_COUNT}.items():
    wrong = (uncounted,) if word in WRITES else ()
    pitfall(*wrong, hows=("python",), name=f"counted, {word}")(partial(written_twice, function=function))
    pitfall(name=f"counted, {word}, no leaf")(
        partial(written_twice, function=function, make=partial(plain, requires_grad=True))
    )


@pytest.mark.parametrize("word", NO_COUNT)
def test_what_eager_does_not_count_and_what_changes_nothing_need_no_count(word: str) -> None:
    agreed(audit(partial(written_twice, function=NO_COUNT[word]), faults.forgets_to_count))


def test_a_count_that_is_missing_shows_in_any_call_and_for_parameters() -> None:
    program = partial(written_twice, function=doubles)
    report = audit(program, faults.from_call(2, faults.forgets_to_count))
    assert found(report) == {("mutation.uncounted", "mutated[x]")}
    assert "increment_version" in str(report)
    assert found(audit(program, faults.dropped_mutation("x"))) == {("mutation.dropped", "mutated[x]")}
    of_parameter = partial(written_twice, function=without_grad, make=lambda: nn.Parameter(plain()))
    assert ("mutation.uncounted", "mutated[x]") in found(audit(of_parameter, faults.forgets_to_count))


def test_tensors_in_one_memory_have_a_count_each_or_together_and_those_of_inference_mode_none() -> None:
    def one_memory(compile_: Compile) -> None:
        x = torch.rand(6)
        compile_(lambda x, y: (x.mul_(2), y + 1)[1])(x, x.data[:3])  # `.data` has a count of its own

    def in_inference_mode(compile_: Compile) -> None:
        with torch.inference_mode():
            compile_(doubles)(torch.rand(4, 3))

    agreed(audit(one_memory, "eager"))
    for compiler in ("eager", "aot_eager", faults.forgets_to_count):
        agreed(audit(in_inference_mode, compiler))


def counted(report: cb.Report, key: str) -> int:
    own = {"passes": backwards, "calls": calls, "regions": lambda report: len(report.coverage.regions)}
    return own[key](report) if key in own else report.coverage.checked[key]


@pytest.mark.parametrize("name", PITFALLS)
def test_it_passes_where_it_is_clean_and_is_caught_where_it_is_wrong(name: str) -> None:
    given = PITFALLS[name]
    for report in clean_reports(given.program, **given.options):
        assert {key: counted(report, key) for key in given.counts} == given.counts
    for make, detail, subject in given.faults:
        for how in given.hows:
            report = audit(given.program, make(how), **given.options)
            told = {(detail and one, about) for one, about in found(report)}
            assert (detail, subject) in told, str(report)
            assert told == {(detail, subject)} or not subject.startswith("grad"), str(report)


def test_activation_checkpointing_with_dropout() -> None:
    """Only through AOT autograd: where a region runs as it is, torch runs the block again from another random state."""
    program = partial(checkpointed, dropout=0.4)
    report = agreed(audit(program, "aot_eager"))
    assert (backwards(report), report.coverage.checked["gradients"]) == (2, 8)
    report = audit(program, faults.zeroed_gradient("block.0.weight", "aot"))
    assert {subject for _, subject in found(report)} == {"grad[block.0.weight]"}
