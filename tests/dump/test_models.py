"""Real programs, dumped with their values and replayed: bit for bit what the user's program computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support.dump_tools import dumping, dumps, python, run, same_leaf
from tests.support.replayed_programs import SPECIAL, custom

IDS = torch.arange(12).reshape(2, 6) % 20


def bert() -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config.return_dict = False
    return BertModel(config), (IDS,)


def gpt2() -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    config.return_dict = False
    config.use_cache = False
    return GPT2Model(config), (IDS,)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + x).relu()


def resnet() -> tuple[nn.Module, tuple[Any, ...]]:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), Block(8), Block(8), nn.AdaptiveAvgPool2d(1)
    )
    return nn.Sequential(body, nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 4)), (torch.randn(3, 3, 10, 10),)


def leaves(value: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


SLOW = (pytest.mark.slow, pytest.mark.ci_sample)
# Dynamo makes an instance of a user's autograd.Function to trace its backward
TRACED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.mark.more
@pytest.mark.parametrize("make", [resnet, *(pytest.param(make, marks=pytest.mark.slow) for make in (bert, gpt2))])
def test_training_with_dynamic_shapes_replays_bit_for_bit(
    make: Callable[[], tuple[nn.Module, tuple[Any, ...]]], tmp_path: Path
) -> None:
    model, args = make()
    model.train()
    outputs = leaves(dumping(model, tmp_path, dynamic=True)(*args))
    sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found = {name: cb.load_dump(path) for name, path in dumps(tmp_path).items()}
    last = max(dump.metadata["index"] for dump in found.values())
    kinds = {dump.kind: dump for dump in found.values() if dump.metadata["index"] == last}
    assert set(kinds) == {"dynamo", "joint", "forward", "backward"}
    assert all(name.startswith(f"{type(model).__name__}_") for name in found)

    replayed = {kind: run(dump) for kind, dump in kinds.items()}
    for output in outputs:
        assert any(same_leaf(output, other) for other in replayed["dynamo"])
        assert any(same_leaf(output, other) for other in replayed["forward"])
    for gradient in gradients:
        assert any(same_leaf(gradient, other) for other in replayed["backward"])

    # what the forward hands over is what the backward takes, with its bytes
    forward, backward = kinds["forward"].metadata, kinds["backward"].metadata
    saved = {entry["name"]: entry["bytes"] for entry in forward["saved"]}
    assert saved == {entry["name"]: entry["bytes"] for entry in backward["saved"]}
    assert sum(size or 0 for size in saved.values()) > 0
    assert forward["pairs"]["backward"] == kinds["backward"].title
    assert forward["symbols"]
    values = dict(zip((e["name"] for e in backward["inputs"]["inputs"]), kinds["backward"].inputs(), strict=True))
    for name, size in saved.items():
        if size is not None:
            assert values[name].numel() * values[name].element_size() == size

    # gradients through the Dynamo graph too
    dump = kinds["dynamo"]
    inputs = dump.inputs()
    with dump.ambient():
        again = [leaf for leaf in leaves(dump.module(*inputs)) if leaf.requires_grad]
        sum(leaf.sum() for leaf in again).backward()  # type: ignore[union-attr]
    regained = [value.grad for value in inputs if isinstance(value, torch.Tensor) and value.grad is not None]
    for gradient in gradients:
        assert any(same_leaf(gradient, other) for other in regained)


OFTEN = ["cond", "custom_op", "channels_last_and_expanded", "float8", "complex"]
"""The programs that are not slow."""


@TRACED
@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(name, marks=SLOW) for name in SPECIAL if name not in OFTEN)])
def test_special_programs_replay_bit_for_bit(name: str, tmp_path: Path) -> None:
    program = SPECIAL[name]()
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):  # else nn.LSTM and nn.GRU stay in Python
        expected = leaves(dumping(program.function, tmp_path, dynamic=program.dynamic)(*program.args))
    computed: dict[str, list[Any]] = {"dynamo": [], "inference": []}
    given: list[Any] = []
    for path in dumps(tmp_path).values():
        dump = cb.load_dump(path)
        computed[dump.kind] += leaves(run(dump))
        given += dump.inputs()
    for kind, results in computed.items():
        assert all(any(same_leaf(leaf, other) for other in results) for leaf in expected), kind
    if name not in ("shared_and_mutated", "optimizer", "data_dependent"):  # the last two have several regions
        assert all(any(same_leaf(arg, value) for value in given) for arg in leaves(program.args))


EACH_IN_A_FORK = """
import os, runpy, sys
import torch._dynamo
for folder in sys.argv[1:]:
    if os.fork() == 0:
        os.chdir(folder)
        os.dup2(os.open("said.txt", os.O_WRONLY | os.O_CREAT), 1)
        sys.path[0], sys.argv[1:] = folder, ["--compiler", "eager"]
        runpy.run_path("repro.py", run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.process
@TRACED
def test_repros_run_from_their_folders_with_nothing_but_torch(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for module in ("checked_backend", "safetensors", "numpy", "pydantic", "transformers", "rich"):
        (blocked / f"{module}.py").write_text(f"raise ModuleNotFoundError('{module} is not installed here')")
    alone = []
    for name in (*(name for name in OFTEN if name != "custom_op"), "transforms", "own_function", "checkpointed"):
        program = SPECIAL[name]()
        dumping(program.function, tmp_path / name, values=False)(*program.args)
        alone += [folder.rename(tmp_path / f"{name}_{folder.name}") for folder in dumps(tmp_path / name).values()]
    done = python("-c", EACH_IN_A_FORK, *alone, folder=tmp_path, module_path=blocked)
    assert done.stdout.split() == ["0"] * len(alone), done.stderr
    for said in ((folder / "said.txt").read_text() for folder in alone):
        assert "output[0]" in said
        assert "differ" not in said
        assert "equal" in said


@pytest.mark.process
def test_a_custom_op_says_what_it_needs(tmp_path: Path) -> None:
    program = SPECIAL["custom_op"]()
    dumping(program.function, tmp_path, values=False)(*program.args)
    folders = [*dumps(tmp_path).values()]
    for folder in folders:
        assert cb.load_dump(folder).metadata["requires"] == [custom.__module__]
        assert f"import {custom.__module__}" in (folder / "module.py").read_text().splitlines()
    code = f"import checked_backend as cb; cb.load_dump({str(folders[0])!r}).module"
    done = python("-c", code, folder=tmp_path)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.endswith(f"if you trust it. The dump says that it needs: {custom.__module__}")
    assert "dump_replayed.double" in message
