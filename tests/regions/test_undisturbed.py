"""A checked run leaves everything as an unchecked one does: results to the bit, and all state around it."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered, same_bits, training_state


def convolutional() -> nn.Module:
    """A net with running statistics and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(6 * 36, 4)
    )


WRONG = faults.scaled_gradient("0.weight", "aot", factor=3.0)


def trained(
    model: nn.Module, function: Callable[..., Any], optimizer: type[torch.optim.Optimizer], steps: int = 5
) -> list[torch.Tensor]:
    torch.manual_seed(5)
    stepper = optimizer(model.parameters(), lr=0.05)
    outputs = []
    for _ in range(steps):
        stepper.zero_grad()
        out = function(torch.randn(4, 3, 8, 8))
        torch.nn.functional.cross_entropy(out, torch.randint(0, 4, (4,))).backward()
        stepper.step()
        outputs.append(out.detach())
    return [*outputs, *training_state(model)]


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({"compiler": "eager"}, torch.optim.SGD),
        ({"compiler": "aot_eager"}, torch.optim.Adam),
        ({"compiler": "aot_eager", "reference": "recompute"}, torch.optim.SGD),
        ({"compiler": "aot_eager", "every": 2}, torch.optim.Adam),
        pytest.param({"compiler": "inductor"}, torch.optim.Adam, marks=pytest.mark.inductor),
        # wrong, and its results are handed out, with all the controls run in between
        ({"compiler": WRONG, "on_divergence": "record"}, torch.optim.SGD),
    ],
)
def test_training_is_bit_identical_to_the_unchecked_run(
    options: dict[str, Any], optimizer: type[torch.optim.Optimizer]
) -> None:
    model = convolutional()
    twin = copy.deepcopy(model)
    own = {"options": {"fallback_random": True}} if options["compiler"] == "inductor" else {}
    unchecked = trained(model, torch.compile(model, backend=options["compiler"], **own), optimizer)
    torch._dynamo.reset()
    with cb.collect() as session:
        actual = trained(twin, checked(twin, **{"on_divergence": "raise", **options}), optimizer)
    assert same_bits(actual, unchecked)
    assert session.report.verdict is (cb.Verdict.FAIL if options["compiler"] is WRONG else cb.Verdict.PASS)
    [region] = session.report.coverage.regions
    assert region.checked_backwards == (3 if options.get("every") == 2 else 5)


