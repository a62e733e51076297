"""Two recordings of a program: where the second leaves the noise of the first."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checked_backend import CheckedBackendError, Kind, Verdict
from checked_backend.autostart import RUN
from checked_backend.cli.running import checking_environment
from checked_backend.options import environment_variable
from checked_backend.program.compare import compare_recordings
from checked_backend.program.record import describe
from checked_backend.program.records import PLAIN, RecordFile, TensorRecord, read_run
from tests.support.started_programs import finished
from tests.support.warm_process import WarmPython

VERB = (sys.executable, "-m", "checked_backend")

PROGRAM = """
import sys, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def backend(gm, inputs):
    calls = []
    def run(*args):
        calls.append(1)
        outputs = gm.forward(*args)
        wrong = "output" in sys.argv and len(calls) == 5
        return tuple(output * (1 + 1e-4) for output in outputs) if wrong else outputs
    return run

compiled = torch.compile(model, backend=backend)
for step in range(6):
    x = torch.randn(64, 16)
    loss = compiled(x).square().mean()
    loss.backward()
    if "optimizer" in sys.argv and step == 2:
        model[0].weight.grad[0] *= 1.05
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), torch.rand(1).item())
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "train.py").write_text(PROGRAM)
    code, out, err = finished((*VERB, "record", "--out", "first", "--", "train.py"), folder)
    assert code == 0, err
    assert err.endswith("recorded the program, and 2 noise runs in first (checked-backend compare first DIR)\n")
    plain = warm_python.run(folder / "train.py", env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout
    assert out.splitlines()[0] == plain.strip()  # a recorded run is as it is alone
    assert len(set(out.splitlines())) > 1  # and the noise runs are not
    return folder


@pytest.mark.process
def test_a_program_leaves_no_noise_of_its_own(program: Path) -> None:
    words = (*VERB, "record", "--out", "second", "--noise-runs", "0", "--", sys.executable, "train.py")
    assert finished(words, program)[0] == 0
    code, out, err = finished((*VERB, "compare", "first", "second"), program)
    assert (code, err) == (0, "")
    assert out.startswith("PASS: the second run stays within the noise of the first (")
    assert out.splitlines()[0].endswith(" tensors of both runs and 1 process)")


@pytest.mark.process
@pytest.mark.parametrize(
    ("changed", "subject", "where", "meaning"),
    [
        ("output", "output[0]", "first in call 5 of Sequential", "arises in this region"),
        ("optimizer", "input[0.weight]", "first in call 4 of Sequential", "from outside"),
    ],
)
def test_the_first_place_is_named(program: Path, changed: str, subject: str, where: str, meaning: str) -> None:
    place = str(program / f"second-{changed}" / PLAIN)
    more = {**checking_environment(), RUN: str(program), environment_variable("record"): place}  # as the verb starts it
    code, _, err = finished((sys.executable, "train.py", changed), program, more)
    assert code == 0, err
    report = compare_recordings(program / "first", program / f"second-{changed}")
    assert report.findings[0].subject == subject
    told = " ".join(str(report).split())
    assert told.startswith(f"FAIL: Sequential: {subject} leaves the noise of the first run"), told
    assert where in told
    assert meaning in told


@pytest.mark.process
def test_compare_tells_people_pages_and_programs(tmp_path: Path) -> None:
    leave(tmp_path / "first", [[TENSOR], [moved(1e-5)], [moved(-1e-5)]])
    leave(tmp_path / "second", [[moved(0.1)]])
    code, out, _ = finished((*VERB, "compare", "first", "second", "--html", "page.html"), tmp_path)
    assert code == 1, out
    assert out.startswith("FAIL: f: output[0] leaves the noise of the first run"), out
    assert "noise of the first run" in (tmp_path / "page.html").read_text()
    found = json.loads(finished((*VERB, "compare", "first", "second", "--json"), tmp_path)[1])
    assert found["findings"][0]["subject"] == "output[0]"


@pytest.mark.process
def test_a_program_that_fails_or_compiles_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("import torch, sys\ntorch.compile(torch.sin, backend='eager')(torch.ones(3))")
    (tmp_path / "q.py").write_text("pass")
    (tmp_path / "r.py").write_text((tmp_path / "p.py").read_text() + "\nsys.exit(5)")
    code, _, err = finished((*VERB, "record", "--out", "q", "--", "q.py"), tmp_path)
    assert (code, "the program compiled nothing that ran" in err) == (3, True)
    assert finished((*VERB, "record", "--out", "r", "--", "r.py"), tmp_path)[0] == 5
    code, _, err = finished((*VERB, "record", "--out", "r", "--", "p.py"), tmp_path)
    assert (code, "has a recording already" in err) == (3, True)
    code, _, err = finished((*VERB, "compare", "q", "nowhere"), tmp_path)
    assert (code, "no recording" in err) == (3, True)


TENSOR = TensorRecord("f", 1, "output[0]", "float32", (3,), 1, 2.0, 0, 2**-24, (1.0, 2.0, 3.0))


def leave(folder: Path, runs: Sequence[Sequence[TensorRecord]]) -> Path:
    for number, tensors in enumerate(runs):
        file = RecordFile(folder / (f"noise-{number}" if number else PLAIN), "0", {"environment": {"torch": "2"}})
        for tensor in tensors:
            file.add(tensor)
        file.file.close()
    return folder


def moved(by: float, **more: object) -> TensorRecord:
    sample = tuple(value + by for value in TENSOR.sample)
    return replace(TENSOR, bits=None, sample=sample, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("by", "verdict"), [(1e-5, Verdict.PASS), (1e-3, Verdict.FAIL), (float("nan"), Verdict.FAIL)])
def test_a_difference_is_held_against_the_noise_of_the_first(tmp_path: Path, by: float, verdict: Verdict) -> None:
    first = leave(tmp_path / "a", [[TENSOR], [moved(1e-5)], [moved(-1e-5)]])
    report = compare_recordings(first, leave(tmp_path / "b", [[moved(by)]]))
    assert report.verdict is verdict
    assert report.coverage.detection_limit["output[0] of f"] == pytest.approx(8e-5, rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "unit", "roundings", "verdict"),
    [
        ("float32", 2**-24, 6, Verdict.PASS),  # as randn with other vector instructions
        ("float32", 2**-24, 40, Verdict.FAIL),
        ("bfloat16", 2**-8, 2, Verdict.PASS),
        ("bfloat16", 2**-8, 6, Verdict.FAIL),
    ],
)
def test_what_code_between_the_regions_makes_may_round_otherwise(
    tmp_path: Path, dtype: str, unit: float, roundings: float, verdict: Verdict
) -> None:
    made = replace(TENSOR, dtype=dtype, roundoff=unit)
    first = leave(tmp_path / "a", [[made], [made], [made]])  # alike: no region rounds before it
    other = moved(roundings * unit * made.rms, dtype=dtype, roundoff=unit)
    assert compare_recordings(first, leave(tmp_path / "b", [[other]])).verdict is verdict


