"""Dumping from a program that runs: numbering, failures that must not reach it, and every backend and compiler."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, aot_module

import checked_backend as cb
from checked_backend.dump import RegionDump
from checked_backend.dump.region import claim_index
from tests.support.dump_tools import Net, dumping, dumps, python, run, same_leaf
from tests.support.raising import raising


def step(backend: Any, **options: Any) -> torch.Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net()
    torch.compile(net, backend=backend, options=options)(torch.ones(4, 3)).sum().backward()
    assert net.linear.weight.grad is not None
    return net.linear.weight.grad


@pytest.mark.parametrize("backend", ["nop", "debug_interpreter", "graph_dumper"])
def test_the_variable_dumps_every_kind(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHECKED_BACKEND_DUMP", str(tmp_path))
    monkeypatch.setenv("CHECKED_BACKEND_DUMP_VALUES", "1")
    gradient = step(backend)
    assert sorted(dumps(tmp_path)) == [f"Net_{kind}_0" for kind in ("backward", "dynamo", "forward", "joint")]
    told = "wrote the graph Net/Net_dynamo_0, and beside it joint and forward (checked-backend show Net/Net_dynamo_0)"
    assert capsys.readouterr().err == f"checked-backend: {told}\n"  # the backward pass is compiled later
    (backward,) = (cb.load_dump(path) for name, path in dumps(tmp_path).items() if "backward" in name)
    assert any(same_leaf(gradient, leaf) for leaf in run(backward))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "nop"])
def test_the_variable_dumps_numchecks_region(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_DUMP", str(tmp_path))
    step("numcheck", compiler=compiler)
    dump = cb.load_dump(dumps(tmp_path)["Net_dynamo_0"])
    assert dump.metadata["inputs"]["called"]
    assert len(run(dump)) == 1


def test_a_full_disk_is_a_warning_and_the_program_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step("nop")
    real, room = Path.write_bytes, [0]

    def full(path: Path, data: bytes) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    for bytes_left in (0, 5_000, 20_000, 60_000):
        room[0] = bytes_left
        root = tmp_path / str(bytes_left)
        with pytest.warns(cb.DumpWarning, match=r"the program goes on.*No space left on device"):
            gradient = step("graph_dumper", dump=str(root))
        assert torch.equal(expected, gradient)
        for path in dumps(root).values():
            assert cb.load_dump(path).module is not None
        assert [path for path in root.rglob("*") if path.name.startswith(".") and path.name != ".claims"] == []


LIMITED = """
import resource, signal, sys, warnings, torch
from torch import nn
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(300, 400), nn.ReLU()), torch.ones(600, 300)
net(x).sum().backward()
expected, net[0].weight.grad = net[0].weight.grad, None
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]) << 10,) * 2)
options = {"dump": sys.argv[1], "dump_values": True}
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    torch.compile(net, backend="graph_dumper", options=options)(x).sum().backward()
assert torch.equal(expected, net[0].weight.grad)
print(*[str(one.message) for one in told if one.category.__name__ == "DumpWarning"], sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kib", "graphs", "why"), [(3, 0, "cannot write the dump"), (100, 4, "were not recorded")])
def test_files_that_really_cannot_grow_are_a_warning(tmp_path: Path, kib: int, graphs: int, why: str) -> None:
    root = tmp_path / "d"
    done = python("-c", LIMITED, root, kib, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout.strip().splitlines()
    assert told
    assert all(why in line and "the program goes on" in line and "File too large" in line for line in told)
    found = {name: cb.load_dump(path) for name, path in dumps(root).items()}
    assert len(found) == graphs
    for dump in found.values():
        dump.module(*dump.inputs())
    assert [path for path in root.rglob("*") if path.name.startswith(".") and path.name != ".claims"] == []


def test_a_disk_that_is_full_from_the_start_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "folder")))
    with pytest.warns(cb.DumpWarning, match="No space left on device"):
        step("nop", dump=str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


KILLER = """
import os, sys, pathlib, torch
from checked_backend.dump import encode
calls, last = 0, int(sys.argv[2])
def dying(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == last:
            os._exit(9)
        return function(*args, **kwargs)
    return call
pathlib.Path.write_bytes = dying(pathlib.Path.write_bytes)
os.rename, os.replace, os.mkdir, os.open = map(dying, (os.rename, os.replace, os.mkdir, os.open))
encode._write = dying(encode._write)
def program(x, w):
    return (x @ w).relu() * torch.tensor([1.0, 2.0])
w = torch.ones(3, 2, requires_grad=True)
options = {"dump": sys.argv[1], "dump_values": True}
torch.compile(program, backend="graph_dumper", options=options)(torch.ones(4, 3), w).sum().backward()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.ci_sample
def test_killed_at_any_point_nothing_half_written_is_loadable(tmp_path: Path) -> None:
    whole = 0
    for last in range(1, 1000, 7):
        root = tmp_path / str(last)
        done = python("-c", KILLER, root, last, folder=tmp_path)
        assert done.returncode in (0, 9), done.stderr
        for path in [one for one in root.rglob("*") if one.is_dir() and one.name != ".claims"]:
            try:
                dump = cb.load_dump(path)
            except cb.DumpError:
                assert path.name.startswith(".") or path.parent == root
                continue
            assert not path.name.startswith(".")
            dump.module(*dump.inputs())
            whole += 1
        if done.returncode == 0:
            break
    assert done.returncode == 0
    assert whole > 10


def test_cut_off_before_the_last_file_a_dump_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prefix of the files of a dump, in the order in which they are written."""
    written: list[Path] = []
    real = Path.write_bytes

    def note(path: Path, data: bytes) -> int:
        written.append(path)
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", note)
    step("graph_dumper", dump=str(tmp_path))
    (folder,) = (path for name, path in dumps(tmp_path).items() if "forward" in name)
    names = [path.name for path in written if path.parent.name.startswith(".Net_forward")]
    assert names[-1] == "graph.json"
    assert cb.load_dump(folder).kind == "forward"
    for name in reversed(names):
        (folder / name).unlink()
        with pytest.raises(cb.DumpError):
            cb.load_dump(folder)


def test_a_backward_that_is_compiled_twice_is_dumped_once_and_another_is_told(tmp_path: Path) -> None:
    dump = RegionDump.claim(tmp_path, "net", values=False)
    gm, file = torch.fx.symbolic_trace(lambda x: x + 1), tmp_path / "net/net_backward_0/graph.json"
    dump.write("backward", gm)
    before = file.stat().st_mtime_ns, file.read_bytes()
    dump.write("backward", gm)
    with pytest.warns(cb.DumpWarning, match=r"not dumped, the program goes on: .*net_backward_0 is there already"):
        dump.write("backward", torch.fx.symbolic_trace(lambda x: x + 2))
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before


def test_only_the_first_call_is_recorded_also_from_threads(tmp_path: Path) -> None:
    compiled = dumping(lambda x: x * 2, tmp_path)
    compiled(torch.full((3,), 1.0))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda value: compiled(torch.full((3,), float(value))), range(2, 10)))
    for path in dumps(tmp_path).values():
        (x,) = cb.load_dump(path).inputs()
        assert torch.equal(x, torch.ones(3))