def surroundings() -> dict[str, Any]:
    return {
        "rng": torch.get_rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "warnings": list(warnings.filters),
        "threads": torch.get_num_threads(),
        "dynamo": torch._dynamo.config.save_config(),
        "anomaly": torch.is_anomaly_enabled(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
    }


@contextlib.contextmanager
def unusual() -> Any:
    """Every setting other than torch's default, so that a reset to the default shows."""
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    with torch.autocast("cpu", torch.bfloat16, enabled=False, cache_enabled=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a filter of the user's own")
        yield


PLANTED = {
    "nothing wrong": "aot_eager",
    "value": faults.one_element(0),
    "value, compiled": faults.one_element(0, "aot"),
    "mutation": faults.wrong_mutation("1.running_mean"),
    "gradient": faults.scaled_gradient("0.weight", "aot"),
    "gradient, in torch's own nodes": faults.scaled_gradient("0.weight"),
    "crash": faults.crash_when_running(),
    "crash when compiling": faults.crash_when_compiling("aot"),
    "outputs": faults.missing_output(),
}


@pytest.mark.parametrize(
    ("name", "on_divergence"), [(name, ("raise", "record")[number % 2]) for number, name in enumerate(PLANTED)]
)
def test_state_around_is_as_before(name: str, on_divergence: str) -> None:
    """Also after a `DivergenceError` in forward or in backward."""

    def step(function: Callable[..., Any], x: torch.Tensor) -> bool:
        try:
            function(x).square().sum().backward()
        except cb.DivergenceError:
            return True
        return False

    model = convolutional()
    x = torch.randn(4, 3, 8, 8)
    with unusual():
        compiled = checked(model, PLANTED[name], on_divergence=on_divergence)
        step(compiled, x)  # what the first compilation of all loads and sets is torch's own business
        model.zero_grad()
        before = surroundings()
        raised = step(compiled, x)
        after = surroundings()
        assert raised == (on_divergence == "raise" and name != "nothing wrong")
        assert after.pop("rng") != before.pop("rng") or raised  # dropout draws
        assert after == before


def test_random_state_after_an_error_in_forward_is_what_the_candidate_left() -> None:
    model = convolutional()
    compiled = checked(model, faults.one_element(0), on_divergence="raise")
    x = torch.randn(4, 3, 8, 8)
    states = []
    for function in (compiled, model):
        torch.manual_seed(11)
        with contextlib.suppress(cb.DivergenceError):
            function(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_gradients_accumulate_as_unchecked(compiler: str) -> None:
    """`.grad` is neither cleared nor replaced nor added to twice."""
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    results = []
    for function in (torch.compile(model, backend=compiler), checked(model, compiler)):
        torch._dynamo.reset()
        model.weight.grad, model.bias.grad = torch.ones(2, 3), None
        kept = model.weight.grad
        for _ in range(2):
            function(x).square().sum().backward()
        assert model.weight.grad is kept
        results.append([model.weight.grad, model.bias.grad])
    assert same_bits(results[0], results[1])
    assert x.grad is None


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", faults.scaled_gradient("weight", "aot")])
@pytest.mark.parametrize("reference", ["keep", "recompute"])
def test_users_hooks_are_called_as_often_as_unchecked(compiler: Any, reference: str) -> None:
    calls: list[str] = []
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda _gradient: calls.append("tensor"))
    model.bias.register_post_accumulate_grad_hook(lambda _parameter: calls.append("accumulated"))
    counted = []
    for function in (torch.compile(model, backend=compiler), checked(model, compiler, reference=reference)):
        torch._dynamo.reset()
        first = torch.randn(4, 3, requires_grad=True)
        calls.clear()
        for _ in range(2):
            x = first * 2
            x.register_hook(lambda _gradient: calls.append("input"))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                y = function(x)
            y.register_hook(lambda _gradient: calls.append("output"))
            y.square().sum().backward()
        counted.append(sorted(calls))
    assert counted == [sorted(["tensor", "accumulated", "input", "output"] * 2)] * 2


@pytest.mark.parametrize("compiler", ["aot_eager", faults.scaled_gradient("x", "aot")])
@pytest.mark.parametrize("hook", [lambda a, b: (a * 3, b), lambda a, b: (b, a), lambda a, b: (None, b)])
def test_a_hook_before_the_backward_pass_may_give_it_other_gradients(compiler: Any, hook: Any) -> None:
    function = checked(lambda x: (x.sin() * 2, x.exp()), compiler)
    x = torch.randn(4, requires_grad=True)
    with cb.collect() as session:
        one, other = function(x)
        one.grad_fn.register_prehook(lambda gradients: hook(*gradients))
        (one.sum() + other.square().sum()).backward()
    assert found(session.report) == (set() if compiler == "aot_eager" else {("logic", "grad[x]")})
    assert session.report.coverage.checked["gradients"] == 1


def test_the_users_tensors_die_when_they_would() -> None:
    class Trainer:
        def train(self, function: Any) -> list[weakref.ref[torch.Tensor]]:
            x, unrelated = torch.randn(4, requires_grad=True), torch.zeros(3)
            function(x).sum().backward()
            references = [weakref.ref(x), weakref.ref(unrelated)]
            del x, unrelated
            gc.collect()
            assert [reference() for reference in references] == [None, None]
            mine = locals()
            function(torch.randn(5))  # compiles again
            assert mine["references"] is references
            return references

    assert Trainer().train(checked(lambda x: x.sin(), "aot_eager", dynamic=False))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_module_hooks_are_called_as_often_as_unchecked() -> None:
    counted = []
    for make in (lambda model: torch.compile(model, backend="eager"), lambda model: checked(model, "eager")):
        torch._dynamo.reset()
        calls: list[str] = []
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        model.register_forward_hook(lambda *_, calls=calls: calls.append("forward"))
        model.register_full_backward_hook(lambda *_, calls=calls: calls.append("backward"))
        function = make(model)
        for _ in range(2):
            function(torch.randn(4, 3, requires_grad=True)).sum().backward()
        counted.append(calls)
    assert counted[1] == counted[0] != []


def test_users_inputs_are_as_the_candidate_leaves_them() -> None:
    """The versions that autograd counts too: one write is one write."""

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    seen = []
    for function in (torch.compile(run, backend="eager"), checked(run, "eager")):
        torch._dynamo.reset()
        x, y = torch.ones(3), torch.ones(3)
        for _ in range(2):
            function(x, y)
        seen.append((x.tolist(), x._version, y.tolist(), y._version))
    assert seen[0] == seen[1] == ([3.0] * 3, 2, [1.0] * 3, 0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_transforms_that_a_region_enters_are_left() -> None:
    """Forward-mode AD on fake tensors raises; what was entered until then would make all later transforms fail."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.func.hessian(lambda y: (y.sin() * y.sum()).sum())(x)

    x = torch.randn(4)
    expected = run(x)
    assert agreed(gathered(lambda: checked(run, faults.clean())(x)))
    assert torch.equal(run(x), expected)
    assert torch.autograd.forward_ad._current_level == -1


@pytest.mark.parametrize("backend", ["numcheck", "graph_dumper", "debug_interpreter"])
def test_the_storage_of_inputs_and_results_can_still_be_resized(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP frees its parameters so."""
    for name, value in (("DUMP", str(tmp_path)), ("DUMP_VALUES", "1"), ("COMPILER", "aot_eager")):
        monkeypatch.setenv(f"CHECKED_BACKEND_{name}", value)
    compiled = torch.compile(lambda x: x * 2, backend=backend)
    x = torch.randn(50)
    for tensor in (x, compiled(x)):
        tensor.untyped_storage().resize_(0)
