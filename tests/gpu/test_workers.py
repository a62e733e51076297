"""Where CUDA is up no process may be forked, and a device that is gone is said to be gone."""

from __future__ import annotations

import subprocess
import sys

import torch

import checked_backend as cb
from checked_backend.process.worker import cannot_fork
from tests.support import faults

OUT_OF_RANGE = """
import torch

import checked_backend as cb

x, index = torch.randn(8, device="cuda"), torch.tensor([1, 3000], device="cuda")


def program(x, index):
    return x[index].sin()


if __name__ == "__main__":
    try:
        print("verdict:", cb.check(program, (x, index)).verdict)
    except Exception as error:
        print("raised:", type(error).__name__, error)
"""


def test_nothing_is_forked_and_the_operator_is_found(gpu: str) -> None:
    x = torch.randn(64, device=gpu)
    assert cannot_fork() == "a process that has used CUDA cannot be forked"
    compiler = faults.wrong_operator("aten.sin.default", how="aot")
    report = cb.check(lambda x: x.sin() + 1, (x,), compiler=compiler, localize=True)
    assert {finding.op for finding in report.findings} == {"aten.sin.default"}, str(report)


def test_an_error_of_the_device_does_not_pass(gpu: str) -> None:
    ended = subprocess.run([sys.executable, "-c", OUT_OF_RANGE], capture_output=True, text=True, timeout=600)
    said = ended.stdout + ended.stderr
    assert f"verdict: {cb.Verdict.PASS}" not in said
    assert "device-side assert" in said or "raised:" in said, said
    del gpu
