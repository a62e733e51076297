"""Lightning: a callback that gathers what ``numcheck`` finds while a model is fitted, and logs it beside the loss."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    from pytorch_lightning.callbacks import Callback

from checked_backend.regions.health import CheckRecord, on_check
from checked_backend.report import Report
from checked_backend.report.session import Session, collect


class NumcheckCallback(Callback):  # type: ignore[misc]
    """Logs each check of a fit, and has its report at the end.

    Compile by name, as always: ``self.model = torch.compile(self.model, backend="numcheck",
    options={"on_divergence": "record"})`` in the module, or ``trainer.fit(torch.compile(module, backend="numcheck"))``.

    The trainer's loggers get ``numcheck/ratio`` (how many times its noise the largest difference of the check is),
    ``numcheck/share`` (of the time) and ``numcheck/findings`` (how many so far fail), with the trainer's step.

    Args:
        raises: Raise at the end of a fit in which a finding fails.

    Attributes:
        report: What was found and covered in the latest fit; None before its end.
    """

    def __init__(self, *, raises: bool = True) -> None:
        self.report: Report | None = None
        self._raises = raises
        self._session: Session | None = None
        self._open = ExitStack()
        self._findings = 0
        self._latest: list[CheckRecord] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Gather from now on; Lightning calls it before it looks at the model."""
        if self._session is None:
            self._findings = 0
            self._session = self._open.enter_context(collect(closing=False))
            self._open.enter_context(on_check(self._latest.append))

    def on_train_batch_end(self, trainer: Any, *_batch: Any) -> None:
        """Log the checks of a batch."""
        records, self._latest[:] = list(self._latest), []
        if not records:
            return
        self._findings += sum(record.findings for record in records)
        ratios = [record.ratio for record in records if record.ratio is not None]
        metrics = {"numcheck/share": records[-1].share, "numcheck/findings": float(self._findings)}
        metrics |= {"numcheck/ratio": max(ratios)} if ratios else {}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    on_validation_batch_end = on_train_batch_end

    def teardown(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """End the report.

        Raises:
            DivergenceError: A finding fails, and it was not asked to be quiet about it.
        """
        self._end()
        if self._raises and self.report is not None:
            self.report.raise_for_verdict()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the report of a fit that an exception ends."""
        self._end()

    def _end(self) -> None:
        if self._session is not None:
            self._open.close()
            self.report, self._session = self._session.report, None