def test_what_cannot_be_compared_is_no_pass(tmp_path: Path) -> None:
    first = leave(tmp_path / "a", [[TENSOR], [TENSOR], [TENSOR]])
    other = leave(tmp_path / "b", [[TENSOR, replace(TENSOR, region="g")]])
    assert compare_recordings(first, other).verdict is Verdict.INCONCLUSIVE
    report = compare_recordings(leave(tmp_path / "c", [[TENSOR]]), leave(tmp_path / "d", [[moved(1.0)]]))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "--noise-runs" in str(report)


def test_structure_and_what_is_no_number(tmp_path: Path) -> None:
    first = leave(tmp_path / "a", [[TENSOR], [TENSOR], [TENSOR]])
    shape = replace(TENSOR, shape=(1, 3), bits=2)
    assert compare_recordings(first, leave(tmp_path / "b", [[shape]])).findings[0].kind is Kind.STRUCTURE
    nonfinite = moved(0.0, nonfinite=1)
    assert compare_recordings(first, leave(tmp_path / "c", [[nonfinite]])).findings[0].kind is Kind.NONFINITE


@pytest.mark.parametrize(
    "line",
    [
        *(b"{", b'{"schema": "other", "version": 1}', b"[]", b"\x00", b'{"a":' * 2000, b"\xff\xfe"),
        b'{"schema": "checked_backend.record", "version": 1, "environment": [1]}',
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "rank0-0.jsonl").write_bytes(line + b"\n")
    with pytest.raises(CheckedBackendError, match=r"rank0-0.jsonl:1: no line of a recording"):
        read_run(tmp_path)


def test_records_of_two_devices_are_compared_by_their_values(tmp_path: Path) -> None:
    # what a GPU would leave: another order of additions, another layout in memory, its name
    first = leave(tmp_path / "a", [[replace(TENSOR, device="cpu")], [moved(1e-5)], [moved(-1e-5)]])
    report = compare_recordings(first, leave(tmp_path / "b", [[replace(moved(2e-5, device="cuda"), bits=7)]]))
    assert report.verdict is Verdict.PASS
    assert f"device: cpu in {tmp_path / 'a'}, cuda in {tmp_path / 'b'}" in report.coverage.notes
    assert compare_recordings(first, leave(tmp_path / "c", [[moved(1e-2, device="cuda")]])).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("amount", "device", "verdict"),
    [(0.01, "cuda", Verdict.PASS), (0.01, "cpu", Verdict.FAIL), (1.0, "cuda", Verdict.FAIL)],
)
def test_autocast_may_choose_another_dtype_on_another_device(
    tmp_path: Path, amount: float, device: str, verdict: Verdict
) -> None:
    half = {"device": "cpu", "dtype": "bfloat16", "roundoff": 2**-8}
    first = leave(tmp_path / "a", [[moved(by, **half)] for by in (0.0, 0.02, -0.02)])
    other = moved(amount, device=device, dtype="float16", roundoff=2**-11)
    report = compare_recordings(first, leave(tmp_path / "b", [[other]]))
    assert report.verdict is verdict
    told = any("bfloat16 on cpu, float16 on cuda" in note for note in report.coverage.notes)
    assert told == (verdict is Verdict.PASS)


