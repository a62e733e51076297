"""The verb ``doctor``: what works on this machine."""

from __future__ import annotations

import json

import pytest

from tests.support.cli_tools import Run

pytestmark = pytest.mark.process


def test_doctor(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    read = json.loads(out)
    assert code == {"pass": 0, "fail": 1}[read["verdict"]]
    assert "inductor" in read["backends"]
    assert "torch" in read["environment"]
    names = {capability["name"] for capability in read["capabilities"]}
    assert {"torch version", "backends by name", "Inductor on the CPU", "a process of its own"} <= names
    assert "pytest --numcheck" in names
    assert not [name for name in read["backends"] if name.endswith("_TESTING_ONLY") or "minifier" in name]
    assert "aot_eager" in read["backends"]
    code, out, _ = run("doctor")
    assert out.startswith("Versions\n  python ")
    assert "\nWhat can be checked here\n" in out
    assert "one that names none writes nothing, and nobody says so (checked-backend run --dump DIR" in out


def test_doctor_without_a_compiler(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    _, out, _ = run("doctor")
    assert "Inductor on the CPU: no-such-compiler is not on the PATH; install one or set CXX." in out


def test_doctor_under_another_processor_setting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache gives code for 16 numbers at a time to a program that is compiled for 8: wrong values."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    _, out, _ = run("doctor")
    assert "ATEN_CPU_CAPABILITY=avx2 is set" in out
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "here")
    assert "results are wrong" not in run("doctor")[1]