def test_values_are_those_before_the_call(tmp_path: Path) -> None:
    x = torch.zeros(3)
    dumping(lambda x: x.add_(1), tmp_path)(x)
    assert torch.equal(x, torch.ones(3))
    for path in dumps(tmp_path).values():
        assert torch.equal(cb.load_dump(path).inputs()[0], torch.zeros(3))


def test_each_rank_has_names_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        step("nop", dump=str(tmp_path))
    found = dumps(tmp_path)
    assert {"Net.rank0_dynamo_0", "Net.rank1_dynamo_0"} <= set(found)
    data = cb.load_dump(found["Net.rank1_forward_0"]).metadata
    assert (data["rank"], data["world_size"], data["process"]) == (1, 2, os.getpid())


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    class Escape(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    Escape.__name__ = "../../../escape"
    root = tmp_path / "a/b/c/d"
    dumping(Escape(), root, values=False)(torch.ones(1))
    assert set(dumps(root)) == {"escape_dynamo_0", "escape_inference_0"}
    assert [path.name for path in (tmp_path / "a/b/c").iterdir()] == ["d"]


@pytest.mark.process
@pytest.mark.parametrize("works", [True, False])
def test_graphviz_is_used_where_it_is(works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/dot"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\ncp "$2" "$4"\n' if works else "#!/bin/sh\necho bad >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    if works:
        step("graph_dumper", dump=str(tmp_path / "d"))
    else:
        with pytest.warns(UserWarning, match="Graphviz failed on .*graph.dot: bad"):
            step("graph_dumper", dump=str(tmp_path / "d"))
    for path in dumps(tmp_path / "d").values():
        assert (path / "graph.svg").exists() == works
        assert (path / "graph.dot").read_text().startswith("digraph")
        cb.load_dump(path)


def test_the_drawing_colours_by_kind(tmp_path: Path) -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.view(-1), 0.5).relu()

    dumping(mixed, tmp_path, values=False)(torch.ones(2, 3))
    text = (dumps(tmp_path)["mixed_inference_0"] / "graph.dot").read_text()
    lines = {line.split('"')[1]: line for line in text.splitlines() if "fillcolor" in line}
    colours = {name: line.split('fillcolor="')[1] for name, line in lines.items()}
    chosen = [colours[name] for name in ("arg0_1", "view", "native_dropout", "relu", "output")]
    assert len(set(chosen)) == 5
    assert "float32[6] strides (1)" in lines["relu"]


@pytest.mark.parametrize("entry", [aot_function, aot_module])
def test_dump_graph_is_a_compiler(entry: Callable[..., Any], tmp_path: Path) -> None:
    compiler = cb.aot_compilers.dump_graph(tmp_path, "mine", values=True)
    net, x = Net(), torch.ones(4, 3)
    net(x).sum().backward()
    expected = net.linear.weight.grad
    if entry is aot_module:
        net.zero_grad()
        aot_module(net, fw_compiler=compiler, bw_compiler=compiler)(x).sum().backward()
        actual = net.linear.weight.grad
    else:
        weight = net.linear.weight.detach().clone().requires_grad_()

        def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, weight, bias).relu() * torch.tensor([1.0, 2.0])

        bias = net.linear.bias.detach()
        aot_function(function, fw_compiler=compiler, bw_compiler=compiler)(x, weight, bias).sum().backward()
        actual = weight.grad
    assert torch.equal(expected, actual)
    found = dumps(tmp_path)
    assert sorted(found) == ["mine_backward_0", "mine_forward_0"]
    backward = cb.load_dump(found["mine_backward_0"])
    assert backward.has_values
    assert any(same_leaf(expected, leaf) for leaf in run(backward))


