"""An oracle reports the death of a process as a finding, or finds that the case is no program."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from checked_backend.diagnose.oracle import verdict_oracle
from checked_backend.process.worker import cannot_fork
from tests.support.reduce_tools import case_of

pytestmark = pytest.mark.skipif(cannot_fork() is not None, reason="no process can be forked")
aten = torch.ops.aten


def dies(_gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    os.kill(os.getpid(), signal.SIGUSR1)
    raise AssertionError


@pytest.mark.process
def test_a_death_is_a_finding_only_where_eager_runs() -> None:
    [found] = verdict_oracle(case_of(lambda x: (aten.relu.default(x),), torch.ones(2), compiler=dies), 60) or ()
    assert (found.detail, found.actual) == ("crash.signal", "killed by SIGUSR1")
    refused = case_of(lambda x, y: (aten.mm.default(x, y),), torch.ones(2, 3), torch.ones(2, 3), compiler=dies)
    assert verdict_oracle(refused, 60) is None