def described(tensor: torch.Tensor) -> TensorRecord:
    return describe("f", 1, "output[0]", tensor)


def test_a_record_holds_values_in_their_order_whatever_the_layout_in_memory(tmp_path: Path) -> None:
    square = torch.arange(4.0).view(2, 2)
    assert described(square.T).sample == described(square.T.contiguous()).sample
    first = leave(tmp_path / "a", [[described(square)]] * 3)
    assert compare_recordings(first, leave(tmp_path / "b", [[described(square.T)]])).verdict is Verdict.FAIL
    turned = leave(tmp_path / "c", [[described(square.T)]] * 3)
    alike = leave(tmp_path / "d", [[described(square.T.contiguous())]])
    assert compare_recordings(turned, alike).verdict is Verdict.PASS


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.bool, torch.complex64])
def test_every_dtype_is_read(dtype: torch.dtype) -> None:
    found = described(torch.ones(3).to(dtype))
    ones = (1.0, 0.0) * 3 if dtype.is_complex else (1.0,) * 3
    assert (found.unread, found.sample, found.device) == ("", ones, "cpu")


def rows_swapped(tensor: torch.Tensor) -> torch.Tensor:
    order = torch.arange(len(tensor))
    order[3], order[4] = 4, 3
    return tensor[order]


def one_sign_turned(tensor: torch.Tensor) -> torch.Tensor:
    turned = tensor.clone()
    turned[3, 7] *= -1
    return turned


