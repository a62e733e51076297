"""A compiled program that leaves a setting of the process other than eager does is found, and the setting set back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend._torch.settings import set_backend_flag
from checked_backend.regions.process_state import ProcessState
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered

HELD: list[object] = []  # the mode lasts as long as its guard
CHANGES: dict[str, Callable[[], object]] = {
    "grad_mode": lambda: torch.set_grad_enabled(False),
    "inference_mode": lambda: HELD.append(torch.autograd.grad_mode._enter_inference_mode(True)),
    "autocast.cpu": lambda: torch.autocast("cpu").__enter__(),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "default_device": lambda: torch.set_default_device("meta"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "flush_denormal": lambda: torch.set_flush_denormal(True),
    "float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "fp32_precision.mkldnn.conv": lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
    "cudnn.benchmark": lambda: set_backend_flag("cudnn", "benchmark", True),
    "mkldnn.enabled": lambda: set_backend_flag("mkldnn", "enabled", False),
    "sdp.math": lambda: torch.backends.cuda.enable_math_sdp(False),
}


@pytest.fixture
def state() -> ProcessState:
    return ProcessState.capture()


def program(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin()


def ran(function: Callable[..., Any] = program, times: int = 1) -> None:
    for _ in range(times):
        function(torch.randn(3, requires_grad=True)).sum().backward()


def test_a_backend_flag_is_set_back_where_test_suites_have_forbidden_to_set_it(
    state: ProcessState, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHANGES["cudnn.benchmark"]()
    CHANGES["mkldnn.enabled"]()
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(RuntimeError, match="not allowed to set"):
        torch.backends.cudnn.benchmark = False
    state.restore()
    assert state.changed(ProcessState.capture()) == ()


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *((name, "running") for name in CHANGES),
        *((name, "raising") for name in ("grad_mode", "num_threads")),
        *((name, "backward") for name in ("default_dtype", "deterministic", "num_threads", "flush_denormal")),
        *((name, "compiling") for name in ("num_threads", "flush_denormal")),
    ],
)
def test_a_setting_that_is_left_changed_is_found_and_set_back(name: str, when: Any, state: ProcessState) -> None:
    report = gathered(lambda: ran(checked(program, faults.leaves_setting(CHANGES[name], when)), times=2))
    crashed = {("crash.running", "candidate")} if when == "raising" else set()
    assert found(report) == {(f"mutation.{name.partition('.')[0]}", f"state[{name}]")} | crashed
    assert state.changed(ProcessState.capture()) == ()
    (finding,) = [finding for finding in report.findings if finding.subject.startswith("state")]
    assert finding.evidence["before_call"] == finding.expected != finding.actual
    where = {"backward": ", in its backward pass", "compiling": ", while it is compiled"}.get(when, "")
    assert f"the compiled program changes the setting {name}{where}, and eager leaves it as it was" in finding.message
    if not where:
        assert finding.evidence["seen_in_calls"] == 2
    assert "set it again after the compiled function" in " ".join(str(report).split())


def test_by_default_the_call_raises_with_the_setting_set_back(state: ProcessState) -> None:
    wrong = faults.leaves_setting(CHANGES["grad_mode"])
    compiled = checked(program, wrong, on_divergence="raise")
    with pytest.raises(cb.DivergenceError, match="grad_mode"):
        ran(compiled)
    assert torch.is_grad_enabled()
    fell_back = checked(program, wrong, on_divergence="fallback")
    assert len(gathered(lambda: ran(fell_back, times=3)).findings) == 1


def sets_grad_mode(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.set_grad_enabled(False)
    return y + x


def sets_more(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    return x * torch.ones(3)


def sets_threads(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    CHANGES["num_threads"]()
    return y * 2


def inside(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu"):
        y = x[None] @ x[:, None]
    with torch.inference_mode(False), torch.backends.cudnn.flags(benchmark=True):
        return x * y.sum()


@faults.runs
def forgets_grad_mode(forward: Callable[..., Any], *args: Any) -> Any:
    """AOT autograd of torch 2.11 does so."""
    before = torch.is_grad_enabled()
    outputs = forward(*args)
    torch.set_grad_enabled(before)
    return outputs


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_grad_mode_that_the_compiled_program_does_not_set_is_found(state: ProcessState) -> None:
    x = torch.randn(3, requires_grad=True)
    compiled = checked(sets_grad_mode, forgets_grad_mode)
    (finding,) = gathered(lambda: compiled(x)).findings
    assert (finding.detail, finding.expected, finding.actual) == ("mutation.grad_mode", "False", "True")
    assert "leaves the setting grad_mode as it was, and eager leaves another" in finding.message
    assert not torch.is_grad_enabled()
    state.restore()

    def raises(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x + torch.ones(4)

    with pytest.raises(Exception, match=r"size|shape"):
        checked(raises, "eager")(x)
    assert torch.is_grad_enabled()


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("function", "compiler"),
    [
        (sets_grad_mode, "eager"),
        (sets_grad_mode, "aot_eager"),
        (sets_more, "aot_eager"),
        (sets_threads, "eager"),
        (inside, "aot_eager"),
    ],
)
def test_a_program_that_sets_modes_itself_is_not_reported(
    function: Callable[..., Any], compiler: str, state: ProcessState
) -> None:
    if torch.__version__.startswith("2.11.") and (function, compiler) == (sets_grad_mode, "aot_eager"):
        pytest.skip("AOT autograd of torch 2.11 leaves gradients on where eager leaves them off: a mistake, reported")
    x = torch.randn(3, requires_grad=True)
    function(x)
    in_eager = state.changed(ProcessState.capture())
    state.restore()
    report = gathered(lambda: checked(function, compiler)(x))
    assert report.findings == ()
    if function is not inside:  # of which Dynamo leaves a part in Python
        agreed(report)
    assert state.changed(ProcessState.capture()) == in_eager
    state.restore()
    for iterations in (1, 3):
        report = cb.check(function, (x,), compiler=compiler, iterations=iterations)
        assert report.findings == ()
        assert state.changed(ProcessState.capture()) == ()


def test_check_finds_what_only_the_compiled_program_sets(state: ProcessState) -> None:
    def sets_one(x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float16 if torch.compiler.is_compiling() else torch.float64)
        return x * 2

    def forgets(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            torch.set_grad_enabled(False)
        return x + 1

    (finding,) = cb.check(sets_one, (torch.randn(3),), compiler="eager").findings
    assert finding.detail == "mutation.default_dtype"
    assert (finding.expected, finding.actual) == ("torch.float64", "torch.float16")
    assert (finding.evidence["before_call"], finding.stage) == ("torch.float32", "eager")
    assert "eager leaves another" in finding.message
    assert found(cb.check(forgets, (torch.randn(3),), compiler="eager")) == {("mutation.grad_mode", "state[grad_mode]")}
    assert state.changed(ProcessState.capture()) == ()


def test_wrong_values_and_a_wrong_setting_are_both_told() -> None:
    def spoiled(x: torch.Tensor) -> torch.Tensor:
        return x * (3 if torch.compiler.is_compiling() else 2)

    report = cb.check(spoiled, (torch.randn(3),), compiler=faults.leaves_setting(CHANGES["num_threads"]))
    assert {subject for _, subject in found(report)} == {"state[num_threads]", "output[0]"}


@pytest.mark.parametrize("name", ["grad_mode", "num_threads"])
@pytest.mark.parametrize("when", ["running", "backward"])
def test_check_finds_what_the_compiled_program_leaves(name: str, when: Any, state: ProcessState) -> None:
    x = torch.randn(3, requires_grad=True)
    report = cb.check(program, (x,), compiler=faults.leaves_setting(CHANGES[name], when), iterations=2)
    expected = set() if (name, when) == ("grad_mode", "backward") else {(f"mutation.{name}", f"state[{name}]")}
    assert found(report) == expected  # the autograd engine itself sets grad mode back
    assert state.changed(ProcessState.capture()) == ()
