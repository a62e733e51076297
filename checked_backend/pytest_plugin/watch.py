"""A ``torch.compile`` whose compiled programs are checked."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import lookup_backend
from checked_backend.backends import debug_interpreter, graph_dumper, nop, numcheck
from checked_backend.errors import OptionError
from checked_backend.findings import Verdict
from checked_backend.options import CheckOptions, parse_options
from checked_backend.pytest_plugin.summary import COUNTS, SENTENCE, VERDICT
from checked_backend.regions.compile import resolve_compiler
from checked_backend.report import Report
from checked_backend.report.session import Session, active_sessions, collect

__all__ = ["CheckingBackend", "TestCheck", "Watch"]

Compile = Callable[..., Any]

_REFUSED = ("on_divergence",)
_SELF_CHECKING = (nop, debug_interpreter, graph_dumper)
_LOCALIZE = "CHECKED_BACKEND_LOCALIZE"


@dataclass(frozen=True, slots=True)
class Settings:
    """How ``torch.compile`` is checked.

    Attributes:
        compiler: The backend where the code names none.
        options: Options of ``numcheck``.
        enabled: Whether to check at all.
    """

    compiler: str | Callable[..., Any] = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)
    enabled: bool = True


@dataclass(slots=True)
class TestCheck:
    """What the checks of one test found.

    Attributes:
        session: Gathers it.
        settings: How this test is checked.
        reports: Of `check`, called through the fixture.
        told: Whether the test was failed for it.
        misuse: What is wrong with the marker.
        asked: Whether the test has the marker.
        compiled: Whether the test asked torch to compile something.
    """

    __test__ = False  # pytest collects classes of this name

    session: Session
    settings: Settings
    reports: list[Report] = field(default_factory=list)
    told: bool = False
    misuse: str = ""
    asked: bool = False
    compiled: bool = False

    @property
    def _all(self) -> list[Report]:
        collected = self.session.report
        seen = bool(collected.coverage.regions or collected.findings)
        # A check that was asked for and looked at nothing is no pass. What calls `check` has its own report.
        missed = (self.asked and not self.reports) or (self.compiled and self.session.dynamo_looked)
        return [*self.reports, *([collected] if seen or missed else [])]

    @property
    def failed(self) -> bool:
        """Whether compiled code of this test is wrong, and the test is to fail for it."""
        return self.settings.enabled and self.session.report.verdict is Verdict.FAIL

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict; None if nothing was checked."""
        verdicts = {report.verdict for report in self._all}
        return next((v for v in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS) if v in verdicts), None)

    @property
    def text(self) -> str:
        """The reports that are no pass."""
        if not self.settings.enabled:
            return ""
        return "\n\n".join(str(report) for report in self._all if report.verdict is not Verdict.PASS)

    def properties(self) -> list[tuple[str, str]]:
        """The result as plain words, for reports that travel between processes and into files."""
        verdict = self.verdict
        if not self.settings.enabled or verdict is None:
            return []
        told_most = sorted(self._all, key=lambda report: not report.findings)
        worst = next(report for report in told_most if report.verdict is verdict)
        regions = [region for report in self._all for region in report.coverage.regions]
        counts = {
            "regions": len(regions),
            "calls": sum(region.checked_calls for region in regions),
            "backwards": sum(region.checked_backwards for region in regions),
            "findings": sum(len(report.findings) for report in self._all),
        }
        told = [(f"{COUNTS}{name}", str(number)) for name, number in counts.items()]
        return [(VERDICT, verdict.value), (SENTENCE, str(worst).partition("\n")[0]), *told]


class CheckingBackend:
    """A Dynamo backend that checks another one, and gathers what it finds.

    Two of them are equal where the backends they check are, as torch's own wrappers are: code that Dynamo compiled for
    one serves the other.

    Args:
        compiler: What to check.
        options: Options of ``numcheck``.
        mode: Inductor's mode.
        current: Says which session a thread without one belongs to.
    """

    compiler_name = "numcheck"

    def __init__(
        self,
        compiler: str | Callable[..., Any],
        options: Mapping[str, Any],
        mode: str | None,
        current: Callable[[], Session | None],
    ) -> None:
        self._options = {**options, "compiler": compiler, "on_divergence": "record"}
        self._mode = mode
        self._current = current

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CheckingBackend):
            return NotImplemented
        return (self._options, self._mode) == (other._options, other._mode)

    def __hash__(self) -> int:
        return hash((type(self), self._mode))

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_kwargs: Any) -> Callable[..., Any]:
        """Compile a region and check it on every call."""
        region = numcheck(gm, example_inputs, options=self._options, mode=self._mode)

        def run(*args: Any) -> Any:
            session = None if active_sessions() else self._current()
            if session is None:
                return region(*args)
            with session.entered():  # another thread of the test
                return region(*args)

        return run


