from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.aot.test_backend import train
from tests.support.dump_tools import Net

AOT_BACKENDS: tuple[Callable[..., Any], ...] = (cb.nop, cb.debug_interpreter, cb.graph_dumper)


def network() -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8 * 16, 4)
    )
    return layers, torch.randn(4, 3, 6, 6)


def module_files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("module.py"))


def test_entry_points_are_found_by_torch() -> None:
    assert {"nop", "debug_interpreter", "graph_dumper", "numcheck"} <= set(torch._dynamo.list_backends())
    points = {point.name: point for point in entry_points(group="torch_dynamo_backends")}
    for backend in AOT_BACKENDS:
        assert points[backend.__name__].load() is backend


@pytest.mark.process
def test_a_fresh_process_needs_no_import() -> None:
    program = "import torch; f = torch.compile(lambda x: x.sin() + 1, backend='nop'); print(f(torch.zeros(2)).tolist())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.0, 1.0]"


@pytest.mark.parametrize("name", ["nop", "debug_interpreter", "graph_dumper"])
@pytest.mark.parametrize("partition", ["min_cut", "default"])
def test_training_by_name_equals_eager_bit_for_bit(name: str, partition: str) -> None:
    model, x = network()
    twin = copy.deepcopy(model)
    reference = train(model, model, x)
    candidate = train(twin, torch.compile(twin, backend=name, options={"partition": partition}), x)
    for expected, actual in zip(reference, candidate, strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("backend", AOT_BACKENDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"bogus": 1}}, "has no option 'bogus'. Valid options: .*decompositions"),
        ({"options": {"partition": "max_cut"}}, "option 'partition' got 'max_cut'.*'min_cut' or 'default'"),
        ({"mode": "reduce-overhead"}, "takes no mode, got mode='reduce-overhead'.*numcheck"),
    ],
)
def test_misuse_is_an_option_error_at_the_first_call(
    backend: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    compiled = torch.compile(lambda x: x + 1, backend=backend, **arguments)
    for _ in range(2):  # not only at the first
        with pytest.raises(cb.OptionError, match=message) as caught:
            compiled(torch.ones(2))
        assert str(caught.value).startswith(f"backend '{backend.__name__}'")


def test_misuse_is_not_swallowed_when_dynamo_suppresses_errors() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        compiled = torch.compile(lambda x: x + 1, backend=cb.nop, options={"bogus": 1})
        with pytest.raises(cb.OptionError, match="has no option 'bogus'") as caught:
            compiled(torch.ones(2))
    restored = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  our own bytes
    assert type(restored) is cb.OptionError
    assert str(restored) == str(caught.value)


def test_graph_dumper_writes_each_graph_once_and_numbers_regions(tmp_path: Path) -> None:
    def run() -> None:
        torch._dynamo.reset()
        compiled = torch.compile(Net(), backend=cb.graph_dumper, options={"dump": str(tmp_path)})
        compiled(torch.randn(4, 3)).sum().backward()
        with torch.no_grad():
            compiled(torch.randn(4, 3))

    run()
    kinds = ["backward_0", "dynamo_0", "dynamo_1", "forward_0", "inference_1", "joint_0"]
    assert module_files(tmp_path) == [f"Net/Net_{kind}/module.py" for kind in kinds]
    before = (tmp_path / "Net/Net_forward_0/module.py").stat().st_mtime_ns
    run()  # a later run, or another process, adds to it
    assert len(module_files(tmp_path)) == 12
    assert (tmp_path / "Net/Net_forward_2/module.py").is_file()
    assert (tmp_path / "Net/Net_forward_0/module.py").stat().st_mtime_ns == before
    text = (tmp_path / "Net/Net_forward_0/module.py").read_text()
    assert "torch.ops.aten.relu.default" in text
    assert "self.linear(x).relu()" in text  # the user's own line
    compile(text, "module.py", "exec")


def test_graph_dumper_falls_back_to_report_dir(tmp_path: Path) -> None:
    def fancy(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    torch.compile(fancy, backend="graph_dumper")(torch.ones(2))
    assert module_files(tmp_path / "reports") == ["fancy/fancy_dynamo_0/module.py", "fancy/fancy_inference_0/module.py"]


def test_a_dump_folder_that_cannot_be_made_is_a_dump_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compiled = torch.compile(lambda x: x + 1, backend="graph_dumper", options={"dump": str(tmp_path / "file")})
    with pytest.raises(cb.DumpError, match=r"cannot make the dump folder .* Set the option dump"):
        compiled(torch.ones(2))
