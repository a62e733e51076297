"""The pytest plugin: ``--numcheck``, the marker ``numcheck`` and the fixture ``numcheck``.

pytest imports this module in every run where the package is installed, so it imports no torch. `watch` needs torch
and is loaded when the option, the marker or the fixture is used.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

from checked_backend.errors import DivergenceError, OptionError
from checked_backend.pytest_plugin.summary import FOLDER, REPORT, Summary, kept_file
from checked_backend.random_state import random_untouched

if TYPE_CHECKING:
    from checked_backend.pytest_plugin.watch import Numcheck, TestCheck, Watch

_COMPILER = "inductor"

_TRACE = re.compile(r"(\S+ )?DEBUG +torch\.__trace:")
"""How a line of torch's logger for ``tlparse`` begins, as pytest writes it."""

_WATCH: pytest.StashKey[Watch] = pytest.StashKey()
_CHECK: pytest.StashKey[TestCheck] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--numcheck``."""
    group = parser.getgroup("numcheck", "checking torch.compile against eager")
    group.addoption(
        "--numcheck",
        nargs="?",
        const=_COMPILER,
        default=None,
        metavar="COMPILER",
        help=(
            "check every torch.compile that a test runs against eager. --numcheck=COMPILER is the backend where the "
            f"code names none (default: {_COMPILER}). Options: CHECKED_BACKEND_* in the environment."
        ),
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Replace ``torch.compile`` before a conftest can use it.

    A bare ``--numcheck`` takes no value, also where a path follows it: only ``--numcheck=COMPILER`` does.
    """
    known = early_config.known_args_namespace
    for place, word in enumerate(args):
        if word == "--numcheck":
            args[place] = f"--numcheck={_COMPILER}"
            if known.numcheck == "".join(args[place + 1 : place + 2]):
                known.file_or_dir.insert(0, known.numcheck)
            known.numcheck = _COMPILER
    if known.numcheck is not None:
        _watch(early_config).check_everything(known.numcheck)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and the summary. Start to check, if no earlier conftest did."""
    config.addinivalue_line(
        "markers",
        "numcheck(enabled=True, *, compiler=..., **options): check every torch.compile that this test runs against "
        "eager; options are those of the backend numcheck. enabled=False: not this test, also with --numcheck.",
    )
    if config.option.numcheck is not None:
        _watch(config).check_everything(config.option.numcheck)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(), "numcheck-summary")


def _watch(config: pytest.Config) -> Watch:
    """The watch that replaces ``torch.compile``. It is made, and torch is imported, when it is first needed."""
    watch = config.stash.get(_WATCH, None)
    if watch is None:
        watch = config.stash[_WATCH] = _later().Watch()
        config.add_cleanup(watch.close)
    return watch


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse an unknown compiler. By now every conftest has had its chance to register it."""
    if session.config.option.numcheck is not None:
        try:
            _watch(session.config).validate()
        except OptionError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Check what a module runs while it is imported."""
    if collector.config.option.numcheck is None:
        return (yield)
    with _watch(collector.config).test(None) as check:
        report = yield
    if check.failed and report.outcome == "passed":
        report.outcome, report.longrepr = "failed", check.text
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Gather the findings of one test and of its fixtures."""
    marker = item.get_closest_marker("numcheck")
    has_fixture = "numcheck" in getattr(item, "fixturenames", ())
    if marker is None and item.config.option.numcheck is None and not has_fixture:
        return (yield)
    marked = None if marker is None else (marker.args, marker.kwargs)
    folder = getattr(item.config, "workerinput", {}).get(FOLDER)

    def keep(check: TestCheck) -> None:
        if folder is not None and check.failed:
            known = [check.properties(), check.text]
            kept_file(folder, item.nodeid).write_text(json.dumps(known), "utf-8")

    with _watch(item.config).test(marked, has_fixture=has_fixture, on_news=keep) as check:
        item.stash[_CHECK] = check
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test whose compiled code is wrong, also where its fixtures run that after it."""
    result = yield
    check = item.stash.get(_CHECK, None)
    wrong = "" if check is None else check.misuse or (check.text if check.failed else "")
    if check is not None and wrong and not check.told:
        check.told = True
        pytest.fail(wrong, pytrace=False)
    return result


pytest_runtest_teardown = pytest_runtest_call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Put the report into the test's sections, and the verdict into its properties.

    Properties travel from the workers of pytest-xdist, and into JUnit files.
    """
    check = item.stash.get(_CHECK, None)
    last = call.when == "teardown"
    if call.excinfo is not None and isinstance(call.excinfo.value, DivergenceError):
        users = _users_frames(call.excinfo.tb)  # torch's hundred frames would bury the report
        if users is not None:
            call.excinfo.traceback = type(call.excinfo.traceback)(users)
    if check is not None and last:
        item.user_properties.extend(check.properties())
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, DivergenceError):
        _put_cause_first(report)
    if check is not None and report.failed:
        check.told = True  # here, or by the section below
        # torch's own records of compiling, hundreds of lines, say nothing to a person
        plain = [
            (name, [one for one in text.splitlines(True) if not _TRACE.match(one)]) for name, text in report.sections
        ]
        report.sections = [(name, kept) for name, lines in plain if (kept := "".join(lines).rstrip("\n"))]
    if check is not None and check.text and (report.failed or last) and not _shown(report, check.text):
        report.sections.append((REPORT, check.text))
    return report


def _users_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of torch and of this package."""
    if trace is None:
        return None
    rest = _users_frames(trace.tb_next)
    module = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    if module in ("torch", "checked_backend"):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _put_cause_first(report: pytest.TestReport) -> None:
    """Begin the message of pytest's summary and of JUnit with the cause: a terminal cuts what comes later."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = re.sub(r"^[\w.]*DivergenceError: FAIL: ", "numcheck: ", crash.message)


def _shown(report: pytest.TestReport, text: str) -> bool:
    """Whether the failure itself says all of this: pytest indents what an exception says, whose title is another."""
    said = str(report.longrepr or "")
    return text in said or all(
        line in said for line in text.splitlines() if line.startswith(("FAIL", "INCONCLUSIVE", " "))
    )


@pytest.fixture
def numcheck(request: pytest.FixtureRequest) -> Numcheck:
    """Check a function in one call, or gather what the checks of a block find.

    ``numcheck(fn, args, kwargs, **options)`` is `checked_backend.check` that fails the test if the compiled function is
    wrong; it returns the report. ``with numcheck.collect() as session:`` checks every ``torch.compile`` in the block
    and fails nothing: ``session.report`` is for the test to examine. ``numcheck.report`` has the findings of this
    test so far. Options of the marker ``numcheck`` are defaults here.
    """
    made: Numcheck = _later().Numcheck(_watch(request.config), request.node.stash[_CHECK])
    return made


def _later() -> Any:
    """Import what needs torch, without a trace in the random numbers that a test draws."""
    with random_untouched():
        return importlib.import_module("checked_backend.pytest_plugin.watch")
