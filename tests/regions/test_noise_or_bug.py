"""Noise or bug in whole regions: what is compiled besides the candidate, and what each kind of tensor is judged by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import faults
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from region_tools import agreed, checked, found, gathered
from torch import fx, nn
from torch.testing._internal.two_tensor import TwoTensor

import checked_backend as cb
from checked_backend._torch.aot import aot_autograd
from checked_backend._torch.operators import core_aten_decompositions, get_decompositions
from checked_backend.options import CheckOptions, parse_options
from checked_backend.regions import compile as candidate
from checked_backend.regions.control_runs import RegionControlRuns
from checked_backend.regions.float64_twin import computes_in_low_precision
from checked_backend.regions.recompile import compile_again


class Counting:
    """A right compiler that keeps the dtype of each graph it compiles."""

    def __init__(self) -> None:
        self.compiled: list[torch.dtype] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compiled.append(next(value.dtype for value in example_inputs if isinstance(value, torch.Tensor)))
        return gm.forward


def mlp(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def train(model: nn.Module, dtype: torch.dtype, *, steps: int = 3, device_cast: bool = False) -> None:
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=device_cast):
            out = model(torch.randn(6, 8, dtype=dtype))
        out.square().sum().backward()


# what is compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_region_in_half_precision_is_compiled_twice_more_in_all(dtype: torch.dtype) -> None:
    """Forward and backward pass share the twin, and the probe for single operators; later steps need none."""
    compiler = Counting()
    assert agreed(gathered(lambda: train(checked(mlp(dtype), compiler), dtype)))
    assert compiler.compiled == [dtype, torch.float64, dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_region_in_full_precision_that_is_equal_bit_for_bit_is_not(dtype: torch.dtype) -> None:
    compiler = Counting()
    assert agreed(gathered(lambda: train(checked(mlp(dtype), compiler), dtype)))
    assert compiler.compiled == [dtype]


def test_region_under_autocast_counts_as_half_precision() -> None:
    compiler = Counting()

    def run() -> None:
        train(checked(mlp(torch.float32), compiler), torch.float32, device_cast=True)

    assert agreed(gathered(run))
    assert compiler.compiled == [torch.float32, torch.float64, torch.float32]


def test_inputs_of_another_kind_need_another_twin() -> None:
    compiler = Counting()
    compiled = checked(lambda x: x.sin() * 2, compiler, dynamic=True)

    def run() -> None:
        for rows in (3, 4, 5, 4, 4, 4, 4, 4):  # it is asked again at the second, fourth and eighth call
            compiled(torch.randn(rows, 4, dtype=torch.bfloat16))

    assert agreed(gathered(run))
    assert compiler.compiled == [torch.bfloat16, torch.float64, torch.bfloat16, torch.float64]


@pytest.mark.parametrize(
    ("program", "low"),
    [
        (lambda x: x.sin(), False),
        (lambda x: x.bfloat16().sin().float(), True),
        (lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.half().float() * 2, x, use_reentrant=False), True),
        (lambda x: x.double().sum(), False),
    ],
)
def test_half_precision_is_found_wherever_it_is(program: Callable[..., Any], low: bool) -> None:
    seen: list[bool] = []

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(computes_in_low_precision(gm))
        return gm.forward

    torch.compile(program, backend=compiler, fullgraph=True)(torch.randn(4, requires_grad=True))
    assert seen == [low]


# bugs that half precision hides


@pytest.mark.parametrize("face", ["check", "numcheck"])
@pytest.mark.parametrize("how", ["python", "aot"])
def test_error_below_half_precision_is_found(how: faults.How, face: str) -> None:
    def slightly_off(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (1 + 1e-5) if tensor.dtype is torch.float64 else tensor * 1.0

    compiler = faults.spoiled_output(slightly_off, 0, how)
    model, x = mlp(torch.bfloat16), torch.randn(6, 8, dtype=torch.bfloat16)
    if face == "check":
        report = cb.check(model, (x,), compiler=compiler, gradients=False)
    else:
        report = gathered(lambda: checked(model, compiler)(x))
    assert found(report) == {("logic", "output[0]")}
    [finding] = report.findings
    assert finding.metrics is not None
    assert finding.metrics.bitwise_equal
    assert finding.evidence["float64 twin differs from float64 reference, relative"] == pytest.approx(1e-5, rel=10)
    assert "hides that bit for bit" in str(report).replace("\n  ", " ")


@pytest.mark.parametrize("how", ["python", "aot"])
def test_gradient_below_half_precision_is_found(how: faults.How) -> None:
    def slightly_off(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (1 + 1e-5) if tensor.dtype is torch.float64 else tensor * 1.0

    compiler = faults.spoiled_gradient("0.weight", slightly_off, how)
    assert found(gathered(lambda: train(checked(mlp(torch.bfloat16), compiler), torch.bfloat16))) == {
        ("logic", "grad[0.weight]")
    }


def test_fault_of_the_twin_alone_is_not_the_candidates() -> None:
    """A compiler that is wrong in float64 only: said in a note, not held against the program in bfloat16."""

    def wrong_in_float64(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.5 if tensor.dtype is torch.float64 else tensor

    compiler = faults.spoiled_output(wrong_in_float64)
    report = gathered(lambda: checked(mlp(torch.bfloat16), compiler)(torch.randn(6, 8, dtype=torch.bfloat16)))
    assert report.verdict is cb.Verdict.PASS
    assert [("the float64 twin was not used" in note) for note in report.coverage.notes] == [True]


# rounding of fused kernels


def inductor_that_rounds_other(error: float) -> Callable[..., Any]:
    """In Inductor's place: off by ``error`` in half precision, unless it is told to round wherever eager does.

    It is right where the tensors inside are handed out: nothing is fused there.
    """

    def inductor(
        gm: fx.GraphModule, _example_inputs: Sequence[Any], *, config_patches: dict[str, Any]
    ) -> Callable[..., Any]:
        rounds_as_eager = config_patches.get("emulate_precision_casts", False)

        def run(*args: Any) -> Any:
            results = gm.forward(*args)
            if rounds_as_eager or results[0].dtype is torch.float64 or len(results) > 1:
                return results
            return tuple(result * (1 + error) for result in results)

        return run

    return inductor


@pytest.mark.parametrize(("dtype", "kinds"), [(torch.bfloat16, set()), (torch.float32, {"logic"})])
def test_fusion_rounding_is_a_note(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kinds: set[str]) -> None:
    real = candidate.lookup_backend
    fake = inductor_that_rounds_other(1 / 8)
    monkeypatch.setattr(candidate, "lookup_backend", lambda name: fake if name == "inductor" else real(name))
    report = gathered(lambda: checked(mlp(dtype), "inductor")(torch.randn(6, 8, dtype=dtype)))
    assert {str(finding.kind) for finding in report.findings} == kinds
    assert any("fusion-rounding: output[0] differs" in note for note in report.coverage.notes) is not bool(kinds)
    assert ("fusion-rounding" in str(report)) is not bool(kinds)


@pytest.mark.slow
@pytest.mark.inductor
def test_compiler_without_fused_rounding_rounds_as_eager() -> None:
    def chain(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(6):
            x = x * 1.3 + x / 7
        return (x,)

    x = torch.randn(4096, dtype=torch.bfloat16)
    graph = fx.symbolic_trace(chain)
    options = parse_options(CheckOptions, "numcheck", {})
    plain, unfused = candidate.resolve_compiler(options), candidate.unfused_compiler(options)
    assert unfused is not None
    assert not torch.equal(compile_again(plain, candidate.copy_graph(graph), [x], [x])(x)[0], chain(x)[0])
    assert torch.equal(compile_again(unfused, candidate.copy_graph(graph), [x], [x])(x)[0], chain(x)[0])


def test_only_inductor_can_be_told_to_round_as_eager() -> None:
    assert candidate.unfused_compiler(parse_options(CheckOptions, "numcheck", {"compiler": "eager"})) is None
    assert candidate.unfused_compiler(parse_options(CheckOptions, "numcheck", {"compiler": faults.clean()})) is None


# sparse gradients


class Sparse(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=True, dtype=dtype)
        self.linear = nn.Linear(3, 2, dtype=dtype)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.table(index)))


def rebuilt(gradient: torch.Tensor, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> torch.Tensor:
    gradient = gradient.coalesce()
    parts = change(gradient.indices(), gradient.values().clone())
    return torch.sparse_coo_tensor(*parts, gradient.shape, check_invariants=True)


def one_value(indices: torch.Tensor, values: torch.Tensor) -> Any:
    values[-1, -1] *= 1.01
    return indices, values


SPARSE: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], str]] = {
    "one value": (one_value, "logic"),
    "twice": (lambda indices, values: (indices, values * 2), "logic"),
    "other places": (lambda indices, values: ((indices + 1) % 20, values), "structure.indices"),
    "a place left out": (lambda indices, values: (indices[:, 1:], values[1:]), "structure.indices"),
    "a zero stored": (
        lambda indices, values: (
            torch.cat([indices, torch.tensor([[9]])], 1),
            torch.cat([values, torch.zeros(1, 3, dtype=values.dtype)]),
        ),
        "structure.indices",
    ),
}


def sparse_report(compiler: Any, dtype: torch.dtype) -> cb.Report:
    torch.manual_seed(0)
    model = checked(Sparse(dtype), compiler)
    return gathered(lambda: model(torch.tensor([1, 2, 2, 5])).sum().backward())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "compiler",
    [
        "eager",
        "aot_eager",
        faults.clean("aot"),
        faults.spoiled_gradient("table.weight", lambda gradient: gradient.coalesce(), "python"),
        faults.spoiled_gradient(
            "table.weight", lambda gradient: rebuilt(gradient, lambda i, v: (i.flip(1), v.flip(0)))
        ),
    ],
    ids=["eager", "aot_eager", "clean", "coalesced", "other order"],
)
# torch 2.11 warns although the test says what it wants
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_sparse_gradient_that_is_right(compiler: Any, dtype: torch.dtype) -> None:
    report = sparse_report(compiler, dtype)
    assert agreed(report)
    assert report.coverage.checked["gradients"] == 3


@pytest.mark.parametrize("how", ["python", "aot"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradient_that_is_wrong(name: str, how: faults.How) -> None:
    change, detail = SPARSE[name]
    compiler = faults.spoiled_gradient("table.weight", lambda gradient: rebuilt(gradient, change), how)
    report = sparse_report(compiler, torch.float32)
    assert found(report) == {(detail, "grad[table.weight]")}
    if detail == "structure.indices":
        assert report.findings[0].expected == "3 places: 1, 2, 5"


# what noise hides


def mixed_units(x: torch.Tensor, boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Coordinates in pixels and confidences of a thousandth, in one tensor."""
    return torch.cat([(x @ boxes) * 1000, torch.sigmoid(x @ scores) * 1e-3], -1)


