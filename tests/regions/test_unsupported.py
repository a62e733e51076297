"""What this machine cannot do is no finding; what a candidate does wrong stays a crash."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler, LoweringException

import checked_backend as cb
from checked_backend._torch.caches import fresh_compile_caches
from checked_backend.regions import unsupported
from checked_backend.regions.unsupported import MachineLimits, may_be_the_cache
from tests.support.raising import raising
from tests.support.region_tools import checked, same_bits

Raising = Callable[[], Exception]


def failed(output: str) -> CppCompileError:
    return CppCompileError(["g++", "x.cpp", "-I/no/space/left/on/device"], output)


LIMITS: list[tuple[Raising, str]] = [
    (lambda: OSError(errno.ENOSPC, "No space left on device"), "disk"),
    (lambda: OSError(errno.EDQUOT, "Disk quota exceeded"), "disk"),
    (lambda: OSError(errno.EMFILE, "Too many open files"), "files"),
    (lambda: BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "processes"),
    (lambda: RuntimeError("can't start new thread"), "processes"),
    (lambda: PermissionError(errno.EACCES, "Permission denied", "/tmp/torchinductor_me/ab/x.so"), "cache"),
    (InvalidCxxCompiler, "compiler"),
    (lambda: failed("cc1plus: out of memory allocating 65536 bytes"), "memory"),
    (lambda: failed("x.cpp: fatal error: error writing to /tmp/x.s: No space left on device"), "disk"),
]


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "free_memory", lambda: 2**40)
    monkeypatch.setattr(unsupported, "compile_trifle", lambda: None)


@pytest.mark.parametrize(("make", "what"), LIMITS)
@pytest.mark.usefixtures("roomy")
def test_limits_of_the_system(make: Raising, what: str) -> None:
    found = MachineLimits()(make())
    assert (found.kind, found.detail) == (cb.Kind.UNSUPPORTED, f"unsupported.{what}")
    wrapped = RuntimeError("the compiler failed")
    wrapped.__cause__ = make()
    assert MachineLimits()(wrapped).detail == found.detail


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("an internal assertion"),
        KeyError("stride"),
        failed("x.cpp:3: error: 'tmp4' was not declared in this scope"),
        failed("x.cpp:3: fatal error: own_header.h: No such file or directory"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "kernel.cpp"),
        MemoryError("no memory left"),
        torch.OutOfMemoryError("Tried to allocate 20.00 GiB"),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("roomy")
def test_where_everything_else_works_it_is_the_candidates_own(error: Exception) -> None:
    assert MachineLimits()(error) is None


@pytest.mark.parametrize(
    ("line", "name", "package"),
    [
        (
            "/tmp/a.h:31:10: fatal error: Python.h: No such file or directory",
            "Python.h",
            "-dev; Fedora: dnf install py",
        ),
        ("a.cpp:1:10: fatal error: 'omp.h' file not found", "omp.h", "libomp-dev"),
        ("/usr/bin/ld: cannot find -lgomp: No such file or directory", "-lgomp", "libomp-dev"),
        ("ld: library not found for -lpython3.11", "-lpython3.11", "headers of this Python"),
        ("a.cpp:1:10: fatal error: cstdint: No such file or directory", "cstdint", "build-essential"),
    ],
)
def test_a_file_that_the_compiler_does_not_find_is_named_with_what_brings_it(
    line: str, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = failed(f"In file included from x:\n{line}\n   31 | #include <x>\ncompilation terminated.")
    monkeypatch.setattr(unsupported, "compile_trifle", raising(error))
    found = MachineLimits()(failed("anything"))
    assert found.detail == "unsupported.headers"
    assert f"does not find {name}. " in found.message
    assert package in found.message
    assert found.actual == line
    assert ("belong in " in found.message) == ("ython" in name)


def test_where_the_least_program_fails_too_it_is_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "compile_trifle", raising(failed("garbage")))
    found = MachineLimits()(failed("anything"))
    assert found.detail == "unsupported.compiler"
    assert "compiles nothing here" in found.message


def test_a_lowering_that_raises_is_not_laid_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "nothing_compiles", raising(AssertionError("nothing was compiled before")))
    assert MachineLimits(inductor=True)(LoweringException(NotImplementedError(), "aten.relu", [], {})) is None
    with pytest.raises(AssertionError):
        MachineLimits(inductor=True)(RuntimeError())


def request(size: int) -> RuntimeError:
    return RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes.")


def test_memory_is_short_or_the_candidate_asks_for_far_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "free_memory", lambda: 2**30)
    needed = 2**29
    for error in (MemoryError(), request(2**30), OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert MachineLimits(lambda: needed)(error).detail == "unsupported.memory"
    assert MachineLimits(lambda: needed)(request(2**50)) is None


@pytest.mark.parametrize("error", [ImportError("x.so: file too short"), EOFError(), failed("truncated")], ids=repr)
def test_what_a_broken_cache_may_raise(error: Exception) -> None:
    wrapped = RuntimeError("backend raised")
    wrapped.__cause__ = error
    assert may_be_the_cache(wrapped)
    assert not may_be_the_cache(InvalidCxxCompiler())
    assert not may_be_the_cache(RuntimeError("an internal assertion"))


@pytest.mark.parametrize("kept", [False, True])
def test_an_empty_cache_lasts_for_its_block_or_for_the_process(kept: bool) -> None:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with fresh_compile_caches(kept=kept):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert not list(folder.iterdir())
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
    assert folder.exists() is kept
    with suppress(ZeroDivisionError), fresh_compile_caches(kept=True):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        print(1 / 0)
    assert not folder.exists()


# through numcheck


def net(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


class Failing:
    """A compiler whose forward or backward graphs fail some times before they work."""

    def __init__(self, error: Raising, times: int, when: str) -> None:
        self.left, self.error, self.when = times, error, when

    def fails(self, when: str) -> None:
        if when == self.when and self.left:
            self.left -= 1
            raise self.error()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def forward(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
            self.fails("compiling")
            running = self.when == "running" and self.left
            self.left -= bool(running)

            def run(*args: Any) -> Any:
                if running:
                    raise self.error()
                return graph(*args)

            return make_boxed_func(run)

        def backward(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
            self.fails("compiling backward")

            def run(*args: Any) -> Any:
                self.fails("backward")
                return graph(*args)

            return make_boxed_func(run)

        return aot_autograd(fw_compiler=forward, bw_compiler=backward)(gm, example_inputs)


def ran(compiler: Any, folder: Path, calls: int = 1, dynamic: bool | None = None) -> cb.Report:
    torch._dynamo.reset()
    with cb.collect() as session:
        compiled = checked(net, compiler, dynamic=dynamic, report_dir=folder)
        for size in range(3, 3 + calls):
            x = torch.randn(size, requires_grad=True)
            out = compiled(x)
            assert same_bits(out, net(x))
            out.sum().backward()
            assert torch.equal(x.grad, torch.autograd.grad(net(x).sum(), x)[0])
    return session.report


def cut_off() -> Exception:
    return ImportError("/tmp/cache/x.so: file too short")


@pytest.mark.parametrize(
    ("when", "dynamic", "times"),
    # that of dynamic shapes is first compiled with the forward graph, where nobody is told if it fails
    [
        ("compiling", False, 1),
        ("compiling", True, 1),
        ("compiling backward", False, 1),
        ("compiling backward", True, 2),
    ],
)
def test_a_broken_cache_is_tried_again_with_a_fresh_one(when: str, dynamic: bool, times: int, tmp_path: Path) -> None:
    report = ran(Failing(cut_off, times, when), tmp_path, dynamic=dynamic)
    assert report.verdict is cb.Verdict.PASS
    assert any("file too short" in note and "TORCHINDUCTOR_CACHE_DIR" in note for note in report.coverage.notes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["compiling", "running", "backward"])
def test_where_a_fresh_cache_does_not_help_it_is_a_crash(when: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unsupported, "compile_trifle", lambda: None)
        report = ran(Failing(cut_off, 99, when), tmp_path, dynamic=False)
    assert report.verdict is cb.Verdict.FAIL
    assert [finding.detail for finding in report.findings] == [f"crash.{when}"]


@pytest.mark.parametrize("when", ["compiling", "running", "backward"])
def test_what_is_missing_here_is_inconclusive_and_the_program_goes_on(
    when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = ran(Failing(LIMITS[0][0], 99, when), tmp_path, dynamic=False)
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert [finding.detail for finding in report.findings] == ["unsupported.disk"]
    assert "Free some room" in str(report)
    assert "numcheck cannot judge this program" in caplog.text
    assert len(list(tmp_path.iterdir())) == 1  # the report


def test_nothing_raises_for_it_and_every_session_is_told(tmp_path: Path) -> None:
    options: dict[str, Any] = {"compiler": Failing(InvalidCxxCompiler, 99, "compiling"), "report_dir": tmp_path}
    compiled = torch.compile(net, backend="numcheck", options=options)
    verdicts = []
    for _ in range(2):
        with cb.collect() as session:
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
        verdicts.append((session.report.verdict, [finding.detail for finding in session.report.findings]))
    assert verdicts == [(cb.Verdict.INCONCLUSIVE, ["unsupported.compiler"])] * 2


@pytest.mark.parametrize("make", [InvalidCxxCompiler, LIMITS[0][0]])
@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.forks)])
def test_check_is_inconclusive_too(make: Raising, isolate: bool) -> None:
    report = cb.check(net, (torch.ones(3),), compiler=Failing(make, 99, "compiling"), isolate=isolate)
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert {finding.kind for finding in report.findings} == {cb.Kind.UNSUPPORTED}
