"""The kernels that Inductor generated for a region, checked as they run; part by part where there is little room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import lowerings

import checked_backend as cb
from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.generated_modules import GeneratedModule, generated_modules_noted
from checked_backend.graphs.nodes import origin_of
from checked_backend.regions.operator_check import check
from checked_backend.regions.operator_check.check import OperatorCheck
from checked_backend.regions.operator_check.findings import BY_ITSELF
from checked_backend.regions.operator_check.in_place import KernelCheck
from tests.support.locate_tools import located
from tests.support.lying_operators import define, library_of_lies
from tests.support.planted import Fault, in_half_precision, planted, tail_in_half_precision
from tests.support.raising import raising
from tests.support.region_tools import agreed, checked, gathered

pytestmark = [pytest.mark.inductor]


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w)  # the product that reads it needs it in memory
    return torch.softmax(y @ w.t(), -1) * y.sum(1, keepdim=True)


def variances(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """No node holds the sums of squares that variances are made of."""
    y = x @ w
    return (y - y.std(1, keepdim=True)) / (1 + y.float().var(0)).to(y.dtype) + y.float().mean(1, keepdim=True)


def inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in ((16, 32), (32, 24)))


@pytest.mark.parametrize("clean", [program, variances])
def test_a_clean_program_passes_and_its_kernels_are_checked(clean: Callable[..., torch.Tensor]) -> None:
    for _ in range(2):  # the second comes from the caches of torch
        torch._dynamo.reset()
        report = cb.check(clean, inputs(), compiler="inductor", localize=False)
        assert report.verdict is cb.Verdict.PASS, report.to_text()
        assert report.coverage.checked["operators"] > 12
        assert not report.coverage.skipped


def test_what_was_lowered_has_its_casts_written_out() -> None:
    """Under the user's autocast operators would be of other dtypes: many on a GPU, products of float32 on a CPU."""

    def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x @ w
        return torch.sigmoid(y @ w)

    def report() -> cb.Report:
        torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16):
            return cb.check(mixed, (torch.randn(16, 16), torch.randn(16, 16)), localize=False)

    right = report()
    assert agreed(right)
    assert right.coverage.checked["operators"] > 3
    with planted(Fault("sigmoid", "pointwise", "lowering", in_half_precision)), without_compile_caches():
        assert report().verdict is cb.Verdict.FAIL


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's caches of graphs, empty at first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def next_run(
    function: Callable[..., torch.Tensor],
    calls: int = 4,
    *,
    dynamic: bool | None = None,
    given: Callable[[], Sequence[torch.Tensor]] = inputs,
) -> tuple[cb.Report, list[str]]:
    """What a run of a program shows that has nothing from an earlier one but torch's caches, and what was looked at."""
    looked: list[str] = []
    torch._dynamo.reset()
    model = checked(function, "inductor", dynamic=dynamic)

    def run() -> None:
        for _ in range(calls):
            model(*given()).sum().backward()

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((KernelCheck, "run"), (OperatorCheck, "_check_probe"), (GraphLowering, "run")):
            patch.setattr(owner, name, noting(looked, owner, name))
        report = gathered(run)
    return report, looked


def noting(looked: list[str], owner: type, name: str) -> Callable[..., Any]:
    method = getattr(owner, name)
    return lambda *args, **kwargs: (looked.append(f"{owner.__name__}.{name}"), method(*args, **kwargs))[1]