@pytest.mark.process
def test_every_file_of_the_layout_is_there_and_module_imports_alone(tmp_path: Path) -> None:
    step("graph_dumper", dump=str(tmp_path), dump_values=True)
    for path in dumps(tmp_path).values():
        names = {file.name for file in path.iterdir()}
        layout = {"module.py", "repro.py", "graph.json", "inputs.json", "inputs.safetensors", "graph.dot"}
        assert layout <= names <= layout | {"constants.safetensors", "graph.svg"}
        text = (path / "module.py").read_text()
        for words in ("File: ", "self.linear(x).relu() * torch.tensor([1.0, 2.0])", '"f32[4, 2][2, 1]cpu"'):
            assert words in text
        nodes = json.loads((path / "graph.json").read_text())["graph"]["nodes"]
        for node in [node for node in nodes if "relu" in node["target"] and node["op"].startswith("call")]:
            assert node["expected"]["tensor"]["shape"] == [4, 2]
            assert "in forward: return self.linear(x).relu()" in node["source"]
    module = "runpy.run_path(folder + '/module.py')['GraphModule']()"
    code = f"import runpy, sys\nfor folder in sys.argv[1:]: print(len(list({module}.parameters())))"
    done = python("-c", code, *dumps(tmp_path).values(), folder=tmp_path)
    assert (done.returncode, {*done.stdout.split()}) == (0, {"0"}), done.stderr


def test_a_graph_that_dynamo_traces_anew_leaves_no_dump(tmp_path: Path) -> None:
    def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, None, None, training=True, eps=eps)

    dumping(normalised, tmp_path, dynamic=True)(torch.randn(4, 3), 0.125)
    found = dumps(tmp_path)
    assert set(found) == {"normalised_dynamo_0", "normalised_inference_0"}
    assert all(cb.load_dump(path).has_values for path in found.values())


def test_each_backward_graph_of_one_compiler_gets_the_index_of_its_forward_graph(tmp_path: Path) -> None:
    compiler = cb.aot_compilers.dump_graph(tmp_path)
    for size in (3, 5, 7):
        layer = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU())
        aot_module(layer, fw_compiler=compiler, bw_compiler=compiler)(torch.randn(2, size)).sum().backward()
    for index, size in enumerate((3, 5, 7)):
        for kind in ("forward", "backward"):
            dump = cb.load_dump(tmp_path / "graph" / f"graph_{kind}_{index}")
            assert any(size in tuple(value.shape) for value in dump.inputs() if isinstance(value, torch.Tensor))
    assert not list((tmp_path / "graph").glob("graph_*_3"))


def test_indices_are_never_shared(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_index(tmp_path, "net"), range(32)))
    assert sorted(claimed) == [(tmp_path / "net", "net", index) for index in range(32)]


def test_numbering_goes_on_after_folders_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "net" / "net_backward_6").mkdir(parents=True)
    (tmp_path / "net" / "net_backward_x").mkdir()
    assert [claim_index(tmp_path, "net")[-1] for _ in range(2)] == [7, 8]


def test_names_become_file_names(tmp_path: Path) -> None:
    assert claim_index(tmp_path, "../a b/<lambda>") == (tmp_path / "a_b_lambda", "a_b_lambda", 0)
    assert claim_index(tmp_path, "<>")[1] == "graph"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    dump = RegionDump(*claim_index(tmp_path, "net"), values=False)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        dump.place("forward", fail)
    assert [path.name for path in (tmp_path / "net").iterdir()] == [".claims"]


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    dump = RegionDump(*claim_index(tmp_path, "net"), values=False)
    target = dump.place("forward", lambda folder: (folder / "module.py").write_text("1") and None)
    assert target == tmp_path / "net" / "net_forward_0"
    with pytest.raises(cb.DumpError, match="cannot write the dump"):
        dump.place("forward", lambda folder: (folder / "module.py").write_text("2") and None)
    assert (target / "module.py").read_text() == "1"
