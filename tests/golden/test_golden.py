"""The golden outputs are what the package makes; what is not is reported, and `--accept` keeps it."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checked_backend as cb
from tests.golden.__main__ import main
from tests.golden.compare import EXPECTED, read
from tests.golden.masks import MASKS, mask, same
from tests.golden.produce import PARTS

Printed = pytest.CaptureFixture[str]


def compared(part: str, folder: Path = EXPECTED, *more: str) -> int:
    return main([part, "--folder", str(folder), *more])


def test_the_stored_reports_are_shown_as_they_were(capsys: Printed) -> None:
    assert compared("views") == 0, capsys.readouterr().out


@pytest.mark.process
@pytest.mark.smoke
def test_help_is_as_it_was(capsys: Printed) -> None:
    assert compared("help") == 0, capsys.readouterr().out


@pytest.mark.process
@pytest.mark.timeout(1800)
def test_programs_and_command_lines_end_as_they_did() -> None:
    words = [sys.executable, "-m", "tests.golden", "reports", "sweep", "fuzz", "exits"]
    ended = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_file_is_of_a_part_and_all_are_small() -> None:
    files = read(EXPECTED)
    assert {name.partition("/")[0] for name in files} == {*PARTS}
    assert sum(map(len, files.values())) < 1_000_000


def test_what_is_different_is_reported_until_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    folder = tmp_path / "expected"
    shutil.copytree(EXPECTED, folder)
    (folder / "views" / "graph.json").rename(folder / "views" / "graph.txt")
    to_text = cb.Report.to_text
    monkeypatch.setattr(
        cb.Report,
        "to_text",
        lambda report, **how: to_text(report, **how).replace("something else than", "nothing like"),
    )
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    changed = ["api.txt", "few.xml", "pipe_120.txt", "reports.xml", "shown.txt"]

    assert compared("views", folder) == 1
    out = capsys.readouterr().out
    assert re.findall(r"^views/(\S+): differs$", out, re.MULTILINE) == changed
    assert "\nviews/graph.json: new\nviews/graph.txt: is not made any more\n" in out
    assert "\n    +   The compiled program computes nothing like your model.\n" in out
    assert times == {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}

    assert compared("views", folder, "--accept") == 0
    assert (
        sorted(path.name for path, time in times.items() if path.exists() and path.stat().st_mtime_ns != time)
        == changed
    )
    assert read(folder).keys() == read(EXPECTED).keys()
    assert compared("views", folder) == 0


HIDDEN = (
    ("net-20260102T030405Z-77-0.json", "net-TIME-PID.json"),
    ("2026-01-02T03:04:05.678+00:00", "TIME"),
    ("(2026-01-02)", "(DATE)"),
    ('"gpu": "H100", "cpu": 1', '"cpu": 1'),
    (f'"torch": "{torch.__version__}"', '"torch": "VERSION"'),
    ("platform Linux-6.1-x86_64; cpu", "platform PLATFORM; cpu"),
    ("cpu</th><td>AMD EPYC (AVX2)</td>", "cpu</th><td>CPU</td>"),
    ("- compiler: g++ (Debian) 12.2", "- compiler: COMPILER"),
    (
        f"torch {torch.__version__}, Python {platform.python_version()}, Linux x86_64, AVX2\\n",
        "torch VERSION, Python VERSION, MACHINE\\n",
    ),
    ('"host": "vm"', '"host": "HOST"'),
    ("0.5 s, 10 min", "N s, N s"),
    ("0.05 a second", "N a second"),
    ('"seconds": 0.5123,', '"seconds": SECONDS,'),
    ('"process_peak": 295657472,', '"process_peak": BYTES,'),
    ("342.1 MiB", "N MiB"),
    ("<pre>Traceback (most recent call last):\n  File 1\nError: no</pre>", "<pre>TRACEBACK</pre>"),
)


@pytest.mark.parametrize(("text", "masked"), HIDDEN)
def test_masks_hide_what_is_different_in_each_run(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_no_mask_is_left_out() -> None:
    for place, (text, masked) in enumerate(HIDDEN):
        assert mask(text, MASKS[:place] + MASKS[place + 1 :]) != masked
    assert len(HIDDEN) == len(MASKS)


@pytest.mark.parametrize(
    "text",
    [
        "FAIL: programs.py:147: output[0] has another dtype than in eager",
        "logic, output[0]: 5 of 6 elements, 99% off, 3.01e+04 times its rounding noise",
        "compiled by tests.golden.programs.right; threads 1",
        '"compiler": "FOLDER/models.py:wrong", "max_abs_diff": 16.25, "rmse": 9.28877',
        "python checked_backend_reports/repro_relu.py",
        '"torch": "2.1.7+cpu"',
        "torch.compiler.disable, torch 2, 20260102, 12 of 16 elements, 8388608 ulp",
        "host: killed by SIGKILL while compiling, after 3 calls",
    ],
)
def test_masks_hide_nothing_else(text: str) -> None:
    assert mask(text) == text


def test_only_the_last_digits_of_long_numbers_may_differ() -> None:
    assert same("rms 9.288770101579649 of 6", "rms 9.288770101579612 of 6")
    assert not same("rms 9.288770101579649", "rms 9.298770101579649")
    assert not same("97% off", "98% off")
    assert not same("1.5 off", "1.50001 off")
    assert not same("12345 off", "12345 on")
    assert not same("1 2", "1 2 3")
