"""What can be pasted into an issue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch._inductor.config

from checked_backend.diagnose.bug_report import describe_candidate, write_bug_report
from checked_backend.findings import Finding, Kernel, Kind
from checked_backend.options import CheckOptions

FINDING = Finding(
    Kind.LOGIC,
    "output[0]",
    "wrong also in float64",
    "logic",
    op="aten.relu.default",
    source="m.py:3 in f: torch.relu(x)",
)


def test_it_has_all_that_a_stranger_needs(tmp_path: Path) -> None:
    script = tmp_path / "repro_relu.py"
    script.write_text('print("```")\n')
    script.with_suffix(".safetensors").write_bytes(b"")
    finding = replace(
        FINDING,
        repro=str(script),
        workaround="torch.compile(model, options={'a': 1})",
        evidence={"reduced": "to 1 call"},
        kernel=Kernel("cpp_fused_relu_0", "C++", "void kernel() {}", 3, ("relu",)),
    )
    with torch._inductor.config.patch(pattern_matcher=not torch._inductor.config.pattern_matcher):
        candidate = describe_candidate(CheckOptions(compiler_options={"epilogue_fusion": False}), "max-autotune")
    path = write_bug_report(finding, candidate, "the bug is there")
    assert path == tmp_path / "repro_relu.md"
    text = path.read_text()
    assert text.startswith("# inductor: aten.relu.default: logic\n")
    for part in (
        "wrong also in float64",
        "m.py:3 in f: torch.relu(x)",
        script.read_text(),
        "the bug is there",
        "showed it",
        "`repro_relu.safetensors`: attach",
        "torch.compile(model, options={'a': 1})",
        "- reduced: to 1 call",
        "cpp_fused_relu_0 (C++), which computes relu:\n\n```cpp\nvoid kernel() {}\n```\n\nAnd 3 more lines.",
        "- mode: max-autotune",
        "- options: {'epilogue_fusion': False}",
        f"torch._inductor.config.pattern_matcher = {not torch._inductor.config.pattern_matcher}",
        f"- torch: {torch.__version__}",
        "- cpu: ",
    ):
        assert part in text, part
    assert "pattern_matcher" not in str(describe_candidate(CheckOptions(), None))  # set back is not set


def test_without_a_script_there_is_none(tmp_path: Path) -> None:
    assert write_bug_report(FINDING, {"compiled by": "inductor"}, "") is None
    assert list(tmp_path.iterdir()) == []
