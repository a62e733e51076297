"""Every way in which a program has something compiled: checked, or told; and the program runs as it does alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.pytest_plugin.watch import Watch
from tests.support.faults import wrong_value

wrong = wrong_value()


def f(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@pytest.fixture
def watch() -> Iterator[Watch]:
    with closing(Watch()) as made:
        made.check_everything("eager")
        yield made


def forced() -> torch.Tensor:
    compiled = torch.compile(f, backend="eager")
    with torch.compiler.set_stance("default", force_backend=wrong):
        return compiled(torch.ones(3))


def by_default() -> torch.Tensor:
    torch.compiler.set_default_backend(wrong)
    try:
        return torch.compile(f)(torch.ones(3))
    finally:
        torch.compiler.set_default_backend(None)


def by_default_as_a_decorator() -> torch.Tensor:
    torch.compiler.set_default_backend(wrong)
    try:
        decorator = torch.compile(dynamic=False)
    finally:
        torch.compiler.set_default_backend(None)
    return decorator(f)(torch.ones(3))


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return f(x)


def in_a_module() -> torch.Tensor:
    net = Net()
    net.compile(backend=wrong)
    return net(torch.ones(3))


@pytest.mark.parametrize(
    "way",
    [
        lambda: torch._dynamo.optimize(wrong)(f)(torch.ones(3)),
        lambda: torch._dynamo.optimize(wrong, nopython=True)(f)(torch.ones(3)),
        *(forced, by_default, by_default_as_a_decorator, in_a_module),
    ],
)
def test_every_way_to_name_a_backend_is_checked(way: Callable[[], torch.Tensor], watch: Watch) -> None:
    if way in (by_default, by_default_as_a_decorator) and not hasattr(torch.compiler, "set_default_backend"):
        pytest.skip("torch has no default backend to set before 2.13")
    with watch.test(None) as check:
        checked = way()
    assert check.verdict is cb.Verdict.FAIL
    watch.close()
    torch._dynamo.reset()
    assert torch.equal(checked, way())
    assert not torch.equal(checked, f(torch.ones(3)))


def test_what_a_stance_compiles_at_first_is_checked_too(watch: Watch) -> None:
    compiled = torch.compile(f, backend=wrong)
    with watch.test(None) as check, torch.compiler.set_stance("aot_eager_then_compile"):
        first = compiled(torch.ones(3))  # torch has its own AOT eager compile this one
        assert len(check.session.report.coverage.regions) == 1
        assert check.verdict is cb.Verdict.PASS
        compiled(torch.ones(4))
    assert torch.equal(first, f(torch.ones(3)))
    assert check.verdict is cb.Verdict.FAIL


def test_what_torch_hands_to_dynamo_itself_is_left_alone(watch: Watch) -> None:
    with watch.test(None) as check:
        torch.export.export(Net(), (torch.ones(3),))
        torch._dynamo.explain(f)(torch.ones(3))
    assert not check.compiled
    assert check.verdict is None


def test_a_check_inside_of_a_checked_program_compares_with_eager_and_not_with_a_check(watch: Watch) -> None:
    inner = torch.compile(f, backend=wrong)
    with watch.test(None):
        assert cb.check(lambda x: inner(x) * 2, (torch.ones(3),), compiler="eager").verdict is cb.Verdict.PASS


def test_the_look_up_of_backends_is_put_back() -> None:
    before, made = torch._dynamo.eval_frame.get_compiler_fn, Watch()
    made.check_everything("eager")
    assert torch._dynamo.eval_frame.get_compiler_fn is not before
    made.close()
    assert torch._dynamo.eval_frame.get_compiler_fn is before


class Kept(torch._dynamo.aot_compile_types.SerializableCallable):  # what aot_compile wants of a backend
    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    @classmethod
    def serialize_compile_artifacts(cls, _function: Any) -> bytes:
        return b""

    @classmethod
    def deserialize_compile_artifacts(cls, _data: bytes) -> Any:
        raise NotImplementedError

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)


def kept(gm: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Kept:
    return Kept(gm.forward)


def test_what_is_compiled_ahead_of_time_works_and_is_told(watch: Watch) -> None:
    with watch.test(None) as check, torch._dynamo.config.patch(enable_aot_compile=True):  # off by default in 2.11
        ahead = torch.compile(f, fullgraph=True, backend=kept).aot_compile(((torch.ones(3),), {}))
        assert torch.equal(ahead(torch.ones(3)), f(torch.ones(3)))
    assert check.verdict is cb.Verdict.INCONCLUSIVE
    assert "f: compiled ahead of time (aot_compile), which is not checked" in " ".join(check.text.split())


def test_a_module_that_is_compiled_ahead_of_time_works_and_is_told(watch: Watch) -> None:
    module, x = torch.nn.Linear(3, 2), torch.ones(1, 3)
    wanted = torch._dynamo.aot_compile.ModelInput((x,), {}, [])
    with watch.test(None) as check, torch._dynamo.config.patch(enable_aot_compile=True):
        ahead: Any = torch.compile(module, fullgraph=True, backend=kept)
        ahead._aot_compile([wanted])
        assert torch.equal(ahead(x), module(x))
    assert type(ahead.forward) is torch._dynamo.aot_compile.AOTCompiledModel
    assert check.verdict is cb.Verdict.INCONCLUSIVE
    assert "Linear: compiled ahead of time (aot_compile), which is not checked" in " ".join(check.text.split())


def test_a_package_of_inductor_as_a_backend_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **kwargs: given.append(kwargs) if model is f else None)
    with closing(Watch()) as watch:
        watch.check_everything("inductor")
        torch.compile(f, options={"use_aoti": True, "max_autotune": False}, dynamic=False)
    options = given[0]["backend"]._options
    assert isinstance(options["compiler"], torch._TorchCompileAOTInductorWrapper)
    assert options["compiler"].config["max_autotune"] is False
    assert options["compiler_options"] == {}
