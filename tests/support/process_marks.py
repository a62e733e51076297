"""What the default run leaves out: tests marked ``process`` or ``more``, and the guard that no test lacks ``process``.

A test that starts a process, or compiles with Inductor, takes seconds where others take milliseconds. What took half
a second or longer when it was last recorded (`tests.durations`) is ``more``, and so are the cases of a test marked
``sampled(n)`` after the first n. The default run has of both only what is also ``smoke``, as those first cases.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import pytest

KINDS = ("default", "process", "more", "slow")
"""What the default run has; what it leaves out because it starts processes, or says little more; CI's sample."""

IMPLYING = ("inductor", "forks")
"""Marks whose tests have the mark ``process``, too."""

HARMLESS = {
    r"\S*(g|c|clang)\+\+ --version": "a report names the C++ compiler",
    r"uname -p": "a report names the platform",
}
"""Commands that any test may start, and why: they take milliseconds, or come once."""

_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
_COMPILER = "torch._inductor.compile_fx"

_started: list[str] = []
"""What the test of this moment started, in words."""
_by_fixture: dict[pytest.FixtureDef[Any], str] = {}
"""What was started by a fixture of more than one test: each test that asks for it needs the mark."""
_left_out: Counter[str] = Counter()


# marks


def kind_of(item: pytest.Item) -> str:
    """Which run has this test, of `KINDS`."""
    marks = {mark.name for mark in item.iter_markers()}
    if "slow" in marks:
        return "slow"
    return next((kind for kind in ("process", "more") if kind in marks and "smoke" not in marks), "default")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marks that other marks imply, before tests are chosen by their marks."""
    cases: Counter[str] = Counter()
    for item in items:
        if any(item.get_closest_marker(mark) for mark in IMPLYING):
            item.add_marker("process")
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > sampled.args[0]:
                item.add_marker("more")
            elif item.get_closest_marker("process") is None:
                item.add_marker("smoke")


# the guard


def pytest_configure() -> None:
    """Watch what this process starts from now on; nothing can end that."""
    owner, starts = os.getpid(), _STARTS  # a module's own names are gone when the interpreter ends

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in starts and os.getpid() == owner:
            _started.extend(in_words(event, args))

    sys.addaudithook(watch)
    BaseProcess.start = _counted(
        BaseProcess.start, "starts a process of multiprocessing"
    )  # spawned ones have no audit event
    if _COMPILER in sys.modules:
        _count_compiles(sys.modules[_COMPILER])
    else:
        sys.meta_path.insert(0, _WhenInductorIsImported())


def in_words(event: str, args: tuple[Any, ...]) -> Iterator[str]:
    """What an audit event says was started; nothing where it is harmless."""
    if event in ("os.fork", "os.forkpty"):
        yield "forks"
        return
    words = args[0] if event == "os.system" else args[1]
    command = os.fsdecode(words) if isinstance(words, str | bytes) else " ".join(map(os.fsdecode, words))
    if not any(re.fullmatch(harmless, command, re.DOTALL) for harmless in HARMLESS):
        yield f"starts `{' '.join(command.split())[:60]}`"


class _WhenInductorIsImported(MetaPathFinder):
    """Inductor is slow to import, and few tests need it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def then_count(module: ModuleType) -> None:
            execute(module)
            _count_compiles(module)

        spec.loader.exec_module = then_count
        return spec


def _count_compiles(compile_fx: Any) -> None:
    """Each compile calls the first of two functions; the second is called also where a cache has the result."""
    graph, what = compile_fx.CompiledFxGraph, "compiles with Inductor"
    compile_fx._compile_fx_inner = _counted(compile_fx._compile_fx_inner, what)
    graph.post_compile = _counted(graph.post_compile, what)


def _counted(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _started.append(what)
        return function(*args, **kwargs)

    return counted


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    before = len(_started)
    result = yield
    _by_fixture.pop(fixturedef, None)
    if fixturedef.scope != "function" and len(_started) > before:
        _by_fixture[fixturedef] = _started[before]
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Iterator[None]:
    _started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield
    fixtures = [one for same_name in item._fixtureinfo.name2fixturedefs.values() for one in same_name]
    _check(item, [*_started, *(_by_fixture[one] for one in fixtures if one in _by_fixture)])
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    _started.clear()
    result = yield
    _check(item, _started)
    return result


def _check(item: pytest.Item, started: Sequence[str]) -> None:
    if started and not any(map(item.get_closest_marker, ("process", "slow"))):
        what = ", ".join(sorted(set(started))[:3])
        pytest.fail(
            f"this test {what}, and is not marked `process`. Mark it with pytest.mark.process: the default run leaves "
            "such tests out, and CI runs them. Add pytest.mark.smoke if the default run needs it.",
            pytrace=False,
        )


# what the default run left out


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    _left_out.update(kind for kind in map(kind_of, items) if kind != "default")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker of pytest-xdist left out the same tests."""
    if not _left_out:
        _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the default run left out; where tests were chosen in another way, pytest's own line is enough."""
    if _left_out and config.option.markexpr in config.getini("addopts") and not config.option.keyword:
        terminalreporter.write_line(
            f"left out: {_left_out['process']:,} tests that start processes or compile with Inductor, "
            f'{_left_out["more"]:,} more cases (these, too: pytest -m "not slow"), {_left_out["slow"]:,} slow tests; '
            'everything: pytest -m ""'
        )
