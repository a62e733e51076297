"""Dumps from strangers: nothing of them runs, and what is wrong with them is said."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import pickle
import py_compile
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.dump import render_dump
from tests.support.dump_tools import Net, dumping, dumps, edit, python
from tests.support.hostile_edits import GRAPH_EDITS, Edit, relu


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    torch._dynamo.reset()
    dumping(Net(), folder)(torch.randn(4, 3)).sum().backward()
    return dumps(folder)["Net_forward_0"]


@pytest.fixture
def dump(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "dump"))


def refused(dump: Path, file: str, why: str) -> None:
    def use() -> None:
        loaded = cb.load_dump(dump)
        render_dump(loaded)
        loaded.inputs()
        with loaded.ambient():
            _ = loaded.module

    with pytest.raises(cb.DumpError, match=why) as caught:
        use()
    assert str(dump / file) in str(caught.value)


def test_the_original_is_not_refused(dump: Path) -> None:
    loaded = cb.load_dump(dump)
    assert loaded.module(*loaded.inputs())[0].shape == (4, 2)


READ = ["graph.json", "inputs.json", "inputs.safetensors", "constants.safetensors", "module.py"]
FILES = [*READ, "repro.py", "graph.dot"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "flipped", "folder", "link"])
def test_damage_is_named(dump: Path, file: str, how: str) -> None:
    path = dump / file
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[:-3])
    elif how == "flipped":
        at = len(data) - 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        if how == "link":
            (dump.parent / "elsewhere").write_bytes(data)
            path.symlink_to(dump.parent / "elsewhere")
    refused(dump, file, ".")


@pytest.mark.parametrize("version", [2, 4, "3", None])
def test_another_version_is_refused(dump: Path, version: object) -> None:
    for file in ("inputs.json", "graph.json"):
        edit(dump / file, lambda document: document.update(version=version))
        refused(dump, file, f"of version {version!r}; this package reads version 3. Dump the graph again")


def test_an_edit_is_said_to_be_one(dump: Path) -> None:
    (dump / "graph.json").write_text((dump / "graph.json").read_text().replace("aten.relu", "aten.tanh"))
    refused(dump, "graph.json", "edited or damaged")


def test_an_edit_of_a_program_is_said_to_do_nothing(dump: Path) -> None:
    with (dump / "module.py").open("a") as file:
        file.write("# tried\n")
    refused(dump, "module.py", "graph.json is run here, and no program: run repro.py to try an edit")


@pytest.mark.parametrize("name", GRAPH_EDITS)
def test_a_hostile_graph_is_refused(dump: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dump.parent)
    change, why = GRAPH_EDITS[name]
    edit(dump / "graph.json", change)
    refused(dump, "constants.safetensors" if name == "huge" else "graph.json", why)
    assert not (dump.parent / "pwned").exists()


def test_an_operator_that_opens_files_is_refused(dump: Path) -> None:
    library = torch.library.Library("dump_files", "DEF")
    library.define("read(Tensor x, *, str? file_name=None) -> Tensor")
    library.impl("read", lambda x, file_name=None: x.clone(), "CPU")
    for target in ("op:dump_files.read.default", "packet:dump_files.read"):
        edit(dump / "graph.json", lambda document, target=target: relu(document).update(target=target))
        refused(dump, "graph.json", r"opens a file \(file_name\)")
        (dump / "graph.json").write_text((dump / "graph.json").read_text().replace(target, "op:aten.relu.default"))
        edit(dump / "graph.json", lambda document: None)


INPUT_EDITS: dict[str, tuple[Edit, str]] = {
    "no such memory": (lambda d: d["inputs"][0]["tensor"].update(shape=[2**40, 2**40]), "beyond|cannot"),
    "device": (lambda d: d["storages"][0].update(device="__import__('os')"), "device"),
    "range": (lambda d: d["inputs"][0]["tensor"].update(range=[2, 1]), "range is empty"),
    "values": (lambda d: d.update(values="../../x.safetensors"), "values"),
    "grad": (lambda d: d["inputs"][0]["tensor"].update(dtype="int32"), "require grad"),
    "names": (lambda d: d["inputs"].pop(), "other inputs"),
    "a device that torch would import": (
        lambda d: [one.update(device="privateuseone") for one in (*d["storages"], d["inputs"][0]["tensor"])],
        ".",
    ),
    "type": (lambda d: d["inputs"][0].update(type="int"), "not of type"),
    "rng": (lambda d: d["rng"].update(cpu="!!"), "rng"),
    "random state": (lambda d: d["rng"].update(cpu="aGVsbG8="), "random state"),
    "random state, no text": (lambda d: d["rng"].update(cpu="a"), "random state"),
    "autocast": (lambda d: d["ambient"]["autocast"].update(cpu="int64"), "no autocast"),
    "memory": (lambda d: d["storages"][0].update(start=2**46, end=2**46 + d["storages"][0]["end"]), "this machine has"),
    "expression": (lambda d: d["inputs"][0]["tensor"].update(symbolic={"shape": 5}), "symbolic"),
    "other dump": (lambda d: d.update(graph="0" * 64), "another dump"),
    "stride": (lambda d: d["inputs"][0]["tensor"].update(stride=[]), "lengths"),
    "dimensions": (lambda d: d["inputs"][0]["tensor"].update(shape=[1] * 10**5, stride=[1] * 10**5), "at most 1000"),
}


@pytest.mark.parametrize("name", INPUT_EDITS)
def test_hostile_inputs_are_refused(dump: Path, name: str) -> None:
    change, why = INPUT_EDITS[name]
    edit(dump / "inputs.json", change)
    refused(dump, "inputs.json", why)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a": NaN}',
        '{"format": "checked_backend dump", "version": 1, "a": 1e999}',
        "null",
        "[]",
        '{"format": "checked_backend dump", "version": "1"}',
        "\0",
        "1" * 5000,
    ],
)
@pytest.mark.parametrize("file", ["graph.json", "inputs.json"])
def test_what_is_not_a_document_is_refused(dump: Path, file: str, text: str) -> None:
    (dump / file).write_text(text)
    refused(dump, file, ".")


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("file", ["inputs.safetensors", "constants.safetensors", "graph.json"])
def test_a_pickle_is_never_opened(dump: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dump.parent)
    (dump / file).write_bytes(pickle.dumps(Bomb()))
    refused(dump, file, ".")
    torch.save({"x": torch.ones(1)}, dump / file)
    refused(dump, file, ".")
    assert not (dump.parent / "pwned").exists()


def test_code_in_the_folder_is_not_run_by_loading_or_showing(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dump)
    bomb = "open('pwned', 'w').close()\n"
    for file in ("module.py", "repro.py", "torch.py", "json.py", "numpy.py"):
        (dump / file).write_text(bomb)
    own = dict.fromkeys(("module.py", "repro.py"), hashlib.sha256(bomb.encode()).hexdigest())
    edit(dump / "graph.json", lambda document: document["files"].update(own))
    loaded = cb.load_dump(dump)
    loaded.module(*loaded.inputs())
    render_dump(loaded)
    assert not (dump / "pwned").exists()


@pytest.mark.process
def test_repro_runs_no_other_code_of_its_folder(dump: Path) -> None:
    bomb = "import os\nopen('pwned', 'w').close()\n"
    for file in ("torch.py", "json.py", "numpy.py", "argparse.py", "types.py", "contextlib.py"):
        (dump / file).write_text(bomb)
    (dump / "typing").mkdir()
    (dump / "typing" / "__init__.py").write_text(bomb)
    # a compiled module that claims to belong to module.py, and not to need another look at it
    source = dump / "other.py"
    source.write_text(bomb)
    compiled = py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    Path(compiled).rename(importlib.util.cache_from_source(str(dump / "module.py")))
    for words in (("repro.py",), ("repro.py", "--compiler", "eager")):
        done = python(*words, folder=dump)
        assert done.returncode == 0, done.stderr
        assert "output[0]" in done.stdout
    assert not (dump / "pwned").exists()


def test_text_in_a_dump_cannot_write_to_the_terminal(dump: Path) -> None:
    edit(dump / "graph.json", lambda document: relu(document).update(source="\x1b]0;owned\x07\x1b[2J"))
    assert "\x1b" not in render_dump(cb.load_dump(dump))


def test_a_source_line_in_a_dump_cannot_leave_its_comment(dump: Path) -> None:
    stack = '  File "a.py", line 1, in f\n    x = 1\rimport os\x0b\x0c\x1b\u0085\u2028'
    edit(dump / "graph.json", lambda document: document.update(stacks=[stack] * len(document["stacks"])))
    traces = {node.meta["stack_trace"] for node in cb.load_dump(dump).module.graph.nodes if "stack_trace" in node.meta}
    assert traces == {'  File "a.py", line 1, in f\n    x = 1?import os?????'}


def test_files_that_only_claim_to_be_large_are_refused_at_once(dump: Path) -> None:
    for file in READ:
        size = (dump / file).stat().st_size
        os.truncate(dump / file, 2**40)  # a file with a hole: it takes no room
        refused(dump, file, ".")
        os.truncate(dump / file, size)
    (dump / "inputs.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    refused(dump, "inputs.safetensors", ".")


def test_a_great_many_values_are_refused_before_they_are_made(dump: Path) -> None:
    (dump / "graph.json").write_text("[" + "[]," * 10_000_000 + "[]]")
    refused(dump, "graph.json", "has 20,000,002 values, more than the 2,000,000 that a graph may have")
    (dump / "graph.json").write_text('{"format": "' + "x" * (65 << 20) + '"}')
    refused(dump, "graph.json", "larger than 64 MiB")


def test_a_large_header_is_refused_before_it_is_read(dump: Path) -> None:
    header = json.dumps({f"storage_{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(10**5)})
    (dump / "constants.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    refused(dump, "constants.safetensors", "its header has")


def test_what_is_no_file_is_not_waited_for(dump: Path) -> None:
    (dump / "inputs.json").unlink()
    os.mkfifo(dump / "inputs.json")
    refused(dump, "inputs.json", "regular file")
    os.unlink(dump / "inputs.json")
    (dump / "inputs.json").symlink_to("/dev/zero")
    refused(dump, "inputs.json", "regular file")


def test_a_folder_above_names_the_dumps_in_it(original: Path) -> None:
    with pytest.raises(cb.DumpError, match=r"graph\.json: missing.*Net_forward_0"):
        cb.load_dump(original.parent)
    with pytest.raises(cb.DumpError, match="not a folder"):
        cb.load_dump(original / "nothing")


def test_bounds_greater_than_any_float_are_shown(dump: Path) -> None:
    bounds = [-(10**400), 10**4000]
    edit(dump / "inputs.json", lambda d: next(e for e in d["inputs"] if e["tensor"])["tensor"].update(range=bounds))
    assert f"in [{bounds[0]}, {bounds[1]}]" in render_dump(cb.load_dump(dump))


@pytest.mark.parametrize(("left", "place", "fine"), [(1, 0, True), (100, 525, True), (624, 624, False), (0, 0, False)])
def test_a_random_state_stays_in_its_table(dump: Path, left: int, place: int, fine: bool) -> None:
    state = bytearray(torch.get_rng_state().tolist())
    struct.pack_into("<iiQ", state, 8, left, 1, place)
    edit(dump / "inputs.json", lambda document: document["rng"].update(cpu=base64.b64encode(state).decode()))
    if fine:
        with cb.load_dump(dump).ambient():
            torch.rand(3)
    else:
        refused(dump, "inputs.json", "no random state: its place lies outside of its table")