@pytest.mark.parametrize("rest", [1.0, 1 + 1.2e-7], ids=["the rest is equal", "the rest is off by a rounding"])
def test_small_elements_are_judged_beside_large_ones(rest: float) -> None:
    def without_scores(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[..., :4] * rest, tensor[..., 4:] * 0], -1)

    x, boxes, scores = torch.randn(16, 32), torch.randn(32, 4), torch.randn(32, 20)
    report = gathered(lambda: checked(mixed_units, faults.spoiled_output(without_scores))(x, boxes, scores))
    assert found(report) == {("logic", "output[0]")}
    assert agreed(gathered(lambda: checked(mixed_units, faults.spoiled_output(lambda t: t * rest))(x, boxes, scores)))


def naive_variance(x: torch.Tensor) -> torch.Tensor:
    return (x * x).mean(-1) - x.mean(-1) ** 2


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4])
def test_cancellation_hides_no_wrong_factor(offset: float) -> None:
    x = torch.randn(64, 256) + offset
    wrong = faults.spoiled_output(lambda variance: variance * 2)
    assert found(gathered(lambda: checked(naive_variance, wrong)(x))) == {("logic", "output[0]")}
    assert agreed(gathered(lambda: checked(naive_variance, lambda gm, _: lambda x: gm.forward(x.flip(-1)))(x)))


