"""Each operator of a 16-bit region by itself: what a whole program's noise hides, and what is noise of one operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import checked_backend as cb
from checked_backend.modes.monte_carlo import PoisonMode
from checked_backend.regions.operator_check import check as operator_check
from tests.support import faults
from tests.support.region_tools import agreed, audit, checked, clean_reports, found, gathered

LOW = (torch.bfloat16, torch.float16)

Change = Callable[[torch.Tensor], torch.Tensor]


def at_16_bits(change: Change) -> Change:
    """A fault that is there in half precision alone."""
    return lambda tensor: change(tensor) if tensor.dtype in LOW else tensor


def times(factor: float) -> Change:
    """A fault that scales at 16 bits."""
    return at_16_bits(lambda tensor: tensor * factor)


class Block(nn.Module):
    """A transformer's block, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(heads[0] @ heads[1].transpose(-1, -2) * 8**-0.5, -1)
        x = x + (weights @ heads[2]).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), target)


def trained(compiler: Any, dtype: torch.dtype, *, amp: bool = False) -> cb.Report:
    """Train a block for one step."""

    def program(compiled: Callable[..., Any]) -> None:
        model = Block() if amp else Block().to(dtype)
        run = compiled(model)
        x = torch.randn(4, 24, 32, dtype=torch.float32 if amp else dtype)
        with torch.autocast("cpu", dtype=dtype, enabled=amp):
            loss = run(x, torch.randint(0, 10, (96,)))
        loss.backward()

    return audit(program, compiler)


FAULTS = {
    "gelu": lambda: faults.wrong_operator("aten.gelu.default", times(1.03), "aot"),
    "softmax": lambda: faults.wrong_operator("aten._softmax.default", times(0.97), "aot"),
    "product": lambda: faults.wrong_operator("aten.bmm.default", times(1.03), "aot"),
    "gelu's gradient": lambda: faults.wrong_operator("aten.gelu_backward.default", times(1.03), "aot"),
    "a parameter's gradient": lambda: faults.spoiled_gradient("up.weight", times(1.03)),
    "a parameter's gradient, compiled": lambda: faults.spoiled_gradient("up.weight", times(1.03), "aot"),
    "the norm": lambda: faults.wrong_operator("aten.native_layer_norm.default", _first(times(1.03)), "aot"),
}


def _first(change: Change) -> Callable[[Any], Any]:
    return lambda results: (change(results[0]), *results[1:])


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("dtype", LOW)
def test_operator_that_is_three_percent_off_at_16_bits_alone_is_found(name: str, dtype: torch.dtype) -> None:
    report = trained(FAULTS[name](), dtype)
    assert report.verdict is cb.Verdict.FAIL
    assert {finding.detail for finding in report.findings} <= {"logic.this_dtype", "precision.operator", "precision"}


def test_finding_names_operator_line_and_what_it_reaches() -> None:
    report = trained(FAULTS["gelu"](), torch.float16)
    finding = report.findings[0]
    assert (finding.kind, finding.detail, finding.subject) == (cb.Kind.LOGIC, "logic.this_dtype", "output[0]")
    assert (finding.op, finding.graph) == ("torch._C._nn.gelu", "dynamo")
    assert finding.node is not None
    assert "x = x + self.down(F.gelu(self.up(x)))" in str(finding.source)
    assert "is off by 0.03 in float16" in finding.message
    assert finding.evidence["operator_bias"] == pytest.approx(1.03, abs=1e-3)


def test_gradient_of_a_percent_too_much_is_found_in_bfloat16() -> None:
    """A percent is 1.3 units in the last place there: of every element, and always the same."""
    report = trained(faults.spoiled_gradient("qkv.weight", times(1.01)), torch.bfloat16)
    assert found(report) == {("precision.operator", "grad[qkv.weight]")}


def test_four_units_in_the_last_place_of_float16_are_found() -> None:
    report = trained(faults.spoiled_gradient("down.weight", times(1.004)), torch.float16)
    assert found(report) == {("precision.operator", "grad[down.weight]")}


