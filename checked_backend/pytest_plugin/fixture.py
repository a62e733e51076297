"""The object that the fixture ``numcheck`` gives to a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from checked_backend.checking import check
from checked_backend.pytest_plugin.watch import TestCheck, Watch
from checked_backend.report import Report
from checked_backend.report.session import Session, collect


class Numcheck:
    """Checks a function in one call, or gathers the findings of a block."""

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
            report = check(fn_or_module, args, kwargs, **options)
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
        with self._watch.using(settings), self._test.session.paused(), collect(closing=False) as session:
            yield session

    @property
    def report(self) -> Report:
        """The findings about compiled regions in this test so far."""
        return self._test.session.report