def test_noise_of_ill_conditioned_data_excuses_nothing_in_later_data() -> None:
    def run(compiler: Any) -> cb.Report:
        compiled = checked(naive_variance, compiler)
        data = [torch.randn(64, 256) + 1e4, *(torch.randn(64, 256) for _ in range(4))]
        return gathered(lambda: [compiled(x) for x in data])

    half = faults.spoiled_output(lambda variance: variance * 0.5)
    assert found(run(faults.on_data(lambda args: args[0].mean() < 1, half))) == {("logic", "output[0]")}
    assert agreed(run(faults.spoiled_output(rounding_otherwise)))


def large(args: Sequence[Any]) -> bool:
    return any(bool((arg.detach().abs() > 100).any()) for arg in args if isinstance(arg, torch.Tensor))


@pytest.mark.parametrize(("order", "seen"), [((0, 1), True), ((0, 0, 1), False), ((0, 0, 0, 1), True)])
def test_half_precision_is_asked_again_ever_more_rarely(order: tuple[int, ...], seen: bool) -> None:
    """What differs by less than its noise is seen in the first call, the second, the fourth, the eighth, ..."""
    data = (torch.randn(6, 8, dtype=torch.bfloat16), torch.randn(6, 8, dtype=torch.bfloat16) * 1000)
    off = faults.spoiled_output(lambda tensor: (tensor.double() * 1.003).to(tensor.dtype))

    def run() -> None:
        compiled = checked(mlp(torch.bfloat16), faults.on_data(large, off))
        with torch.no_grad():
            for place in order:
                compiled(data[place])

    report = gathered(run)
    assert found(report) == ({("logic", "output[0]")} if seen else set())
    if not seen:  # and no more is claimed
        assert report.coverage.detection_limit["output[0]"] > 0.003


# tensor subclasses have noise and a float64 like others


def rounding_otherwise(tensor: Any) -> Any:
    return tensor * (1 + 2.0**-22) if tensor.dtype is torch.float32 else tensor


def test_wrapper_subclass_has_noise() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.sin(x @ x) * 2
        return x

    x = TwoTensor(torch.randn(8, 8), torch.randn(8, 8))
    assert agreed(gathered(lambda: checked(program, faults.spoiled_output(rounding_otherwise))(x)))


def test_wrong_value_in_a_wrapper_subclass_is_logic() -> None:
    x = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    compiler = faults.spoiled_output(lambda tensor: tensor * 1.01)
    report = gathered(lambda: checked(lambda x: torch.sin(x @ x), compiler)(x))
    assert found(report) == {("logic", "output[0]")}
    assert not report.coverage.skipped
    assert all(finding.noise is not None and finding.noise.rms > 0 for finding in report.findings)


# exact values have no noise


EXACT_TIES = {
    "greatest of equals": (lambda x: (x * 0.5).argmax(-1), lambda places: torch.zeros_like(places)),
    "comparison of equals": (lambda x: x * 0.5 >= 1.0, lambda _: None),
    "floor of halves": (lambda x: (x / 2).floor(), lambda floors: floors - (floors % 2 == 0) * 1.0),
}