def test_wrong_signs_at_random_are_found_as_well_as_a_factor() -> None:
    def rough(tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)).sub(0.5).sign()
        return tensor * (1 + 0.04 * signs.to(tensor.dtype))

    report = trained(faults.wrong_operator("aten.gelu.default", at_16_bits(rough), "aot"), torch.bfloat16)
    assert {finding.op for finding in report.findings} == {"torch._C._nn.gelu"}


def test_linear_that_is_wrong_under_autocast_is_found() -> None:
    report = trained(faults.wrong_operator("aten.addmm.default", times(1.1), "aot"), torch.bfloat16, amp=True)
    assert report.verdict is cb.Verdict.FAIL


def accumulated(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose sums of half precision are accumulated in half precision."""

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=tensor.dtype)
        for value in tensor.flatten():
            total = total + value
        return total

    for node in gm.graph.find_nodes(op="call_method", target="mean"):
        node.op, node.target = "call_function", lambda value: summed(value) / value.numel()
    gm.recompile()
    return gm.forward


def test_loss_that_is_accumulated_at_16_bits_is_found() -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sigmoid() - y).square().mean()

    x, y = torch.randn(600, dtype=torch.bfloat16), torch.rand(600, dtype=torch.bfloat16)
    assert agreed(gathered(lambda: checked(loss, faults.clean())(x, y)))
    report = gathered(lambda: checked(loss, accumulated)(x, y))
    assert report.verdict is cb.Verdict.FAIL


@pytest.mark.parametrize("amp", [False, True])
def test_correct_programs_are_accused_of_nothing_and_told_what_could_hide(amp: bool) -> None:
    for dtype in (torch.bfloat16,) if amp else LOW:
        for compiler in ("eager", "aot_eager"):
            report = trained(compiler, dtype, amp=amp)
            assert agreed(report)
            assert report.coverage.checked["operators"] > 30
            assert not report.coverage.skipped


def test_own_precision_power_is_that_of_the_worst_operator() -> None:
    """Rounding otherwise changes what is seen, not what is stated."""

    def nudged(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(tensor.numel()).reshape(tensor.shape) % 7 == 0, tensor * 1.004, tensor)

    x = torch.randn(40, 50, dtype=torch.bfloat16)
    report = gathered(lambda: checked(lambda x: torch.tanh(x).exp(), faults.spoiled_output(at_16_bits(nudged)))(x))
    assert agreed(report)
    told = report.coverage.own_precision_limit["output[0]"]
    assert 0.004 < told < 0.03


def test_what_is_written_in_place_random_and_cast_is_walked_through() -> None:
    def program(compiled: Callable[..., Any]) -> None:
        weight = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)

        def body(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            made = x @ weight
            made[:, 0] = 1.0
            made = F.dropout(made, 0.2).float()
            made += 1
            halves = made.chunk(2, -1)
            with torch.no_grad():
                size = halves[1].abs().amax()
            kept = torch.where(halves[0] > 0, halves[0], halves[1]).to(torch.bfloat16)
            return kept * 2, size, kept.topk(3).values, made.argmax(-1)

        results = compiled(body)(torch.randn(64, 16, dtype=torch.bfloat16))
        results[0].sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["operators"] > 5


@pytest.mark.parametrize("rows", [(8, 12, 40)])
def test_region_for_any_size_is_compiled_for_them_once(rows: Sequence[int]) -> None:
    sizes: list[int] = []

    def compiler(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        sizes.append(len(given))
        return gm.forward

    weight = torch.randn(16, 8, dtype=torch.bfloat16, requires_grad=True)
    compiled = checked(lambda x: F.silu(x @ weight).exp(), compiler, dynamic=True)

    def run() -> None:
        for count in rows:
            compiled(torch.randn(count, 16, dtype=torch.bfloat16)).sum().backward()

    report = gathered(run)
    assert agreed(report)
    assert not any("operators" in skip.subject for skip in report.coverage.skipped)
    assert len({size for size in sizes if sizes.count(size) == 1}) >= 1


def test_operators_that_were_not_judged_are_in_the_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_check, "LARGEST", 100)
    report = gathered(lambda: checked(lambda x: x.sin() * 2, "eager")(torch.randn(99, dtype=torch.bfloat16)))
    assert report.verdict is cb.Verdict.PASS
    [skip] = report.coverage.skipped
    assert (skip.subject, skip.matters) == ("operators by themselves", False)
    assert "at most 9.3e-08 GiB are handed out" in skip.reason


def test_compiler_that_cannot_compile_the_probe_is_judged_without() -> None:
    def compiler(gm: fx.GraphModule, _given: Sequence[Any]) -> Callable[..., Any]:
        if len(gm.graph.find_nodes(op="output")[0].args[0]) > 1:
            raise RuntimeError("no more than one result")
        return gm.forward

    report = gathered(lambda: checked(lambda x: x.sin() * 2, compiler)(torch.randn(99, dtype=torch.bfloat16)))
    assert report.verdict is cb.Verdict.PASS
    assert "RuntimeError: no more than one result" in report.coverage.skipped[0].reason


def test_compiler_that_cannot_compile_the_probes_gradients_has_its_forward_operators_judged() -> None:
    wrong = faults.wrong_operator("aten.gelu.default", times(1.05), "aot")

    def compiler(inner: Callable[..., Any]) -> Callable[..., Any]:
        def compile_(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
            if any("operator_tap" in node.name for node in gm.graph.nodes):
                raise RuntimeError("no taps here")
            compiled: Callable[..., Any] = inner(gm, given)
            return compiled

        return compile_

    report = trained(compiler(wrong), torch.float16)
    assert "torch._C._nn.gelu" in {finding.op for finding in report.findings}
    report = trained(compiler(faults.clean("aot")), torch.float16)
    assert report.verdict is cb.Verdict.PASS
    assert report.coverage.checked["operators"] > 10
    [skip] = report.coverage.skipped
    assert (skip.subject, skip.matters) == ("gradients of operators by themselves", False)
    assert "no taps here" in skip.reason


def test_where_noise_hides_all_and_operators_are_not_judged_nothing_is_passed() -> None:
    """Cancellation: in bfloat16 the result is all noise, and in float64 it is right."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return (x * 3 + 100) - x * 2 - 100 - x * 0.999

    def compiler(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        if len(gm.graph.find_nodes(op="output")[0].args[0]) > 1:
            raise RuntimeError("no more than one result")
        return faults.spoiled_output(at_16_bits(lambda tensor: tensor * 1.5))(gm, given)

    x = torch.randn(2000, dtype=torch.bfloat16)
    report = gathered(lambda: checked(body, compiler)(x))
    assert report.verdict is cb.Verdict.INCONCLUSIVE, str(report)
    [skip] = [skip for skip in report.coverage.skipped if skip.matters]
    assert skip.subject == "output[0]"
    assert "no more than one result" in skip.reason


def test_a_choice_of_few_elements_that_differs_is_told_as_not_judged() -> None:
    x = torch.linspace(0.1, 5, 20).to(torch.float16)
    wrong = faults.wrong_operator("aten.frac.default", times(1.0005), "aot")
    report = gathered(lambda: checked(lambda x: torch.frac(x) * 2, wrong)(x))
    assert report.verdict is cb.Verdict.PASS
    assert "frac (too few of its elements" in str(report.coverage.skipped)
    assert agreed(gathered(lambda: checked(lambda x: torch.frac(x) * 2, "aot_eager")(x)))


def test_check_judges_operators_too() -> None:
    x = torch.randn(64, 32, dtype=torch.float16)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)).to(torch.float16)
    report = cb.check(model, (x,), compiler=faults.wrong_operator("aten.gelu.default", times(1.004), "aot"))
    assert any(finding.op == "torch._C._nn.gelu" for finding in report.findings)
    assert agreed(cb.check(model, (x,), compiler="aot_eager"))


