"""The walk through a region: writes in place, random operators, casts, choices, and memory without values."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import checked_backend as cb
from checked_backend.modes.monte_carlo import PoisonMode
from checked_backend.regions.operator_check import check
from checked_backend.regions.operator_check.lane import Moved
from checked_backend.regions.operator_check.tensor_checks import TensorChecks, own_error
from checked_backend.regions.operator_check.walk import Walk, walk_again
from tests.support import faults
from tests.support.low_precision import LOW, Block, times, trained
from tests.support.region_tools import agreed, checked, clean_reports, gathered


@pytest.mark.more
@pytest.mark.parametrize("amp", [False, True])
def test_correct_programs_have_no_findings_and_told_what_could_hide(amp: bool) -> None:
    for dtype, compiler in ((torch.bfloat16, "aot_eager"),) if amp else zip(LOW, ("eager", "aot_eager"), strict=True):
        report = trained(compiler, dtype, amp=amp)
        assert agreed(report)
        assert report.coverage.checked["operators"] > 30
        assert not report.coverage.skipped


def test_the_tensors_of_a_walk_do_not_wait_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[weakref.ref[Walk]] = []
    run = Walk.run

    def noted_run(walk: Walk) -> None:
        walks.append(weakref.ref(walk))
        run(walk)

    monkeypatch.setattr(Walk, "run", noted_run)
    gc.disable()
    try:
        trained(faults.wrong_operator("aten.gelu.default", times(1.02), "aot"), torch.bfloat16)
        assert walks
        assert all(walk() is None for walk in walks)
    finally:
        gc.enable()


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

        compiled(body)(torch.randn(64, 16, dtype=torch.bfloat16))[0].sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["operators"] > 5


def test_a_choice_of_few_elements_that_differs_is_told_as_not_checked() -> None:
    x = torch.linspace(0.1, 5, 20).to(torch.float16)
    wrong = faults.wrong_operator("aten.frac.default", times(1.0005), "aot")
    report = gathered(lambda: checked(lambda x: torch.frac(x) * 2, wrong)(x))
    assert report.verdict is cb.Verdict.PASS
    assert "frac (too few of its elements" in str(report.coverage.skipped)
    assert agreed(gathered(lambda: checked(lambda x: torch.frac(x) * 2, "aot_eager")(x)))


def joined(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Two parts written into memory that begins without values."""
    made = left.new_empty(*left.shape[:-1], left.shape[-1] + right.shape[-1])
    made[..., : left.shape[-1]].copy_(left * 1.5)
    made[..., left.shape[-1] :].copy_(right.sin())
    return made.exp().sum(-1)


SEEDS = itertools.count(2)


@faults.runs
def with_junk(forward: Callable[..., Any], *args: Any) -> Any:
    """A compiler whose programs find other values in memory that nothing was written to, at each run."""
    with PoisonMode(next(SEEDS)):
        return forward(*args)


@pytest.mark.parametrize("dtype", LOW)
def test_memory_that_nothing_was_written_to_is_not_checked(dtype: torch.dtype) -> None:
    parts = [torch.randn(4, 64).to(dtype) for _ in range(2)]
    report = gathered(lambda: checked(joined, with_junk)(*parts))
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert report.coverage.checked["operators"] >= 3
    wrong = faults.wrong_operator("aten.sin.default", times(1.05), "aot")
    report = gathered(lambda: checked(joined, wrong)(*parts))
    assert report.verdict is cb.Verdict.FAIL
    assert {finding.detail for finding in report.findings} <= {"logic.this_dtype", "precision.operator"}


@torch.library.custom_op("test_walk::half_written", mutates_args=())
def half_written(x: torch.Tensor) -> torch.Tensor:
    """An operator that leaves some places of its result to what the memory held."""
    made = torch.empty_like(x)
    made[2:] = x[2:] * 2
    return made


half_written.register_fake(torch.empty_like)