@pytest.mark.parametrize("name", EXACT_TIES)
def test_exact_values_have_no_noise_that_hides_a_bug(name: str) -> None:
    program, wrong = EXACT_TIES[name]
    x = torch.randint(0, 9, (200, 20)).float()

    def spoil(result: torch.Tensor) -> torch.Tensor:
        spoiled = wrong(result)
        return x * 0.5 > 1.0 if spoiled is None else spoiled

    assert found(gathered(lambda: checked(program, faults.spoiled_output(spoil))(x)))
    assert agreed(gathered(lambda: checked(program, faults.clean())(x)))


def test_where_eager_has_flips_others_may_not_be_wrong() -> None:
    """Rounding changes the order of a few neighbours; that excuses no other places."""
    x = torch.rand(4000)
    off = faults.spoiled_output(lambda places: places + 1)
    assert found(gathered(lambda: checked(lambda x: (x + 1000).sort()[1], off)(x)))

    def other(_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda x: ((x + 1000).sort(stable=True)[1],)

    assert agreed(gathered(lambda: checked(lambda x: (x + 1000).sort()[1], other)(x)))


@pytest.mark.parametrize("value", [5.0, 1e6])
def test_where_noise_makes_nan_not_everything_is_right(value: float) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * a - b * b).sqrt()

    a = torch.rand(200) + 2.1
    b = a - 1
    b[7] = a[7]
    spoil = faults.spoiled_output(lambda root: torch.where(root == 0, value, root))
    assert found(gathered(lambda: checked(program, spoil)(a, b)))
    assert agreed(gathered(lambda: checked(program, faults.spoiled_output(lambda r: r.nan_to_num(0.0)))(a, b)))


