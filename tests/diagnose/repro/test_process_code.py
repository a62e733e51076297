"""Settings of the process in scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checked_backend.diagnose.repro.process_code import _SETTINGS, process_lines
from checked_backend.findings import Kind
from checked_backend.regions.process_state import ProcessState
from tests.support.reduce_tools import case_of
from tests.support.repro_tools import wrote


def test_a_process_as_torch_makes_it_needs_no_line() -> None:
    assert process_lines(ProcessState.capture()) == []


def test_torch_has_each_of_the_settings() -> None:
    assert not _SETTINGS.keys() - ProcessState.capture().values.keys()


@pytest.mark.parametrize(("name", "code"), [(name, code) for name, (_, code) in _SETTINGS.items()])
def test_a_line_sets_what_it_says(name: str, code: str) -> None:
    before = ProcessState.capture()
    value = before.values[name]
    others = {False: True, True: False, "highest": "high", "none": "ieee", "tf32": "ieee"}
    wanted = (True, True) if isinstance(value, tuple) else others[value]
    try:
        with torch.backends.__allow_nonbracketed_mutation():  # torch's own test module, if imported, forbids it
            exec(code.format(wanted), {"torch": torch})
        after = ProcessState.capture()
        assert after.values[name] == wanted
        assert process_lines(after) == [code.format(wanted)]  # and not what follows from it
    finally:
        before.restore()


@pytest.mark.process
def test_a_script_computes_with_the_users_precision(tmp_path: Path) -> None:
    before = ProcessState.capture()
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        case = case_of(lambda x: (torch.ops.aten.mm.default(x, x),), torch.ones(2, 2))
        text = wrote(case, tmp_path, Kind.LOGIC).path.read_text()
    finally:
        before.restore()
    assert "torch.set_float32_matmul_precision('high')" in text
    assert "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False" in text
    assert text.index("set_float32_matmul_precision") < text.index("def program")
