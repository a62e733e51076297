"""Memory that really runs out, and how much a check really needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from checked_backend.regions.execution import Execution
from tests.support.started_programs import finished

PROGRAM = """
import sys
import torch
import checked_backend as cb

def attention(x):  # eager's scores are quadratic
    return torch.softmax(x[:, None] * x[None, :], 1).sum(1)

def compiler(gm, example_inputs):
    return lambda *args: (args[-1].new_ones(args[-1].shape),)

def wanted():
    for line in open("/proc/self/status"):
        if line.startswith("VmSize"):
            return int(line.split()[1]) * 1024

with cb.collect() as session, torch.no_grad():
    compiled = torch.compile(attention, backend="numcheck", options={"compiler": compiler, "report_dir": sys.argv[1]})
    import resource
    room = wanted() + (600 << 20)
    torch._dynamo.config.automatic_dynamic_shapes = False
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    out = compiled(torch.zeros(20_000))
assert out.shape == (20_000,) and bool((out == 1).all())
assert not session.report.findings, session.report
print(session.report.verdict, *session.report.coverage.skipped)
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, sets RLIMIT_AS")
def test_eager_that_really_runs_out_of_memory(tmp_path: Path) -> None:
    code, out, err = finished((sys.executable, "-c", PROGRAM, tmp_path), tmp_path)
    assert code == 0, err
    assert out.startswith("inconclusive")
    assert "unsupported: memory: eager's forward pass ran out of it" in out


def test_eagers_values_without_their_graph() -> None:
    x = torch.randn(3, requires_grad=True)
    out = torch.tanh(x)
    execution = Execution([out, out, x, 3], [x]).without_graph()
    first, second, passed_through, number = execution.outputs
    assert first is second
    assert first.requires_grad
    assert [made_by.name() for made_by, _ in first.grad_fn.next_functions] == ["torch::autograd::AccumulateGrad"]
    assert torch.equal(first, out)
    assert passed_through is x is execution.arguments[0]
    assert number == 3


PEAK = """
import sys
from pathlib import Path
import torch
from torch import nn

def resident(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
options = {"compiler": "aot_eager", "reference": sys.argv[1]}
checked = {"backend": "numcheck", "options": options}
compiled = torch.compile(model, **({"backend": "aot_eager"} if sys.argv[1] == "plain" else checked))
x = torch.randn(16_384, 64)
for step in range(5):  # the fifth is held against the noise that is known
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    compiled(x).sum().backward()
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_recomputing_needs_no_more_memory_than_the_program_itself(tmp_path: Path) -> None:
    # large blocks go back to the system as soon as they are freed, so that the peak is that of live tensors
    more = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    peaks = {
        variant: int(finished((sys.executable, "-c", PEAK, variant), tmp_path, more)[1])
        for variant in ("plain", "keep", "recompute")
    }
    assert peaks["recompute"] < 1.3 * peaks["plain"] < peaks["keep"], peaks
