"""The script of one operator, for arguments whose values are hard to make anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.metadata.findings import operator_script
from tests.support.lying_operators import NAME, define, local, record, run_alone
from tests.support.warm_process import WarmPython

DEFINITION = """
import torch
library = torch.library.Library("scripted", "FRAGMENT")
library.define("as_float(Tensor x) -> Tensor")
library.impl("as_float", lambda x: x.float(), "CPU")
torch.library.register_fake("scripted::as_float", lambda x: torch.empty_like(x), lib=library)
"""


@pytest.mark.process
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
def test_a_mismatch_is_reported_and_its_script_runs(
    argument: torch.Tensor, tmp_path: Path, warm_python: WarmPython
) -> None:
    names: dict[str, object] = {}
    exec(DEFINITION, names)
    try:
        options: dict[str, Any] = {"on_divergence": "record", "report_dir": str(tmp_path)}
        with cb.collect() as session:
            torch.compile(lambda x: torch.ops.scripted.as_float(x), backend="debug_interpreter", options=options)(
                argument
            )
    finally:
        names["library"]._destroy()  # type: ignore[attr-defined]
    assert session.report.verdict is cb.Verdict.FAIL
    (finding,) = session.report.findings
    assert finding.detail == "structure.dtype"
    script = tmp_path / "with_definition.py"
    script.write_text(DEFINITION + Path(finding.repro).read_text().replace("from __future__ import annotations", ""))
    ran = warm_python.run(script, timeout=120)
    assert "THEY DIFFER" in ran.stdout + ran.stderr, ran.stderr


# operators that write to their arguments


def mutating(library: Any, lie: str) -> Any:
    """``lie(Tensor(a!) x, Tensor(b!)[] ys, Tensor z, int n) -> Tensor`` that tells one lie."""

    def kernel(x: torch.Tensor, ys: list[torch.Tensor], z: torch.Tensor, n: int) -> torch.Tensor:
        x.add_(n)
        for y in ys:
            y.mul_(2)
        if lie == "mutation":
            z.add_(1)
        if lie == "resized":
            ys[-1].resize_(1)
        return z.double() if lie == "dtype" else z.t().contiguous().t() if lie == "stride" else z.clone()

    schema = "lie(Tensor(a!) x, Tensor(b!)[] ys, Tensor z, int n) -> Tensor"
    return define(library, schema, kernel, lambda x, ys, z, n: torch.empty_like(z))


def written(operator: Any, version: int) -> cb.Finding | None:
    """What is found when it writes to two views of one memory, a tensor of its own, and reads another."""

    def program(x: torch.Tensor) -> Any:
        memory, own, z = x * 2, x * 3, x.sinh()
        return operator(memory[0], [memory[1], own], z, 3), memory, own

    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        report = record(program, (torch.randn(3, 4),))
    found = local(report)
    assert all(f.node == ("auto_functionalized_v2" if version == 2 else "auto_functionalized") for f in found)
    return found[0] if found else None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("lie", ["dtype", "stride", "mutation", "resized"])
def test_an_operator_that_writes_to_its_arguments_is_shown_alone(library: Any, lie: str, version: int) -> None:
    finding = written(mutating(library, lie), version)
    assert finding.op == f"{NAME}.lie.default"
    ended, printed = run_alone(finding)
    assert ended == "THEY DIFFER", printed
    assert f"torch.ops.{NAME}.lie.default" in finding.evidence["script"]
    assert "auto_functionalized" not in finding.evidence["script"].replace(finding.message, "").partition("import")[2]
    if lie == "mutation":
        assert "['z']" in printed
    else:
        assert "given these inputs it says something else" in finding.evidence["at_fault"]
    if version == 2:
        assert "memory" in finding.evidence["script"]  # two of its arguments lie in one memory


@pytest.mark.parametrize("version", [1, 2])
def test_the_same_operator_told_truly_is_clean(library: Any, version: int) -> None:
    assert written(mutating(library, ""), version) is None


def test_lazy_bits_of_arguments_are_in_the_script() -> None:
    number = torch.randn(3, dtype=torch.complex64)
    node = torch.fx.Graph().call_function(torch.ops.aten.stack.default, ([],))
    script = operator_script(node, (([number.conj(), torch._neg_view(number)],), {}), "")
    assert ".conj(), torch._neg_view(" in script
    with pytest.raises(SystemExit, match="they agree"):
        exec(script, {})


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="wrong in torch 2.13's own metadata")
def test_what_torchs_cache_of_fake_results_forgets_is_named_and_shown() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x[1:, ::2].mul_(2)
        return x

    (finding,) = record(program, (torch.randn(4, 6),)).findings
    assert (finding.op, finding.detail) == ("aten.slice_scatter.default", "structure.offset")
    assert (finding.expected, finding.actual) == ("0", "6")
    assert "torch's cache of fake results" in finding.evidence["at_fault"]
    ended, printed = run_alone(finding)
    assert ended == "THEY DIFFER"
    assert printed.count("storage offset=6") == 2
    assert printed.count("storage offset=0") == 1