class Watch:
    """Replaces ``torch.compile`` while tests want it checked, and knows which test runs."""

    def __init__(self) -> None:
        self._original: Compile | None = None
        self._settings: list[Settings] = []
        self._checks: list[TestCheck] = []

    def check_everything(self, compiler: str) -> None:
        """Check ``torch.compile`` from now on, until `close`."""
        if not self._settings:
            self._settings.append(Settings(compiler))
            self._replace()

    def validate(self) -> None:
        """See whether the options in the environment and the compiler are known.

        Raises:
            OptionError: They are not.
        """
        resolve_compiler(parse_options(CheckOptions, "numcheck", {"compiler": self._now().compiler}))

    def close(self) -> None:
        """Put the original ``torch.compile`` back."""
        self._settings.clear()
        self._restore()

    @contextmanager
    def test(
        self, marker: tuple[Sequence[Any], Mapping[str, Any]] | None, *, judges_itself: bool = False
    ) -> Iterator[TestCheck]:
        """Gather what is found while one test runs.

        Args:
            marker: The marker's arguments; if None, ``torch.compile`` is checked only if everything is.
            judges_itself: Whether the test has the fixture, and so its own reports.
        """
        misuse, settings = "", self._now()
        try:
            settings = self._marked(*marker) if marker else settings
        except OptionError as error:
            misuse = str(error)
        with collect(closing=False) as session:
            check = TestCheck(session, settings, misuse=misuse, asked=marker is not None and not judges_itself)
            self._checks.append(check)
            try:
                if marker and not misuse:
                    with self.using(settings):
                        yield check
                else:
                    yield check
            finally:
                self._checks.remove(check)

    @contextmanager
    def using(self, settings: Settings) -> Iterator[None]:
        """Check what ``torch.compile`` compiles inside of the block."""
        self._settings.append(settings)
        self._replace()
        try:
            yield
        finally:
            self._settings.pop()
            if not self._settings:
                self._restore()

    def derived(self, settings: Settings, options: Mapping[str, Any]) -> Settings:
        """Settings with other options.

        Raises:
            OptionError: An unknown option or a bad value.
        """
        changed = dict(options)
        for name in _REFUSED:
            if name in changed:
                raise OptionError(f"numcheck: option {name!r} is not taken here: findings fail the test.")
        compiler = changed.pop("compiler", settings.compiler)
        enabled = bool(changed.pop("enabled", True))
        merged = {**settings.options, **changed}
        resolve_compiler(parse_options(CheckOptions, "numcheck", {**merged, "compiler": compiler}))
        return Settings(compiler, merged, enabled)

    def _now(self) -> Settings:
        return self._settings[-1] if self._settings else Settings()

    def _marked(self, args: Sequence[Any], options: Mapping[str, Any]) -> Settings:
        if len(args) > 1 or not all(isinstance(arg, bool) for arg in args) or (args and "enabled" in options):
            raise OptionError(f"marker numcheck: got {args!r}; it takes enabled=True or False, then options by name.")
        return self.derived(self._now(), {**dict(zip(("enabled",), args, strict=False)), **options})

    def _current(self) -> Session | None:
        return self._checks[-1].session if self._checks else None

    def _replace(self) -> None:
        if self._original is None:
            self._original = torch.compile
            torch.compile = self._checking(torch.compile)

    def _restore(self) -> None:
        if self._original is not None:
            torch.compile = self._original
            self._original = None

    def _checking(self, original: Compile) -> Any:
        @functools.wraps(original)
        def compile_checked(model: Any = None, **kwargs: Any) -> Any:
            settings = self._now()
            if model is None:  # used as a decorator with arguments
                return lambda decorated: compile_checked(decorated, **kwargs)
            if not self._settings or not settings.enabled or kwargs.get("disable") or _checks_itself(kwargs):
                return original(model, **kwargs)
            original(_nothing, **kwargs)  # what torch refuses is refused when and as torch does it
            for check in self._checks[-1:]:
                check.compiled = True
            return original(model, **self._redirected(settings, kwargs))

        return compile_checked

    def _redirected(self, settings: Settings, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of ``torch.compile`` with a backend that checks the one they name."""
        rest = {name: value for name, value in kwargs.items() if name not in ("backend", "mode", "options")}
        backend, mode = kwargs.get("backend"), kwargs.get("mode")
        given = dict(kwargs.get("options") or {})
        if "guard_filter_fn" in given:  # Dynamo's, not the backend's
            rest["options"] = {"guard_filter_fn": given.pop("guard_filter_fn")}
        if backend is None:
            backend = settings.compiler
            if backend != "inductor":  # they are Inductor's, which does not compile this
                mode, given = None, {}
        if backend != "inductor" and mode is not None:
            compiler: Any = lookup_backend(backend) if isinstance(backend, str) else backend
            backend, mode = functools.partial(compiler, mode=mode), None
        options = dict(settings.options)
        if _LOCALIZE not in os.environ:
            options.setdefault("localize", False)  # a test suite is to end today
        options["compiler_options"] = {**options.get("compiler_options", {}), **given}
        return {**rest, "backend": CheckingBackend(backend, options, mode, self._current)}


def _nothing() -> None:
    """Is never called."""


def _checks_itself(kwargs: Mapping[str, Any]) -> bool:
    """Whether the backend is one of this package that checks: it is not checked in turn."""
    backend = kwargs.get("backend")
    while isinstance(backend, functools.partial):
        backend = backend.func
    if backend == "numcheck":
        return True
    ours = str(getattr(backend, "__module__", "")).partition(".")[0] == "checked_backend"
    return (ours and backend not in _SELF_CHECKING) or bool((kwargs.get("options") or {}).get("use_aoti"))
