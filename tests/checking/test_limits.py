"""Limits of the system that plain torch hits too: inconclusive, never a finding against the compiled program."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.regions import unsupported
from tests.support.raising import raising
from tests.support.started_programs import finished

PROGRAM = """
import ctypes, json, os, resource, struct, sys
import torch
import checked_backend as cb

def small(x):
    return torch.relu(x) * x

def large(x):
    return torch.cat([x.expand(2**28) * 2, x]).sum()

def limit_processes():
    # root has no such limit, unless it is another user by name and has lost two of its rights
    if os.getuid() == 0:
        os.setresuid(65534, 0, 0)
        libc, head = ctypes.CDLL(None), struct.pack("Ii", 0x20080522, 0)
        rights = ctypes.create_string_buffer(24)
        libc.capget(head, rights)
        words = list(struct.unpack("6I", rights.raw))
        words[:2] = [word & ~(1 << 24 | 1 << 21) for word in words[:2]]
        libc.capset(head, struct.pack("6I", *words))
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    try:
        if os.fork() == 0:
            os._exit(0)
    except BlockingIOError:
        return
    print("null")
    sys.exit()

def limit_memory():
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
    most = used * 1024 + 900 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))

name, limit, compiler, isolate = sys.argv[1:]
cb.check(small, (torch.ones(1),), compiler="eager")
from torch._inductor import compile_fx
{"processes": limit_processes, "memory": limit_memory}[limit]()
check = lambda: cb.check(globals()[name], (torch.ones(1),), compiler=compiler, isolate=isolate == "isolate")
print(json.dumps(json.loads(check().to_json())))
"""


def checked(name: str, limit: str, compiler: str, isolate: str, folder: Path) -> dict[str, Any]:
    words = (sys.executable, "-c", PROGRAM, name, limit, compiler, isolate)
    code, out, err = finished(words, folder, {"TORCHINDUCTOR_CACHE_DIR": str(folder)})
    assert code == 0, err
    report = json.loads(out.strip().splitlines()[-1])
    if report is None:
        pytest.skip("this user's processes cannot be limited")
    return dict(report)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are set as on Linux")


@pytest.mark.process
@pytest.mark.parametrize(
    ("compiler", "isolate", "words"),
    [
        ("eager", "isolate", "nothing was run: no process can be started here (BlockingIOError"),
        ("inductor", "", "numcheck cannot judge this program"),
    ],
)
def test_no_further_process(compiler: str, isolate: str, words: str, tmp_path: Path) -> None:
    report = checked("small", "processes", compiler, isolate, tmp_path)
    assert report["verdict"] == "inconclusive"
    [finding] = report["findings"]
    assert finding["detail"] == "unsupported.processes"
    assert words in finding["message"]
    assert "ulimit -u" in finding["message"]


@pytest.mark.process
@pytest.mark.parametrize("isolate", ["isolate", pytest.param("", marks=pytest.mark.slow)])
def test_memory_that_eager_does_not_get_either(isolate: str, tmp_path: Path) -> None:
    report = checked("large", "memory", "eager", isolate, tmp_path)
    assert report["verdict"] == "inconclusive"
    assert not [finding for finding in report["findings"] if not finding["detail"].startswith("unsupported")]
    assert "can't allocate memory" in str(report["coverage"]["skipped"])


@pytest.mark.process
def test_a_check_that_gets_no_memory_itself_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("checked_backend.checking.check"), "run_program", raising(MemoryError))
    monkeypatch.setattr(unsupported, "free_memory", lambda: 2**20)
    report = cb.check(torch.sin, (torch.ones(1),), compiler="eager", gradients=False, isolate=True)
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert [finding.detail for finding in report.findings] == ["unsupported.memory"]


@pytest.mark.slow
@pytest.mark.parametrize("isolate", ["isolate", ""])
def test_a_program_that_keeps_within_the_limit_is_checked(isolate: str, tmp_path: Path) -> None:
    assert checked("small", "memory", "eager", isolate, tmp_path)["verdict"] == "pass"
