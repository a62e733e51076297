"""Gather the findings of each test while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from checked_backend import checking
from checked_backend.errors import OptionError
from checked_backend.findings import Skip, Verdict
from checked_backend.options import CheckOptions, parse_options
from checked_backend.program.compile_calls import CompileWatch, Settings
from checked_backend.pytest_plugin.summary import COUNTS, SENTENCE, VERDICT
from checked_backend.regions.compile import resolve_compiler
from checked_backend.report import Report
from checked_backend.report.session import Session, collect


@dataclass(slots=True)
class TestCheck:
    """The checks of one test.

    Attributes:
        reports: The reports of `check` calls through the fixture.
        told: Whether the findings have failed the test.
        misuse: The error in the marker, if it has one.
        asked: Whether the test has the marker.
        unchecked: Whether something that it compiled was left unchecked.
    """

    __test__ = False  # pytest collects classes of this name

    session: Session
    settings: Settings
    reports: list[Report] = field(default_factory=list)
    told: bool = False
    misuse: str = ""
    asked: bool = False
    compiled: bool = False
    unchecked: bool = False

    @property
    def _all(self) -> list[Report]:
        collected = self.session.report
        seen = bool(collected.coverage.regions or collected.findings or self.unchecked)
        # A check that was asked for and compared nothing is no pass. A call of `check` has its own report.
        missed = (self.asked and not self.reports) or (self.compiled and self.session.dynamo_looked)
        return [*self.reports, *([collected] if seen or missed else [])]

    @property
    def failed(self) -> bool:
        """Whether compiled code of this test is wrong, and the test should fail."""
        return self.settings.enabled and self.session.report.verdict is Verdict.FAIL

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict; None if nothing was checked."""
        return Verdict.worst(report.verdict for report in self._all)

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


class Watch(CompileWatch):
    """Replaces ``torch.compile`` in tests that want it checked, and knows the running test."""

    def __init__(self) -> None:
        super().__init__(
            forced={"on_divergence": "record"},  # findings fail the test, not the call
            defaults={"localize": False},  # looking for operators would take too long in a test suite
        )
        self._checks: list[TestCheck] = []

    @contextmanager
    def test(
        self,
        marker: tuple[Sequence[Any], Mapping[str, Any]] | None,
        *,
        has_fixture: bool = False,
        on_news: Callable[[TestCheck], None] = lambda _check: None,
    ) -> Iterator[TestCheck]:
        """Gather the findings while one test runs.

        Args:
            marker: The marker's arguments; if None, ``torch.compile`` is checked only if everything is.
            has_fixture: Whether the test has the fixture, and so examines its reports itself.
            on_news: Called when a finding that fails is new: the process may not outlive the test.
        """
        misuse, settings = "", self._now()
        try:
            settings = self._marked(*marker) if marker else settings
        except OptionError as error:
            misuse = str(error)
        session = Session(lambda: on_news(check))
        check = TestCheck(session, settings, misuse=misuse, asked=marker is not None and not has_fixture)
        with session.entered():
            self._checks.append(check)
            try:
                with self.using(settings) if marker and not misuse else nullcontext():
                    yield check
            finally:
                self._checks.remove(check)
                session.close()

    def derived(self, settings: Settings, options: Mapping[str, Any]) -> Settings:
        """Settings with other options; an OptionError is raised for unknown ones and bad values."""
        changed = dict(options)
        if "on_divergence" in changed:
            raise OptionError("numcheck: option 'on_divergence' is not taken here: findings fail the test.")
        compiler = changed.pop("compiler", settings.compiler)
        enabled = bool(changed.pop("enabled", True))
        merged = {**settings.options, **changed}
        resolve_compiler(parse_options(CheckOptions, "numcheck", {**merged, "compiler": compiler}))
        return Settings(compiler, merged, enabled)

    def _marked(self, args: Sequence[Any], options: Mapping[str, Any]) -> Settings:
        if len(args) > 1 or not all(isinstance(arg, bool) for arg in args) or (args and "enabled" in options):
            raise OptionError(f"marker numcheck: got {args!r}; it takes enabled=True or False, then options by name.")
        return self.derived(self._now(), {**dict(zip(("enabled",), args, strict=False)), **options})

    def asked(self) -> None:
        """Note for the running test that it calls ``torch.compile``."""
        for check in self._checks[-1:]:
            check.compiled = True

    def left_unchecked(self, skip: Skip) -> None:
        """Note for the running test what it compiles unchecked."""
        for check in self._checks[-1:]:
            check.unchecked = True
            check.session.ledger.skip(skip)


class Numcheck:
    """What the fixture gives to a test: checks a function in one call, or gathers the findings of a block."""

    def __init__(self, watch: Watch, test: TestCheck) -> None:
        self._watch = watch
        self._test = test

    def __call__(
        self,
        fn_or_module: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Report:
        """Compare a function or a module in eager with itself compiled; the test fails if the compiled one is wrong.

        Args:
            fn_or_module: The function or module to check; it is not changed.
            args: Positional arguments.
            kwargs: Keyword arguments.
            options: Options of `checked_backend.check`: ``compiler``, ``gradients``, ``dynamic``, ... The default
                compiler is the marker's, else that of ``--numcheck``.

        Returns:
            The report: a pass, or inconclusive, which fails no test but is told in the summary.

        Raises:
            DivergenceError: The compiled function is wrong.
            OptionError: An unknown option.
        """
        options.setdefault("compiler", self._test.settings.compiler)
        with self._test.session.paused():  # the exception shows the report as it is
            report = checking.check(fn_or_module, args, kwargs, **options)
        self._test.reports.append(report)
        report.raise_for_verdict()
        return report

    @contextmanager
    def collect(self, **options: Any) -> Iterator[Session]:
        """Check every ``torch.compile`` inside of a block, and gather the findings. They do not fail the test.

        Args:
            options: ``compiler`` (where the code names no backend) and options of the backend ``numcheck``.

        Yields:
            The session; its ``report`` may be read during the block and after it.

        Raises:
            OptionError: An unknown option or a bad value.
        """
        settings = self._watch.derived(self._test.settings, options)
        with self._watch.using(settings), self._test.session.paused(), collect(threads=False, closing=False) as session:
            yield session

    @property
    def report(self) -> Report:
        """The findings about compiled regions in this test so far."""
        return self._test.session.report
