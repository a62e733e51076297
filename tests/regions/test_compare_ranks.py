"""Parameters are compared between ranks where there are some; with ranks that differ in `test_exchanges`."""

from __future__ import annotations

from torch import nn

import checked_backend as cb


def test_without_other_ranks_nothing_is_compared() -> None:
    report = cb.compare_ranks(nn.Linear(2, 2))
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "torch.distributed is not set up" in str(report)
