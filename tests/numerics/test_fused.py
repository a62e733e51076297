from __future__ import annotations

import gc
import math
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from checked_backend.numerics import fused
from checked_backend.numerics.fused import FUSED_ROW, fused_loop


def test_rows_are_those_of_the_source():
    source = Path(fused.__file__).with_name("fused.c").read_text()
    assert re.search(r"ROW = (\d+)", source)[1] == str(FUSED_ROW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_says_where_and_keeps_what_is_known(dtype):
    reference = torch.ones(3 * FUSED_ROW + 5, dtype=dtype)
    candidate = reference.clone()
    candidate[FUSED_ROW + 7] = 1.5
    candidate[2 * FUSED_ROW + 1] = -1.0
    loop = fused_loop(dtype)
    found = loop(reference, candidate, 0.0, 0)
    assert (found.differing, found.peak, found.ratio, found.top) == (2, 2.0, 2.0, 1.0)
    assert found.peak_row == found.ratio_row == 2 * FUSED_ROW
    assert found.squares == 4.25
    bits = reference.view(torch.int32 if dtype is torch.float32 else torch.int16)
    assert found.ulp == 2 * int(bits[0].item())
    again = loop(reference, candidate, 3.0, found.ulp + 1)
    assert (again.ratio, again.ulp, again.differing) == (3.0, found.ulp + 1, 2)


@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(value, position):
    loop = fused_loop(torch.float32)
    reference, candidate = torch.zeros(FUSED_ROW + 1), torch.zeros(FUSED_ROW + 1)
    for side in (candidate, reference):  # at last in both
        side[position] = value
        found = loop(reference, candidate, 0.0, 0)
        assert not (math.isfinite(found.peak) and math.isfinite(found.top))


def test_no_other_dtypes():
    assert fused_loop(torch.float64) is fused_loop(torch.int32) is None


@pytest.mark.parametrize("compiler", [None, "/no/such/compiler", "false"])
def test_without_a_compiler_there_is_no_loop(compiler, monkeypatch):
    monkeypatch.setattr(fused.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    build = fused._build.__wrapped__()
    assert build is None or build.library() is None


def test_without_a_folder_to_write_to_there_is_no_loop(monkeypatch):
    def refuse(*args, **kwargs):
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(fused.tempfile, "mkdtemp", refuse)
    assert fused._build.__wrapped__() is None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(fused.tempfile, "mkdtemp", lambda prefix: str((tmp_path / prefix).mkdir() or tmp_path / prefix))
    return tmp_path / "checked_backend_"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Makes the compiler that CC names, which is a shell script."""

    def make(script):
        path = tmp_path / "cc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))

    return make


def test_a_compiler_that_knows_no_processor_is_asked_again(folder, compiler):
    compiler('case "$*" in *native*) exit 1;; esac\nexec cc "$@"')
    build = fused._build.__wrapped__()
    assert folder.exists()
    assert build.library() is not None
    assert not folder.exists()


def test_a_build_that_nobody_waits_for_leaves_nothing(folder, compiler):
    compiler("exec sleep 600")
    build = fused._build.__wrapped__()
    assert folder.exists()
    group = build.group
    os.killpg(group, 0)
    assert fused._said(build._pipe, 0.0) is None
    del build
    gc.collect()
    assert not folder.exists()
    assert all_ended(group)


def all_ended(group):
    """Whether no process of a group runs; one that nobody waits for may still be listed."""
    states = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        states += [state] if int(its_group) == group else []
    return set(states) <= {"Z", "X"}


def test_a_compiler_that_hangs_is_ended(folder, compiler, monkeypatch):
    compiler("exec sleep 600")
    monkeypatch.setattr(fused, "_TIMEOUT", 0.05)
    assert fused._build.__wrapped__().library() is None
    assert not folder.exists()


def test_a_compiler_that_hangs_is_not_asked_again(folder, compiler, monkeypatch, tmp_path):
    compiler(f"echo asked >> {tmp_path}/asked\nexec sleep 600")
    monkeypatch.setattr(fused, "_TIMEOUT", 0.5)
    assert fused._build.__wrapped__().library() is None
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_temporary_files_of_the_compiler_go_with_the_build(folder, compiler, tmp_path):
    compiler(f'echo half > "$TMPDIR/cc.s"\necho "$TMPDIR" > {tmp_path}/where\nexec sleep 600')
    build = fused._build.__wrapped__()
    where = tmp_path / "where"
    until = time.monotonic() + 20
    while not (where.exists() and where.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    assert where.read_text().strip() == str(folder)
    del build
    gc.collect()
    assert not folder.exists()


def test_the_compiler_is_no_child_of_the_programs(folder, compiler):
    compiler("exec sleep 600")
    build = fused._build.__wrapped__()
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    if not listed.exists():
        pytest.skip("this system does not list the children of a process")
    children = listed.read_text().split()
    assert str(build.group) not in children
    for child in children:
        assert "fused.c" not in Path(f"/proc/{child}/cmdline").read_text()


def test_a_compiler_between_quotation_marks(tmp_path, monkeypatch):
    path = tmp_path / "with spaces" / "cc"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\nexec cc "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CC", f"'{path}' -g0")
    assert fused._build.__wrapped__().library() is not None


def test_options_of_the_users_compiler_change_no_arithmetic(monkeypatch):
    denormal = torch.tensor([2.0**-149])
    monkeypatch.setenv("CC", "cc -ffast-math")
    assert fused._build.__wrapped__().library() is not None
    assert (denormal * 1).item() == 2.0**-149


@pytest.fixture
def unbuilt():
    fused._build.cache_clear()
    yield
    fused._build.cache_clear()


@pytest.mark.forks
@pytest.mark.usefixtures("unbuilt")
def test_a_process_that_is_forked_while_a_thread_waits_for_the_compiler(folder, compiler, monkeypatch):
    compiler("exec sleep 600")
    build = fused._build()
    waiting = threading.Thread(target=build.library)
    waiting.start()
    while not build._lock.locked():
        time.sleep(0.001)
    time.sleep(0.1)  # it has begun to wait
    monkeypatch.setattr(fused, "_TIMEOUT", 0.05)
    monkeypatch.setattr(fused.tempfile, "mkdtemp", lambda prefix: str((folder / "child").mkdir() or folder / "child"))
    child = os.fork()
    if not child:
        os._exit(0 if fused._library() is None else 1)
    until = time.monotonic() + 15
    ended = (0, 0)
    while not ended[0] and time.monotonic() < until:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.killpg(build.group, signal.SIGKILL)
    waiting.join()
    assert ended == (child, 0)


@pytest.mark.forks
@pytest.mark.usefixtures("unbuilt")
def test_a_forked_process_builds_its_own():
    build = fused._build()
    child = os.fork()
    if not child:
        os._exit(0 if fused._library() is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert build.library() is not None


def test_ratios_of_denormals_are_not_overlooked():
    loop = fused_loop(torch.float32)
    reference, candidate = torch.ones(2 * FUSED_ROW), torch.ones(2 * FUSED_ROW)
    candidate[0] = 0.05
    reference[-1], candidate[-1] = 2.0**-149, 2.0**-148
    assert loop(reference, candidate, 0.0, 0).ratio == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_sixteen_bits_is_read_as_torch_reads_it(dtype):
    loop = fused_loop(dtype)
    numbers = torch.arange(2**16).to(torch.int16).view(dtype)
    zeros = torch.zeros(FUSED_ROW, dtype=dtype)
    for row in numbers.split(FUSED_ROW):
        found = loop(row.contiguous(), zeros, 0.0, 0)
        wide = row.float().abs()
        assert (found.top == wide.max()) or (math.isnan(found.top) and wide.isnan().any())
        assert found.differing == int((row != 0).sum())
        if wide.isfinite().all() and wide.max() < 2.0**60:
            assert found.squares == pytest.approx(wide.double().square().sum().item(), rel=1e-5)