@pytest.mark.parametrize("dtype", LOW)
def test_an_operator_that_reads_junk_in_eager_too_is_not_accused(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return half_written(x.sin())[2:].exp()

    x = torch.randn(512, 8).to(dtype)
    report = gathered(lambda: checked(program, with_junk)(x))
    assert not [finding for finding in report.findings if finding.fails], str(report)
    wrong = faults.wrong_operator("aten.exp.default", times(1.05), "aot")
    torch._dynamo.reset()
    assert gathered(lambda: checked(program, wrong)(x)).verdict is cb.Verdict.FAIL


def copied_through_a_view(shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A part that several heads share, written beside the part that each has: nothing but the view reads the first."""
    made = own.new_empty(*own.shape[:-1], own.shape[-1] + shared.shape[-1])
    made[..., : own.shape[-1]].copy_(own)
    made[..., own.shape[-1] :].copy_(shared.cos().expand(-1, own.shape[1], -1, -1))
    return made.sin()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", LOW)
def test_the_gradient_of_a_tensor_that_a_write_reads_through_a_view_is_not_complete(dtype: torch.dtype) -> None:
    def report_of(compiler: Any) -> cb.Report:
        shared = torch.randn(2, 1, 16, 8, dtype=dtype, requires_grad=True)
        own = torch.randn(2, 4, 16, 8, dtype=dtype, requires_grad=True)
        return gathered(lambda: checked(copied_through_a_view, compiler)(shared, own).sum().backward())

    report = report_of("aot_eager")
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert "it writes in place" in str(report.coverage.skipped)
    assert report_of(faults.wrong_operator("aten.sin.default", times(1.05), "aot")).verdict is cb.Verdict.FAIL


def doubled_in_place(h: torch.Tensor) -> torch.Tensor:
    h.mul_(2.5)
    return h.bfloat16().float()


def jittered_in_place(h: torch.Tensor) -> torch.Tensor:
    h *= torch.empty_like(h).uniform_(0.9, 1.1)
    return h.bfloat16().float()


def row_in_place(h: torch.Tensor) -> torch.Tensor:
    h[0] *= torch.empty(32).uniform_(0.9, 1.1)
    return h.bfloat16().float()


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("body", [doubled_in_place, jittered_in_place, row_in_place])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_write_to_an_input_is_made_also_where_its_gradient_is_asked_for(
    body: Callable[[torch.Tensor], torch.Tensor], gradients: bool
) -> None:
    def report_of(compiler: Any) -> cb.Report:
        torch._dynamo.reset()
        x = torch.randn(16, 32, requires_grad=gradients)

        def step() -> None:
            out = checked(body, compiler)(x * 1.0)
            if gradients:
                out.sum().backward()

        return gathered(step)

    assert agreed(report_of("aot_eager"))
    off = faults.wrong_operator("aten.mul.Tensor", lambda out: out * 1.05 if out.dtype is torch.float32 else out, "aot")
    assert report_of(off).verdict is cb.Verdict.FAIL


def into_another(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.flip(0)
    into = torch.zeros_like(half)
    return torch.mul(half, -0.5, out=into), half.sin()


@pytest.mark.parametrize("dtype", LOW)
def test_what_is_written_with_out_is_not_taken_for_the_first_argument(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64).to(dtype)
    report = gathered(lambda: checked(into_another, faults.clean())(x))
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert gathered(lambda: checked(into_another, faults.wrong_value())(x)).verdict is cb.Verdict.FAIL


def handing_out_views(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that writes to nothing, and takes the stack of one tensor, and a copy of that, for views of it."""

    class Views(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return args[0][0].unsqueeze(0) if target is torch.stack else super().call_function(target, args, kwargs)

        def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target == "copy_":
                return args[1].expand_as(args[0])
            return args[0] if target == "clone" else super().call_method(target, args, kwargs)

    return lambda *args: Views(gm).run(*args)


def test_a_walk_writes_to_no_memory_of_the_user() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch.stack([x], 0).copy_(y)
        return y + 1

    x = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    kept = x.clone()
    with torch.no_grad():
        report = gathered(lambda: checked(program, handing_out_views)(x, torch.ones(1, 3, 1, dtype=torch.bfloat16)))
    assert torch.equal(x, kept)
    assert agreed(report)
    assert report.coverage.checked["operators"]


def test_inputs_that_share_memory_that_is_written_to_are_left_out() -> None:
    def halved(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        rows.mul_(0.5)
        return other + 1

    for other in (lambda rows: rows[0], lambda rows: rows.view(torch.int16), torch._neg_view):
        rows = torch.randn(4, 64, dtype=torch.bfloat16)
        torch._dynamo.reset()
        report = agreed(gathered(lambda rows=rows, other=other: checked(halved, "eager")(rows, other(rows))))
        assert any("another one shares" in skip.reason for skip in report.coverage.skipped)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_gradients_of_inputs_that_share_memory_are_checked_where_another_one_is_written_to() -> None:
    def count(a: torch.Tensor, b: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        number.add_(1)
        return a.exp() * b

    def run(compiler: Any) -> cb.Report:
        torch._dynamo.reset()
        rows = torch.randn(2, 256, dtype=torch.bfloat16).requires_grad_() * 1
        number = torch.zeros(())
        return gathered(lambda: checked(count, compiler)(rows[0], rows[1], number).sum().backward())

    assert agreed(run("aot_eager"))
    [finding] = run(faults.spoiled_gradient("b", times(1.03), "aot")).findings
    assert finding.subject == "grad[b]"


def test_great_parts_of_a_gradient_that_cancel_may_take_a_small_one_with_them() -> None:
    def program(x: torch.Tensor, y: torch.Tensor, half: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y / F.pairwise_distance(x, x, keepdim=True).reshape(-1), torch.acosh(x), half.exp()

    def run() -> None:
        x = torch.tensor([5.0, 6.0, 4.75], requires_grad=True)
        made = checked(program, "aot_eager")(x, torch.ones(3), torch.ones(4, dtype=torch.bfloat16))
        torch.autograd.backward(made[:2], (torch.tensor([1.5, -0.3, -2.2]), torch.ones(3)))
        assert x.grad.count_nonzero() == 0  # the parts of the distance are 1e12, so the others are lost

    assert agreed(gathered(run))


def test_what_is_repeated_along_a_dimension_moves_together() -> None:
    """As the gradient of an average: it was rounded once."""
    repeated = torch.randn(16, 1, 2, dtype=torch.bfloat16).expand(16, 5000, 2)
    shift = Moved(1).shift(repeated, 2.0**-8)
    assert bool((shift == shift[:, :1]).all())
    assert bool((shift[:, 0].abs() >= 2.0**-8 * repeated[:, 0].abs()).all())
    assert Moved(1).shift(torch.randn(16, 5000, dtype=torch.bfloat16), 2.0**-8).unique().numel() > 70_000


@pytest.mark.parametrize(("unrounded", "wrong"), [(1.0, True), (1.5, False), (1.2, True), (math.nan, True)])
def test_what_inputs_make_before_their_rounding_is_right_as_well(unrounded: float, wrong: bool) -> None:
    eager = torch.rand(200, dtype=torch.bfloat16) + 1
    exact = eager.double()
    made = [eager, exact, *(exact * (1 + 1e-4 * step) for step in (-1, 1, 2)), exact * unrounded]
    assert own_error(eager * 1.5, made, roundoff=2.0**-8, narrows=False, jumps=False, smooth=True).wrong is wrong


# a walk at a later call


ONES = torch.ones(4)


def noted(checks: TensorChecks, found: torch.Tensor, eager: torch.Tensor = ONES, **where: Any) -> None:
    [node] = fx.symbolic_trace(lambda x: torch.sin(x)).graph.find_nodes(op="call_function", target=torch.sin)
    checks.settle(node, found, eager, **where)


@pytest.mark.parametrize(
    ("later", "walks"),
    [
        (lambda checks: noted(checks, torch.tensor([1.0, 1.001, 1.0, 0.999])), [True]),
        (lambda checks: noted(checks, torch.tensor([1.0, 1.01, 1.0, 1.0])), [True, False]),
        (lambda checks: noted(checks, torch.tensor([1.0, math.nan, 1.0, 1.0])), [True, False]),
        (lambda checks: noted(checks, torch.tensor([1.0, 1.001, 1.0, 1.0]), gradient=True), [True, False]),
        (lambda checks: noted(checks, ONES), [True]),
    ],
    ids=["as far", "further", "not a number", "not seen before", "equal"],
)
def test_all_lanes_walk_again_only_where_something_changed(
    later: Callable[[TensorChecks], None], walks: list[bool]
) -> None:
    first = walk_again(lambda checks: noted(checks, torch.tensor([1.0, 1.002, 1.0, 1.0])), None)
    made: list[bool] = []

    def walk(checks: TensorChecks) -> None:
        made.append(checks.quick)
        later(checks)

    again = walk_again(walk, first)
    assert made == walks
    assert (again is first) == (walks == [True])


def test_what_cannot_be_checked_any_more_is_told() -> None:
    first = walk_again(lambda checks: noted(checks, ONES), None)
    again = walk_again(lambda checks: checks.unchecked.update(sin="it is gone"), first)
    assert again.unchecked == {"sin": "it is gone"}
    assert not again.limits[False]


def test_no_lane_runs_for_what_is_eagers_bit_for_bit() -> None:
    walks: list[bool] = []

    def walk(checks: TensorChecks) -> None:
        walks.append(checks.quick)
        noted(checks, ONES)

    checks = walk_again(walk, None)
    assert walks == [True]
    assert checks.limits[False] == {"sin": 0.0}


def one_element(tensor: torch.Tensor) -> torch.Tensor:
    """A fault in one element, at 16 bits."""
    changed = tensor.clone()
    changed.view(-1)[5] += 1
    return changed if tensor.dtype in LOW else tensor


@pytest.mark.more
@pytest.mark.parametrize("change", [times(1.02), one_element], ids=["factor", "one element"])
@pytest.mark.parametrize("operator", ["aten.gelu.default", "aten.gelu_backward.default", "aten.bmm.default"])
def test_what_all_lanes_find_is_found_where_they_run_for_what_differs(
    operator: str, change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_lanes(walk: Callable[[TensorChecks], object], _earlier: TensorChecks | None) -> TensorChecks:
        checks = TensorChecks()
        walk(checks)
        return checks

    def found() -> tuple[set[tuple[object, ...]], int]:
        torch._dynamo.reset()
        report = trained(faults.wrong_operator(operator, change, "aot"), torch.bfloat16)
        return {(one.subject, one.node) for one in report.findings}, report.coverage.checked["operators"]

    lazily = found()
    monkeypatch.setattr(check, "walk_again", all_lanes)
    assert lazily == found()


@pytest.mark.parametrize("factor", [1.0, 1.03])
def test_an_equal_operator_that_draws_numbers_is_run_for_those_that_draw_later(factor: float) -> None:
    weight, x = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16() * 0.1
    drawing = 0

    def off(node: fx.Node, value: Any) -> Any:
        nonlocal drawing
        drawing += "native_dropout" in str(node.target)
        if "native_dropout" not in str(node.target) or drawing % 2 or value[0].dtype is not torch.bfloat16:
            return value
        made = value[0] * factor
        made.view(-1)[::7] = torch.nextafter(made.view(-1)[::7], made.view(-1)[::7] * 2)  # a rounding
        return made, value[1]

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x, 0.2) @ weight, 0.2).exp()

    report = gathered(lambda: checked(program, faults.interpreted(off, "aot"))(x))
    assert report.verdict is (cb.Verdict.PASS if factor == 1 else cb.Verdict.FAIL), str(report)


def renormalized(x: torch.Tensor, _mean: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight = x * 2
    return F.embedding(torch.arange(9), weight, max_norm=1.0), torch.exp(weight)


def normalized(x: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean = mean * 1.5
    return F.batch_norm(x, mean, torch.ones_like(mean), training=True, momentum=0.5), torch.exp(mean)


@pytest.mark.parametrize("body", [renormalized, normalized])
def test_a_write_that_no_operator_tells_of_is_made_once(body: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    def rounded(node: fx.Node, value: Any) -> Any:
        if "exp" not in str(node.target) or "expand" in str(node.target) or value.dtype is not torch.bfloat16:
            return value
        return torch.nextafter(value, value * 2)

    x, mean = torch.randn(64, 32).bfloat16() * 3, torch.randn(32).bfloat16()
    assert agreed(gathered(lambda: checked(body, faults.interpreted(rounded, "aot"))(x, mean)))


def test_infinities_that_eager_has_too_are_no_change() -> None:
    masked = torch.tensor([-math.inf, 1.0])
    first = walk_again(lambda checks: noted(checks, masked, masked), None)
    assert walk_again(lambda checks: noted(checks, masked, masked), first) is first


@pytest.mark.parametrize("operator", ["aten.gelu.default", "aten.gelu_backward.default"])
def test_what_becomes_wrong_is_found_at_a_later_call(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where nothing does, a later call is walked through in eager alone."""
    walks: list[bool] = []

    def spied(walk: Callable[[TensorChecks], None], earlier: TensorChecks | None) -> TensorChecks:
        def noted(checks: TensorChecks) -> None:
            walks.append(checks.quick)
            walk(checks)

        return walk_again(noted, earlier)

    monkeypatch.setattr(check, "walk_again", spied)
    wrong = torch.zeros(())
    compiler = faults.wrong_operator(operator, lambda tensor: times(1.02)(tensor) if wrong else tensor, "aot")
    compiled = checked(Block().to(torch.bfloat16), compiler)
    target = torch.randint(0, 10, (48,))

    def step() -> None:
        compiled(torch.randn(2, 24, 32, dtype=torch.bfloat16), target).backward()

    def run() -> None:
        step()
        step()
        wrong.fill_(1)
        step()  # compared with what is known, and not rechecked
        step()

    report = gathered(run)
    assert walks == [True, True, True, False]
    assert "torch._C._nn.gelu" in {finding.op for finding in report.findings}, report.to_text()