def test_what_comes_before_code_generation_is_the_same_in_each_call() -> None:
    with without_compile_caches():
        report, looked = next_run(program, 8)
    assert agreed(report)
    checks = [one for one in looked if one != "GraphLowering.run"]
    assert checks == ["KernelCheck.run", "OperatorCheck._check_probe", *["KernelCheck.run"] * 3]


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_next_run_of_a_program_lowers_nothing_and_checks_its_kernels(dynamic: bool | None) -> None:
    first, looked = next_run(program, dynamic=dynamic)
    assert agreed(first)
    assert looked.count("OperatorCheck._check_probe") == 1
    assert "GraphLowering.run" in looked
    second, looked = next_run(program, dynamic=dynamic)
    assert agreed(second)
    assert set(looked) == {"KernelCheck.run"}
    assert second.coverage.checked["operators"] > 8
    assert not second.coverage.skipped


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("calls", [1, 4])
def test_a_fault_that_comes_from_the_cache_is_found_in_each_run(calls: int) -> None:
    with planted(Fault("tanh", "pointwise", "lowering", in_half_precision)):
        wrong, _ = next_run(program, 1)
    again, looked = next_run(program, calls)
    assert "GraphLowering.run" not in looked[: looked.index("KernelCheck.run")]
    assert again.verdict is wrong.verdict is cb.Verdict.FAIL
    told = [[(one.kind, one.detail, one.subject, one.op) for one in report.findings] for report in (wrong, again)]
    assert told[0] == told[1]
    assert any(op == "torch.tanh" for *_, op in told[0])


@pytest.mark.usefixtures("empty_cache")
def test_what_is_rewritten_otherwise_is_looked_at_again() -> None:
    assert agreed(next_run(program)[0])
    with planted(Fault("tanh_backward", "pointwise", "decomposition", in_half_precision)):
        torch._dynamo.reset()
        with functorch_config.patch(enable_autograd_cache=False):
            report, looked = next_run(program, 1)
    assert "OperatorCheck._check_probe" in looked
    assert report.verdict is cb.Verdict.FAIL


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_front_of_which_nothing_is_seen_is_looked_at_again(value: float) -> None:
    def blank() -> list[torch.Tensor]:
        return [torch.full_like(one, value).requires_grad_() for one in inputs()]

    assert next_run(program, given=blank)[1].count("OperatorCheck._check_probe") == 2
    assert "OperatorCheck._check_probe" in next_run(program, 1)[1]


