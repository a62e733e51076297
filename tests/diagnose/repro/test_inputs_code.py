"""Inputs as code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from checked_backend.findings import Kind
from tests.support.reduce_tools import case_of
from tests.support.repro_tools import wrote

aten = torch.ops.aten


def test_inputs_in_one_memory_are_views_only_if_they_were(tmp_path: Path) -> None:
    x = torch.arange(3.0)
    case = case_of(lambda a, b: (aten.add.Tensor(a, b),), x, x.detach())
    assert wrote(case, tmp_path / "alone", Kind.LOGIC).path.read_text().count(", 0).detach()") == 2
    views = [x[:2], x[1:]]
    case = case_of(lambda a, b: (aten.add.Tensor(a, b),), *views)
    text = wrote(replace(case, inputs=views), tmp_path / "views", Kind.LOGIC).path.read_text()
    assert text.count("torch.as_strided(memory, (2,), (1,), ") == 2
    assert "detach" not in text