def test_random_state_and_gradients_are_left_alone() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    plain, watched = Block().to(torch.bfloat16), Block().to(torch.bfloat16)
    target, given = torch.randint(0, 10, (48,)), torch.randn(2, 24, 32, dtype=torch.bfloat16)
    states = []
    for model, run in ((plain, torch.compile(plain, backend="aot_eager")), (watched, checked(watched, "aot_eager"))):
        torch.manual_seed(3)
        F.dropout(run(given, target) + 0 * x.sum(), 0.1).backward()
        states.append((torch.get_rng_state(), [parameter.grad for parameter in model.parameters()]))
    assert torch.equal(states[0][0], states[1][0])
    assert all(map(torch.equal, states[0][1], states[1][1]))


def one_of(fault: Change, count: int = 1) -> Change:
    """A fault of a few elements, the middle ones."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.flatten()
        place = torch.arange(flat.numel())
        some = (place >= flat.numel() // 2) & (place < flat.numel() // 2 + count)
        return torch.where(some, fault(flat), flat).reshape(tensor.shape)

    return at_16_bits(change)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("operator", ["gelu", "bmm", "_softmax", "gelu_backward"])
def test_one_element_that_is_wrong_at_16_bits_alone_is_found(operator: str, dtype: torch.dtype) -> None:
    factor = 1.25 if "backward" in operator else 1.1
    report = trained(faults.wrong_operator(f"aten.{operator}.default", one_of(times(factor)), "aot"), dtype)
    assert {finding.detail for finding in report.findings} == {"logic.this_dtype"}
    finding = report.findings[0]
    assert "is off in one element of" in finding.message
    assert finding.evidence["wrong_elements"] == 1


def test_a_fault_beside_one_of_the_probe_alone_is_found() -> None:
    """What the compiler gets wrong in the probe alone excuses nothing that does not come of it."""

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        [output] = gm.graph.find_nodes(op="output")
        probe = len(output.args[0]) > 2

        def worse(tensor: torch.Tensor) -> torch.Tensor:
            return tensor * (3.0 if probe and tensor.dtype in LOW else 1.0)

        compiled = faults.wrong_operator("aten.sin.default", worse, "eager")(gm, inputs)
        return faults.spoiled_output(times(1.03), 1)(gm, inputs) if not probe else also_wrong(compiled)

    def also_wrong(compiled: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: [
            times(1.03)(value) if place == 1 else value for place, value in enumerate(compiled(*args))
        ]

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin() * 2, x.cos().exp()

    report = gathered(lambda: checked(body, compiler)(torch.randn(40, 50, dtype=torch.bfloat16)))
    assert report.verdict is cb.Verdict.FAIL, str(report)
    assert {finding.subject for finding in report.findings} == {"output[1]"}


def joined(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Two parts written into memory that begins without values."""
    made = left.new_empty(*left.shape[:-1], left.shape[-1] + right.shape[-1])
    made[..., : left.shape[-1]].copy_(left * 1.5)
    made[..., left.shape[-1] :].copy_(right.sin())
    return made.exp().sum(-1)


