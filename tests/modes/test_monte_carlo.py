from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from checked_backend.modes.monte_carlo import MonteCarloMode, PoisonMode
from checked_backend.modes.noise_source import NoiseSource
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from checked_backend.numerics.bits import unit_roundoff
from tests.support.mode_programs import CASES, relative, same

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
UNIFORM_RMS = 3**-0.5


def values(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).exp().to(dtype)


def perturbed(program, seed=0, magnitude=1.0):
    with MonteCarloMode(seed, magnitude) as mode:
        return program(), mode


@pytest.fixture
def perturbations(monkeypatch):
    """The shapes of the tensors that were perturbed, in order."""
    shapes = []
    original = NoiseSource.perturb_

    def noting(source, tensor, amplitude):
        shapes.append(tuple(tensor.shape))
        return original(source, tensor, amplitude)

    monkeypatch.setattr(NoiseSource, "perturb_", noting)
    return shapes


def spread(program, dtype, magnitude=1.0):
    """Relative spread of a program's result, root mean square, in unit roundoffs."""
    reference = program().double()
    result = perturbed(program, magnitude=magnitude)[0].double()
    kept = reference != 0
    relative_change = (result[kept] - reference[kept]) / reference[kept]
    return float(relative_change.square().mean().sqrt()) / unit_roundoff(dtype), relative_change


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [0.5, 1.0, 1.7, 2.0, 8.0])
def test_spread_of_one_operator(dtype, magnitude):
    x, y = values(200_003, dtype=dtype), values(200_003, dtype=dtype, seed=1)
    size, change = spread(lambda: x * y, dtype, magnitude)
    assert size == pytest.approx(UNIFORM_RMS * magnitude, rel=0.12)
    # Unbiased: the mean is of the order of the spread over the root of the number of elements.
    assert abs(float(change.mean())) < 5 * size * unit_roundoff(dtype) / 200_003**0.5


def test_powers_of_two_are_perturbed_too():
    x = torch.full((100_000,), 1 / 3)
    assert torch.equal(x * 3, torch.ones(100_000))  # rounded
    assert spread(lambda: x * 3, torch.float32)[0] == pytest.approx(UNIFORM_RMS, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_ieee_demands_to_be_exact_is_not_perturbed(dtype):
    x = torch.arange(200 if dtype is torch.float32 else 16, dtype=dtype)

    def exact():
        return x * 0.5, x + 3, x - x.flip(0), x / 4, 7 - x, torch.add(x, x, alpha=-1)

    again, _ = perturbed(exact)
    assert all(map(torch.equal, again, exact()))
    y = x * 1.1
    assert (perturbed(lambda: y - y.round())[0] != y - y.round()).any()  # exact, but not what came before
    for quotient in (lambda: x / 3, lambda: x[1:] / x[1:]):  # of which some are exact, too
        assert (perturbed(quotient)[0] != quotient()).any()


def test_spread_of_a_chain_grows_with_its_root():
    x = values(100_000)

    def chain():
        y = x
        for _ in range(25):
            y = y * 1.1 / 1.1
        return y

    assert spread(chain, torch.float32)[0] == pytest.approx(50**0.5 * UNIFORM_RMS, rel=0.2)


def test_special_values_stay():
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, info.min], dtype=dtype)
        special = special.repeat(1000)
        assert torch.equal(perturbed(lambda x=special: x * 1)[0].nan_to_num(nan=7.0), special.nan_to_num(nan=7.0))


EXACT = {
    "relu": torch.relu,
    "neg": torch.neg,
    "abs": torch.abs,
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1)[0],
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(2, 1)[0],
    "clamp": lambda x: x.clamp(0.1, 1.0),
    "clone": torch.clone,
    "contiguous": lambda x: x.t().contiguous(),
    "cat": lambda x: torch.cat([x, x.flip(0)]),
    "stack": lambda x: torch.stack([x, x.roll(1)]),
    "gather": lambda x: x.gather(0, torch.zeros(3, 5, dtype=torch.int64)),
    "index": lambda x: x[torch.tensor([2, 0])],
    "embedding": lambda x: F.embedding(torch.tensor([1, 2]), x),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "pad": lambda x: F.pad(x, (1, 1)),
    "tril": torch.tril,
    "floor": lambda x: x.floor(),
    "floor_divide": lambda x: x // 0.3,
    "div_mode": lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    "sign": torch.sign,
    "widening": lambda x: x.bfloat16().double(),
    "max_pool": lambda x: F.max_pool1d(x[None], 2),
    "nearest": lambda x: F.interpolate(x[None], size=9),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "index_put": lambda x: x.clone().index_put_((torch.tensor([0]),), torch.ones(5)),
    "scatter": lambda x: x.scatter(0, torch.zeros(3, 5, dtype=torch.int64), 1.0),
    "constants": lambda x: torch.cat([torch.arange(5.0)[None], torch.full((1, 5), 0.1), torch.ones(1, 5)]),
    "integers": lambda x: (x * 8).long() * 0 + torch.arange(5).cumsum(0),
    "comparison": lambda x: (x > 1).any(),
    "random": lambda x: torch.rand(3, 5, generator=torch.Generator().manual_seed(0)),
    "view": lambda x: x.t()[1:],
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_operators_are_untouched(name):
    x = values(5, 5)[:3].bfloat16() if name == "widening" else values(3, 5)
    program = EXACT[name]
    for seed in range(20):
        assert torch.equal(perturbed(lambda: program(x), seed)[0], program(x))


