from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from checked_backend.errors import CheckedBackendError
from checked_backend.modes.float64 import Float64Mode, PromotionError, to_float64
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from tests.support.mode_programs import CASES, Case, promote_tensors, relative, same


def high(program, *inputs):
    with Float64Mode() as mode:
        result = program(*to_float64(list(inputs)))
    assert mode.lossy == set()
    return result


@pytest.mark.parametrize("name", CASES)
def test_equals_the_model_in_double(name):
    case = CASES[name]()
    tape = RandomTape()
    torch.manual_seed(0)
    with RecordRandom(tape):
        low = case.run()
    with ReplayRandom(tape), Float64Mode() as mode:
        result = case.run(promote_tensors(case.state()))
    assert mode.lossy == set()
    assert all(value.dtype == torch.float64 for value in result if value.is_floating_point())

    double = Case(copy.deepcopy(case.model).double(), promote_tensors(case.args))
    double.model.autocast = False
    with ReplayRandom(tape):
        expected = double.run()
    for actual, wanted, rounded in zip(result, expected, low, strict=True):
        assert relative(actual, wanted) < 1e-12
        assert actual.shape == rounded.shape
    assert relative(result[0], low[0]) < (1e-6 if name in ("mlp", "conv") else 2e-2)


def test_state_is_restored_also_after_an_error():
    before = torch.get_default_dtype(), torch.is_autocast_cache_enabled(), torch.get_rng_state()
    with pytest.raises(RuntimeError), Float64Mode():
        torch.ones(2) @ torch.ones(3)
    with Float64Mode():
        assert torch.get_default_dtype() == torch.float64
    after = torch.get_default_dtype(), torch.is_autocast_cache_enabled(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


PROGRAMS = {
    "factory": lambda x: torch.full((4,), 1 / 3, dtype=torch.float32) + x,
    "factory_default": lambda x: torch.full((4,), 1 / 3) + x,
    "cast": lambda x: (x.to(torch.bfloat16) / 3).float(),
    "half": lambda x: (x.half() / 3).to(torch.float32),
    "sum_dtype": lambda x: x.sum(dtype=torch.float32) / 3,
    "softmax_dtype": lambda x: F.softmax(x.bfloat16(), 0, dtype=torch.float32),
    "integers": lambda x: torch.arange(1, 5) / 3 + x,
    "integer_mean": lambda x: torch.arange(1, 5).float().mean() / 3,
    "sqrt_of_integers": lambda x: torch.arange(1, 5).sqrt(),
    "scalar_tensor": lambda x: torch.scalar_tensor(1 / 3, dtype=torch.float32) * x,
    "linspace": lambda x: torch.linspace(0, 1, 4),
    "type_as": lambda x: torch.ones(4, dtype=torch.float16).type_as(x) / 3,
    "complex": lambda x: torch.complex(x, x).to(torch.complex64).abs() / 3,
    "fft": lambda x: torch.fft.fft(x).real,
    "explicit_double": lambda x: x.double() / 3,
    "arange": lambda x: torch.arange(0, 1, 0.3, dtype=torch.float32) + x,
    "one_hot": lambda x: F.one_hot(torch.arange(4)).float() @ x / 3,
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 2, 2)] * 3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_asked_for_dtypes_become_float64(name):
    x = torch.tensor([0.1, 0.2, 0.3, 0.4])
    result = high(PROGRAMS[name], x)
    assert result.dtype == torch.float64
    torch.set_default_dtype(torch.float64)
    exact = {
        "cast": lambda y: y / 3,
        "half": lambda y: y / 3,
        "factory": lambda y: torch.full((4,), 1 / 3) + y,
        "sum_dtype": lambda y: y.sum() / 3,
        "softmax_dtype": lambda y: F.softmax(y, 0),
        "integer_mean": lambda y: torch.arange(1, 5).double().mean() / 3,
        "scalar_tensor": lambda y: torch.scalar_tensor(1 / 3) * y,
        "complex": lambda y: torch.complex(y, y).abs() / 3,
        "arange": lambda y: torch.arange(0, 1, 0.3) + y,
        "one_hot": lambda y: F.one_hot(torch.arange(4)).double() @ y / 3,
    }.get(name, PROGRAMS[name])
    assert torch.allclose(result, exact(x.double()), rtol=1e-15, atol=0)


def test_constants_of_the_program_are_converted_once_per_memory():
    state, table = torch.zeros(4), torch.full((4, 4), 0.1)
    window = table[1:3, ::2]

    def program(x):
        state.add_(x)
        state[1:].mul_(2)
        table.mul_(3)
        return state + window.sum() + torch.tensor([0.5, 0.25, 0.0, 1.0], dtype=torch.float32)

    x = torch.tensor([0.1, 0.2, 0.3, 0.4])
    with Float64Mode():
        result = program(to_float64([x])[0])
    assert result.dtype == torch.float64
    assert torch.equal(state, torch.zeros(4))
    assert torch.equal(table, torch.full((4, 4), 0.1))
    wanted = x.double() * torch.tensor([1.0, 2, 2, 2])
    constant = torch.full((4, 4), 0.1).double()[1:3, ::2].sum() * 3
    assert torch.allclose(result, wanted + constant + torch.tensor([0.5, 0.25, 0.0, 1.0]), rtol=1e-15)