@pytest.mark.parametrize("fault", [rows_swapped, one_sign_turned])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_what_no_sample_and_no_size_shows_is_found(
    tmp_path: Path, dtype: torch.dtype, fault: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    values = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    made = {torch.float32: values, torch.int64: (values * 100).long(), torch.bool: values > 0}[dtype]
    other = rows_swapped(made) if dtype is torch.bool else fault(made)  # a bool has no sign
    assert described(other).sample == described(made).sample
    noisy = [values + torch.randn(1000, 64, generator=torch.Generator().manual_seed(n)) * 1e-7 for n in (1, 2, 3)]
    runs = [noisy[0], noisy[1]] if dtype is torch.float32 else [made, made]
    first = leave(tmp_path / "a", [[described(made)], *([described(run)] for run in runs)])
    assert compare_recordings(first, leave(tmp_path / "b", [[described(other)]])).verdict is Verdict.FAIL
    clean = noisy[2] if dtype is torch.float32 else made
    assert compare_recordings(first, leave(tmp_path / "c", [[described(clean)]])).verdict is Verdict.PASS


def test_signs_follow_from_places_and_squares_may_overflow() -> None:
    ramp = torch.arange(4.0)
    assert described(ramp).projections == described(ramp.double()).projections == (2.0, -3.0, -1.0, 2.0)
    huge = described(torch.full((3,), 1e300, dtype=torch.float64))
    assert (huge.unread, huge.rms > 1e299) == ("", True)


@pytest.mark.parametrize(
    "change",
    [{"shape": [float("inf")]}, {"call": float("inf")}, {"rms": float("nan")}, {"rms": "1e999"}, {"roundoff": -1}],
)
def test_numbers_that_no_recording_has_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    folder = leave(tmp_path, [[TENSOR]]) / PLAIN
    path = folder / "rank0-0.jsonl"
    header, line = path.read_text().splitlines()
    path.write_text(f"{header}\n{json.dumps(json.loads(line) | change)}\n")
    with pytest.raises(CheckedBackendError, match=r"rank0-0.jsonl:2: no line of a recording"):
        read_run(folder)


def test_a_folder_or_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0-0.jsonl")
    with pytest.raises(CheckedBackendError, match="no file"):
        read_run(tmp_path)


def test_recordings_of_two_kinds_are_not_compared_and_no_pass(tmp_path: Path) -> None:
    first = leave(tmp_path / "a", [[TENSOR]] * 3)
    report = compare_recordings(first, leave(tmp_path / "b", [[replace(TENSOR, bits=2, sample=(1.0,))]]))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "in different ways" in str(report)


class Unknown(torch.Tensor):
    pass


def test_what_cannot_be_read_stops_no_program_and_is_told(tmp_path: Path) -> None:
    records = [
        described(torch.ones(3).as_subclass(Unknown)),
        replace(described(torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)), subject="output[1]"),
        replace(described(torch.ones(3).to_sparse()), subject="output[2]"),
    ]
    assert all(record.unread for record in records)
    report = compare_recordings(leave(tmp_path / "a", [records] * 3), leave(tmp_path / "b", [records]))
    assert report.verdict is Verdict.INCONCLUSIVE
    told = {skip.subject: skip.reason for skip in report.coverage.skipped}
    assert told["output[0]"] == "its values were not recorded: a tensor of the class Unknown"
    assert "Float4_e2m1fn_x2" in told["output[1]"]
    assert "torch.sparse_coo" in told["output[2]"]


def test_a_line_that_a_killed_process_left_is_not_read(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "0", {})
    file.add(TENSOR)
    file.file.close()
    path = tmp_path / "rank0-0.jsonl"
    path.write_text(path.read_text() + '{"region": "f"')
    assert len(read_run(tmp_path).tensors) == 1


LOSES_A_WRITE = """
import torch

def backend(gm, inputs):
    for node in gm.graph.nodes:
        if node.target == "add_":
            gm.graph.erase_node(node)
            break
    gm.recompile()
    return gm.forward

def program(x, buffer):
    buffer.add_(1)
    return x * 2

with torch.no_grad():
    torch.compile(program, backend=backend)(torch.ones(3), torch.zeros(3))
"""


@pytest.mark.process
def test_what_is_written_is_recorded_also_if_the_compiler_takes_the_write_out_of_the_graph(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(LOSES_A_WRITE)
    more = {**checking_environment(), RUN: str(tmp_path), environment_variable("record"): str(tmp_path / "out" / PLAIN)}
    code, _, err = finished((sys.executable, "p.py"), tmp_path, more)
    assert code == 0, err
    subjects = {one.subject for one in read_run(tmp_path / "out" / PLAIN).tensors.values()}
    assert {"mutated[buffer]"} == {one for one in subjects if one.startswith("mutated[")}