ROUNDING = {
    "narrowing": lambda x: x.bfloat16(),
    "copy_": lambda x: torch.zeros(64, 64, dtype=torch.float16).copy_(x),
    "sum": lambda x: x.sum(1),
    "mm": lambda x: x @ x,
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(0),
    "layer_norm": lambda x: F.layer_norm(x, (64,)),
    "var": lambda x: x.var(1),
    "conv": lambda x: F.conv1d(x[None], x[:, :, None]),
    "solve": lambda x: torch.linalg.solve(x + 99 * torch.eye(64), x),
    "add_": lambda x: x.clone().add_(0.1),
    "out": lambda x: torch.mul(x, x, out=torch.zeros(64, 64)),
    "foreach": lambda x: torch._foreach_mul([x, x], 1.1)[1],
    "complex": lambda x: torch.complex(x, x).mul(x).abs(),
    "transposed": lambda x: x.t() * 1.1,
    "expanded": lambda x: x[:1].expand(64, 64) * 1.1,
    "strided": lambda x: x[:, ::2].mul(1.1),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 4, 16, 64)] * 3),
    "fft": lambda x: torch.fft.rfft(x).real,
}


@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_operators_are_perturbed(name):
    x = values(64, 64)
    kept = x.clone()
    program = ROUNDING[name]
    expected = program(x)
    (first, mode), (again, _), (other, _) = [perturbed(lambda: program(x), seed) for seed in (1, 1, 2)]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.stride() == expected.stride()
    unit = unit_roundoff(expected.dtype)
    assert 0.1 * unit < relative(first, expected) < 50 * unit
    assert mode.unperturbed == set()
    assert torch.equal(x, kept)


def test_cancelling_sum_is_noisy_at_the_scale_of_its_terms():
    x = values(4096)
    x = torch.cat([x, -x]).view(2, 4096).t().reshape(1, -1)
    results = torch.stack([perturbed(lambda: x.sum(1), seed)[0] for seed in range(10)])
    assert 0.3 < float(results.std()) / (float(x.norm()) * 2.0**-24) < 60


@pytest.mark.parametrize("shape", [(2, 4, 48, 48), (2, 4, 3000)])
def test_sums_inside_a_normalisation_are_as_noisy_as_those_of_a_loop(shape):
    """The gradient of what goes into it adds up to zero. Equal terms round the same way each time."""
    x, channels = values(*shape), shape[1]
    dims, count = [0, *range(2, len(shape))], x.numel() // channels
    arriving = values(channels, seed=1) / count
    grad = arriving.view(1, -1, *[1] * (x.dim() - 2)).expand(shape).contiguous()
    mean, deviation = x.mean(dims), (x.var(dims, correction=0) + 1e-5).rsqrt()

    def left_over():
        backward = torch.ops.aten.native_batch_norm_backward
        sent, *_ = backward(grad, x, None, None, None, mean, deviation, True, 1e-5, [True, False, False])
        return sent.double().sum(dims)

    looped = torch.stack([torch.tensor(np.full(count, one).cumsum(dtype=np.float32)[-1]) for one in arriving.numpy()])
    of_loop = (deviation * (count * arriving.double() - looped)).abs()
    noise = noise_of(left_over)
    assert float(left_over().abs().max()) < 0.1 * float(of_loop.max())  # eager's kernel adds up in another way
    assert float(of_loop.max()) < 8 * float(noise.square().mean().sqrt())
    assert float(noise.max()) < 16 * float(of_loop.max())