def test_promote_keeps_layout_aliasing_and_leaves():
    base = torch.randn(24)
    whole, part = base.view(4, 6), base[3:21].view(3, 6).t()
    weight = torch.nn.Parameter(torch.randn(3, 3).bfloat16())
    integers, double, expanded = torch.arange(3), torch.randn(2).double(), torch.randn(3, 1).expand(3, 5)
    tensors = [whole, part, weight, integers, double, expanded, whole]
    result = to_float64(tensors)
    for old, new in zip(tensors, result, strict=True):
        assert (new.shape, new.stride(), new.storage_offset()) == (old.shape, old.stride(), old.storage_offset())
        assert (new.requires_grad, new.is_leaf) == (old.requires_grad, True)
        assert torch.equal(new, old.to(new.dtype))
    assert [value.dtype for value in result[:4]] == [torch.float64] * 3 + [torch.int64]
    assert result[3] is integers
    assert result[4] is double
    assert result[6] is result[0]
    result[0].zero_()
    assert not result[1].any()
    assert base.any()
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    assert torch.equal(to_float64([conjugate])[0], conjugate.to(torch.complex128))


def test_promote_tensors_keeps_the_tree():
    x = torch.ones(2)
    result = promote_tensors({"a": [x, 3, ("s", x)], "b": None})
    assert result["a"][0] is result["a"][2][1]
    assert result["a"][0].dtype == torch.float64
    assert result["a"][1] == 3
    assert result["b"] is None


def test_what_has_no_meaning_is_refused():
    assert issubclass(PromotionError, CheckedBackendError)
    with pytest.raises(PromotionError, match=r"aten\.view\.dtype.*bits"):
        high(lambda x: x.view(torch.int32), torch.ones(4))
    with pytest.raises(PromotionError, match=r"aten\.view\.dtype.*bits"):
        high(lambda x: torch.arange(4).view(torch.float64), torch.ones(4))
    eighth = torch.ones(16, 16).to(torch.float8_e4m3fn)
    with pytest.raises(PromotionError, match="_scaled_mm"):
        high(lambda x: torch._scaled_mm(x, eighth.t(), torch.tensor(1.0), torch.tensor(1.0)), eighth)
    memory = torch.ones(4)
    with pytest.raises(PromotionError, match="bit casts"):
        to_float64([memory, memory.view(torch.int32)])
    with pytest.raises(PromotionError, match="float64"):
        high(lambda x: memory.view(torch.bfloat16) + memory, memory)


def test_operator_without_float64_kernel_is_named():
    def single(x):
        if x.dtype != torch.float32:
            raise RuntimeError("\"single\" not implemented for 'Double'")
        return x.clone()

    with torch.library._scoped_library("checked_backend_test_promote", "DEF") as library:
        library.define("single(Tensor x) -> Tensor")
        library.impl("single", single, "CPU")
        with pytest.raises(PromotionError, match=r"checked_backend_test_promote\.single\.default"):
            high(torch.ops.checked_backend_test_promote.single, torch.ones(2))


def test_operator_that_returns_low_precision_is_converted_and_named():
    with torch.library._scoped_library("checked_backend_test_promote", "DEF") as library, Float64Mode() as mode:
        library.define("fixed(Tensor x) -> Tensor")
        library.impl("fixed", lambda x: x.float() + 1, "CPU")
        assert torch.ops.checked_backend_test_promote.fixed(torch.ones(2)).dtype == torch.float64
    assert mode.lossy == {"checked_backend_test_promote.fixed.default"}


def test_autocast_around_the_run():
    weight, x = torch.randn(8, 8).requires_grad_(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        clean = F.linear(x, weight)
        result = high(F.linear, x, weight)
        assert torch.equal(F.linear(x, weight), clean)
    assert relative(result, x.double() @ weight.double().t()) < 1e-15


def test_control_flow_and_backward():
    x = torch.randn(8, requires_grad=True)

    def program(t):
        out = torch.utils.checkpoint.checkpoint(lambda v: v.sin().float().exp(), t, use_reentrant=False)
        out = torch.ops.higher_order.cond(out.sum() > 0, lambda v: (v * 1.1,), lambda v: (v.cos(),), (out,))[0]
        return [out.detach(), *torch.autograd.grad(out.sum(), [t])]

    y = x.detach().double()
    result = high(program, x)
    assert relative(result[0], y.sin().exp() * 1.1) < 1e-15
    assert relative(result[1], y.sin().exp() * y.cos() * 1.1) < 1e-15


def test_perturbed_at_the_roundoff_of_float64():
    case = CASES["encoder-bfloat16"]()
    tape = RandomTape()
    with RecordRandom(tape):
        case.run()

    def run(seed):
        with ReplayRandom(tape), MonteCarloMode(seed), Float64Mode():
            return case.run(promote_tensors(case.state()))

    with ReplayRandom(tape), Float64Mode():
        clean = case.run(promote_tensors(case.state()))
    first, again, other = run(0), run(0), run(1)
    assert same(first, again)
    assert not same(first, other)
    assert 0 < max(map(relative, first, clean)) < 1e-11


def test_wrapper_subclass_is_promoted_inside():
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    [wide] = to_float64([TwoTensor(first, second).requires_grad_()])
    assert type(wide) is TwoTensor
    assert wide.dtype is wide.a.dtype is wide.b.dtype is torch.float64
    assert wide.requires_grad
    assert torch.equal(wide.a, first.double())
    result = high(lambda x: (x.to(torch.bfloat16) @ x.float().t()).sin(), TwoTensor(first, second))
    assert torch.equal(result.b, (second.double() @ second.double().t()).sin())


class Stubborn(TwoTensor):
    """Says float32 whatever it wraps."""

    @staticmethod
    def __new__(cls, a, b, *_others):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=torch.float32)

    @staticmethod
    def __tensor_unflatten__(inner_tensors, _meta, _outer_size, _outer_stride):
        return Stubborn(inner_tensors["a"], inner_tensors["b"])


def test_subclass_that_has_no_float64_is_refused():
    with pytest.raises(PromotionError, match=r"Stubborn \(a tensor subclass\) stays torch.float32"):
        to_float64([Stubborn(torch.randn(2), torch.randn(2))])