def test_masks_lend_no_noise_to_other_elements() -> None:
    def program(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return q @ q.t() + mask

    q, mask = torch.randn(32, 16), torch.zeros(32, 32)
    mask[:, 20:] = -1e9
    off = faults.spoiled_output(lambda scores: torch.where(scores > -1e6, scores * 1.0005, scores))
    assert found(gathered(lambda: checked(program, off)(q, mask))) == {("logic", "output[0]")}
    assert agreed(gathered(lambda: checked(program, faults.spoiled_output(rounding_otherwise))(q, mask)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_infinities_and_complex_numbers_are_settled_by_known_noise(dtype: torch.dtype) -> None:
    """A mask of infinities has the noise of its finite elements; later calls need no control runs."""

    def program(x: torch.Tensor) -> torch.Tensor:
        scores = torch.sin(x @ x) * 1.1
        return scores if dtype.is_complex else scores.masked_fill(x > 1, float("-inf"))

    model = checked(program, faults.spoiled_output(lambda r: r * (1 + 2.0**-22)))
    asked: list[int] = []
    monte_carlo = RegionControlRuns.monte_carlo

    def counted(*given: Any, **named: Any) -> Any:
        asked.append(1)
        return monte_carlo(*given, **named)

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RegionControlRuns, "monte_carlo", counted)
            for number in range(1, 8):
                asked.clear()
                model(torch.randn(8, 8, dtype=dtype))
                assert bool(asked) == (number in (1, 2, 4))

    assert agreed(gathered(run))


def test_what_overflows_in_half_precision_has_no_noise_there() -> None:
    x = torch.linspace(0, 1.5, 64, dtype=torch.float16)
    assert agreed(gathered(lambda: checked(lambda x: torch.exp(x * 10), faults.clean())(x)))
    off = faults.spoiled_output(lambda e: (e.double() * 1.01).to(e.dtype))
    assert found(gathered(lambda: checked(lambda x: torch.exp(x * 10), off)(x)))


def test_tails_do_not_acquit_what_the_twin_accuses() -> None:
    """Of the tail of gelu rounding leaves nothing, in the twin as little as in the candidate."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ w)

    x, w = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    off = faults.spoiled_output(lambda result: (result.double() * 1.01).to(result.dtype))
    assert found(gathered(lambda: checked(program, off)(x, w))) == {("logic", "output[0]")}
    assert agreed(gathered(lambda: checked(program, faults.clean())(x, w)))


def buckets(x: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A bias for each distance, in logarithmic buckets: some distances are edges, in exact arithmetic."""
    distance = torch.arange(1, 65)
    places = (torch.log(distance.to(x.dtype) / 8) / math.log(16) * 8).long() + 10
    return torch.softmax(x @ w + table[places], -1)


def bucket_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*shape).to(dtype) for shape in ((16, 32), (24,), (32, 64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice_that_flips_hides_nothing_else(dtype: torch.dtype) -> None:
    inputs = bucket_inputs(dtype)
    off = faults.wrong_operator("aten.mm.default", lambda scores: scores * 1.03, how="aot")
    assert found(gathered(lambda: checked(buckets, off)(*inputs))) == {("logic", "output[0]")}
    report = gathered(lambda: checked(buckets, faults.spoiled_output(rounding_otherwise))(*inputs))
    assert agreed(report)
    if dtype is torch.float32:
        assert max(report.coverage.detection_limit.values()) < 1e-4


def test_gradients_behind_a_choice_that_flips_are_judged() -> None:
    x, table, w = (tensor.requires_grad_() for tensor in bucket_inputs())

    def train(compiler: Any) -> cb.Report:
        torch._dynamo.reset()
        model = checked(buckets, compiler)
        return gathered(lambda: model(x, table, w).square().sum().backward())

    assert found(train(faults.scaled_gradient("w", "aot", 1.05))) == {("logic", "grad[w]")}
    assert agreed(train(faults.clean("aot")))


def test_another_choice_at_an_edge_is_no_bug() -> None:
    x, table, w = bucket_inputs()
    inputs = x, table * 0.02, w

    def rounding_down(quotient: torch.Tensor) -> torch.Tensor:
        return quotient * (1 - torch.finfo(quotient.dtype).eps)

    otherwise = faults.wrong_operator("aten.div.Tensor", rounding_down, how="aot")
    compiled = torch.compile(buckets, backend=otherwise)
    assert (compiled(*inputs) / buckets(*inputs) - 1).abs().max() > 0.005
    assert agreed(gathered(lambda: checked(buckets, otherwise)(*inputs)))


TIES = {
    "places": lambda x: (x * 1.1).argmax(-1),
    "one of them": lambda x: torch.nn.functional.one_hot((x * 1.1).argmax(-1), 20).float(),
}


@pytest.mark.parametrize("name", TIES)
def test_what_is_nothing_but_ties_is_not_passed(name: str) -> None:
    x = torch.randint(0, 3, (64, 20)).float()
    nothing = faults.spoiled_output(torch.zeros_like)
    assert gathered(lambda: checked(TIES[name], nothing)(x)).verdict is not cb.Verdict.PASS
    assert agreed(gathered(lambda: checked(TIES[name], faults.clean())(x)))


def test_a_probability_that_rounds_to_more_than_one_is_none() -> None:
    """Operators that insist on a range are not given what no rounding makes."""
    x, target = torch.randn(4096) * 3, torch.randint(0, 2, (4096,)).float()
    x[0] = 16.0

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy(torch.sigmoid(x), target)

    assert agreed(gathered(lambda: checked(loss, faults.spoiled_output(rounding_otherwise))(x, target)))
    assert found(gathered(lambda: checked(loss, faults.spoiled_output(lambda r: r * 1.001))(x, target)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lerp", "addcmul", "alpha"])
def test_products_that_cancel_inside_an_operator_are_noise(name: str, dtype: torch.dtype) -> None:
    program, fused = {
        "lerp": (lambda a, b, c: torch.lerp(a, b, 0.3), lambda a, b, c: a * 0.7 + b * 0.3),
        "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=0.1), lambda a, b, c: (b * 0.1) * c + a),
        "alpha": (lambda a, b, c: torch.add(a, b, alpha=0.3), lambda a, b, c: b.double() * 0.3 + a),
    }[name]
    numbers = [torch.randint(-9, 10, (40, 50)).to(dtype) for _ in range(3)]

    def wider(_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: torch.Tensor) -> list[torch.Tensor]:
            wide = [arg.float() if arg.dtype is torch.bfloat16 else arg for arg in args]
            return [fused(*(wide * 3)[:3]).to(args[0].dtype)]

        return run

    used = numbers if name == "addcmul" else [*numbers[:2], numbers[1]]
    assert agreed(gathered(lambda: checked(program, wider)(*used)))
    off = faults.spoiled_output(lambda result: (result.double() * 1.01).to(result.dtype))
    assert found(gathered(lambda: checked(program, off)(*used)))


def test_float8_results_are_judged() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).clamp(-400, 400).to(torch.float8_e4m3fn)

    x = torch.randn(64, 64, dtype=torch.bfloat16)
    assert agreed(gathered(lambda: checked(program, faults.clean())(x)))
    off = faults.spoiled_output(lambda result: (result.float() * 1.3).to(result.dtype))
    assert found(gathered(lambda: checked(program, off)(x)))


def test_a_first_call_that_alone_is_wrong_is_found() -> None:
    def once(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        calls: list[int] = []

        def run(*args: Any) -> Any:
            calls.append(1)
            return [result * 1.1 if len(calls) == 1 else result for result in gm.forward(*args)]

        return run

    report = gathered(lambda: checked(torch.sin, once)(torch.randn(50)))
    assert {finding.subject for finding in report.findings} == {"output[0]"}
    assert report.findings[0].evidence["the difference repeats"] == "in 0 of 2 more runs of the candidate"
    assert not any("random" in skip.reason for skip in report.coverage.skipped)


def test_nan_that_flips_may_flip_elsewhere() -> None:
    """Where a cosine rounds to more than 1, its angle is NaN: in a few places only in the candidate."""
    rows = torch.nn.functional.normalize(torch.randn(4000, 8), dim=1)

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.acos((x * x).sum(1))

    def backwards(_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda x: (torch.acos((x * x).flip(1).cumsum(1)[:, -1]),)

    assert agreed(gathered(lambda: checked(program, backwards)(rows)))
    off = faults.spoiled_output(lambda angle: torch.where(torch.arange(4000) % 3 == 0, torch.nan, angle))
    assert found(gathered(lambda: checked(lambda x: program(x * 0.9), off)(rows)))


def in_float32(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that keeps what is between inputs and results in float32."""

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        wide = [arg.float() if arg.dtype is torch.bfloat16 else arg for arg in args]
        results = gm.forward(*wide)
        return [result.to(args[0].dtype) if result.is_floating_point() else result for result in results]

    return run


def test_a_shape_that_rounding_changes_is_not_judged() -> None:
    def kept(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x) * 1.3 > 0.4).nonzero()

    x = torch.randn(60, 80, dtype=torch.bfloat16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = gathered(lambda: checked(kept, in_float32)(x))
        assert report.verdict is cb.Verdict.INCONCLUSIVE
        assert "its shape depends on values that rounding changes" in str(report)
        few = faults.spoiled_output(lambda places: places[1:])
        assert found(gathered(lambda: checked(kept, few)(torch.arange(9.0) - 3))) == {("structure.shape", "output[0]")}
    report = cb.check(lambda x: x[torch.tanh(x) * 1.3 > 0.4], (x.requires_grad_(),), compiler=in_float32)
    assert report.verdict is cb.Verdict.INCONCLUSIVE


@pytest.mark.parametrize("name", ["bernoulli", "multinomial", "normal"])
def test_draws_by_computed_values_accuse_nobody(name: str) -> None:
    program = {
        "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x * 1.1)),
        "multinomial": lambda x: torch.multinomial(torch.softmax(x * 1.1, -1), 4),
        "normal": lambda x: torch.normal(torch.tanh(x * 1.1), torch.sigmoid(x)),
    }[name]
    x = torch.randn(200, 50, dtype=torch.bfloat16)
    assert not found(gathered(lambda: checked(program, in_float32)(x)))
    assert agreed(gathered(lambda: checked(program, faults.clean())(x.float())))


def test_an_element_that_jumps_hides_no_others() -> None:
    """One comparison in the backward pass is a tie; gradients of other elements are as exact as ever."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.1 - x[0] * 1.1).clamp(min=0)

    x = torch.randn(400, dtype=torch.bfloat16, requires_grad=True)
    leaking = faults.spoiled_gradient("x", lambda grad: grad + (grad == 0) * 0.1, "aot")
    report = gathered(lambda: checked(program, leaking)(x).square().sum().backward())
    assert found(report) == {("logic", "grad[x]")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_have_the_dtype_that_the_program_says(dtype: torch.dtype) -> None:
    """A constant of half precision is rounded, in eager in float64 and in the float64 twin."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * torch.tensor([0.2, 0.7, 0.1], dtype=x.dtype)

    rounding = faults.spoiled_output(rounding_otherwise, how="aot")
    assert agreed(gathered(lambda: checked(program, rounding)(torch.randn(20, 3, dtype=dtype))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("off", [False, True])
def test_a_program_that_calls_a_kernel_with_coarse_constants_is_right(dtype: torch.dtype, off: bool) -> None:
    """Compiled in float64 it calls the same kernel, which is not as exact as float64 is."""
    spoil = faults.wrong_operator(
        "aten.hardsigmoid_backward.default", lambda grad: grad * (1.0001 if off else 1), "aot"
    )
    x = torch.randn(50, dtype=dtype, requires_grad=True)
    report = gathered(lambda: checked(torch.nn.functional.hardsigmoid, spoil)(x).square().sum().backward())
    assert report.verdict is (cb.Verdict.FAIL if off else cb.Verdict.PASS)


def test_a_kernel_with_coarse_constants_is_not_the_reference() -> None:
    """Eager's gradient of hardsigmoid has a sixth of float32 in float64, too."""

    def decomposed(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        table = get_decompositions([torch.ops.aten.hardsigmoid_backward])
        return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), decompositions=table)(
            gm, given
        )

    x = torch.randn(50, dtype=torch.bfloat16, requires_grad=True)
    model = checked(lambda x: torch.nn.functional.hardsigmoid(x * 2), decomposed)
    assert agreed(gathered(lambda: model(x).square().sum().backward()))


def test_draws_by_computed_values_hide_no_wrong_logic_elsewhere() -> None:
    """What the float64 twin shows to be wrong is no draw that flipped."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(x) * 1.1, torch.bernoulli(torch.sigmoid(x))

    off = faults.spoiled_output(lambda result: result * 1.01)
    assert found(gathered(lambda: checked(program, off)(torch.randn(40, 50)))) == {("logic", "output[0]")}


@pytest.mark.parametrize("off", [False, True])
def test_grouped_products_have_a_float64_twin(off: bool) -> None:
    """Torch has no kernel of a grouped matrix product in float64; mixtures of experts are judged there all the same."""

    def experts(x: torch.Tensor, weights: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        gates, chosen = torch.softmax(x @ router, -1).max(-1)
        order = chosen.argsort()
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).to(torch.int32)
        made = F.silu(F.grouped_mm(x[order], weights, offs=ends))
        return (made * gates[order][:, None])[order.argsort()]

    shapes = (32, 16), (4, 16, 16), (16, 4)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    compiler = faults.scaled_gradient("weights", factor=1.001) if off else faults.spoiled_output(rounding_otherwise)
    report = gathered(lambda: checked(experts, compiler)(*inputs).square().sum().backward())
    assert found(report) == ({("logic", "grad[weights]")} if off else set())
    assert not report.coverage.skipped
    assert report.coverage.detection_limit["output[0]"] < 1e-6


TAILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda x: F.cross_entropy(x * 40, x.argmax(-1)),
    "gelu": lambda x: F.gelu(x - 8),
    "gelu tanh": lambda x: F.gelu(x - 8, approximate="tanh"),
    "softmax": lambda x: F.softmax(x * 30, -1).log_softmax(-1),
    "tanh": lambda x: torch.tanh(x * 3 + 8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TAILS)
def test_what_cancels_inside_of_an_operator_is_noise(name: str, dtype: torch.dtype) -> None:
    """Of a probability of nearly 1, less 1, only the rounding of the probability is left."""

    def decomposed(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        """As Inductor does it, and with an exponential that is off by a unit in the last place."""

        def compile_graph(graph: fx.GraphModule, _given: Sequence[Any]) -> Callable[..., Any]:
            for node in list(graph.graph.nodes):
                if node.target in (torch.ops.aten.exp.default, torch.ops.aten.erf.default, torch.ops.aten.tanh.default):
                    with graph.graph.inserting_after(node):
                        above = graph.graph.call_function(_next_above, (node,))
                    node.replace_all_uses_with(above, delete_user_cb=lambda user, above=above: user is not above)
            graph.recompile()
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=compile_graph, decompositions=core_aten_decompositions())(gm, given)

    x = torch.randn(64, 50, dtype=dtype, requires_grad=True)
    model = checked(TAILS[name], decomposed)
    report = gathered(lambda: model(x).float().square().sum().backward())
    assert agreed(report)


def _next_above(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor == 0, tensor, torch.nextafter(tensor, tensor.new_full((), torch.inf)))


@pytest.mark.parametrize("fault", ["none", "in all dtypes"])
def test_a_program_that_leaves_the_range_of_its_dtype_accuses_nobody(fault: str) -> None:
    """Squares overflow: eager's layer norm gives NaN, and what it is made of gives numbers, wrong ones, too."""

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)

    def compiler(gm: fx.GraphModule, _given: Sequence[Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> tuple[torch.Tensor]:
            return ((by_hand(x) * (1.0 if fault == "none" else 1.01)),)

        return run

    x = torch.randn(6, 32) * torch.tensor([1.0, 1.0, 1.0, 1e25, 1e30, 1e33])[:, None]
    report = gathered(lambda: checked(lambda x: F.layer_norm(x, (32,)), compiler)(x))
    if fault == "none":
        assert report.verdict is cb.Verdict.INCONCLUSIVE
        [reason] = [skip.reason for skip in report.coverage.skipped if skip.matters]
        assert "leaves the range of float32" in reason
    else:
        assert report.verdict is cb.Verdict.FAIL


@pytest.mark.parametrize("spoiled", [0, 100])
def test_nan_at_the_edge_excuses_no_nan_elsewhere(spoiled: int) -> None:
    """Cosines that rounding takes beyond 1 have no angle; others are no cosines of that kind."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.acos((x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)))

    def otherwise(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: torch.Tensor) -> tuple[torch.Tensor]:
            x, y = args if args[0].dtype == torch.float64 else (arg + 0.0 for arg in args)
            angle = torch.acos((x / x.norm(dim=-1)[:, None] * (y / y.norm(dim=-1)[:, None])).sum(-1))
            angle[angle.nan_to_num(-1.0).argsort(descending=True)[:spoiled]] = torch.nan
            return (angle,)

        return run

    x = torch.randn(6000, 8)
    y = torch.where(torch.arange(6000)[:, None] < 3000, x, torch.randn(6000, 8))
    report = gathered(lambda: checked(program, otherwise)(x, y))
    assert report.verdict is (cb.Verdict.FAIL if spoiled else cb.Verdict.PASS), report


@pytest.mark.parametrize("fill", [-1e9, "lowest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_masked_row_of_attention_hides_nothing(dtype: torch.dtype, fill: float | str) -> None:
    """What attention keeps for backward is as large as the mask there; a roundoff of it is none of the program's."""
    query, key, value = (torch.randn(2, 4, 10, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    keep = torch.rand(2, 1, 10, 10) > 0.4
    keep[..., 0] = True
    keep[0, :, 3] = False
    mask = torch.where(keep, 0.0, torch.finfo(dtype).min if isinstance(fill, str) else fill).to(dtype)

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    otherwise = faults.spoiled_output(rounding_otherwise, how="aot")
    report = gathered(lambda: checked(attention, otherwise)(query, key, value).sum().backward())
    assert agreed(report)
    assert max(report.coverage.detection_limit.values()) < (1e-5 if dtype is torch.float32 else 1e-8)
    wrong = faults.scaled_gradient("key", "aot")
    assert found(gathered(lambda: checked(attention, wrong)(query, key, value).sum().backward())) == {
        ("logic", "grad[key]")
    }


def test_a_loop_has_a_float64_twin() -> None:
    def looping(x: torch.Tensor) -> torch.Tensor:
        def goes_on(step: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return step < 4

        def body(step: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return step + 1, torch.sin(y * 1.3) + 0.1

        result: torch.Tensor = torch.while_loop(goes_on, body, (torch.tensor(0), x))[1]
        return result

    with torch.no_grad():
        report = gathered(lambda: checked(looping, "aot_eager")(torch.randn(8, dtype=torch.bfloat16)))
    assert agreed(report)
    assert not report.coverage.skipped
    assert report.coverage.detection_limit["output[0]"] < 1e-8


@pytest.mark.parametrize("instead", [torch.nan, -torch.inf, 6e4])
def test_what_overflows_must_be_the_same_infinity(instead: float) -> None:
    """Eager's infinity is right at its precision, and so is no other."""

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(tensor.to(torch.float16).isinf(), instead, tensor) if tensor.dtype.itemsize == 2 else tensor

    x = torch.randn(64, dtype=torch.float16) * 500
    report = gathered(lambda: checked(lambda x: x * x, faults.spoiled_output(spoil))(x))
    assert found(report) == {("nonfinite", "output[0]")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_what_processors_flush_to_zero_may_be_zero(dtype: torch.dtype) -> None:
    """Below 1e-38 a number may be lost; nobody flushes those below 6e-5 that float16 keeps with fewer bits."""

    def flush(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(tensor.abs() < torch.finfo(dtype).tiny, 0.0, tensor) if tensor.dtype is dtype else tensor

    x = (torch.randn(400) * torch.finfo(dtype).tiny / 2).to(dtype)
    report = gathered(lambda: checked(lambda x: x * 0.7, faults.spoiled_output(flush))(x))
    assert report.verdict is (cb.Verdict.FAIL if dtype is torch.float16 else cb.Verdict.PASS), report


def test_what_a_cast_and_back_takes_from_a_value_is_not_nothing() -> None:
    """In float64 it is zero, and nothing is near to that. A program that feeds the error back asks for just that."""

    def rest(x: torch.Tensor) -> torch.Tensor:
        return x - x.bfloat16().float()

    x = torch.randn(200)
    assert agreed(gathered(lambda: checked(rest, "aot_eager")(x)))

    def nothing(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        """As a fused kernel that leaves the cast out: what is handed out on the way is rounded."""
        return lambda *args: tuple(
            torch.zeros_like(result) if len(results) == 1 else result
            for results in [gm.forward(*args)]
            for result in results
        )

    report = gathered(lambda: checked(rest, nothing)(x))
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    [skip] = [skip for skip in report.coverage.skipped if skip.matters]
    assert (skip.subject, skip.reason) == (
        "output[0]",
        "it is what rounding leaves, and of that the compiled program has nothing",
    )

    def rounded_on_the_way(x: torch.Tensor) -> torch.Tensor:
        return (x * 3 - x - x - x).sum(-1)

    # a program in half precision throughout asks for no rest, and a fused kernel that leaves none is right
    x = torch.randn(200, 3, dtype=torch.bfloat16)
    assert rounded_on_the_way(x).count_nonzero() > 64
    assert agreed(gathered(lambda: checked(rounded_on_the_way, nothing)(x)))


@pytest.mark.inductor
def test_a_cast_and_back_that_inductor_leaves_out_is_told() -> None:
    report = cb.check(lambda x: x - x.bfloat16().float(), (torch.randn(200),))
    assert not report.findings
    if report.verdict is cb.Verdict.INCONCLUSIVE:  # before torch 2.13 there was no setting that kept the casts
        assert "it is what rounding leaves" in str(report)
    else:
        [note] = [note for note in report.coverage.notes if "fusion-rounding" in note]
        assert "fusion-rounding: output[0]" in note
        assert "emulate_precision_casts" in note


def test_power_against_wrong_kernels_of_one_precision_is_told() -> None:
    """The float64 twin shows that the logic is right; what is wrong in bfloat16 alone must exceed bfloat16's noise."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(torch.bfloat16)
    x = torch.randn(16, 32, dtype=torch.bfloat16)

    def wrong_by(factor: float) -> cb.Report:
        def spoil(tensor: torch.Tensor) -> torch.Tensor:
            return tensor * factor if tensor.dtype is torch.bfloat16 else tensor

        with torch.no_grad():
            return gathered(lambda: checked(model, faults.spoiled_output(spoil))(x))

    report = wrong_by(1.004)
    assert agreed(report)
    assert report.coverage.detection_limit["output[0]"] < 1e-8
    told = report.coverage.own_precision_limit["output[0]"]
    assert 0.004 < told < 0.5
    assert agreed(wrong_by(1 + told / 4))
    assert found(wrong_by(1 + 6 * told))
    assert found(wrong_by(1 - 6 * told))


@pytest.mark.parametrize("window", ["blackman", "nuttall", "hamming"])
def test_coefficients_of_windows_are_rounded_in_the_twin_as_in_eager(window: str) -> None:
    """Dynamo calls these as a whole; inside, numbers become tensors of the dtype that the program says."""

    def windowed(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = getattr(torch.signal.windows, window)(13, dtype=torch.float32)
        return made * x

    last_bit = faults.spoiled_output(lambda y: y * (1 + 2**-23) if y.dtype is torch.float32 else y)
    report = cb.check(windowed, (torch.ones(13),), compiler=last_bit)
    assert agreed(report)
    assert report.coverage.detection_limit["output[0]"] < 1e-8
    wrong = faults.spoiled_output(lambda y: y * (1 + 2**-23))
    assert found(cb.check(windowed, (torch.ones(13),), compiler=wrong)) == {("logic", "output[0]")}