def noise_of(program):
    runs = []
    for seed in range(8):
        with MonteCarloMode(seed, 2.0, correlated=True):
            runs.append(program())
    return torch.stack(runs).abs().amax(0)


@pytest.mark.parametrize("made", ["sum", "mean", "bias of a convolution"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_sum_that_cancels_is_as_noisy_as_that_of_a_loop(made, kept):
    """Terms of two signs, each equal to a thousand others: what is left shows nothing of the partial sums."""
    sizes = values(4, seed=1).abs()
    terms = torch.stack([one * sizes[:, None].expand(4, 1152) for one in (1, 1, 1, -3)]).unsqueeze(-1)
    terms, count = (terms if kept else terms.transpose(0, 1)).contiguous(), 4 * 1152
    dims = [0, 2, 3] if kept else [-1, 1, -2]

    def left_over():
        if made == "bias of a convolution":
            images, weight = torch.zeros(4, 1, 1152, 1), torch.zeros(4, 1, 1, 1)
            how = [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, False, True]
            sent = terms if kept else terms.transpose(0, 1)
            return torch.ops.aten.convolution_backward(sent, images, weight, *how)[2]
        return getattr(terms, made)(dims, keepdim=kept).flatten()

    ordered = (terms if kept else terms.transpose(0, 1)).transpose(0, 1).flatten(1).numpy()
    of_loop = torch.from_numpy(ordered.cumsum(1, dtype=np.float32)[:, -1]).abs()
    of_loop = of_loop / count if made == "mean" else of_loop
    noise = noise_of(left_over)
    assert 0 < float(of_loop.max()) < 8 * float(noise.square().mean().sqrt())
    assert float(noise.max()) < 16 * float(of_loop.max())


def test_a_sum_of_terms_in_no_order_is_not_much_noisier_than_its_terms_are():
    x = values(4, 100_000) - values(4, 100_000, seed=1)
    noise = []
    for seed in range(8):
        with MonteCarloMode(seed, 2.0, correlated=True):
            noise.append((x.sum(1) - x.sum(1)).abs().max())
    size = float(x.square().sum(1).sqrt().max())  # the partial sums are of this size, and there are 100,000
    assert float(max(noise)) < 100_000 * unit_roundoff(torch.float32) * size


def test_bfloat16_accumulation_noise_stays_at_its_storage():
    x = values(256, 256, dtype=torch.bfloat16)
    assert spread(lambda: x @ x, torch.bfloat16)[0] == pytest.approx(UNIFORM_RMS, rel=0.15)


@pytest.mark.parametrize("name", CASES)
def test_training_programs(name):
    case = CASES[name]()
    tape = RandomTape()
    torch.manual_seed(0)
    with RecordRandom(tape):
        expected = case.run()
    before, cache = torch.get_rng_state(), torch.is_autocast_cache_enabled()

    def run(seed):
        with ReplayRandom(tape), MonteCarloMode(seed) as mode:
            result = case.run()
        assert mode.unperturbed == set()
        return result

    first, again, other = run(1), run(1), run(2)
    assert same(first, again)
    assert not same(first, other)
    worst = 1e-4 if name in ("mlp", "conv") else 0.5
    assert 0 < max(map(relative, first, expected)) < worst
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_autocast_cache_enabled() == cache
    assert same(case.run(), case.run()) or not tape.empty


def test_gradient_of_a_normalisation_over_a_million_elements_has_no_subnormal_factor():
    x = values(1, 1_000_000, dtype=torch.float16).log().requires_grad_()
    weights = values(1, 1_000_000, seed=1, dtype=torch.float16).log()

    def gradient():
        return torch.autograd.grad((F.layer_norm(x, x.shape[1:]) * weights).sum(), x)[0]

    size = float((perturbed(gradient)[0].double() - gradient().double()).square().mean().sqrt())
    assert size < 4 * unit_roundoff(torch.float16)  # the deviation over 1,000,000, in float16: 27 roundoffs


def test_batch_norm_statistics_are_perturbed_and_gradients_still_work():
    case = CASES["conv"]()
    expected = case.run()
    with MonteCarloMode(0):
        result = case.run()
    mean, variance = result[-3:-1]
    assert 0 < relative(mean, expected[-3]) < 1e-5
    assert 0 < relative(variance, expected[-2]) < 1e-5
    assert int(result[-1]) == 1
    statistics = torch.zeros(4), torch.ones(4)
    with MonteCarloMode(0):
        torch.native_batch_norm(values(8, 4, 5), None, None, *statistics, True, 0.1, 1e-5)
    assert all(bool((value != start).all()) for value, start in zip(statistics, (0, 1), strict=True))


def test_in_place_operators_leave_version_counters_to_the_program():
    x = values(10).requires_grad_()
    with MonteCarloMode(0):
        y = x * 2
        version = y._version
        y.add_(1)
        assert y._version == version + 1
        y.exp().sum().backward()
    assert relative(x.grad, 2 * (2 * x + 1).exp()) < 1e-6
    with MonteCarloMode(0):
        y = x.exp()
        y.add_(1)
        loss = y.sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_control_flow_checkpoint_and_inference(perturbations):
    x = values(8).requires_grad_()

    def program():
        out = torch.utils.checkpoint.checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False)
        out = torch.ops.higher_order.cond(out.sum() > 0, lambda t: (t * 1.1,), lambda t: (t.cos(),), (out,))[0]
        return [out.detach(), *torch.autograd.grad(out.sum(), [x])]

    expected = program()
    result, _ = perturbed(program, magnitude=4.0)
    assert 0 < max(map(relative, result, expected)) < 1e-5
    assert perturbations.count((8,)) >= 6  # forward, inside of the branch, and backward
    with torch.inference_mode():
        a = values(32, 32)
        assert 0 < relative(perturbed(lambda: F.linear(a, a))[0], F.linear(a, a)) < 1e-5


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's own formulas
def test_tensors_without_values_are_left_alone():
    """Torch finds out the layout of a tangent by running its formula on the meta device."""

    def tangent(x):
        with fwAD.dual_level():
            return fwAD.unpack_dual(fwAD.make_dual(x, x).tanh() * 2).tangent

    x = torch.rand(100)
    with MonteCarloMode(1):
        noisy = tangent(x)
    assert not torch.equal(noisy, tangent(x))
    assert relative(noisy, tangent(x)) < 1e-5


def test_what_cannot_be_perturbed_is_named():
    dense = torch.eye(3)
    _, mode = perturbed(lambda: torch.mul(dense.to_sparse(), 2))
    assert any("mul" in name for name in mode.unperturbed)
    result, mode = perturbed(lambda: values(8).to(torch.float8_e4m3fn))
    assert mode.unperturbed == {"aten._to_copy.default"}
    assert torch.equal(result.float(), values(8).to(torch.float8_e4m3fn).float())


def test_autocast_cache_does_not_leak():
    weight, x = values(16, 16).requires_grad_(), values(16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        clean = F.linear(x, weight).clone()
    with torch.autocast("cpu", torch.bfloat16):
        with MonteCarloMode(0, magnitude=64.0):
            F.linear(x, weight)
        assert torch.equal(F.linear(x, weight), clean)


def test_error_inside_restores_state():
    cache = torch.is_autocast_cache_enabled()
    with pytest.raises(RuntimeError), MonteCarloMode(0):
        torch.ones(2) @ torch.ones(3)
    assert torch.is_autocast_cache_enabled() == cache
    with pytest.raises(ValueError, match="magnitude"):
        MonteCarloMode(0, magnitude=-1.0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.int8, torch.bool, torch.complex64])
def test_uninitialised_memory_is_poisoned(dtype):
    def program(seed, mode):
        with mode(seed):
            source = torch.zeros(64, dtype=dtype)
            made = torch.empty(64, dtype=dtype), torch.empty_like(source), source.new_empty(64)
            return [*made, torch.empty_strided((8, 8), (1, 8), dtype=dtype).flatten()]

    for mode in (PoisonMode, MonteCarloMode):
        first, again, other = program(1, mode), program(1, mode), program(2, mode)
        assert same(first, again)
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        if dtype.is_floating_point:
            assert all(bool(value.isfinite().all()) for value in first)


def test_resize_keeps_what_was_there():
    with PoisonMode(0):
        x = torch.ones(4)
        x.resize_(8)
    assert torch.equal(x[:4], torch.ones(4))
    assert not (x[4:] == 1).any()


def test_poison_changes_nothing_else():
    case = CASES["conv"]()
    expected, before = case.run(), torch.get_rng_state()
    with PoisonMode(0):
        assert same(case.run(), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_wrapper_subclass_is_perturbed_inside(perturbations):
    wrapped = TwoTensor(values(1000), values(1000, seed=1))

    result, _ = perturbed(lambda: wrapped * 3)
    assert type(result) is TwoTensor
    assert perturbations == [(1000,), (1000,)]
    for part, source in ((result.a, wrapped.a), (result.b, wrapped.b)):
        change = (part / (source * 3) - 1).abs().max()
        assert 0 < change < 2.0**-22
