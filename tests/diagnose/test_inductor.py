"""What Inductor itself gets wrong, from a program to its script."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checked_backend.diagnose.oracle import verdict_oracle
from checked_backend.diagnose.reduce import reduce
from checked_backend.diagnose.repro import write_repro
from tests.support.reduce_tools import case_of, targets

aten = torch.ops.aten

pytestmark = [pytest.mark.slow, pytest.mark.inductor, pytest.mark.ci_sample]


def test_a_float_floor_division_that_inductor_rounds_wrong(tmp_path: Path) -> None:
    # https://github.com/pytorch/pytorch/issues/197895
    def divided(x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (aten.neg.default(aten.floor_divide.default(aten.abs.default(x), y)),)

    inputs = (torch.arange(1, 65).float() / 2, torch.tensor([0.1, 0.2, 0.3, 0.7]).repeat(16))
    case = case_of(divided, *inputs, compiler="inductor")
    found = verdict_oracle(case, 300) or ()
    if not found:
        pytest.skip("this version of torch divides right")
    reduction = reduce(case, subject="output[0]", kind=found[0].kind, deadline=time.monotonic() + 400)
    assert targets(reduction) == ["aten.floor_divide.default"]
    assert reduction.size.elements <= 4
    repro = write_repro(reduction.case, tmp_path, name="floor", subject=reduction.subject, kind=reduction.kind)
    assert repro.confirmed, repro.output
    assert " // " in repro.path.read_text()