@pytest.mark.usefixtures("empty_cache")
def test_the_cached_code_of_another_program_is_not_taken_for_this_ones() -> None:
    """Torch's key is the graph of AOT autograd, so that programs whose lines have other names share an entry."""

    def before(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        h += w
        y = torch.sigmoid(h @ b)
        return y + v

    def after(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        h = h + w
        y = torch.sigmoid(h @ b)
        return y + v

    def wrong_add(right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = right(*args, **kwargs)
        return in_half_precision(lambda: made) if made.get_size()[-1] == 24 else made

    given = [torch.randn(size, dtype=torch.bfloat16) for size in ((16, 32), (16, 32), (32, 24), (16, 24))]
    with planted(Fault("add", "pointwise", "lowering", wrong_add)):
        for function in (before, after):
            model = checked(function, "inductor")
            report = gathered(lambda model=model: model(*given))  # type: ignore[misc]
            assert report.verdict is cb.Verdict.FAIL
            assert all("return y + v" in (finding.source or "") for finding in report.findings)


@pytest.mark.usefixtures("empty_cache")
def test_a_front_that_was_not_found_right_is_looked_at_in_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(check, "expose", raising(RuntimeError("no graph can be traced")))
        next_run(program)
    report, looked = next_run(program)
    assert looked.count("OperatorCheck._check_probe") == 1
    assert agreed(report)


def test_kernels_count_although_what_comes_before_them_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperatorCheck, "_check_probe", raising(RuntimeError("no graph can be traced")))
    report = cb.check(program, inputs(), compiler="inductor", localize=False)
    assert report.coverage.checked["operators"] > 8
    assert any("no graph can be traced" in skip.reason for skip in report.coverage.skipped)


@pytest.mark.parametrize("operator", ["tanh", "tanh_backward"])
def test_what_is_wrong_in_its_own_precision_alone_is_named(operator: str) -> None:
    """A kernel that is generated wrong, and a decomposition, of which right kernels are generated."""
    backward = operator.endswith("backward")
    fault = Fault(operator, "pointwise", "decomposition" if backward else "lowering", in_half_precision)
    with planted(fault), without_compile_caches():
        report = cb.check(program, inputs(), compiler="inductor", localize=False)
    own = ("logic.this_dtype", "precision.operator")
    finding = next(finding for finding in report.findings if finding.detail in own)
    assert (finding.op, finding.subject) == ("torch.tanh", "grad[x]" if backward else "output[0]")
    assert "torch.tanh(x @ w)" in (finding.source or "")
    assert ("by the kernel that ran" in report.to_text(verbose=True)) is not backward


def test_what_is_wrong_in_one_column_in_its_own_precision_alone_is_named() -> None:
    given = tuple(torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in ((64, 32), (32, 48)))
    assert cb.check(program, given, compiler="inductor", localize=False).verdict is cb.Verdict.PASS
    with planted(Fault("tanh", "pointwise", "lowering", tail_in_half_precision)), without_compile_caches():
        report = cb.check(program, given, compiler="inductor", localize=False)
    finding = next(finding for finding in report.findings if finding.detail in BY_ITSELF)
    assert finding.op == "torch.tanh"
    assert "the elements of a column have a factor of 1.06" in finding.message


def test_numbers_of_8_bits_hide_nothing_beside_them() -> None:
    def quantized(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return program(x, w), (x * 2).to(torch.float8_e4m3fn).to(torch.bfloat16)

    with planted(Fault("tanh", "pointwise", "lowering", in_half_precision)), without_compile_caches():
        report = cb.check(quantized, [one.detach() for one in inputs()], compiler="inductor", localize=False)
    assert any(finding.op == "torch.tanh" and finding.detail in BY_ITSELF for finding in report.findings)


def test_what_a_buffer_holds_is_known() -> None:
    found: list[GeneratedModule] = []
    graphs: list[torch.fx.GraphModule] = []

    def compile_(gm: torch.fx.GraphModule, given: Any) -> Any:
        graphs.append(torch.fx.GraphModule(gm, gm.graph))
        return torch._dynamo.lookup_backend("inductor")(gm, given)

    with generated_modules_noted(found), without_compile_caches():
        torch.compile(program, backend=compile_)(*inputs()).sum().backward()
    assert [module.kind for module in found] == ["forward", "backward"]
    for module in found:
        nodes = [node for held in module.held.values() for node in held if node is not None]
        assert len(nodes) >= 0.9 * len(module.held)
        assert {origin.name for node in nodes if (origin := origin_of(node, graphs[0])) is not None} & {"y", "tanh"}


def test_the_operator_is_found_with_nothing_compiled_to_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = raising(AssertionError("compiled with its inner tensors as results, or compared at a stage"))
    for name in ("probe_isolated", "rerun_failure"):
        monkeypatch.setattr(import_module("checked_backend.diagnose.localize.locate"), name, compiled)
    with planted("tanh"), without_compile_caches():
        location = located(lambda f: f(*inputs()), lambda x, w: torch.tanh(x @ w).exp().sum(1), "inductor")
    assert (location.stage, location.graph, location.op) == ("compiled", "forward", "aten.tanh.default")
    assert location.cut is not None


def test_what_one_kernel_fills_and_adds_to_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a gather is zeros to which the kernel adds: two writes to a buffer, of which the last is seen."""
    run, found = KernelCheck.run, []

    def noting(kernels: KernelCheck, *args: Any, **kwargs: Any) -> Any:
        found.extend(run(kernels, *args, **kwargs))
        return found

    monkeypatch.setattr(KernelCheck, "run", noting)
    x, _ = inputs()
    places = torch.randint(16, (12,))
    report = cb.check(lambda x: torch.tanh(x)[places].exp(), (x,), compiler="inductor", localize=False)
    assert report.verdict is cb.Verdict.PASS, report.to_text()
    added = {node for one in found for node in one.values if node.startswith("index_put")}
    assert added
    assert any(added <= one.checks.limits[False].keys() for one in found)


def filled_and_scattered(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Torch takes the fill for the scatter."""
    greatest = torch.full((8,), -1e4, dtype=x.dtype).scatter_reduce(0, places, x * 1.5, "amax")
    return (x * 1.5 - greatest[places]).exp()


def scaled_signal(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A kernel of its backward pass is called with a buffer whose store was left out."""
    x = x * scale.exp()
    target = (x * y).sum() / (x * x).sum() * x
    noise = y - target
    return 10 * torch.log10((target * target).sum() / (noise * noise).sum())


def test_a_buffer_holds_what_its_last_write_leaves() -> None:
    x, y = (torch.randn(16, 8, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    scale = torch.full((1,), 0.3, dtype=torch.bfloat16, requires_grad=True)
    scattered = (torch.randn(40, dtype=torch.bfloat16), torch.randint(8, (40,)))
    for program, tensors in ((filled_and_scattered, scattered), (scaled_signal, (x, y, scale))):
        report = cb.check(program, tensors, compiler="inductor", localize=False)
        assert report.verdict is cb.Verdict.PASS, report.to_text()


def test_what_an_operator_writes_without_saying_so_is_not_taken_for_what_another_computes() -> None:
    with library_of_lies() as library:
        shifted = define(library, "shifted(Tensor x) -> Tensor", lambda x: x.add_(1).clone(), torch.empty_like)

        def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.tanh(x @ w)
            return y, shifted(y) * 2

        report = cb.check(program, [one.detach() for one in inputs()], compiler="inductor", localize=False)
    assert report.verdict is cb.Verdict.PASS, report.to_text()


class Layers(nn.Module):
    """Draws random numbers, writes to its buffers, and repeats itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 32, 32) / 6)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weight:
            x = torch.tanh(nn.functional.dropout(x, 0.1) @ weight)
        return self.norm(x)


def report(room: float, monkeypatch: pytest.MonkeyPatch) -> tuple[cb.Report, list[int]]:
    """Check it in as much room, in bytes. Returns also what each run kept."""
    recorded, kept = KernelCheck._recorded, list[int]()

    def noting(kernels: KernelCheck, *args: Any, **kwargs: Any) -> Any:
        called = recorded(kernels, *args, **kwargs)
        kept.append(max(recording.kept for _, recording in called))
        return called

    torch._dynamo.reset()
    with monkeypatch.context() as patched, without_compile_caches():
        patched.setattr(KernelCheck, "_recorded", noting)
        patched.setattr(check, "LARGEST", room)
        module, x = Layers().bfloat16(), torch.randn(64, 32, dtype=torch.bfloat16)
        return cb.check(module, (x,), compiler="inductor", localize=False), kept


def test_kernels_are_checked_in_as_many_runs_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, once = report(1 << 30, monkeypatch)
    size = max(once)
    parts, kept = report(size / 2, monkeypatch)
    for one in (whole, parts):
        assert one.verdict is cb.Verdict.PASS, one.to_text()
        assert not [skip for skip in one.coverage.skipped if "operators" in skip.subject]
    assert len(kept) > len(once)
    assert max(kept) <= size / 2
    assert parts.coverage.checked["operators"] > 0.7 * whole.coverage.checked["operators"]  # without what is a view
    with planted(Fault("tanh", "pointwise", "lowering", in_half_precision)):
        found, _ = report(size / 2, monkeypatch)
    assert found.findings[0].op == "torch.tanh"


def test_what_there_is_no_room_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told, kept = report(4096, monkeypatch)
    assert max(kept) <= 4096
    reasons = [skip.reason for skip in told.coverage.skipped if skip.subject == "operators by themselves"]
    assert any("the tensors inside of the region take more than 3.8e-06 GiB" in reason for reason in reasons), reasons


def written_twice(x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Its result has a buffer of whose two values only the last is seen, and nothing reads it."""
    for _ in range(5):
        x = torch.sin((x @ w) * 8)
    y = torch.zeros_like(x).scatter_add(0, i, x)
    return y.index_put_((i[:, 0],), (y @ w).cos(), accumulate=True)


def larger(right: Any, self: Any, index: Any, source: Any, *rest: Any) -> Any:
    scaled = lowerings[torch.ops.aten.mul.Tensor](source, 1.05) if source.get_dtype() is torch.bfloat16 else source
    return right(self, index, scaled, *rest)


def test_a_result_whose_buffer_tells_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = (torch.randn(32, 32, dtype=torch.bfloat16) for _ in range(2))
    monkeypatch.setattr(check, "LARGEST", 18432)
    with without_compile_caches(), planted(Fault("index_put", "scatter", "lowering", larger)):
        report = cb.check(written_twice, (x, torch.randint(32, (32, 32)), w / 6), localize=False)
    assert [finding.op for finding in report.findings] == ["index_put_"]