def with_junk(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose programs find other values in memory that nothing was written to, at each run."""
    seeds = itertools.count(2)

    def compile_(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = compiler(gm, inputs)

        def run(*args: Any) -> Any:
            with PoisonMode(next(seeds)):
                return compiled(*args)

        return run

    return compile_


@pytest.mark.parametrize("dtype", LOW)
def test_memory_that_nothing_was_written_to_is_not_judged(dtype: torch.dtype) -> None:
    parts = [torch.randn(4, 64).to(dtype) for _ in range(2)]
    compiled = checked(joined, with_junk(lambda gm, _inputs: gm.forward))
    report = gathered(lambda: compiled(*parts))
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert report.coverage.checked["operators"] >= 3
    wrong = faults.wrong_operator("aten.sin.default", times(1.05), "aot")
    report = gathered(lambda: checked(joined, wrong)(*parts))
    assert report.verdict is cb.Verdict.FAIL
    assert {finding.detail for finding in report.findings} <= {"logic.this_dtype", "precision.operator"}


def test_an_error_of_the_probe_alone_is_none_of_the_program() -> None:
    """A compiler may fuse, and get wrong, a graph that hands out more: the user does not run that."""

    def wrong_where_much_is_handed_out(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        [output] = gm.graph.find_nodes(op="output")
        if len(output.args[0]) <= 2:
            return gm.forward
        return faults.wrong_operator("aten.gelu.default", times(1.5), "aot")(gm, inputs)

    report = trained(wrong_where_much_is_handed_out, torch.bfloat16)
    assert report.verdict is cb.Verdict.PASS, str(report)
    [reason] = [skip.reason for skip in report.coverage.skipped if skip.subject == operator_check.SUBJECT]
    assert "with the tensors inside handed out the compiler makes another program" in reason
    assert not report.coverage.checked.get("operators")
