"""The script of one operator, for arguments whose values are hard to make anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checked_backend as cb
from checked_backend import Verdict

DEFINITION = """
import torch
library = torch.library.Library("scripted", "FRAGMENT")
library.define("as_float(Tensor x) -> Tensor")
library.impl("as_float", lambda x: x.float(), "CPU")
torch.library.register_fake("scripted::as_float", lambda x: torch.empty_like(x), lib=library)
"""


@pytest.mark.parametrize(
    "argument",
    [
        torch.arange(64).to(torch.uint16),
        torch.arange(64).to(torch.uint32),
        torch.full((64,), 2**64 - 1, dtype=torch.uint64),
        torch.full((64,), 2**63 - 1),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.zeros(0, dtype=torch.bool),
    ],
    ids=lambda x: f"{x.dtype}-{x.numel()}",
)
def test_a_mismatch_is_reported_and_its_script_runs(argument: torch.Tensor, tmp_path: Path) -> None:
    names: dict[str, object] = {}
    exec(DEFINITION, names)
    try:
        compiled = torch.compile(
            lambda x: torch.ops.scripted.as_float(x),
            backend="debug_interpreter",
            options={"on_divergence": "record", "report_dir": str(tmp_path)},
        )
        with cb.collect() as session:
            compiled(argument)
    finally:
        names["library"]._destroy()  # type: ignore[attr-defined]
    assert session.report.verdict is Verdict.FAIL
    (finding,) = session.report.findings
    assert finding.detail == "structure.dtype"
    script = tmp_path / "with_definition.py"
    script.write_text(DEFINITION + Path(finding.repro).read_text().replace("from __future__ import annotations", ""))
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert "THEY DIFFER" in ran.stdout + ran.stderr, ran.stderr
